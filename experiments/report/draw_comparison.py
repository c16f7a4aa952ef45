"""Draw a comparison: tokens per micro-batch, and where stage time goes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenflow.results.bubbles import CAUSES
from experiments.outcome import Outcome
from experiments.report.data import shares, steady
from experiments.report.plots import finish, panels, stage_time
from experiments.report.style import DECODE, PARTS, PREFILL
from experiments.report.words import LEAST_SHARE, cause_label

SHOWN_BATCHES = 250


def draw_comparison(runs: Mapping[str, Outcome]) -> Figure:
    """Return a row a run: tokens of consecutive micro-batches, and shares of stage time."""
    figure, cells = panels(2 * len(runs), 5, 1.35 + 1 / len(runs), columns=2, width_ratios=[2.6, 1])
    shown: set[str] = set()
    for (name, run), tokens, time in zip(runs.items(), cells[::2], cells[1::2], strict=True):
        _draw_tokens(tokens, name, run)
        parts = shares(run)
        busy = parts["computing"]
        stage_time(time, {name: parts}, lying=True)
        time.text(50 * busy, 0, f"{100 * busy:.0f} %", ha="center", va="center", fontsize=10)
        time.set(ylim=(-0.6, 0.6), yticks=[])
        finish(time, grid="")
        time.spines["left"].set_visible(False)
        shown |= {cause for cause in CAUSES if parts[cause] > LEAST_SHARE}
    top = max(axes.get_ylim()[1] for axes in cells[::2])
    for axes in cells[::2]:
        axes.set_ylim(0, top)
    for axes in cells[:-2]:
        axes.tick_params(labelbottom=False)
    cells[-2].set_xlabel(f"{SHOWN_BATCHES} consecutive micro-batches of the steady state")
    cells[-1].set_xlabel("share of stage time (%)")
    finish(cells[0], "Tokens in each micro-batch", grid="")
    finish(cells[1], "Computing, and idle by cause", grid="")
    colours = {"prefill tokens": PREFILL, "decode tokens": DECODE, "computing": PARTS["computing"]}
    colours |= {cause_label(cause): PARTS[cause] for cause in CAUSES if cause in shown}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw_tokens(axes: Axes, name: str, run: Outcome) -> None:
    shown = steady(run, SHOWN_BATCHES)
    decode, prefill = run.result.decode_tokens[shown], run.result.prefill_tokens[shown]
    at = np.arange(len(decode))
    axes.bar(at, decode, width=1.0, color=DECODE)
    axes.bar(at, prefill, width=1.0, bottom=decode, color=PREFILL)
    axes.set(xlim=(-0.5, len(at) - 0.5), ylabel="tokens")
    axes.margins(y=0.25)
    axes.text(0.01, 0.95, name, transform=axes.transAxes, va="top", weight="bold", fontsize=10)
    finish(axes, grid="")
