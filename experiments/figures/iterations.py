"""Seconds of single micro-batches on a figure's deployment: no arrivals, no scheduler.

Knows what a run is built from, and the roofline's formulas for the parts of an iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from evenflow.config.build import build
from evenflow.costs import RooflineCost, Work, prefill_work
from evenflow.costs.roofline import AttentionRates, Rates, linear_s
from evenflow.engines.pools import PooledWorld
from evenflow.errors import UsageError
from evenflow.experiments.figures.schema import Layer, layered
from evenflow.experiments.figures.study import FigureStudy
from evenflow.sim import World
from evenflow.sums import plain_sum

Seconds = Callable[[Work], float]

_UNUSED = {"scheduler": "sarathi", "workload": {"trace": "sharegpt-sample"}}


class IterationParts(NamedTuple):
    """Seconds of an iteration, all stages together.

    Linear operators of the layers, attention, all-reduces, and the rest (norms, activations,
    overhead, embedding, LM head).
    """

    linear: float
    attention: float
    all_reduce: float
    other: float


def world_of(study: FigureStudy, *layers: Layer, noted: bool = True) -> World:
    """Return the world that the figure's run with `layers` over it describes, without requests.

    A run that names no policy and no trace will do. `noted`: the footnote names its machine.
    """
    whole = layered(_UNUSED, study.plan.run.data)
    config = study.config(whole, *layers)
    if noted:
        study.note_machine(config)
    world = build(config, study.plan.beside).world
    if isinstance(world, PooledWorld):
        raise UsageError("scheduler: a figure of single iterations has no pools")
    return world


def roofline_of(study: FigureStudy, *layers: Layer) -> RooflineCost:
    """Return the costs of the figure's run; UsageError unless they are a roofline's."""
    costs = world_of(study, *layers).costs
    if not isinstance(costs, RooflineCost):
        raise UsageError("costs: this figure takes iterations apart, which needs kind: roofline")
    return costs


def iteration(world: World) -> Seconds:
    """Return the seconds from a micro-batch's start on stage 0 to its end on the last stage.

    Stages and links one after the other, and the CPU work that the runtime does not hide.
    """

    def seconds(work: Work) -> float:
        tokens = work.prefill_tokens + work.decode_tokens
        stages_s = world.costs.times(work)
        links_s = plain_sum(hop.latency_s + hop.per_token_s * tokens for hop in world.hops)
        cpu = world.overheads
        prepare_s = world.depth * cpu.inputs_s(work) + cpu.prepare_share * plain_sum(stages_s)
        return (
            cpu.host_s(work)
            + (0.0 if cpu.overlapped else prepare_s)
            + plain_sum(stages_s)
            + links_s
        )

    return seconds


def parts_of(cost: RooflineCost, work: Work) -> IterationParts:
    """Return an iteration's seconds by part; they add up to `sum(cost.times(work))`."""
    deployment = cost.deployment
    model, ranks = deployment.model, deployment.tensor_parallel
    rates = Rates.of(deployment.gpu)
    attention = AttentionRates.of(model, ranks, rates)
    tokens = work.prefill_tokens + work.decode_tokens
    layer_s = plain_sum(
        linear_s(tokens, shape, model.dtype_bytes, cost.tile_tokens, rates)
        for shape in model.linear_shapes(ranks)
    )
    attention_s = plain_sum(attention.prefill_s(chunk.start, chunk.stop) for chunk in work.chunks)
    if work.decode_tokens:
        attention_s += attention.decode_s(work.decode_tokens, work.decode_context)
    layers = model.num_layers
    known = (layers * layer_s, layers * attention_s, layers * cost.all_reduce_s(tokens))
    return IterationParts(*known, other=plain_sum(cost.times(work)) - plain_sum(known))


def prompts(count: int, tokens: int) -> Work:
    """Return the work of `count` whole prompts of `tokens` tokens in one micro-batch."""
    one = prefill_work(tokens)
    return Work(one.chunks * count, count * tokens, 0, 0, count)


def in_chunks(tokens: int, chunk_tokens: int) -> list[Work]:
    """Return a prompt cut into chunks; the last one is what is left."""
    starts = range(0, tokens, chunk_tokens)
    return [
        prefill_work(min(chunk_tokens, tokens - start), start, last=start + chunk_tokens >= tokens)
        for start in starts
    ]
