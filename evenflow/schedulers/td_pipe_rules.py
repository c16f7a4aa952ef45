"""The rules of TD-Pipe as pure functions: future KV use, even shares, spatial-temporal intensity.

Knows lengths and times; not which requests they belong to, nor when they are asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

DecodeTime = Callable[[int, int], float]
"""Seconds that one stage takes for a decode step of (rows, tokens they attend to in all)."""

SATURATED_GAIN = 1.05
LARGEST_BATCH_ROWS = 8192


class FutureUsage:
    """KV tokens in use at each future point, if every request lives as long as predicted.

    `points` are decode steps from now, in rising order. A request that attends to c tokens counts
    c + m at each point m that it reaches (TD-Pipe, algorithm 1): the KV grows by a token a step,
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


def temporal_intensity(prefill_s: Sequence[float], decode_step_s: float, depth: int) -> float:
    """Return 1 - bubble / total, for a switch to these prefill micro-batches now.

    All times are seconds on one stage. Behind a decode step each later stage waits the longer for
    the prefill that follows: bubble = (longest prefill - decode step) * (depth - 1) on the last
    one. total = all prefills + a decode step of each of `depth` batches + bubble. TD-Pipe, section
    3.4.
    """
    bubble_s = max(max(prefill_s) - decode_step_s, 0.0) * (depth - 1)
    total_s = sum(prefill_s) + depth * decode_step_s + bubble_s
    return 1 - bubble_s / total_s if total_s else 1.0
