"""Layers per stage such that the slowest stage is as fast as it can be.

Knows the roofline; no memory. The stage with the fewest layers has the most room for KV, so a
balanced split may hold fewer pages than an even one: the fullest stage decides.
"""

from __future__ import annotations

from dataclasses import replace

from evenflow.costs.base import BatchShape, decode_work
from evenflow.costs.collectives import Fabric
from evenflow.costs.roofline import RooflineCost
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GpuSpec, LinkSpec
from evenflow.specs.model import ModelSpec

REFERENCE = decode_work(64, 64 * 1024)
"""The micro-batch that a split is balanced for: decodes, since most steps are such."""


def balanced_layers(
    model: ModelSpec,
    gpu: GpuSpec,
    stages: int,
    *,
    tensor_parallel: int = 1,
    fabric: LinkSpec | Fabric | None = None,
    work: BatchShape = REFERENCE,
) -> tuple[int, ...]:
    """Return the layers of each stage that minimise the slowest stage's seconds for `work`.

    The embedding counts on stage 0, the LM head on the last stage. Layers are alike, so handing
    each to the stage that is done first with it gives the best split; of equal stages the first
    takes it. UsageError when there are more stages than layers.
    """
    split_layers(model.num_layers, stages)

    def times(layers: tuple[int, ...]) -> list[float]:
        part = replace(model, num_layers=sum(layers))
        return RooflineCost(Deployment(part, gpu, layers, tensor_parallel), fabric).times(work)

    layers = [1] * stages
    done_s = times(tuple(layers))
    layer_s = times((2, *layers[1:]))[0] - done_s[0]
    for _ in range(model.num_layers - stages):
        stage = min(range(stages), key=done_s.__getitem__)
        layers[stage] += 1
        done_s[stage] += layer_s
    return tuple(layers)
