"""The same world without one cause of bubbles, to simulate what that cause costs.

A cause says what idle time is due to, given everything else. Removing it changes everything else
too, so what it saves takes another simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenflow.core.world import World
from evenflow.costs import BatchShape, StageCost
from evenflow.costs.modifiers import Modified
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.results.run import RunResult
from evenflow.runtimes import RuntimeOverheads
from evenflow.sums import plain_sum

PLENTY_OF_PAGES = 1 << 40


class EvenStages(Modified):
    """Every stage takes the mean of what the stages take for a micro-batch."""

    __slots__ = ()

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        return [plain_sum(times) / len(times)] * len(times)


@dataclass(frozen=True, slots=True)
class EvenBatches(Modified):
    """Every micro-batch takes the same `seconds` on each stage, whatever it holds."""

    seconds: Sequence[float]

    def times(self, batch: BatchShape) -> list[float]:
        return list(self.seconds)


def counterfactuals(
    world: World | PooledWorld, result: RunResult
) -> Mapping[str, World | PooledWorld]:
    """Return, by cause, the worlds without it; `result` is what happened in `world`.

    `link`: activations arrive at once. `cpu`: the ideal runtime. `kv_limited`: pages never run out.
    `uneven_stages`: each stage takes the mean of all. `uneven_batches` (the causes uneven_prefill,
    prefill_decode and uneven_decode together): every micro-batch takes the mean time of the run. A
    system of pools is without the cause in each pool, and its KV also crosses at once.
    """
    if isinstance(world, PooledWorld):
        return _of_pools(world, result)
    return _of_pipeline(world, result)


def _of_pools(world: PooledWorld, result: RunResult) -> dict[str, PooledWorld]:
    pools = {name: _of_pipeline(getattr(world, name), own) for name, own in result.pools.items()}
    without: dict[str, PooledWorld] = {}
    for cause in pools["prefill"]:
        changed: dict[str, Any] = {name: own[cause] for name, own in pools.items()}
        without[cause] = replace(world, **changed)
    ideal = TransferLink(bytes_per_token=world.link.bytes_per_token)
    return without | {"link": replace(without["link"], link=ideal)}


def _of_pipeline(world: World, result: RunResult) -> dict[str, World]:
    even: StageCost = world.costs
    if len(result.scheduled_s):  # else there is no mean, and nothing uneven
        even = EvenBatches(even, (result.end_s - result.start_s).mean(axis=0).tolist())
    return {
        "link": replace(world, link=None, hop_links=None),
        "cpu": replace(world, overheads=RuntimeOverheads()),
        "kv_limited": replace(world, total_pages=PLENTY_OF_PAGES),
        "uneven_stages": replace(world, costs=EvenStages(world.costs)),
        "uneven_batches": replace(world, costs=even),
    }
