"""Fit the roofline's three efficiencies on measured operators of real GPUs, and say how far off.

`python -m tools.calibrate_silicon` prints a line per GPU: the efficiencies that
`gpu.py` carries, fitted on some models and checked on others. Needs the extras `silicon` and `fit`.
Knows the tables only through `evenflow.costs.silicon.cost`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenflow.costs import RooflineCost, StageCost, Work, decode_work, prefill_work
from evenflow.costs.silicon.cost import GPUS, silicon_cost, silicon_source
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import GpuSpec, gpu
from evenflow.specs.model import model
from tools.efficiencies import (
    Efficiencies,
    Errors,
    Floats,
    bundled,
    errors_of,
    soft_fit,
)

FITTED_ON = ("Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B")
CHECKED_ON = ("Mistral-7B", "Qwen2.5-32B", "Llama2-13B")

WORKS: tuple[Work, ...] = (
    *(
        decode_work(rows, rows * context)
        for rows in (1, 4, 16, 64, 128, 256)
        for context in (128, 512, 1024, 2048)
        if rows * context <= 256 * 1024
    ),
    *(
        prefill_work(tokens, context)
        for tokens in (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
        for context in (0, 2048)
    ),
)
"""Micro-batches that engines send: decode steps and prompt chunks, with and without context."""


def deployments(spec: GpuSpec, names: Sequence[str]) -> list[Deployment]:
    """Return each model whole on one GPU of unlimited memory."""
    return [Deployment(model(name), spec, (model(name).num_layers,)) for name in names]


def measured(spec: GpuSpec, names: Sequence[str], framework: str = "vllm") -> Floats:
    """Return the seconds of WORKS for each model by the measured operators."""
    costs = [
        silicon_cost(each, silicon_source(each, framework)) for each in deployments(spec, names)
    ]
    return np.concatenate([_seconds(cost) for cost in costs])


def predicted(spec: GpuSpec, names: Sequence[str], efficiencies: Efficiencies) -> Floats:
    """Return the seconds of WORKS for each model by the roofline."""
    return np.concatenate(
        [_seconds(RooflineCost(each)) for each in deployments(efficiencies.on(spec), names)]
    )


def fit(spec: GpuSpec, framework: str = "vllm") -> Efficiencies:
    """Return the efficiencies of least relative error on FITTED_ON, soft."""
    target = measured(spec, FITTED_ON, framework)
    return soft_fit(lambda candidate: predicted(spec, FITTED_ON, candidate), target)


def errors(spec: GpuSpec, names: Sequence[str], efficiencies: Efficiencies) -> Errors:
    """Return how far the roofline is from the measured operators on models of these names."""
    return errors_of(predicted(spec, names, efficiencies), measured(spec, names))


def _seconds(cost: StageCost) -> Floats:
    return np.array([cost(0, work) for work in WORKS])


def main() -> None:
    """Print the fits and their errors on models they have not seen."""
    print("| GPU | compute | bandwidth | overhead per layer | mean error | P95 | before |")
    print("|---|---|---|---|---|---|---|")
    for name in GPUS:
        spec = gpu(name)
        found = fit(spec)
        off, before = errors(spec, CHECKED_ON, found), errors(spec, CHECKED_ON, bundled(spec))
        print(
            f"| {name} | {found.compute:.3f} | {found.bandwidth:.3f} "
            f"| {found.per_layer_overhead_s * 1e6:.1f} us | {off.mean:.1%} | {off.p95:.1%} "
            f"| {before.mean:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
