"""Idle time that stopped or slow stages and dead engines caused on others, as separate causes.

Knows what `evenflow.results.bubbles` attributed, and gives the parts that are due to processes of
the user's another cause. The sum of all idle time stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenflow.results.run import Floats, RunResult

Pieces = tuple[NDArray[Any], ...]
"""Columns: stage, start, end, cause, batch."""

SAME_INSTANT_S = 1e-9


def painted(pieces: Pieces, result: RunResult, opens_s: float, outage: int, slow: int) -> Pieces:
    """Return the pieces with the causes `outage` and `slow` where a disturbance of a run made them.

    A gap begins with the time that the micro-batch behind it was held up on the stages before. On
    stage 0 it was held up as long as the one whose return it was sent at. `opens_s`: when the
    window opens.
    """
    disturbed = result.disturbed
    assert disturbed is not None
    if len(result.scheduled_s):
        gap_s = _gaps(result, opens_s)
        stopped_s = _reaching(result, gap_s, disturbed.stopped_s)
        slowed_s = _reaching(result, gap_s - stopped_s, disturbed.slowed_s)
        stage, _, _, _, batch = pieces
        begin_s = np.vstack([np.full(result.depth, opens_s), result.end_s])[batch, stage]
        begin_s = np.where(batch < 0, result.end_s[-1][stage], begin_s)
        stop_s = begin_s + stopped_s[batch, stage]
        spans = ((begin_s, stop_s, outage), (stop_s, stop_s + slowed_s[batch, stage], slow))
        pieces = _with(pieces, spans)
    for since_s, until_s in disturbed.outages:
        everywhere = np.ones(len(pieces[0]))
        pieces = _with(pieces, [(since_s * everywhere, until_s * everywhere, outage)])
    return pieces


def _gaps(result: RunResult, opens_s: float) -> Floats:
    """Return the idle time before each micro-batch on each stage; of all others in the last row."""
    ends_s = np.vstack([np.full(result.depth, opens_s), result.end_s])
    starts_s = np.vstack([result.start_s, np.full(result.depth, result.returned_s[-1])])
    gaps_s: Floats = np.maximum(starts_s - ends_s, 0.0)
    return gaps_s


def _reaching(result: RunResult, gap_s: Floats, lost_s: Floats) -> Floats:
    """Return how much of each gap is due to seconds that were lost on other stages."""
    back = np.searchsorted(result.returned_s, result.scheduled_s + SAME_INSTANT_S, "right") - 1
    sent_at_once = (back >= 0) & (result.scheduled_s - result.returned_s[back] <= SAME_INSTANT_S)
    found = np.zeros_like(gap_s)
    held_s = np.where(sent_at_once, lost_s[back, 1:].sum(axis=1), 0.0)
    found[:-1, 0] = np.minimum(held_s, gap_s[:-1, 0])
    for stage in range(1, result.depth):
        held_s = found[:-1, stage - 1] + lost_s[:, stage - 1]
        held_s[1:] -= lost_s[:-1, stage]  # the one before it held up this stage meanwhile
        found[:-1, stage] = np.clip(held_s, 0.0, gap_s[:-1, stage])
    behind_s = lost_s[-1].sum() - np.cumsum(lost_s[-1])
    found[-1] = np.minimum(behind_s, gap_s[-1])
    return found


def _with(pieces: Pieces, spans: Any) -> Pieces:
    """Return the pieces, cut and with another cause where each of them is within its span."""
    stage, start_s, end_s, cause, batch = pieces
    cuts: list[tuple[Floats, Floats, Any]] = []
    at_s = start_s
    for since_s, until_s, painted_cause in spans:
        first_s = np.clip(since_s, at_s, end_s)
        last_s = np.clip(until_s, first_s, end_s)
        cuts += [(at_s, first_s, cause), (first_s, last_s, np.full_like(cause, painted_cause))]
        at_s = last_s
    cuts.append((at_s, end_s, cause))
    parts = [*_kept(stage, batch, cuts)]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return tuple(column[order] for column in columns)


def _kept(stage: Any, batch: Any, cuts: list[tuple[Floats, Floats, Any]]) -> Iterator[Pieces]:
    for since_s, until_s, cause in cuts:
        there = until_s > since_s
        yield stage[there], since_s[there], until_s[there], cause[there], batch[there]
