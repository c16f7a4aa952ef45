"""The rules that divide idle time by cause, for `evenflow.results.bubbles`.

Knows the columns of a run; not how gaps are covered without holes, nor what is done with the
pieces. Each rule is explained and drawn in docs/bubbles.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.results.run import WAIT_REASONS, Floats, Ints, RunResult

CAUSES = (
    "fill_drain",
    "starvation",
    "kv_limited",
    "policy",
    "uneven_prefill",
    "prefill_decode",
    "uneven_decode",
    "uneven_stages",
    "link",
    "cpu",
)
"""The causes of idle time. What papers call PB1, PB2 and PB3 is `uneven_prefill`, `prefill_decode`
and `uneven_decode`; `policy` is work that the policy holds back although pages suffice."""

(
    FILL_DRAIN,
    STARVATION,
    KV_LIMITED,
    POLICY,
    UNEVEN_PREFILL,
    PREFILL_DECODE,
    UNEVEN_DECODE,
    UNEVEN_STAGES,
    LINK,
    CPU,
) = range(len(CAUSES))

CAUSE_OF_WAIT = {"work": STARVATION, "kv": KV_LIMITED, "policy": POLICY}
"""The cause for each of WAIT_REASONS."""

RESOLUTION_S = 1e-9
"""Gaps this short are rounding, not idle time, and so are the pieces of a longer gap."""


class Timeline(NamedTuple):
    """The run as differences. All [m, depth], in seconds."""

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
        [_everyone(start_s, CPU)],
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
    yield Rows(batch, slot_s[batch] - gap_s * (link + cpu), np.full(len(batch), POLICY))
    yield Rows(batch, slot_s[batch] - gap_s * cpu, np.full(len(batch), LINK))
    yield Rows(batch, slot_s[batch], np.full(len(batch), CPU))


def _trip_shares(
    result: RunResult, timeline: Timeline, batch: Ints, cap: int
) -> tuple[Floats, Floats, Floats]:
    """Return which shares of the wait are due to the cap, to links and to CPU work.

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
    answer = np.append(cause_of_wait, STARVATION)[following - 1]
    answer[_latest(wait_s, slot_s) < sent_before_s] = STARVATION
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
    """Divide each gap: that of the stage above travels on, then what the micro-batch itself adds.

    With c the service, l the link, w the wait (queue and CPU) and V the predecessor:
    gap[k] = gap[k-1] + (c[k-1] - c_V[k]) + (l - l_V) + cpu - w_V. Terms above 0 make idle time;
    terms below 0 absorb the beginning of the gap that arrives.
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
    uneven[0] = FILL_DRAIN
    arrived_s = ready_s - late_s - longer_s
    shift_s = arrived_s - timeline.start_s[:, stage - 1]
    blocks = (
        Rows(above.batch, above.stop_s + shift_s[above.batch], above.cause),
        Rows(everyone, ready_s - late_s, uneven),
        _everyone(ready_s, LINK),
        _everyone(start_s, CPU),
    )
    return _joined(blocks, start_s - timeline.free_s[:, stage] > RESOLUTION_S)


def _uneven(
    result: RunResult, batch: Ints, predecessor: Ints, *, stages_s: Floats, batches_s: Floats
) -> Ints:
    """Name unevenness: of stages if they differ more than the micro-batches, else by content."""
    prefills = (result.prefill_tokens[batch] > 0).astype(np.int64)
    prefills += result.prefill_tokens[predecessor] > 0
    content = np.array([UNEVEN_DECODE, PREFILL_DECODE, UNEVEN_PREFILL])[prefills]
    return np.where(stages_s > batches_s, UNEVEN_STAGES, content)


def _everyone(stop_s: Floats, cause: int) -> Rows:
    return Rows(np.arange(len(stop_s)), stop_s, np.full(len(stop_s), cause))


def selected(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    """Return those of the rows that are kept."""
    return Rows(rows.batch[keep], rows.stop_s[keep], rows.cause[keep])


def _joined(blocks: Iterable[Rows], gap: NDArray[np.bool_]) -> Rows:
    """Put rows in order of micro-batch; those of one keep the order of the blocks.

    Only of micro-batches before which there is a `gap`: most rows are of the others.
    """
    kept = [selected(rows, gap[rows.batch]) for rows in blocks]
    columns = [np.concatenate(column) for column in zip(*kept, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Rows(*(column[order] for column in columns))
