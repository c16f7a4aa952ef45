"""Segments of each stage, one after another, as the timeline of a page draws them.

Knows the columns of a run; no colours and no HTML, which are those of `timeline.js`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evenflow.report.data import shares_over_time, span_s, steady
from evenflow.results.outcome import Outcome

BINS = 240
"""Parts in which a run is shown where its micro-batches are not."""

FULL = 250
"""What stands for the whole of a part, in the byte of a share."""


def packed(values: Any, kind: str) -> str:
    """Return numbers as base64 of a little-endian typed array, such as "u4"."""
    return b64encode(np.asarray(values).astype(f"<{kind}").tobytes()).decode("ascii")


def timeline_data(
    run: Outcome, most: int, prompts: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """Return what the stages do: `most` micro-batches one by one, the whole run in BINS parts.

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
    """Return where a stage's row begins (s), and the length (us) and kind of all that follows.

    The row ends at the next micro-batch there.
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
