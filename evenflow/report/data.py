"""The numbers behind the report's figures: few enough points for a page, whatever the run's size.

Knows the columns of a run. Does not know how a figure looks, nor any plotting library.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import quantiles
from evenflow.results.outcome import Outcome
from evenflow.results.run import Floats, Ints, RunResult


def replicas(runs: Mapping[str, Outcome], most: int | None = None) -> dict[str, Outcome]:
    """Return the runs by name, each run with replicas replaced by its replicas' runs.

    `most`: only the first replicas with work, at most. Empty if no run has several replicas.
    """
    several = any(len(run.parts) > 1 for run in runs.values())
    found: dict[str, Outcome] = {}
    for name, run in runs.items() if several else ():
        parts = run.parts if len(run.parts) > 1 else {name: run}
        worked = (each for each in parts.items() if len(each[1].result.scheduled_s))
        found |= parts if most is None else dict(islice(worked, most))
    return found


def pipelines(runs: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the runs by name, each system of pools replaced by the runs of pools with work."""
    found: dict[str, Outcome] = {}
    for name, run in runs.items():
        parts = {f"{name}: {pool}": part for pool, part in run.pools.items()}
        found |= {key: part for key, part in parts.items() if len(part.result.scheduled_s)}
        if not parts:
            found[name] = run
    return found


class Binned(NamedTuple):
    """A series cut into bins of equal time: each column has one value a bin."""

    middle_s: Floats
    low: Floats
    mean: Floats
    high: Floats


def span_s(result: RunResult) -> float:
    """Return the time of the last event of a run, in seconds; 0 if nothing ran."""
    return float(result.returned_s.max()) if len(result.returned_s) else 0.0


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """Return (value, share of values at or below it) at 150 or fewer quantiles."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return known, known
    shares = np.linspace(0.0, 1.0, min(150, len(known)))
    return quantiles(known, shares), shares


def binned(at_s: Floats, values: Floats | Ints, stop_s: float, bins: int = 300) -> Binned:
    """Cut the step curve that takes `values` at the times `at_s` (sorted) into bins of [0, stop_s].

    A bin without a value repeats the last one: the curve holds until it changes.
    """
    edges = np.linspace(0.0, stop_s, bins + 1)
    first = np.searchsorted(at_s, edges[:-1])
    stop = np.searchsorted(at_s, edges[1:], side="right")
    first = np.where(stop > first, first, np.maximum(first - 1, 0))
    pieces = [values[a : max(b, a + 1)] for a, b in zip(first, stop, strict=True)]
    low, mean, high = (
        np.array([reduce(piece) for piece in pieces]) for reduce in (np.min, np.mean, np.max)
    )
    return Binned((edges[:-1] + edges[1:]) / 2, low, mean, high)


def chunks_of(count: int, bins: int) -> Ints:
    """Return the edges of at most `bins` nearly equal parts of range(count)."""
    parts = max(1, min(count, bins))
    return np.linspace(0, count, parts + 1).astype(np.int64)


def present(enter_s: Floats | Ints, leave_s: Floats | Ints, at_s: Floats | Ints) -> Ints:
    """Count the intervals entered and not left at the times `at_s`; a NaN never happens."""
    entered = np.searchsorted(np.sort(enter_s[~np.isnan(enter_s)]), at_s, side="right")
    left = np.searchsorted(np.sort(leave_s[~np.isnan(leave_s)]), at_s, side="right")
    return (entered - left).astype(np.int64)


def used_share(result: RunResult) -> Floats:
    """Return the share of KV pages in use when each micro-batch was scheduled, 0 to 1.

    Where several engines divide the pages, the share of the micro-batch's engine.
    """
    return 1.0 - result.free_pages / max(result.total_pages // result.engines, 1)


def shares_by_stage(run: Outcome) -> Floats:
    """Return shares of each stage's time, [depth, 1 + causes]: computing, and idle by cause.

    Replicas count together.
    """
    parts = [(part.result, part.idle.stage_totals()) for part in run.parts.values()]
    columns = [np.column_stack([np.sum(r.end_s - r.start_s, axis=0), idle]) for r, idle in parts]
    times = np.sum(columns, axis=0)
    return np.asarray(times / np.maximum(times.sum(axis=1, keepdims=True), 1e-300))


def shares_over_time(run: Outcome, edges: Floats) -> Floats:
    """Return shares of the time between edges (s): computing, and idle by cause.

    [depth, len(edges) - 1, 1 + causes]; what is neither is idle before the first micro-batch or
    after the last.
    """
    idle, result = run.idle, run.result
    starts, ends = np.asarray(idle.start_s), np.asarray(idle.end_s)
    stages, kinds = np.asarray(idle.stage), np.asarray(idle.cause)
    taken_s = []
    for stage in range(result.depth):
        own = [covered(result.start_s[:, stage], result.end_s[:, stage], edges)]
        for cause in range(len(CAUSES)):
            of = (stages == stage) & (kinds == cause)
            own.append(covered(starts[of], ends[of], edges))
        taken_s.append(np.column_stack(own))
    return np.asarray(np.stack(taken_s) / np.diff(edges)[:, None])


def covered(start_s: Floats, end_s: Floats, edges: Floats) -> Floats:
    """Return the time between edges that is covered by intervals, which do not overlap."""
    order = np.argsort(start_s, kind="stable")
    at = np.column_stack([start_s[order], end_s[order]]).ravel()
    if not len(at):
        return np.zeros(len(edges) - 1)
    so_far = np.cumsum((end_s - start_s)[order])
    total = np.column_stack([np.append(0.0, so_far[:-1]), so_far]).ravel()
    return np.diff(np.interp(edges, at, total))


def shares(run: Outcome) -> dict[str, float]:
    """Return shares of the time of all stages together: "computing", and idle by cause."""
    means = shares_by_stage(run).mean(axis=0).tolist()
    return dict(zip(("computing", *CAUSES), means, strict=True))


def steady(run: Outcome, width: int) -> slice:
    """Return the positions of the `width` micro-batches around the middle of the steady window.

    That is about the same time for every scheduler under the same traffic. Without a steady window
    in the summary, the middle of the run.
    """
    start_s = run.summary.get("steady_start_s", 0.0)
    stop_s = run.summary.get("steady_stop_s", span_s(run.result))
    count = len(run.result.scheduled_s)
    centre = int(np.searchsorted(run.result.scheduled_s, (start_s + stop_s) / 2))
    first = max(0, min(centre - width // 2, count - width))
    return slice(first, min(count, first + width))


BINS = 240
"""Parts in which a run is shown where its micro-batches are not."""

FULL = 250
"""Byte that stands for a share of 1."""


def packed(values: Any, kind: str) -> str:
    """Return numbers as base64 of a little-endian typed array, such as "u4"."""
    return b64encode(np.asarray(values).astype(f"<{kind}").tobytes()).decode("ascii")


def timeline_data(
    run: Outcome, most: int, prompts: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """Return the timeline of stages: `most` micro-batches one by one, the whole run in BINS parts.

    The micro-batches are all, or those around the middle of the steady state. Lengths are whole
    microseconds, kinds are 0 (computing) or 1 + the index of a cause. `prompts`: which requests'
    prompts are in each of all micro-batches.
    """
    result, rows = run.result, steady(run, most)
    stages = [_segments(run, stage, rows) for stage in range(result.depth)]
    pages = result.total_pages // result.engines
    data = {
        "until_s": span_s(result),
        "first": rows.start,
        "stages": stages,
        "prefill": packed(result.prefill_tokens[rows], "u4"),
        "decode": packed(result.decode_tokens[rows], "u4"),
        "used": packed(pages - result.free_pages[rows], "u4"),
        "pages": pages,
    }
    if prompts is not None:
        chosen = prompts[rows]
        data["prompt_counts"] = packed([len(each) for each in chosen], "u4")
        data["prompt_ids"] = packed([number for each in chosen for number in each], "u4")
    if rows.stop - rows.start < len(result.scheduled_s):
        parts = shares_over_time(run, np.linspace(0.0, span_s(result), BINS + 1))
        data["bins"] = BINS
        data["shares"] = packed(np.rint(FULL * parts), "u1")
    return data


def _segments(run: Outcome, stage: int, rows: slice) -> Mapping[str, Any]:
    """Return when a stage's row begins (s), and the lengths (us) and kinds of its segments.

    The row ends at the stage's next micro-batch.
    """
    result, idle = run.result, run.idle
    own = np.asarray(idle.stage) == stage
    starts_s = np.concatenate([result.start_s[rows, stage], np.asarray(idle.start_s)[own]])
    kinds = np.zeros(len(starts_s), dtype=np.int64)
    kinds[rows.stop - rows.start :] = 1 + np.asarray(idle.cause)[own]
    all_s = result.start_s[:, stage]
    since_s = idle.window[0] if rows.start == 0 else float(all_s[rows.start])
    until_s = idle.window[1] if rows.stop == len(all_s) else float(all_s[rows.stop])
    inside = (starts_s >= since_s) & (starts_s < until_s)
    order = np.argsort(starts_s[inside], kind="stable")
    edges = np.rint(1e6 * np.append(starts_s[inside][order], until_s)).astype(np.int64)
    return {
        "from_s": float(edges[0]) * 1e-6,
        "lengths": packed(np.diff(edges), "u4"),
        "kinds": packed(kinds[inside][order], "u1"),
    }
