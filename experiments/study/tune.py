"""A tuning from its question to its folder: the winner as a RUN.yaml, tables, words, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.results.bubbles import CAUSES
from experiments.report import plots
from experiments.report.style import colour
from experiments.report.tables import write_json, write_table
from experiments.report.words import cause_label
from experiments.run_file.yaml_file import Document, patched
from experiments.study.fair import of_trials
from experiments.study.intervals import signed
from experiments.study.launch import run_yaml
from experiments.study.slo import Condition
from experiments.study.trials import How, Trial
from experiments.study.tune_search import (
    TUNED,
    Check,
    Search,
    Tuned,
    check_columns,
    run_bubbles,
    run_checks,
    run_search,
    simplified,
    trial_columns,
)
from experiments.study.tuning import Tuning, Wish, prepare


def tune(document: Document, beside: Path, wish: Wish, how: How) -> Tuned:
    """Search, simplify what was found, and check it on unseen data.

    `beside` is the folder of the run's file. UsageError naming what is wrong with the run or the
    wish, before the first long run.
    """
    tuning = prepare(document, beside, wish)
    searched = (len(tuning.baselines) + wish.trials) * wish.replications
    most = max(map(len, tuning.spaces.values())) + 2
    total = searched + most * wish.replications + 2 * 3 * wish.checks + 2
    with how.simulator("simulations", total) as who:
        search, worth = simplified(run_search(tuning, who), who)
        checks = run_checks(search, wish.checks, who)
        bubbles = run_bubbles(search, checks, who)
    tuned = Tuned(search, worth, tuple(checks), bubbles)
    how.write(lambda folder: _write(folder, tuned, how.out or folder))
    return tuned


def _write(folder: Path, tuned: Tuned, final: Path) -> None:
    """Write tune.json, trials.csv, checks.csv, tuned.yaml, and the picture as tune.png and .svg.

    tuned.yaml runs from any place: its files are named relative to `final`, the folder that
    `folder` becomes.
    """
    search = tuned.search
    write_json(folder / "tune.json", facts(tuned))
    write_table(folder / "trials.csv", trial_columns(search))
    write_table(folder / "checks.csv", check_columns(search.tuning, tuned.checks))
    (folder / "tuned.yaml").write_text(_winner(search, final), encoding="utf-8")
    plots.save(_draw(tuned), folder / "tune")


def _winner(search: Search, final: Path) -> str:
    head = f"# The best settings that evenflow tune found for {search.tuning.document.name}.\n"
    return head + run_yaml(winner_of(search), search.tuning.beside, final)


def winner_of(search: Search) -> Document:
    """Return the run with the best settings that were found."""
    return patched(search.tuning.document, search.winner.candidate.patch)


def facts(tuned: Tuned) -> dict[str, Any]:
    """Return the content of tune.json."""
    search, tuning = tuned.search, tuned.search.tuning
    baselines = search.tried[: len(tuning.baselines)]
    return {
        "objective": tuning.objective,
        "slo": [str(condition) for condition in tuning.slo],
        "winner": search.winner.candidate.labels,
        "default": search.default.candidate.labels,
        "settings": [asdict(each) for each in tuned.worth],
        "trials": len(search.tried) - len(baselines),
        "failed_trials": sum(bool(each.trial.errors) for each in search.tried),
        "training": {
            "parts": [part._asdict() for part in tuning.train],
            "requests": tuning.requests,
            **{each.name: _means(tuning, each.trial) for each in baselines},
            TUNED: _means(tuning, search.winner.trial),
        },
        "checks": {check.name: _check_facts(search, check) for check in tuned.checks},
        "gpu_s_by_cause": dict(tuned.bubbles),
        "layouts": [
            {"layout": each.label, "layers": list(each.layers), "reason": each.reason or None}
            for each in tuning.layouts
        ],
    }


def _means(tuning: Tuning, trial: Trial) -> dict[str, float]:
    return {metric: trial.mean(metric) for metric in tuning.metrics}


def _check_facts(search: Search, check: Check) -> dict[str, Any]:
    tuning = search.tuning
    against = {}
    for rival in search.rivals:
        gains = {name: check.gain(name, rival.name) for name in tuning.metrics}
        against[rival.name] = {
            "survives": check.survives(tuning.objective, rival.name),
            "gains": {
                name: {"mean": gain.mean, "half_width_95": gain.half_width}
                for name, gain in gains.items()
            },
        }
    return {
        "parts": [part._asdict() for part in check.parts],
        "means": {name: _means(tuning, trial) for name, trial in check.trials.items()},
        "against": against,
    }


def worth_rows(tuned: Tuned) -> list[list[str]]:
    """Return a row for each setting that was found: what the objective is without it."""
    rows = []
    for each in tuned.worth:
        share = each.objective_without / each.objective - 1 if each.objective else 0.0
        loss = f"{each.objective_without:.4g} ({share:+.1%})"
        rows.append([each.setting, each.value, each.default, loss, "yes" if each.kept else "no"])
    return rows


def check_rows(tuned: Tuned) -> list[list[str]]:
    """Return a row for each check, metric and rival: both means, the gain, its interval."""
    search = tuned.search
    rows = []
    for check in tuned.checks:
        for metric in search.tuning.metrics:
            for rival in search.rivals:
                gain = check.gain(metric, rival.name)
                ours, other = (check.mean(metric, name).mean for name in (TUNED, rival.name))
                share = f" ({gain.mean / other:+.1%})" if other else ""
                rows.append(
                    [
                        f"{check.name}, n = {len(check.parts)}",
                        metric,
                        rival.name,
                        f"{other:.4g}",
                        f"{ours:.4g}",
                        signed(gain) + share,
                    ]
                )
    return rows


def bubble_rows(tuned: Tuned) -> list[list[str]]:
    """Return a row for each cause of idle time: GPU seconds and their share, in both runs."""
    before, after = _times(tuned)
    totals = sum(before.values()), sum(after.values())
    rows = []
    for cause in ("computing", *CAUSES):
        if before[cause] or after[cause]:
            cells = [
                f"{values[cause]:.1f} ({values[cause] / total:.1%})"
                for values, total in zip((before, after), totals, strict=True)
            ]
            rows.append([cause_label(cause), *cells, f"{after[cause] - before[cause]:+.1f}"])
    return rows


def _times(tuned: Tuned) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the GPU seconds by cause of the run as it is, and of the winner."""
    return tuned.bubbles[tuned.search.tuning.default], tuned.bubbles[TUNED]


def sentences(tuned: Tuned) -> list[str]:
    """Return what to say: what was found, whether it holds, why, and what did not fit."""
    search, checks = tuned.search, tuned.checks
    tuning, winner = search.tuning, search.winner
    words = ", ".join(f"{key} {value}" for key, value in winner.candidate.labels.items())
    said = [f"best of {len(search.tried)} tried: {words}"]
    if winner is search.default:
        return [*said, "these are the settings of the run as it is: nothing better was found"]
    if search.rank.of(winner.trial)[1] > 0:
        said.append(
            "nothing that was tried keeps the SLO, even where it was searched: this is nearest"
        )
    if told := winner.trial.overload:
        said.append(f"overloaded even so: {told}")
    said += [_verdict(search, check, rival.name) for check in checks for rival in search.rivals]
    said += [line for check in checks for line in _missed(tuning.slo, check)]
    if not checks:
        said.append("nothing unseen to check on: the trace ends here and its times are its own")
    said.append(_why(tuned))
    rivals = {"the best": winner.trial, "the run as it is": search.default.trial}
    return [*said, *of_trials(rivals)]


def _verdict(search: Search, check: Check, rival: str) -> str:
    metric = search.tuning.objective
    gain, before = check.gain(metric, rival), check.mean(metric, rival).mean
    share = f", {gain.mean / before:+.1%}" if before else ""
    amount = f"{metric} {signed(gain)} (95 %, n = {gain.n}{share})"
    where = f"{check.name}, against {rival}"
    if check.survives(metric, rival):
        return f"{where}: the gain survives: {amount}"
    return f"{where}: THE GAIN DOES NOT SURVIVE: {amount}"


def _missed(slo: Sequence[Condition], check: Check) -> list[str]:
    trial = check.trials[TUNED]
    return [
        f"{check.name}: the SLO is missed: {condition.metric} is {trial.mean(condition.metric):.4g}"
        f" on average; {condition} was asked"
        for condition in slo
        if not condition.holds({condition.metric: trial.mean(condition.metric)})
    ]


def _why(tuned: Tuned) -> str:
    """Name the causes of idle time whose share of the stage time changed most."""
    before, after = _times(tuned)
    totals = sum(before.values()), sum(after.values())
    changes = {
        cause: after[cause] / totals[1] - before[cause] / totals[0]
        for cause in ("computing", *CAUSES)
    }
    largest = sorted(changes, key=lambda cause: -abs(changes[cause]))[:3]
    words = [f"{cause_label(cause)} {100 * changes[cause]:+.1f} points" for cause in largest]
    return f"share of the GPU time, against the run as it is: {', '.join(words)}"


def _draw(tuned: Tuned) -> Figure:
    """Draw the search, the gain on unseen data, and where the GPU time goes."""
    wide = [1.3, 1.3, 1]
    figure, (trials, gains, stages) = plots.panels(3, 4, 4.2, width_ratios=wide)
    _draw_trials(trials, tuned.search)
    _draw_checks(gains, tuned.search, tuned.checks)
    plots.stage_time(stages, tuned.bubbles)
    plots.finish(stages, "GPU time, unseen part (%)", grid="")
    plots.key(stages, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_trials(axes: Axes, search: Search) -> None:
    """One point a trial, hollow if it misses the SLO; a line for the run as it is, and the best."""
    metric, rank = search.tuning.objective, search.rank
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
    _finish(axes, f"Search: {metric}")


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
    _finish(axes, f"Unseen data: {metric}")


def _finish(axes: Axes, title: str) -> None:
    plots.finish(axes, title)
    plots.key(axes, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
