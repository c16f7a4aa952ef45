"""Causes of bubbles: every idle second of every stage gets exactly one.

Knows a `RunResult` and nothing else: no policy, no costs, no simulator. It attributes what
happened; what would have happened without a cause is a question for the simulator. First come the
rules that divide a gap, explained and drawn in docs/bubbles.md. Then how gaps are covered without
holes, and what is done with the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.results.disturbances import Pieces, painted
from evenflow.results.run import (
    BATCHES,
    STAGES,
    WAIT_REASONS,
    WAITS,
    Columns,
    Floats,
    Ints,
    RunResult,
    schedule_order,
)


class Cause(IntEnum):
    """A cause of idle time. What papers call PB1, PB2 and PB3 is `uneven_prefill`, `prefill_decode`
    and `uneven_decode`; `policy` is work that the policy holds back although pages suffice. The
    last two are due to processes of the user's."""

    FILL_DRAIN = 0
    STARVATION = 1
    KV_LIMITED = 2
    POLICY = 3
    UNEVEN_PREFILL = 4
    PREFILL_DECODE = 5
    UNEVEN_DECODE = 6
    UNEVEN_STAGES = 7
    LINK = 8
    CPU = 9
    OUTAGE = 10
    SLOW_STAGE = 11


CAUSES = tuple(cause.name.lower() for cause in Cause)

CAUSE_OF_WAIT = {"work": Cause.STARVATION, "kv": Cause.KV_LIMITED, "policy": Cause.POLICY}
"""The cause for each of WAIT_REASONS."""

RESOLUTION_S = 1e-9
"""Gaps this short are rounding, not idle time, and so are the pieces of a longer gap."""


class Timeline(NamedTuple):
    """Differences between the times of a run, all [m, depth], in seconds."""

    free_s: Floats  # the predecessor has left the stage (for the first: the window opens)
    start_s: Floats
    service_s: Floats
    link_s: Floats  # on the way from the stage before
    queue_s: Floats  # there, but the predecessor still computes
    cpu_s: Floats  # there and the stage is free: the CPU prepares it


class Rows(NamedTuple):
    """Parts of the gaps before micro-batches: each lasts from the end of the one before it."""

    batch: Ints
    stop_s: Floats
    cause: Ints


def timeline_of(result: RunResult, window_start_s: float) -> Timeline:
    """Return the differences between the times of a run that has at least one micro-batch."""
    start_s, end_s = result.start_s, result.end_s
    free_s = np.concatenate([np.full((1, result.depth), window_start_s), end_s[:-1]])
    there_s = result.available_s.copy()
    there_s[:, 0] = result.scheduled_s  # until stage 0 can start it, the driver prepares it
    link_s = np.zeros_like(there_s)
    link_s[:, 1:] = there_s[:, 1:] - end_s[:, :-1]
    ready_s = np.maximum(there_s, free_s)
    return Timeline(free_s, start_s, end_s - start_s, link_s, ready_s - there_s, start_s - ready_s)


def previous(column: Floats) -> Floats:
    """Return the column of the micro-batches before, 0 for the first."""
    return np.concatenate([np.zeros(1), column[:-1]])


# -- stage 0: what the driver did -----------------------------------------------------------------


def first_stage(result: RunResult, timeline: Timeline) -> Rows:
    """Divide each gap of stage 0: no free slot, then nothing sent, then the CPU prepares."""
    free_s, start_s = timeline.free_s[:, 0], timeline.start_s[:, 0]
    sent_s = np.clip(result.scheduled_s, free_s, start_s)
    slot_s = np.full(len(sent_s), -np.inf)
    cap = result.max_in_flight
    if cap is not None:
        slot_s[cap:] = result.returned_s[: max(0, len(slot_s) - cap)]
    slot_s = np.clip(slot_s, free_s, sent_s)
    blocks = chain(
        () if cap is None else _no_slot(result, timeline, cap, slot_s),
        _nothing_sent(result, slot_s, sent_s),
        [_everyone(start_s, Cause.CPU)],
    )
    return _joined(blocks, start_s - free_s > RESOLUTION_S)


def _no_slot(result: RunResult, timeline: Timeline, cap: int, slot_s: Floats) -> Iterator[Rows]:
    """Divide the wait for the oldest micro-batch in flight, which is `cap` before the next one."""
    free_s, service_s = timeline.free_s[:, 0], timeline.service_s
    batch = np.flatnonzero(slot_s > free_s)
    oldest = batch - cap
    capped, link, cpu = _trip_shares(result, timeline, batch, cap)
    uneven = _uneven(
        result,
        oldest,
        batch - 1,
        stages_s=service_s[oldest].max(axis=1) - service_s[oldest, 0],
        batches_s=service_s[oldest, 0] - service_s[batch - 1, 0],
    )
    gap_s = slot_s[batch] - free_s[batch]
    yield Rows(batch, slot_s[batch] - gap_s * (capped + link + cpu), uneven)
    yield Rows(batch, slot_s[batch] - gap_s * (link + cpu), np.full(len(batch), Cause.POLICY))
    yield Rows(batch, slot_s[batch] - gap_s * cpu, np.full(len(batch), Cause.LINK))
    yield Rows(batch, slot_s[batch], np.full(len(batch), Cause.CPU))


def _trip_shares(
    result: RunResult, timeline: Timeline, batch: Ints, cap: int
) -> tuple[Floats, Floats, Floats]:
    """Return which shares of the wait are due to the cap, to links and to Cause.CPU work.

    On the round trip of the oldest micro-batch stage 0 stood idle for so long in all. Links and CPU
    work explain what they took of the trip, less what the micro-batch queued; a cap below the depth
    explains that share of its computing. Each wait of the trip gets the same proportions.
    """
    oldest = batch - cap
    computed_s = np.concatenate([np.zeros(1), np.cumsum(timeline.service_s[:, 0])])
    prepared_s = np.concatenate([np.zeros(1), np.cumsum(timeline.cpu_s[:, 0])])
    own_cpu_s = prepared_s[batch] - prepared_s[oldest + 1]
    trip_s = result.returned_s[oldest] - timeline.start_s[oldest, 0]
    idle_s = trip_s - (computed_s[batch] - computed_s[oldest]) - own_cpu_s
    link_s = timeline.link_s[oldest].sum(axis=1)
    cpu_s = np.maximum(timeline.cpu_s[oldest, 1:].sum(axis=1) - own_cpu_s, 0.0)
    late_s = np.maximum(link_s + cpu_s - timeline.queue_s[oldest, 1:].sum(axis=1), 0.0)
    capped_s = timeline.service_s[oldest].sum(axis=1) * max(0.0, 1 - cap / result.depth)
    idle_s = np.maximum(idle_s, RESOLUTION_S)  # never 0 / 0
    late = np.minimum(late_s / idle_s, 1.0)
    capped = np.minimum(capped_s / idle_s, 1.0 - late)
    cpu = late * cpu_s / np.maximum(link_s + cpu_s, RESOLUTION_S)
    return capped, late - cpu, cpu


def _nothing_sent(result: RunResult, slot_s: Floats, sent_s: Floats) -> list[Rows]:
    """Divide the time from a free slot to the next micro-batch by what the driver last answered.

    Asked and nothing to send: that answer, until it sends. Not asked since it last sent: no request
    was there until the last arrival or return; from then on the driver was busy.
    """
    wait_s = result.wait_s
    cause_of_wait = np.array([CAUSE_OF_WAIT[why] for why in WAIT_REASONS])[result.wait_reason]
    everyone = np.arange(len(sent_s))
    sent_before_s = np.concatenate([[-np.inf], result.scheduled_s[:-1]])
    asked_s = _latest(wait_s, sent_s)
    event_s = np.maximum(
        _latest(np.sort(result.arrival_s, kind="stable"), sent_s),
        _latest(result.returned_s, sent_s),
    )
    stop_s = np.where(
        asked_s >= sent_before_s,
        sent_s,
        np.clip(np.maximum(event_s, sent_before_s), slot_s, sent_s),
    )
    following = np.searchsorted(wait_s, slot_s, side="right")
    next_wait_s = np.append(wait_s, np.inf)
    answer = np.append(cause_of_wait, Cause.STARVATION)[following - 1]
    answer[_latest(wait_s, slot_s) < sent_before_s] = Cause.STARVATION
    asked = Rows(everyone, np.minimum(next_wait_s[following], stop_s), answer)
    gap = np.searchsorted(slot_s, wait_s, side="left") - 1
    inside = gap >= 0
    again = Rows(
        gap[inside], np.minimum(next_wait_s[1:][inside], stop_s[gap[inside]]), cause_of_wait[inside]
    )
    return [asked, again]


def _latest(times_s: Floats, at_s: Floats) -> Floats:
    """Return for each of `at_s` the last of the sorted `times_s` that is not later (-inf: none)."""
    return np.append(times_s, -np.inf)[np.searchsorted(times_s, at_s, side="right") - 1]


# -- later stages: the gap before arrives with the micro-batch ------------------------------------


def later_stage(result: RunResult, timeline: Timeline, stage: int, above: Rows) -> Rows:
    """Divide each gap: the gap of the stage above travels on, and the micro-batch adds to it.

    gap[k] = gap[k-1] + (c[k-1] - c_V[k]) + (l - l_V) + cpu - w_V.

    c is the service, l the link, w the wait (queue and CPU), V the predecessor. Terms above 0 make
    idle time. Terms below 0 absorb the beginning of the gap that arrives.
    """
    service_s, link_s = timeline.service_s, timeline.link_s[:, stage]
    start_s, cpu_s = timeline.start_s[:, stage], timeline.cpu_s[:, stage]
    previous_s = previous(service_s[:, stage])
    ready_s = start_s - cpu_s
    idle_s = ready_s - timeline.free_s[:, stage]
    late_s = np.clip(link_s - previous(link_s), 0.0, idle_s)
    longer_s = np.clip(service_s[:, stage - 1] - previous_s, 0.0, idle_s - late_s)
    everyone = np.arange(len(start_s))
    uneven = _uneven(
        result,
        everyone,
        np.maximum(everyone - 1, 0),
        stages_s=service_s[:, stage - 1] - service_s[:, stage],
        batches_s=service_s[:, stage] - previous_s,
    )
    uneven[0] = Cause.FILL_DRAIN
    arrived_s = ready_s - late_s - longer_s
    shift_s = arrived_s - timeline.start_s[:, stage - 1]
    blocks = (
        Rows(above.batch, above.stop_s + shift_s[above.batch], above.cause),
        Rows(everyone, ready_s - late_s, uneven),
        _everyone(ready_s, Cause.LINK),
        _everyone(start_s, Cause.CPU),
    )
    return _joined(blocks, start_s - timeline.free_s[:, stage] > RESOLUTION_S)


def _uneven(
    result: RunResult, batch: Ints, predecessor: Ints, *, stages_s: Floats, batches_s: Floats
) -> Ints:
    """Name unevenness: of stages if they differ, and more than micro-batches, else by content."""
    prefills = (result.prefill_tokens[batch] > 0).astype(np.int64)
    prefills += result.prefill_tokens[predecessor] > 0
    content = np.array([Cause.UNEVEN_DECODE, Cause.PREFILL_DECODE, Cause.UNEVEN_PREFILL])[prefills]
    stages = stages_s > np.maximum(batches_s, RESOLUTION_S)
    return np.where(stages, Cause.UNEVEN_STAGES, content)


def _everyone(stop_s: Floats, cause: int) -> Rows:
    return Rows(np.arange(len(stop_s)), stop_s, np.full(len(stop_s), cause))


def selected(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    return Rows(rows.batch[keep], rows.stop_s[keep], rows.cause[keep])


def _joined(blocks: Iterable[Rows], gap: NDArray[np.bool_]) -> Rows:
    """Sort rows by micro-batch; within one, the order of the blocks stays.

    Rows of micro-batches without a `gap` before them, which are most, are left out.
    """
    kept = [selected(rows, gap[rows.batch]) for rows in blocks]
    columns = [np.concatenate(column) for column in zip(*kept, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Rows(*(column[order] for column in columns))


# -- all gaps of a run ----------------------------------------------------------------------------


class Bubbles(NamedTuple):
    """The idle time of a run in pieces: columns in order of stage, then time.

    `stage`, `start_s`, `end_s`, `cause` (an index into CAUSES) and `batch`. That is the index of
    the micro-batch that the stage runs next (-1: none). `window` is (first arrival, last return) in
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
"""Micro-batches whose gaps are divided at a time: in a longer run, rounding cuts some pieces
elsewhere."""


def attribute(result: RunResult) -> Bubbles:
    """Return every idle interval within the window, each piece with its cause.

    An interval is idle if no micro-batch computes on the stage. Raises ValueError for a run in
    which a micro-batch never returned, and for the merged result of several replicas. A system of
    pools has the stages of its pools.
    """
    if result.replicas > 1:
        raise ValueError(f"bubbles need one pipeline, not {result.replicas} merged")
    if result.kept_tally is not None:
        raise ValueError("bubbles need the micro-batches, and the run did not keep them")
    window = _window(result)
    stages = _of_pools(result, window) if result.pools else _of_pipeline(result, window)
    pieces: Pieces = tuple(map(np.concatenate, zip(*stages, strict=True)))
    if result.disturbed is not None:
        pieces = painted(pieces, result, window[0], Cause.OUTAGE, Cause.SLOW_STAGE)
    return Bubbles(result.depth, window, *pieces)


def _of_pipeline(result: RunResult, window: tuple[float, float]) -> list[Pieces]:
    """Return the pieces of each stage. A pool that got no work, while others did, starved."""
    if not np.isfinite(result.returned_s).all():
        lost = int(np.argmin(np.isfinite(result.returned_s)))
        raise ValueError(f"micro-batch {lost} never returned: bubbles need a run that has ended")
    if not len(result.scheduled_s):
        count = result.depth if window[1] > window[0] else 0
        alike = (np.full(count, value) for value in (*window, Cause.STARVATION, -1))
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
    """Return micro-batches [start, stop) and all that their gaps depend on, and the index of the
    first. These are the oldest in flight and what had returned, with the one before each; and the
    one behind, up to the start of which there are waits.
    """
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
        rows = Rows(*map(np.append, rows, (-1, window_end_s, Cause.FILL_DRAIN)))
    return np.full(len(begin_s), stage), begin_s, rows.stop_s, rows.cause, rows.batch
