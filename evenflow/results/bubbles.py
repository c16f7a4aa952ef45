"""Why stages stand idle: every idle second of every stage gets exactly one cause.

Knows a `RunResult` and nothing else: no policy, no costs, no simulator. It attributes what
happened; what would have happened without a cause is a question for the simulator. The rules are in
`evenflow.results.bubble_rules`, and in docs/bubbles.md with a drawing each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.results.bubble_rules import (
    CAUSES,
    FILL_DRAIN,
    RESOLUTION_S,
    STARVATION,
    Rows,
    Timeline,
    first_stage,
    later_stage,
    previous,
    selected,
    timeline_of,
)
from evenflow.results.combine import schedule_order
from evenflow.results.run import BATCHES, STAGES, WAITS, Columns, Floats, Ints, RunResult

__all__ = ["CAUSES", "Bubbles", "attribute"]


class Bubbles(NamedTuple):
    """The idle time of a run in pieces: columns in order of stage, then time.

    `stage`, `start_s`, `end_s`, `cause` (an index into CAUSES) and `batch`, the index of the
    micro-batch that the stage runs next (-1: none). `window` is (first arrival, last return) in
    seconds; outside it no stage counts as idle.
    """

    depth: int
    window: tuple[float, float]
    stage: Ints
    start_s: Floats
    end_s: Floats
    cause: Ints
    batch: Ints

    @property
    def idle_s(self) -> float:
        """Idle seconds of all stages together."""
        return float(np.sum(self.end_s - self.start_s))

    @property
    def busy_s(self) -> float:
        """Busy seconds of all stages together, within the window."""
        return self.depth * (self.window[1] - self.window[0]) - self.idle_s

    def stage_totals(self) -> Floats:
        """Return idle seconds as [depth, len(CAUSES)]."""
        place, count = self.stage * len(CAUSES) + self.cause, self.depth * len(CAUSES)
        seconds = np.bincount(place, weights=self.end_s - self.start_s, minlength=count)
        return seconds.astype(np.float64).reshape(self.depth, len(CAUSES))

    def totals(self) -> dict[str, float]:
        """Return idle seconds of all stages together for each of CAUSES."""
        return dict(zip(CAUSES, self.stage_totals().sum(axis=0).tolist(), strict=True))

    def shares(self) -> dict[str, float]:
        """Return for each of CAUSES its share of the time of all stages, which is not 0."""
        whole_s = self.busy_s + self.idle_s
        return {
            cause: idle_s / whole_s if whole_s else 0.0 for cause, idle_s in self.totals().items()
        }

    def table(self) -> Columns:
        """Return the columns of bubbles.csv by name; the cause is spelt out."""
        return {
            "stage": self.stage,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "cause": np.array(CAUSES)[self.cause],
            "batch_id": self.batch,
        }


BLOCK = 1 << 16
"""Micro-batches whose gaps are divided at a time: in a longer run, some pieces are cut elsewhere by
what rounding makes of it."""

Pieces = tuple[NDArray[Any], ...]
"""The columns of Bubbles: stage, start, end, cause, batch."""


def attribute(result: RunResult) -> Bubbles:
    """Return every idle interval within the window, each piece with its cause.

    An interval is idle if no micro-batch computes on the stage. Raises ValueError for a run in
    which a micro-batch never returned, and for the merged result of several replicas. The stages of
    a system of pools are those of its pools.
    """
    if result.replicas > 1:
        raise ValueError(f"bubbles need one pipeline, not {result.replicas} merged")
    if result.kept_tally is not None:
        raise ValueError("bubbles need the micro-batches, and the run did not keep them")
    window = _window(result)
    pieces = _of_pools(result, window) if result.pools else _of_pipeline(result, window)
    return Bubbles(result.depth, window, *map(np.concatenate, zip(*pieces, strict=True)))


def _of_pipeline(result: RunResult, window: tuple[float, float]) -> list[Pieces]:
    """Return the pieces of each stage. A pool that got no work, while others did, starved."""
    if not np.isfinite(result.returned_s).all():
        lost = int(np.argmin(np.isfinite(result.returned_s)))
        raise ValueError(f"micro-batch {lost} never returned: bubbles need a run that has ended")
    if not len(result.scheduled_s):
        count = result.depth if window[1] > window[0] else 0
        alike = (np.full(count, value) for value in (*window, STARVATION, -1))
        return [(np.arange(count), *alike)]
    result, count = replace(result, arrival_s=np.sort(result.arrival_s)), len(result.scheduled_s)
    blocks = [
        _of_block(result, window, start, min(start + BLOCK, count))
        for start in range(0, count, BLOCK)
    ]
    stages = zip(*blocks, strict=True)
    return [tuple(map(np.concatenate, zip(*stage, strict=True))) for stage in stages]


def _of_block(
    result: RunResult, window: tuple[float, float], start: int, stop: int
) -> list[Pieces]:
    """Return the pieces before micro-batches [start, stop), and behind the last of the run."""
    first, near = _around(result, start, stop)
    timeline = timeline_of(near, window[0])
    rows = _tile(first_stage(near, timeline), timeline, 0)
    pieces = [_pieces(rows, timeline, 0, window[1])]
    for stage in range(1, near.depth):
        rows = _tile(later_stage(near, timeline, stage, rows), timeline, stage)
        pieces.append(_pieces(rows, timeline, stage, window[1]))
    return [_own(columns, first, start, stop, len(result.scheduled_s)) for columns in pieces]


def _around(result: RunResult, start: int, stop: int) -> tuple[int, RunResult]:
    """Return micro-batches [start, stop) amid the others that their gaps depend on, and which of
    the run is the first: the oldest in flight and what had returned, with the one before each; and
    the one behind, up to whose start there are waits."""
    returned = int(np.searchsorted(result.returned_s, result.scheduled_s[start], "right")) - 1
    first = max(0, min(start - (result.max_in_flight or 0), returned) - 1)
    columns: dict[str, Any] = {
        name: getattr(result, name)[first : stop + 1]
        for name in (*BATCHES, *STAGES)
        if getattr(result, name) is not None
    }
    since = int(np.searchsorted(result.wait_s, result.scheduled_s[start - 1])) if start else 0
    until = int(np.searchsorted(result.wait_s, columns["start_s"][-1, 0], "right"))
    columns |= {name: getattr(result, name)[since:until] for name in WAITS}
    return first, replace(result, **columns)


def _own(pieces: Pieces, first: int, start: int, stop: int, count: int) -> Pieces:
    """Return the pieces of [start, stop), given those from `first` on of `count` micro-batches."""
    stage, begin_s, end_s, cause, batch = pieces
    behind = batch < 0
    batch = np.where(behind, batch, batch + first)
    own = ((batch >= start) & (batch < stop)) | (behind & (stop == count))
    return stage[own], begin_s[own], end_s[own], cause[own], batch[own]


def _of_pools(result: RunResult, window: tuple[float, float]) -> list[Pieces]:
    """Return the pools' pieces, with the stages and the micro-batches of the whole."""
    position = np.argsort(schedule_order(result.pools))
    pieces: list[Pieces] = []
    first_stage, first_batch = 0, 0
    for pool in result.pools.values():
        stop_batch = first_batch + len(pool.scheduled_s)
        own = np.append(position[first_batch:stop_batch], -1)
        for stage, *times_and_cause, batch in _of_pipeline(pool, window):
            pieces.append((stage + first_stage, *times_and_cause, own[batch]))
        first_stage, first_batch = first_stage + pool.depth, stop_batch
    return pieces


def _window(result: RunResult) -> tuple[float, float]:
    opens = result.arrival_s if len(result.arrival_s) else result.scheduled_s
    if len(opens) == 0:
        return 0.0, 0.0
    start_s = float(opens.min())
    return start_s, float(result.returned_s.max(initial=start_s))


def _tile(rows: Rows, timeline: Timeline, stage: int) -> Rows:
    """Cover every gap of a stage with its rows, without holes or overlaps.

    Rows that are only rounding go to their neighbours; neighbours of one cause become one piece.
    """
    free_s, start_s = timeline.free_s[:, stage], timeline.start_s[:, stage]
    rows = rows._replace(stop_s=np.clip(rows.stop_s, free_s[rows.batch], start_s[rows.batch]))
    share_s = (start_s - free_s)[rows.batch] / np.bincount(rows.batch, minlength=1)[rows.batch]
    length_s = rows.stop_s - _starts(rows, free_s)
    rows = selected(rows, length_s >= np.minimum(share_s * 0.999, RESOLUTION_S))
    changes = np.diff(rows.batch, append=-1) != 0
    rows = rows._replace(stop_s=np.where(changes, start_s[rows.batch], rows.stop_s))
    return selected(rows, changes | (np.diff(rows.cause, append=-1) != 0))


def _starts(rows: Rows, free_s: Floats) -> Floats:
    """Return where each row begins: where the one before ends, or the gap begins."""
    first = np.diff(rows.batch, prepend=-1) != 0
    return np.where(first, free_s[rows.batch], previous(rows.stop_s)[: len(first)])


def _pieces(rows: Rows, timeline: Timeline, stage: int, window_end_s: float) -> Pieces:
    """Add where each row begins, and the time from the last micro-batch to the end of the run."""
    begin_s = _starts(rows, timeline.free_s[:, stage])
    last_end_s = timeline.start_s[-1, stage] + timeline.service_s[-1, stage]
    if window_end_s - last_end_s > RESOLUTION_S:
        begin_s = np.append(begin_s, last_end_s)
        rows = Rows(*map(np.append, rows, (-1, window_end_s, FILL_DRAIN)))
    return np.full(len(begin_s), stage), begin_s, rows.stop_s, rows.cause, rows.batch
