"""Faults ready made: a slow stage or link, a pipeline that dies; processes as anyone writes them.

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
    slow = _part("straggler", "stage", world, replica, stage)
    yield from _slowed(slow, factor, world, "straggler", (every_s, lasts_s))


def contended_link(
    world: ProcessWorld,
    *,
    hop: Number,
    share: Annotated[float, Field(gt=0, lt=1)],
    replica: Number = 0,
    every_s: Positive | None = None,
    lasts_s: Positive | None = None,
) -> Generator[Event, Any, None]:
    """Let others take a `share` of the bandwidth behind stage `hop`: always, or in spells.

    Spells are as a straggler's. What is sent takes 1 / (1 - share) times as long.
    """
    link = _part("contended_link", "hop", world, replica, hop)
    yield from _slowed(link, 1 / (1 - share), world, "contended_link", (every_s, lasts_s))


def _slowed(
    part: Part,
    factor: float,
    world: ProcessWorld,
    name: str,
    spells: tuple[float | None, float | None],
) -> Generator[Event, Any, None]:
    every_s, lasts_s = spells
    if (every_s is None) != (lasts_s is None):
        raise UsageError(f"process {name}: spells need every_s and lasts_s; give both or none")
    while every_s is not None and lasts_s is not None:
        yield world.env.timeout(world.rng.exponential(every_s))
        part.slow(factor)
        yield world.env.timeout(world.rng.exponential(lasts_s))
        part.slow(1.0)
    part.slow(factor)
    yield world.env.timeout(0.0)


def _part(name: str, kind: str, world: ProcessWorld, replica: int, number: int) -> Part:
    """Return a stage, or the link of a hop, of a replica; UsageError where there is none."""
    parts = world.stages if kind == "stage" else world.links
    if replica >= len(world.replicas) or number >= len(parts):
        raise UsageError(
            f"process {name}: replica {replica}, {kind} {number}: there are {len(world.replicas)} "
            f"replicas of {len(parts)} {kind}s, counted from 0"
        )
    pipeline: ReplicaHandle = world.replicas[replica]
    return (pipeline.stages if kind == "stage" else pipeline.links)[number]


def outage(
    world: ProcessWorld, *, mtbf_s: Positive, restart_s: NonNegative, reject: bool = False
) -> Generator[Event, Any, None]:
    """Let each pipeline die whenever one of its stages fails, and serve again after `restart_s`.

    `mtbf_s`: seconds between the failures of one stage on average, exponential while it is up. What
    is in flight and all KV are lost; requests are computed again or, with `reject`, end.
    """
    dying: list[Event] = []
    while True:
        added = [_dies(world, r, mtbf_s, restart_s, reject) for r in world.replicas[len(dying) :]]
        dying += map(world.env.process, added)
        yield world.env.any_of([world.replicas.added, *dying])


def _dies(
    world: ProcessWorld, replica: ReplicaHandle, mtbf_s: float, restart_s: float, reject: bool
) -> Generator[Event, Any, None]:
    while True:
        yield world.env.timeout(world.rng.exponential(mtbf_s / len(replica.stages)))
        replica.fail(restart_s, reject=reject)
        yield world.env.timeout(restart_s)
