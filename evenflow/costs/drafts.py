"""What proposing tokens costs in speculative decoding, on top of verifying them.

Wraps any cost model; the verification is the ordinary cost of the tokens that the micro-batch
holds. Does not know: prompts of the draft model (small beside the target's), tree drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from evenflow.costs.base import BatchShape, StageCost, decode_work
from evenflow.decodes import Speculation


class DraftedCost:
    """Add the time to propose tokens to the last stage of every micro-batch that decodes.

    The proposals of a step are k decode steps of the draft, one after the other, on the stage that
    samples, after it has sampled (vLLM's place for the drafter). `draft_step_s(rows, context)` is
    one of them.
    """

    __slots__ = ("_draft_step_s", "_speculation", "_target")

    def __init__(
        self,
        target: StageCost,
        speculation: Speculation,
        draft_step_s: Callable[[int, int], float],
    ) -> None:
        self._target = target
        self._speculation = speculation
        self._draft_step_s = draft_step_s

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return self._target.depth

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        times = self._target.times(batch)
        if batch.decode_tokens:
            rows = batch.decode_tokens // self._speculation.verified_tokens
            times[-1] += self._speculation.k * self._draft_step_s(rows, batch.decode_context)
        return times

    def __call__(self, stage: int, batch: BatchShape) -> float:
        """Return the seconds on one stage."""
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self._target.transfer_bytes(batch)


def share_of(target: StageCost, share: float) -> Callable[[int, int], float]:
    """Return the seconds of a draft step as a share of the target's step, all stages together."""
    return lambda rows, context: share * sum(target.times(decode_work(rows, context)))


def step_of(draft: StageCost) -> Callable[[int, int], float]:
    """Return the seconds of a draft step as those of a draft model of its own, on one stage."""
    return lambda rows, context: draft(0, decode_work(rows, context))
