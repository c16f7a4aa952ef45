"""The drawings of docs/bubbles.md: one tiny run for each cause of idle time.

Knows the smallest pipeline that makes a RunResult, and runs that show one cause each; what
`attribute` must answer for them is in tests/test_bubbles.py.
`python -m tools.draw_bubbles` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from evenflow.results.bubbles import CAUSES, attribute
from evenflow.results.run import WAIT_REASONS, Floats, Ints, RunResult
from experiments.report.style import BUSY, CAUSE_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
LIGHT = {"fill_drain", "starvation", "uneven_decode", "uneven_stages"}  # black letters can be read
TITLES = {
    "fill_drain": "Three equal micro-batches fill and drain three stages",
    "starvation": "The second request arrives at 3 s",
    "kv_limited": "Work waits for pages, which come back with micro-batch 0",
    "policy": "Work waits, pages suffice: the policy sends nothing until 2 s",
    "uneven_prefill": "A long prefill follows a short one",
    "prefill_decode": "A prefill follows a decode",
    "uneven_decode": "Decodes with long contexts follow decodes with short ones",
    "uneven_stages": "Stage 0 is slower than stage 1",
    "link": "At most two in flight, each half a second on the link",
    "cpu": "Inputs are prepared while the stage waits",
}


def tandem(
    service_s: ArrayLike,
    *,
    ready_s: ArrayLike = 0.0,
    cap: int | None = None,
    link_s: ArrayLike = 0.0,
    prepare_s: ArrayLike = 0.0,
    prefill_tokens: Sequence[int] | None = None,
    waits: Sequence[tuple[float, str]] = (),
    arrival_s: Sequence[float] = (0.0,),
) -> RunResult:
    """Return the run of micro-batches through first-come-first-served stages.

    `service_s` is [m, depth]. A micro-batch is sent when it is ready (`ready_s`, [m] or a number),
    stage 0 is free and fewer than `cap` are in flight. Crossing a link takes `link_s` ([m, depth]
    or a number; column 0 is not used). Preparing takes `prepare_s` ([m, depth] or a number), from
    when the predecessor has left. `waits` are (time, one of WAIT_REASONS).
    """
    service = np.array(service_s, dtype=np.float64)
    count, depth = service.shape
    ready = np.broadcast_to(np.asarray(ready_s, dtype=np.float64), (count,))
    link = np.broadcast_to(np.asarray(link_s, dtype=np.float64), (count, depth))
    prepare = np.broadcast_to(np.asarray(prepare_s, dtype=np.float64), (count, depth))
    scheduled = np.zeros(count)
    available, start, end = (np.zeros((count, depth)) for _ in range(3))
    for i in range(count):
        before = end[i - 1] if i else np.full(depth, -np.inf)
        slot = end[i - cap, -1] if cap is not None and i >= cap else -np.inf
        scheduled[i] = max(ready[i], before[0], slot)
        for k in range(depth):
            available[i, k] = end[i, k - 1] + link[i, k] if k else scheduled[i]
            start[i, k] = max(available[i, k], before[k]) + prepare[i, k]
            end[i, k] = start[i, k] + service[i, k]
    tokens = np.array(prefill_tokens if prefill_tokens is not None else [0] * count, dtype=np.int64)
    return _result(
        scheduled=scheduled,
        available=available,
        start=start,
        end=end,
        prefill_tokens=tokens,
        waits=waits,
        arrival_s=arrival_s,
        cap=cap,
    )


def _result(
    *,
    scheduled: Floats,
    available: Floats,
    start: Floats,
    end: Floats,
    prefill_tokens: Ints,
    waits: Sequence[tuple[float, str]],
    arrival_s: Sequence[float],
    cap: int | None,
) -> RunResult:
    """Return a RunResult whose requests have nothing but an arrival."""
    batches, requests = len(scheduled), len(arrival_s)
    return RunResult(
        depth=end.shape[1],
        max_in_flight=cap,
        total_pages=1,
        page_tokens=16,
        request_id=np.arange(requests),
        arrival_s=np.array(arrival_s, dtype=np.float64),
        prompt_tokens=np.ones(requests, dtype=np.int64),
        output_tokens=np.ones(requests, dtype=np.int64),
        first_scheduled_s=np.full(requests, np.nan),
        first_token_s=np.full(requests, np.nan),
        completion_s=np.full(requests, np.nan),
        preemptions=np.zeros(requests, dtype=np.int64),
        status=["completed"] * requests,
        reason=[""] * requests,
        scheduled_s=scheduled,
        prefill_tokens=prefill_tokens,
        decode_tokens=np.ones(batches, dtype=np.int64),
        sampled_rows=np.ones(batches, dtype=np.int64),
        free_pages=np.zeros(batches, dtype=np.int64),
        available_s=available,
        start_s=start,
        end_s=end,
        wait_s=np.array([at for at, _ in waits]),
        wait_reason=np.array([WAIT_REASONS.index(why) for _, why in waits], dtype=np.int64),
        gap_s=np.zeros(0),
        gap_count=np.zeros(0, dtype=np.int64),
    )


def scenarios() -> dict[str, RunResult]:
    """Return for each cause a run in which, beside fill and drain, it is the only one."""
    even, uneven = [[1, 1], [1, 1]], [[1, 1], [2, 2]]
    return {
        "fill_drain": tandem([[1, 1, 1]] * 3),
        "starvation": tandem(even, ready_s=[0, 3], waits=[(1, "work")], arrival_s=[0, 3]),
        "kv_limited": tandem(even, ready_s=[0, 2], waits=[(1, "kv")]),
        "policy": tandem(even, ready_s=[0, 2], waits=[(1, "policy")]),
        "uneven_prefill": tandem(uneven, prefill_tokens=[256, 512]),
        "prefill_decode": tandem(uneven, prefill_tokens=[0, 512]),
        "uneven_decode": tandem(uneven),
        "uneven_stages": tandem([[2, 1]] * 3),
        "link": tandem([[1, 1]] * 4, cap=2, link_s=0.5),
        "cpu": tandem([[1, 1]] * 3, prepare_s=0.25),
    }


def draw(cause: str, result: RunResult, folder: Path) -> None:
    """Draw the stages of a run and its idle time as `folder`/bubbles_<cause>.svg."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bubbles = attribute(result)
    content = _contents(result)
    figure = Figure(figsize=(7.2, 0.75 + 0.42 * result.depth), layout="constrained")
    axes = figure.subplots()
    for stage in range(result.depth):
        for i, (start, end) in enumerate(
            zip(result.start_s[:, stage], result.end_s[:, stage], strict=True)
        ):
            _bar(axes, stage, (start, end), text=content[i], face=BUSY, ink="black")
    for stage, start, end, index in zip(
        bubbles.stage, bubbles.start_s, bubbles.end_s, bubbles.cause, strict=True
    ):
        shown = CAUSES[index] == cause
        label = CAUSES[index] if shown and end - start > 0.4 else ""
        face = CAUSE_COLOURS[cause] if shown else "white"
        ink = "black" if cause in LIGHT else "white"
        _bar(axes, stage, (start, end), text=label, face=face, ink=ink)
    axes.set_xlim(bubbles.window)
    axes.set_xticks(range(round(bubbles.window[1]) + 1))
    axes.set_yticks(range(result.depth), [f"stage {stage}" for stage in range(result.depth)])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds", loc="right", fontsize=8)
    axes.set_title(TITLES[cause], fontsize=10, loc="left")
    with mpl.rc_context({"svg.hashsalt": "evenflow", "svg.fonttype": "none"}):
        figure.savefig(folder / f"bubbles_{cause}.svg", metadata={"Date": None})


def _contents(result: RunResult) -> list[str]:
    """Return what is written on each micro-batch: its number, and P for a prefill."""
    mark = any(result.prefill_tokens > 0)
    return [
        f"{i}{(' prefill' if tokens else ' decode') if mark else ''}"
        for i, tokens in enumerate(result.prefill_tokens)
    ]


def _bar(
    axes: Axes, stage: int, span: tuple[float, float], *, text: str, face: str, ink: str
) -> None:
    start, end = span
    axes.barh(stage, end - start, left=start, height=0.8, color=face, edgecolor="#9AA5B1", lw=0.6)
    axes.text((start + end) / 2, stage, text, ha="center", va="center", fontsize=8, color=ink)


def draw_all(runs: Mapping[str, RunResult], folder: Path = FIGURES) -> None:
    """Draw every run, named by its cause."""
    folder.mkdir(parents=True, exist_ok=True)
    for cause, result in runs.items():
        draw(cause, result, folder)


if __name__ == "__main__":
    draw_all(scenarios())
