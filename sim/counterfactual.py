"""The same world without one cause of bubbles: what a run would be if that cause did not exist.

A cause says what idle time is due to, given everything else. Removing it changes everything else
too, so what it saves takes another simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenflow.costs import BatchShape, StageCost
from evenflow.result import RunResult
from sim.world import RuntimeOverheads, World

PLENTY_OF_PAGES = 1 << 40


@dataclass(frozen=True, slots=True)
class EvenStages:
    """Every stage takes the mean of what the stages take for a micro-batch."""

    costs: StageCost

    @property
    def depth(self) -> int:
        return self.costs.depth

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        return [sum(times) / len(times)] * len(times)

    def __call__(self, stage: int, batch: BatchShape) -> float:
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        return self.costs.transfer_bytes(batch)


@dataclass(frozen=True, slots=True)
class EvenBatches:
    """Every micro-batch takes the same `seconds` on each stage, whatever it holds."""

    costs: StageCost
    seconds: Sequence[float]

    @property
    def depth(self) -> int:
        return self.costs.depth

    def times(self, batch: BatchShape) -> list[float]:
        return list(self.seconds)

    def __call__(self, stage: int, batch: BatchShape) -> float:
        return self.seconds[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        return self.costs.transfer_bytes(batch)


def counterfactuals(world: World, result: RunResult) -> dict[str, World]:
    """Return, by cause, the worlds without it; `result` is what happened in `world`.

    `link`: activations arrive at once. `cpu`: the ideal runtime. `kv_limited`: pages never run out.
    `uneven_stages`: each stage takes the mean of all. `uneven_batches` (the causes uneven_prefill,
    prefill_decode and uneven_decode together): every micro-batch takes the mean time of the run.
    """
    means = (result.end_s - result.start_s).mean(axis=0).tolist()
    return {
        "link": replace(world, link=None, hop_links=None),
        "cpu": replace(world, overheads=RuntimeOverheads()),
        "kv_limited": replace(world, total_pages=PLENTY_OF_PAGES),
        "uneven_stages": replace(world, costs=EvenStages(world.costs)),
        "uneven_batches": replace(world, costs=EvenBatches(world.costs, means)),
    }
