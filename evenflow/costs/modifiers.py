"""Wrappers of a cost model: drafts, copies to the host, ranks that step together.

Knows the numbers of a micro-batch and another cost model; which rows it holds is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenflow.core.batch import Span, Work
from evenflow.costs.base import BatchShape, StageCost, decode_work
from evenflow.sums import plain_sum


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Modified:
    """Wrapper of `costs` that changes seconds in `times`, and neither stages nor bytes."""

    costs: StageCost

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return self.costs.depth

    def begun(self) -> StageCost:
        """Return the costs of one run: the same, unless they remember what was computed."""
        return self

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        raise NotImplementedError

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self.costs.transfer_bytes(batch)


def begun(costs: StageCost) -> StageCost:
    """Return the costs of one run."""
    return costs.begun() if isinstance(costs, Modified) else costs


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScaledCost(Modified):
    """Every stage takes `factor` times as long."""

    factor: float

    def times(self, batch: BatchShape) -> list[float]:
        return [seconds * self.factor for seconds in self.costs.times(batch)]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PromptsCost(Modified):
    """A micro-batch with prompts takes `factor` times as long on every stage."""

    factor: float

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        return [seconds * self.factor for seconds in times] if batch.prefill_tokens else times


class StagesCost:
    """A cost model for each stage, as where GPUs are unlike."""

    def __init__(self, costs: Sequence[StageCost]) -> None:
        self._costs = costs

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return len(self._costs)

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        known = {cost: cost.times(batch) for cost in dict.fromkeys(self._costs)}
        return [known[cost][stage] for stage, cost in enumerate(self._costs)]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes that cross from one stage to the next."""
        return self._costs[0].transfer_bytes(batch)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DraftedCost(Modified):
    """Add the time to propose tokens to the last stage of every micro-batch that decodes.

    Verifying a row's `k` proposals and its last accepted token is the ordinary cost of the
    micro-batch's tokens. The proposals are k decode steps of the draft, one after the other. The
    stage that samples makes them after it has sampled (vLLM's place for the drafter).
    `draft_step_s(rows, context)` is one of them. With `groups` that step together, it is asked for
    the mean number of rows of a group. A draft model computes the prompts, too: `draft_prompts_s`
    of a micro-batch. Does not know: tree drafts.
    """

    k: int
    draft_step_s: Callable[[int, int], float]
    groups: int = 1
    draft_prompts_s: Callable[[BatchShape], float] | None = None

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        if self.draft_prompts_s is not None and batch.prefill_tokens:
            times[-1] += self.draft_prompts_s(batch)
        if batch.decode_tokens:
            rows = -(-batch.decode_tokens // ((self.k + 1) * self.groups))
            context = batch.decode_context // self.groups
            times[-1] += self.k * self.draft_step_s(rows, context)
        return times


def share_of(target: StageCost, share: float) -> Callable[[int, int], float]:
    """Return the seconds of a draft step as a share of the target's step, all stages together."""
    return lambda rows, context: share * plain_sum(target.times(decode_work(rows, context)))


def step_of(draft: StageCost) -> Callable[[int, int], float]:
    """Return the seconds of a draft step by a separate draft model, on a stage."""
    return lambda rows, context: draft.times(decode_work(rows, context))[0]


class _Joined(Work):
    """Work of data-parallel groups in one step; `parts`: of each group."""

    parts: Sequence[Work] = ()


def prompts_of(draft: StageCost) -> Callable[[BatchShape], float]:
    """Return the seconds of a micro-batch's prompts by a draft model, on a stage."""

    def prompts(batch: BatchShape) -> Work:
        spans = tuple(Span(chunk.start, chunk.stop) for chunk in batch.chunks)
        ends = batch.sampled_rows - batch.decode_tokens
        return Work(spans, batch.prefill_tokens, 0, 0, ends)

    def seconds(batch: BatchShape) -> float:
        parts = getattr(batch, "parts", ())
        if not parts:
            return draft.times(prompts(batch))[0]
        joined = _Joined()
        joined.parts = [prompts(part) for part in parts]
        return draft.times(joined)[0]

    return seconds


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SwapCost(Modified):
    """`costs`, and before them the copies of KV pages that a micro-batch waits for.

    On each stage: swapped_rows * `latency_s` + swapped_pages * page_bytes / `bandwidth_bytes_per_s`
    seconds. `page_bytes` [depth] is a page's share of the layers on one GPU. Each GPU has a
    separate host link; copies in and out share it, one after the other. Known error: an engine that
    copies ahead of time would hide a part.
    """

    page_bytes: Sequence[int]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        if not isinstance(batch, Work) or not batch.swapped_rows:
            return times
        latency_s = batch.swapped_rows * self.latency_s
        per_byte_s = batch.swapped_pages / self.bandwidth_bytes_per_s
        copies_s = [latency_s + per_byte_s * size_bytes for size_bytes in self.page_bytes]
        return [seconds + copy_s for seconds, copy_s in zip(times, copies_s, strict=True)]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RanksCost(Modified):
    """Costs of data-parallel attention: of the slowest of `ranks` groups, and of shared experts.

    `parts` of a micro-batch, one a group, take `costs` each; `experts`, if any, take the tokens of
    all. Without `parts` every group is assumed to have an equal micro-batch. Known error: the
    slowest group is that of a whole stage, though layers of each kind may have another.
    """

    ranks: int
    experts: StageCost | None = None

    def times(self, batch: BatchShape) -> list[float]:
        parts = getattr(batch, "parts", ())
        works = [getattr(part, "charged", None) or part for part in parts] or [batch]
        slowest = [max(times) for times in zip(*map(self.costs.times, works), strict=True)]
        if self.experts is None:
            return slowest
        tokens = sum(work.prefill_tokens + work.decode_tokens for work in works)
        shared = self.experts.times(Work((), tokens if parts else self.ranks * tokens))
        return [own + more for own, more in zip(slowest, shared, strict=True)]
