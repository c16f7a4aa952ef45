"""Draw a comparison: tokens per micro-batch, and where stage time goes.

`python -m experiments.report.draw_comparison` draws the README's again, from the runs of
`make demo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenflow.results.bubbles import CAUSES
from experiments.report.data import Run, shares, steady
from experiments.report.style import BUSY, CAUSE_COLOURS, DECODE, PREFILL
from experiments.report.words import cause_label
from experiments.run_file.run import load_config
from experiments.runs import run_all_of
from experiments.study.compare import parse_schedulers

SHOWN_BATCHES = 250


def draw_comparison(runs: Mapping[str, Run]) -> Figure:
    """Return a row a run: tokens of consecutive micro-batches, and shares of stage time."""
    figure = Figure(figsize=(10, 1.0 + 1.35 * len(runs)), dpi=150, layout="constrained")
    grid = figure.subplots(len(runs), 2, width_ratios=[2.6, 1], squeeze=False)
    for row, (name, run) in enumerate(runs.items()):
        _draw_tokens(grid[row, 0], name, run)
        _draw_shares(grid[row, 1], run)
    for axes in grid[:-1].flat:
        axes.tick_params(labelbottom=False)
    grid[-1, 0].set_xlabel(f"{SHOWN_BATCHES} consecutive micro-batches of the steady state")
    grid[-1, 1].set_xlabel("share of stage time (%)")
    grid[0, 0].set_title("Tokens in each micro-batch", loc="left", fontsize=11)
    grid[0, 1].set_title("Computing, and idle by cause", loc="left", fontsize=11)
    figure.legend(
        handles=_key(runs), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    return figure


def _draw_tokens(axes: Axes, name: str, run: Run) -> None:
    shown = steady(run, SHOWN_BATCHES)
    decode, prefill = run.result.decode_tokens[shown], run.result.prefill_tokens[shown]
    at = np.arange(len(decode))
    axes.bar(at, decode, width=1.0, color=DECODE)
    axes.bar(at, prefill, width=1.0, bottom=decode, color=PREFILL)
    axes.set(xlim=(-0.5, len(at) - 0.5), ylabel="tokens")
    axes.margins(y=0.25)
    axes.text(0.01, 0.95, name, transform=axes.transAxes, va="top", weight="bold", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(axes: Axes, run: Run) -> None:
    busy, idle = shares(run)
    left = 0.0
    colours = [BUSY, *(CAUSE_COLOURS[cause] for cause in CAUSES)]
    for share, colour in zip([busy, *idle], colours, strict=True):
        axes.barh(0, 100 * share, left=left, height=0.5, color=colour)
        left += 100 * share
    axes.text(50 * busy, 0, f"{100 * busy:.0f} %", ha="center", va="center", fontsize=10)
    axes.set(xlim=(0, 100), ylim=(-0.6, 0.6), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _key(runs: Mapping[str, Run]) -> list[Patch]:
    seen = np.sum([shares(run)[1] for run in runs.values()], axis=0)
    entries = [("prefill tokens", PREFILL), ("decode tokens", DECODE), ("computing", BUSY)]
    entries += [
        (cause_label(cause), CAUSE_COLOURS[cause])
        for cause, share in zip(CAUSES, seen, strict=True)
        if share > 0.005
    ]
    return [Patch(color=colour, label=label) for label, colour in entries]


def main() -> None:
    """Draw the comparison of `make demo` into docs/figures."""
    root = Path(__file__).parent.parent.parent
    config = load_config(root / "examples" / "quickstart.yaml")
    runs = run_all_of(parse_schedulers("token_throttling,sarathi,vllm", config), root)
    path = root / "docs" / "figures" / "quickstart.png"
    draw_comparison(runs).savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
