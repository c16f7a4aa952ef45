"""The drawing of docs/disaggregation.md: two requests over two pools, the second one held back.

`python -m tools.draw_pools` draws it; that its times are right is a test of
the simulator.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evenflow.costs import AffineCost
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from experiments.report.style import BUSY
from sim import PooledWorld, TransferLink, World, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "disaggregation.svg"
LINK = TransferLink(per_token_s=1e-6, latency_s=1e-3, bytes_per_token=8.0)
MOVING, HELD, BLOCKED = "#56B4E9", "#DDE3E9", "#E69F00"
ROWS = ("prefill pool", "link", "decode pool", "1's pages, prefill side", "1's pages, decode side")


def scenario() -> PooledWorld:
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


def draw(result: RunResult, path: Path = FIGURE) -> None:
    """Draw the run of the scenario."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 3.0), layout="constrained")
    axes = figure.subplots()
    _work(axes, result)
    _pages(axes, result)
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * float(result.completion_s.max()))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds", loc="right", fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "evenflow", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _work(axes: Axes, result: RunResult) -> None:
    """Draw what the stages and the link do, one after the other."""
    moved = result.transfers
    assert moved is not None
    texts = (["0: prompt", "1: prompt"], ["0: token 2", "0: token 3", "1: token 2"])
    for row, part, labels in zip((0, 2), result.pools.values(), texts, strict=True):
        for start_s, end_s, text in zip(part.start_s[:, 0], part.end_s[:, 0], labels, strict=True):
            _bar(axes, row, (start_s, end_s), text, BUSY)
    for request, start_s, busy_s in zip(
        moved.request_id, moved.start_s, moved.link_busy_s, strict=True
    ):
        _bar(axes, 1, (start_s, start_s + busy_s), str(request), MOVING)


def _pages(axes: Axes, result: RunResult) -> None:
    """Draw on which side request 1 holds pages, and why."""
    moved = result.transfers
    assert moved is not None
    start_s, end_s, first_token_s = moved.start_s[1], moved.end_s[1], result.first_token_s[1]
    prompt_s = result.pools["prefill"].start_s[1, 0]
    _bar(axes, 3, (prompt_s, first_token_s), "computing", HELD)
    _bar(axes, 3, (first_token_s, start_s), "back-pressure", BLOCKED)
    for row in (3, 4):
        _bar(axes, row, (start_s, end_s), "", MOVING)
    _bar(axes, 4, (end_s, result.completion_s[1]), "decoding", HELD)


def _bar(axes: Axes, row: int, span_s: tuple[float, float], text: str, face: str) -> None:
    start, end = (1e3 * at_s for at_s in span_s)
    axes.barh(row, end - start, left=start, height=0.8, color=face, edgecolor="#9AA5B1", lw=0.6)
    axes.text((start + end) / 2, row, text, ha="center", va="center", fontsize=8)


if __name__ == "__main__":
    draw(simulate(scenario()))
