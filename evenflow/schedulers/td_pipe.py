"""TD-Pipe: the whole pipeline prefills, then the whole pipeline decodes.

The rules come first, as pure functions of lengths and times: future KV use, even shares,
spatial-temporal intensity. They do not know which requests these belong to, nor when they are asked
for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from evenflow.compiled import mypyc_attr
from evenflow.core.rules import Rules
from evenflow.core.scheduling import Order, Plan, Prompt, View
from evenflow.errors import is_count
from evenflow.keys import Count, Share, expect
from evenflow.schedulers.admission import UNLIMITED, Room
from evenflow.schedulers.limits import Policy, Range, SearchSpace
from evenflow.sums import plain_sum

DecodeTime = Callable[[int, int], float]
"""Seconds that one stage takes for a decode step of (rows, tokens they attend to in all)."""

SATURATED_GAIN = 1.05
LARGEST_BATCH_ROWS = 8192


class FutureUsage:
    """KV tokens in use at each future point, if every request lives as long as predicted.

    `points` are decode steps from now, in rising order. A request with a context of c tokens counts
    c + m at each point m that it reaches (TD-Pipe, algorithm 1). The KV grows by a token a step,
    and falls when a request ends. Known error: pages that are not full count as their tokens only.
    """

    __slots__ = ("_context", "_ending", "points")

    def __init__(self, points: Sequence[int]) -> None:
        self.points = points
        # Requests and their tokens by how many points they reach, so that adding costs O(1).
        self._ending = [0] * (len(points) + 1)
        self._context = [0] * (len(points) + 1)

    def add(self, context_tokens: int, remaining_tokens: int) -> None:
        """Count a request that attends to `context_tokens` and ends `remaining_tokens` later."""
        reached = bisect_right(self.points, remaining_tokens)
        self._ending[reached] += 1
        self._context[reached] += context_tokens

    def at_points(self) -> list[int]:
        """Return the KV tokens in use at each point."""
        usage = []
        requests = context = 0
        for index in reversed(range(len(self.points))):
            requests += self._ending[index + 1]
            context += self._context[index + 1]
            usage.append(context + requests * self.points[index])
        return usage[::-1]

    def peak(self) -> int:
        """Return the most KV tokens in use at any point."""
        return max(self.at_points())


def stealing_share(live: int, depth: int, turn: int) -> int:
    """Return how many rows the next decode batch submits: the average over the pipeline's batches.

    TD-Pipe's average is (requests in the sliding window of the last `depth` batches - finished) /
    depth. What was withheld is still in the window, so the numerator is the number of `live`
    requests. `turn` counts batches, and the first `live % depth` of each round take the remainder.
    """
    return live // depth + (turn % depth < live % depth)


def saturating_rows(decode_s: DecodeTime) -> int:
    """Return the batch size, a power of two, from which doubling gains less than 5 % in rows/s.

    Without context: what saturates is the use of the weights, once for all rows of a batch.
    """
    rows = 1
    while rows < LARGEST_BATCH_ROWS:
        if 2 * decode_s(rows, 0) < SATURATED_GAIN * decode_s(2 * rows, 0):
            return rows
        rows *= 2
    return rows


def spatial_intensity(
    rows: int, context_tokens: float, saturated_rows: int, decode_s: DecodeTime
) -> float:
    """Return Achieved(rows) / Peak: rows per second of a decode batch, over those when saturated.

    `context_tokens` is what one row attends to, the mean over the batch. TD-Pipe, section 3.4.
    """
    step_s = decode_s(rows, round(rows * context_tokens))
    saturated_s = decode_s(saturated_rows, round(saturated_rows * context_tokens))
    return (rows * saturated_s) / (saturated_rows * step_s) if step_s else 1.0


def temporal_intensity(
    prefill_s: Sequence[float], decode_step_s: float, depth: int, waits: int = 1
) -> float:
    """Return 1 - bubble / total, for a switch to these prefill micro-batches now.

    All times are seconds on one stage: bubble = longest prefill - decode step, counted `waits`
    times. Total = all prefills + a decode step of each of `depth` batches + bubble. TD-Pipe,
    section 3.5, equation 2, which counts the bubble once.
    """
    bubble_s = max(max(prefill_s) - decode_step_s, 0.0) * waits
    total_s = plain_sum(prefill_s) + depth * decode_step_s + bubble_s
    return 1 - bubble_s / total_s if total_s else 1.0


# -- the policy ---------------------------------------------------------------------------------

PRINTED_POINTS = tuple(range(32, 1025, 32))
CODE_POINTS = (5, 8, *(2**power for power in range(4, 13)))
CODE_SATURATED_ROWS = 192
CODE_PEAK_ROWS = 256
CODE_FULL = 0.9


def _is_rising(points: object) -> bool:
    steps = points if isinstance(points, list | tuple) else []
    rising = all(map(is_count, steps)) and all(one < other for one, other in pairwise(steps))
    return bool(steps) and rising


FuturePoints = Annotated[
    Sequence[int], expect(_is_rising, "numbers of decode steps in rising order")
]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class TDPipe(Policy):
    """Prefill until the KV cache is predicted to fill up; then decode in even batches, one a stage.

    Source: TD-Pipe (ICPP'25), algorithm 1 and section 3. Prefill ends when the predicted KV use at
    one of `future_points` exceeds the pool. The live requests are then split evenly over the
    stages. A batch that returns withholds rows above the average, or is topped up from what others
    withheld. Decode ends when its batches use the GPUs less well than prefills that would fit
    (intensities, section 3.4). A decode phase lasts one round at least. Micro-batches in flight are
    not capped in prefill, and are one a stage in decode. Evicted is the latest-arrived ready
    request. A request without a prediction counts as outliving every future point. Prefill
    micro-batches hold whole prompts.

    Ablations: `kv_occupancy_ratio`, `work_stealing`, `request_finish_ratio`. `variant: paper`
    counts the bubble of equation 2 once, as printed. `reading` counts it on each stage after the
    first, as each waits the longer behind a decode step. `code` does so too, and is the public code
    otherwise. Prefill ends at a predicted use of 90 %, at future points 5, 8, 16, 32, 64, ... 4096.
    The even split takes the rows that arrived first. Peak decode speed is that of 256 rows, and 192
    count as saturated. The end of decode is looked for at one batch a round.
    """

    search_space: ClassVar[SearchSpace] = {
        "max_num_batched_tokens": Range(1024, 16384, log=True),
        "kv_occupancy_ratio": Range(0.3, 1.0),
    }

    predictor: str | Mapping[str, Any] = "oracle"
    """The predictor of output lengths: oracle, mean, {kind: noisy, accuracy}, or {kind: classifier,
    path}.
    """
    future_points: FuturePoints | None = None
    """Decode steps from now at which the predicted use of the pages has to fit; null: 32, 64, ...
    1024.
    """
    work_stealing: bool = True
    """Whether decode batches are evened out as they return."""
    kv_occupancy_ratio: Share | None = None
    """The share of the pages in use that ends prefill; null: the prediction."""
    request_finish_ratio: Share | None = None
    """The share of its requests that have ended which ends decode; null: the intensities."""
    variant: Literal["paper", "reading", "code"] = "paper"
    """`paper`: as printed; `reading`: the bubble of equation 2 times (stages - 1); `code`: as the
    authors' package.
    """
    max_num_batched_tokens: Count = 2048
    """Most tokens of a micro-batch; null: `max_model_len`."""
    max_batch_rows: Count | None = None
    """Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit."""
    prefill_s: Callable[[int], float] | None = None
    decode_s: DecodeTime | None = None

    def __post_init__(self) -> None:
        if self.request_finish_ratio is None and (self.prefill_s is None or self.decode_s is None):
            raise ValueError("without request_finish_ratio it needs prefill_s and decode_s")
        self.rules = Rules(uncapped=True, predictor=self.predictor)
        self._prefill_s = self.prefill_s or (lambda tokens: 0.0)
        self._decode_s = self.decode_s or (lambda rows, context_tokens: 0.0)
        points = CODE_POINTS if self.variant == "code" else PRINTED_POINTS
        self.points = tuple(self.future_points or points)
        self._most_rows = self.max_batch_rows or UNLIMITED
        self._saturated_rows = 0
        self._prefilling = True
        self._usage = FutureUsage(self.points)
        self._turn = 0  # decode batches sent in this phase
        self._started_with = 0  # requests that were live when the decode phase began
        self._preemptions = 0  # until then

    def schedule(self, view: View) -> Plan:
        if not self._prefilling and self._ends_decode(view):
            self._prefilling = True
            self._usage = self._usage_of(view)
        if self._prefilling:
            room = self._admit(view)
            if room.prefills:
                if self._is_full(self._usage, room.pages, view):
                    self._start_decoding(view, view.running + len(room.prefills))
                return Plan(room.prefills)
            self._start_decoding(view, view.running)
        return self._decode(view)

    # -- prefill --------------------------------------------------------------------------------

    def _admit(self, view: View) -> Room:
        room = Room(
            tokens=self.max_num_batched_tokens,
            rows=self._most_rows,
            seats=view.num_waiting,
            pages=view.free_pages,
        )
        room.admit(view, chunked=False)
        for prompt, _ in zip(view.waiting, room.prefills, strict=False):
            self._usage.add(prompt.tokens, self._remaining_tokens(prompt))
        return room

    def _is_full(self, usage: FutureUsage, free_pages: int, view: View) -> bool:
        """Say whether prefill ends with this use and these free pages."""
        if self.kv_occupancy_ratio is not None:
            held_pages = view.total_pages - free_pages
            return held_pages / view.total_pages >= self.kv_occupancy_ratio
        capacity = view.total_pages * view.page_tokens
        if self.variant == "code":
            return usage.peak() >= CODE_FULL * capacity
        return usage.peak() > capacity

    def _remaining_tokens(self, prompt: Prompt) -> int:
        predicted = prompt.predicted_output_tokens
        return self.points[-1] if predicted is None else predicted - prompt.generated

    def _usage_of(self, view: View) -> FutureUsage:
        """Return the future use of the running decodes."""
        usage = FutureUsage(self.points)
        for one in view.decode_lengths:
            predicted = one.predicted_output_tokens
            remaining = self.points[-1] if predicted is None else predicted - one.generated_tokens
            usage.add(one.context_tokens, remaining)
        return usage

    # -- decode ---------------------------------------------------------------------------------

    def _start_decoding(self, view: View, live: int) -> None:
        self._prefilling = False
        self._started_with = live
        self._preemptions = view.preemptions
        self._turn = 0

    def _decode(self, view: View) -> Plan:
        ready = view.ready_decodes
        if not ready or view.in_flight >= view.depth:
            return Plan(kv_limited=view.num_waiting > 0 and not _next_prompt_fits(view))
        rows, order = self._next_batch(view)
        if ready < rows and view.running > view.running_decodes:
            return Plan()  # the rest of the batch is still in its prefill
        self._turn += 1
        return Plan(decodes=min(max(rows, 1), ready, self._most_rows), order=order)

    def _next_batch(self, view: View) -> tuple[int, Order]:
        """Return how many ready decodes to take, and which first."""
        if self._turn < view.depth:
            share = stealing_share(self._started_with, view.depth, self._turn)
            return share, "first_returned"
        if not self.work_stealing:
            return view.ready_group_sizes[0], "first_returned"
        share = stealing_share(view.running, view.depth, self._turn)
        if self.variant == "code":
            return share, "arrival"
        return share, "last_returned" if share <= self._most_rows else "first_returned"

    # -- from decode to prefill -----------------------------------------------------------------

    def _ends_decode(self, view: View) -> bool:
        if not view.num_waiting:
            return False
        if not view.running:
            return True
        if self._turn < view.depth or view.in_flight >= view.depth or not _next_prompt_fits(view):
            return False
        if self.variant == "code" and self._turn % view.depth:
            return False
        if self.request_finish_ratio is not None:
            left = view.running + view.preemptions - self._preemptions
            finished = self._started_with - left
            return finished / max(self._started_with, 1) >= self.request_finish_ratio
        return self._prefill_is_better(view)

    def _prefill_is_better(self, view: View) -> bool:
        """Say whether a switch now would use the pipeline better than the next decode batches.

        How many of the pending prefills fit depends on the predicted use, which looks at every row.
        It is asked for only if some number of them would be better.
        """
        rows = max(view.running // view.depth, 1)
        if self.variant == "code" and rows >= CODE_SATURATED_ROWS:
            return False
        pending = list(self._pending_prefills(view))
        if not pending:
            return False
        context_tokens = view.decode_context_tokens / max(view.running_decodes, 1)
        step_s = self._decode_s(rows, round(rows * context_tokens))
        if not self._saturated_rows:
            in_code = self.variant == "code"
            self._saturated_rows = CODE_PEAK_ROWS if in_code else saturating_rows(self._decode_s)
        spatial = spatial_intensity(rows, context_tokens, self._saturated_rows, self._decode_s)
        seconds = [self._prefill_s(sum(prompt.tokens for prompt in batch)) for batch, _ in pending]
        waits = 1 if self.variant == "paper" else view.depth - 1
        better = [
            spatial < temporal_intensity(seconds[:stop], step_s, view.depth, waits)
            for stop in range(1, len(seconds) + 1)
        ]
        if not any(better):
            return False
        fitting = self._fitting(pending, view)
        return fitting > 0 and better[fitting - 1]

    def _pending_prefills(self, view: View) -> Iterator[tuple[list[Prompt], int]]:
        """Iterate over the prefill micro-batches that there are pages for, with those then free."""
        batch: list[Prompt] = []
        free, tokens = view.free_pages, 0
        for prompt in view.waiting:
            pages = view.pages_for(prompt.tokens)
            if pages > free:
                break
            over = tokens + prompt.tokens > self.max_num_batched_tokens
            if batch and (over or len(batch) >= self._most_rows):
                yield batch, free
                batch, tokens = [], 0
            batch.append(prompt)
            free, tokens = free - pages, tokens + prompt.tokens
        if batch:
            yield batch, free

    def _fitting(self, pending: Sequence[tuple[list[Prompt], int]], view: View) -> int:
        """Return how many of the pending micro-batches leave the predicted use below the pool.

        One that makes it full does not fit, though a prefill phase sends it. Otherwise decode would
        end as soon as it began.
        """
        usage = self._usage_of(view)
        for index, (batch, free) in enumerate(pending):
            for prompt in batch:
                usage.add(prompt.tokens, self._remaining_tokens(prompt))
            if self._is_full(usage, free, view):
                return index
        return len(pending)


def _next_prompt_fits(view: View) -> bool:
    return view.pages_for(next(view.waiting).tokens) <= view.free_pages
