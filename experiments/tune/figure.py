"""Draw what tuning found: the search, the gain on unseen data, and where the stage time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.results.bubbles import CAUSES
from experiments.report.style import BUSY, CAUSE_COLOURS, colour
from experiments.tune.check import TUNED, Check
from experiments.tune.report import Bubbles, stage_label
from experiments.tune.search import Rank, Search

LEAST_SHARE = 0.005
"""Causes below this share of the stage time are not in the key."""


def draw_tuning(search: Search, checks: Sequence[Check], bubbles: Bubbles, folder: Path) -> None:
    """Write tune.png and tune.svg."""
    figure = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
    trials, gains, stages = figure.subplots(1, 3, width_ratios=[1.3, 1.3, 1])
    _draw_trials(trials, search)
    _draw_checks(gains, search, checks)
    _draw_bubbles(stages, bubbles)
    with matplotlib.rc_context({"svg.hashsalt": "evenflow"}):
        figure.savefig(folder / "tune.png", metadata={"Software": None})
        figure.savefig(folder / "tune.svg", metadata={"Date": None})


def _draw_trials(axes: Axes, search: Search) -> None:
    """One point a trial, hollow if it misses the SLO; a line for the run as it is, and the best."""
    metric, rank = search.tuning.objective, Rank.over(search)
    first = len(search.tuning.baselines)
    names = list(dict.fromkeys(each.candidate.scheduler for each in search.tried))
    for position, each in enumerate(search.tried[first:]):
        unknown, missed, _ = rank.of(each.trial)
        shade = colour(names.index(each.candidate.scheduler))
        if not unknown:
            fill = "none" if missed else shade
            axes.scatter(position, each.trial.mean(metric), s=16, facecolors=fill, edgecolors=shade)
    for index, name in enumerate(names):
        axes.scatter([], [], s=16, color=colour(index), label=name)
    axes.scatter([], [], s=16, facecolors="none", edgecolors="black", label="misses the SLO")
    lines = ((search.default, search.tuning.default, ":"), (search.winner, TUNED, "--"))
    for each, label, style in lines:
        level = each.trial.mean(metric)
        axes.axhline(level, color="black", linewidth=1, linestyle=style, label=label)
    axes.set_xlabel("trial")
    axes.set_title(f"Search: {metric}", loc="left", fontsize=11)
    _finish(axes)


def _draw_checks(axes: Axes, search: Search, checks: Sequence[Check]) -> None:
    """The objective of each contender on unseen data, with its interval."""
    metric = search.tuning.objective
    for place, check in enumerate(checks):
        for index, name in enumerate(check.trials):
            mean = check.mean(metric, name)
            at = place + 0.22 * (index - (len(check.trials) - 1) / 2)
            label = name if place == 0 else None
            axes.errorbar(
                at, mean.mean, mean.half_width, fmt="o", capsize=4, color=colour(index), label=label
            )
            values = check.trials[name].values(metric)
            spread = np.full(len(values), at + 0.07)
            axes.plot(spread, values, ".", color=colour(index), alpha=0.35, markersize=4)
    heads = [f"{check.name}\n(n = {len(check.parts)})" for check in checks]
    axes.set_xticks(range(len(checks)), heads)
    axes.set_xlim(-0.6, max(len(checks), 1) - 0.4)
    axes.set_title(f"Unseen data: {metric}", loc="left", fontsize=11)
    _finish(axes)


def _draw_bubbles(axes: Axes, bubbles: Bubbles) -> None:
    """The share of stage time computing, and idle by cause, of both runs."""
    bottom = np.zeros(len(bubbles))
    totals = np.array([sum(values.values()) for values in bubbles.values()])
    for cause in ("computing", *CAUSES):
        shares = np.array([values[cause] for values in bubbles.values()]) / totals
        known = cause == "computing"
        shown = stage_label(cause) if shares.max() > LEAST_SHARE else None
        fill = BUSY if known else CAUSE_COLOURS[cause]
        axes.bar(list(bubbles), 100 * shares, 0.55, bottom=100 * bottom, color=fill, label=shown)
        bottom += shares
    axes.set_ylim(0, 100)
    axes.set_title("GPU time, unseen part (%)", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)


def _finish(axes: Axes) -> None:
    axes.grid(color="#E9ECF0")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        below = (0.5, -0.16)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=below, ncols=3)
