"""Faults ready made: a stage that is slow, a pipeline that dies; processes as anyone writes them.

What they are compared with stands in docs/processes.md. No rate of failures has a default.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any

from pydantic import Field
from simpy import Event

from evenflow.errors import UsageError
from evenflow.keys import NonNegative, Positive
from evenflow.sim.processes import Part, ProcessWorld, ReplicaHandle

Number = Annotated[int, Field(ge=0)]
"""Which stage, or which replica, from 0 on."""


def straggler(
    world: ProcessWorld,
    *,
    stage: Number,
    factor: Positive = 2.0,
    replica: Number = 0,
    every_s: Positive | None = None,
    lasts_s: Positive | None = None,
) -> Generator[Event, Any, None]:
    """Let a stage take `factor` times as long: always, or in spells.

    A spell begins `every_s` seconds after the one before on average, and lasts `lasts_s` on
    average, both exponential.
    """
    if (every_s is None) != (lasts_s is None):
        raise UsageError("process straggler: spells need every_s and lasts_s; give both or none")
    slow = _stage(world, replica, stage)
    while every_s is not None and lasts_s is not None:
        yield world.env.timeout(world.rng.exponential(every_s))
        slow.slow(factor)
        yield world.env.timeout(world.rng.exponential(lasts_s))
        slow.slow(1.0)
    slow.slow(factor)
    yield world.env.timeout(0.0)


def _stage(world: ProcessWorld, replica: int, stage: int) -> Part:
    counts = len(world.replicas), len(world.stages)
    if replica >= counts[0] or stage >= counts[1]:
        raise UsageError(
            f"process straggler: replica {replica}, stage {stage}: there are {counts[0]} replicas "
            f"of {counts[1]} stages, counted from 0"
        )
    pipeline: ReplicaHandle = world.replicas[replica]
    return pipeline.stages[stage]


def outage(
    world: ProcessWorld, *, mtbf_s: Positive, restart_s: NonNegative, reject: bool = False
) -> Generator[Event, Any, None]:
    """Let each pipeline die whenever one of its stages fails, and serve again after `restart_s`.

    `mtbf_s`: seconds between the failures of one stage on average, exponential while it is up. What
    is in flight and all KV are lost; requests are computed again or, with `reject`, end.
    """
    dying = [_dies(world, replica, mtbf_s, restart_s, reject) for replica in world.replicas]
    yield world.env.all_of([world.env.process(each) for each in dying])


def _dies(
    world: ProcessWorld, replica: ReplicaHandle, mtbf_s: float, restart_s: float, reject: bool
) -> Generator[Event, Any, None]:
    while True:
        yield world.env.timeout(world.rng.exponential(mtbf_s / len(replica.stages)))
        replica.fail(restart_s, reject=reject)
        yield world.env.timeout(restart_s)
