"""The drawings of docs/bubbles.md and docs/disaggregation.md: tiny runs that show one thing each.

Knows the smallest pipeline that makes a RunResult, and a run for each cause of idle time; what
`attribute` must answer for them is in tests/results/test_bubbles.py. Of two requests over two
pools the second is held back; that its times are right is a test of the simulator.
`python -m tools.draw_docs` draws them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from evenflow.api import compare
from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import Sequence as ServedSequence
from evenflow.core.request import Request
from evenflow.costs import AffineCost
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.report.plots import svg
from evenflow.report.style import BUSY, CAUSE_COLOURS
from evenflow.results.bubbles import CAUSES, attribute
from evenflow.results.recorder import Recorder
from evenflow.results.run import Disturbed, RunResult
from evenflow.schedulers import create
from evenflow.sim import World, simulate

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"

LIGHT = {"fill_drain", "starvation", "kv_limited", "outage"}  # black letters can be read
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
    "outage": "Stage 1 is stopped for two seconds",
    "slow_stage": "Stage 1 takes twice as long from micro-batch 1 on",
}

LINK = TransferLink(per_token_s=1e-6, latency_s=1e-3, bytes_per_token=8.0)
MOVING, HELD, BLOCKED = "#56B4E9", "#DDE3E9", "#E69F00"
ROWS = ("prefill pool", "link", "decode pool", "1's pages, prefill side", "1's pages, decode side")


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
    prefill = [0] * count if prefill_tokens is None else prefill_tokens
    end = np.full((count, depth), -np.inf)
    recorder = Recorder(depth)
    for i in range(count):
        before = end[i - 1] if i else np.full(depth, -np.inf)
        slot = end[i - cap, -1] if cap is not None and i >= cap else -np.inf
        scheduled = at = max(ready[i], before[0], slot)
        times: list[float] = []
        for k in range(depth):
            available = at + link[i, k] if k else at
            start = max(available, before[k]) + prepare[i, k]
            end[i, k] = at = start + service[i, k]
            times += (available, start, at)
        recorder.batch(MicroBatch(i, scheduled, (), None, prefill[i], 1, 0, 1, 0, 1), times)
    for at_s, why in waits:
        recorder.wait(at_s, why)
    requests = [Request(i, at_s, 1, 1) for i, at_s in enumerate(arrival_s)]
    recorder.finish([ServedSequence(request, 1, generated=1) for request in requests])
    return recorder.result(max_in_flight=cap, total_pages=1, page_tokens=16, gap_s=(), gap_count=())


def scenarios() -> dict[str, RunResult]:
    """Return for each cause a run in which, beside fill and drain, it is the only one."""
    even, uneven = [[1, 1], [1, 1]], [[1, 1], [2, 2]]
    stops, slow = [[1, 1, 1], [1, 3, 1], [1, 1, 1]], [[1, 1, 1], [1, 2, 1], [1, 2, 1]]
    none_s, stopped_s, slowed_s = np.zeros((3, 3)), np.zeros((3, 3)), np.zeros((3, 3))
    stopped_s[1, 1], slowed_s[1:, 1] = 2.0, 1.0
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
        "outage": replace(tandem(stops), disturbed=Disturbed(stopped_s, none_s)),
        "slow_stage": replace(tandem(slow), disturbed=Disturbed(none_s, slowed_s)),
    }


def pooled_scenario() -> PooledWorld:
    """Return two prompts of 1600 tokens (100 pages), of which a decode pool of 110 holds one.

    A stage takes 10 ms a micro-batch, which holds one prompt or all decodes; the link is busy for
    1.6 ms and delivers 1 ms later.
    """
    requests = [Request(0, 0.0, 1600, 3), Request(1, 0.0, 1600, 2)]
    return PooledWorld(requests, pool(400), pool(110), link=LINK, watermark=0.0)


def pool(pages: int, per_token_s: float = 0.0) -> World:
    """Return a pool of one stage: `10 ms + per_token_s` x tokens a micro-batch."""
    return World(
        requests=(),
        make_scheduler=lambda: create("sarathi", {"token_budget": 2048, "mode": "hybrid_only"}),
        costs=AffineCost(0.010, per_token_s, 1),
        depth=1,
        total_pages=pages,
        max_model_len=8192,
        max_in_flight=1,
    )


def draw_bubbles(cause: str, result: RunResult, folder: Path) -> None:
    """Draw the stages of a run and its idle time as `folder`/bubbles_<cause>.svg."""
    bubbles = attribute(result)
    content = _contents(result)
    figure = Figure(figsize=(7.2, 0.75 + 0.42 * result.depth), layout="constrained")
    axes = figure.subplots()
    for stage in range(result.depth):
        for i, (start, end) in enumerate(
            zip(result.start_s[:, stage], result.end_s[:, stage], strict=True)
        ):
            _bar(axes, stage, (start, end), content[i], BUSY)
    for stage, start, end, index in zip(
        bubbles.stage, bubbles.start_s, bubbles.end_s, bubbles.cause, strict=True
    ):
        shown = CAUSES[index] == cause
        label = CAUSES[index] if shown and end - start > 0.4 else ""
        face = CAUSE_COLOURS[cause] if shown else "white"
        ink = "black" if cause in LIGHT else "white"
        _bar(axes, stage, (start, end), label, face, ink=ink)
    axes.set_xlim(bubbles.window)
    axes.set_xticks(range(round(bubbles.window[1]) + 1))
    axes.set_title(TITLES[cause], fontsize=10, loc="left")
    _finish(axes, [f"stage {stage}" for stage in range(result.depth)], "seconds")
    _write(figure, folder / f"bubbles_{cause}.svg")


def _contents(result: RunResult) -> list[str]:
    """Return what is written on each micro-batch: its number, and P for a prefill."""
    mark = any(result.prefill_tokens > 0)
    return [
        f"{i}{(' prefill' if tokens else ' decode') if mark else ''}"
        for i, tokens in enumerate(result.prefill_tokens)
    ]


def draw_pools(result: RunResult, folder: Path) -> None:
    """Draw the run of two pools as `folder`/disaggregation.svg."""
    figure = Figure(figsize=(8.2, 3.0), layout="constrained")
    axes = figure.subplots()
    _work(axes, result)
    _pages(axes, result)
    axes.set_xlim(0, 1e3 * float(result.completion_s.max()))
    _finish(axes, ROWS, "milliseconds")
    _write(figure, folder / "disaggregation.svg")


def _work(axes: Axes, result: RunResult) -> None:
    """Draw what the stages and the link do, one after the other."""
    moved = result.transfers
    assert moved is not None
    texts = (["0: prompt", "1: prompt"], ["0: token 2", "0: token 3", "1: token 2"])
    for row, part, labels in zip((0, 2), result.pools.values(), texts, strict=True):
        for start_s, end_s, text in zip(part.start_s[:, 0], part.end_s[:, 0], labels, strict=True):
            _bar(axes, row, _ms(start_s, end_s), text, BUSY)
    for request, start_s, busy_s in zip(
        moved.request_id, moved.start_s, moved.link_busy_s, strict=True
    ):
        _bar(axes, 1, _ms(start_s, start_s + busy_s), str(request), MOVING)


def _pages(axes: Axes, result: RunResult) -> None:
    """Draw on which side request 1 holds pages, and why."""
    moved = result.transfers
    assert moved is not None
    start_s, end_s, first_token_s = moved.start_s[1], moved.end_s[1], result.first_token_s[1]
    prompt_s = result.pools["prefill"].start_s[1, 0]
    _bar(axes, 3, _ms(prompt_s, first_token_s), "computing", HELD)
    _bar(axes, 3, _ms(first_token_s, start_s), "back-pressure", BLOCKED)
    for row in (3, 4):
        _bar(axes, row, _ms(start_s, end_s), "", MOVING)
    _bar(axes, 4, _ms(end_s, result.completion_s[1]), "decoding", HELD)


def _bar(
    axes: Axes, row: int, span: tuple[float, float], text: str, face: str, *, ink: str = "black"
) -> None:
    start, end = span
    axes.barh(row, end - start, left=start, height=0.8, color=face, edgecolor="#9AA5B1", lw=0.6)
    axes.text((start + end) / 2, row, text, ha="center", va="center", fontsize=8, color=ink)


def _ms(start_s: float, end_s: float) -> tuple[float, float]:
    return 1e3 * start_s, 1e3 * end_s


def _finish(axes: Axes, rows: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit, loc="right", fontsize=8)


def _write(figure: Figure, path: Path) -> None:
    path.write_text(svg(figure, path.stem), encoding="utf-8")


if __name__ == "__main__":
    for name, run in scenarios().items():
        draw_bubbles(name, run, FIGURES)
    draw_pools(simulate(pooled_scenario()), FIGURES)
    demo = compare(ROOT / "examples" / "quickstart.yaml", ["token_throttling", "sarathi", "vllm"])
    demo.draw().savefig(FIGURES / "quickstart.png", metadata={"Software": None})
