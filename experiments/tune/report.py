"""What `evenflow tune` writes and says: the winner as a RUN.yaml, tables, sentences."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from evenflow.results.bubbles import CAUSES
from experiments.report.tables import write_json, write_table
from experiments.report.words import cause_label
from experiments.run_file.yaml_file import find, patched
from experiments.study.intervals import Interval
from experiments.study.slo import Condition
from experiments.study.trials import Trial
from experiments.tune.check import TUNED, Check, rivals
from experiments.tune.search import Rank, Search, Tuning
from experiments.tune.simplify import Worth

Bubbles = Mapping[str, Mapping[str, Any]]


def write_tuning(
    folder: Path,
    search: Search,
    worth: Sequence[Worth],
    checks: Sequence[Check],
    bubbles: Bubbles,
) -> None:
    """Write tune.json, trials.csv and checks.csv; tuned.yaml is `write_winner`'s."""
    write_json(folder / "tune.json", facts(search, worth, checks, bubbles))
    _write_trials(folder / "trials.csv", search)
    _write_checks(folder / "checks.csv", search.tuning, checks)


def write_winner(folder: Path, search: Search, final: Path) -> None:
    """Write tuned.yaml, which runs from any place: its files are named relative to `final`.

    `final` is the folder that `folder` becomes.
    """
    tuning = search.tuning
    document = patched(tuning.document, search.winner.candidate.patch)
    data = _moved(document.data, tuning.beside, final)
    head = f"# The best settings that evenflow tune found for {tuning.document.name}.\n"
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    (folder / "tuned.yaml").write_text(head + text, encoding="utf-8")


def _moved(value: Any, beside: Path, final: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(inner, beside, final) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(inner, beside, final) for inner in value]
    if isinstance(value, str) and value and (path := Path(find(value, beside))).exists():
        return os.path.relpath(path, final)
    return value


def facts(
    search: Search, worth: Sequence[Worth], checks: Sequence[Check], bubbles: Bubbles
) -> dict[str, Any]:
    """Return the content of tune.json."""
    tuning = search.tuning
    return {
        "objective": tuning.objective,
        "slo": [str(condition) for condition in tuning.slo],
        "winner": search.winner.candidate.labels,
        "default": search.default.candidate.labels,
        "settings": [asdict(each) for each in worth],
        "trials": len(search.tried) - len(tuning.baselines),
        "failed_trials": sum(bool(each.trial.errors) for each in search.tried),
        "training": {
            "parts": [part._asdict() for part in tuning.train],
            "requests": tuning.requests,
            **{
                each.name: _means(tuning, each.trial)
                for each in search.tried[: len(tuning.baselines)]
            },
            TUNED: _means(tuning, search.winner.trial),
        },
        "checks": {check.name: _check_facts(search, check) for check in checks},
        "gpu_s_by_cause": dict(bubbles),
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
    for rival in rivals(search):
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


def _write_trials(path: Path, search: Search) -> None:
    rows = [each.candidate.labels for each in search.tried]
    keys = dict.fromkeys(key for row in rows for key in row)
    trials = [each.trial for each in search.tried]
    columns: dict[str, list[Any]] = {"name": [each.name for each in search.tried]}
    columns |= {key: [row.get(key, "") for row in rows] for key in keys}
    for metric in (*search.tuning.metrics, "failed"):
        columns[metric] = [trial.mean(metric) for trial in trials]
    columns["error"] = [" ".join(trial.errors[:1]) for trial in trials]
    write_table(path, columns)


def _write_checks(path: Path, tuning: Tuning, checks: Sequence[Check]) -> None:
    metrics = tuning.metrics
    rows = [
        (check.name, part.seed, part.skip, name, *(trial.values(m)[index] for m in metrics))
        for check in checks
        for index, part in enumerate(check.parts)
        for name, trial in check.trials.items()
    ]
    names = ("check", "seed", "skip", "settings", *metrics)
    write_table(path, dict(zip(names, map(list, zip(*rows, strict=True)), strict=False)))


def worth_rows(worth: Sequence[Worth]) -> list[list[str]]:
    """Return a row for each setting that was found: what the objective is without it."""
    rows = []
    for each in worth:
        share = each.objective_without / each.objective - 1 if each.objective else 0.0
        loss = f"{each.objective_without:.4g} ({share:+.1%})"
        rows.append([each.setting, each.value, each.default, loss, "yes" if each.kept else "no"])
    return rows


def check_rows(search: Search, checks: Sequence[Check]) -> list[list[str]]:
    """Return a row for each check, metric and rival: both means, the gain, its interval."""
    rows = []
    for check in checks:
        for metric in search.tuning.metrics:
            for rival in rivals(search):
                gain = check.gain(metric, rival.name)
                tuned, other = (check.mean(metric, name).mean for name in (TUNED, rival.name))
                share = f" ({gain.mean / other:+.1%})" if other else ""
                rows.append(
                    [
                        f"{check.name}, n = {len(check.parts)}",
                        metric,
                        rival.name,
                        f"{other:.4g}",
                        f"{tuned:.4g}",
                        plus_minus(gain) + share,
                    ]
                )
    return rows


def plus_minus(gain: Interval) -> str:
    """Return a difference with its 95 % confidence interval."""
    return f"{gain.mean:+.4g} ± {gain.half_width:.2g}"


def stage_label(cause: str) -> str:
    """Return what to call a cause of idle time, or `computing`, in tables."""
    return cause if cause == "computing" else cause_label(cause)


def bubble_rows(search: Search, bubbles: Bubbles) -> list[list[str]]:
    """Return a row for each cause of idle time: GPU seconds and their share, in both runs."""
    default, tuned = (bubbles[name] for name in (search.tuning.default, TUNED))
    totals = sum(default.values()), sum(tuned.values())
    rows = []
    for cause in ("computing", *CAUSES):
        if default[cause] or tuned[cause]:
            cells = [
                f"{values[cause]:.1f} ({values[cause] / total:.1%})"
                for values, total in zip((default, tuned), totals, strict=True)
            ]
            rows.append([stage_label(cause), *cells, f"{tuned[cause] - default[cause]:+.1f}"])
    return rows


def sentences(search: Search, checks: Sequence[Check], bubbles: Bubbles) -> list[str]:
    """Return what to say: what was found, whether it holds, why, and what did not fit."""
    tuning, winner = search.tuning, search.winner
    words = ", ".join(f"{key} {value}" for key, value in winner.candidate.labels.items())
    said = [f"best of {len(search.tried)} tried: {words}"]
    if winner is search.default:
        return [*said, "these are the settings of the run as it is: nothing better was found"]
    if Rank.over(search).of(winner.trial)[1] > 0:
        said.append(
            "nothing that was tried keeps the SLO, even where it was searched: this is nearest"
        )
    said += [_verdict(search, check, rival.name) for check in checks for rival in rivals(search)]
    said += [line for check in checks for line in _missed(tuning.slo, check)]
    if not checks:
        said.append("nothing unseen to check on: the trace ends here and its times are its own")
    said.append(_why(search, bubbles))
    return said


def _verdict(search: Search, check: Check, rival: str) -> str:
    metric = search.tuning.objective
    gain, before = check.gain(metric, rival), check.mean(metric, rival).mean
    share = f", {gain.mean / before:+.1%}" if before else ""
    amount = f"{metric} {plus_minus(gain)} (95 %, n = {gain.n}{share})"
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


def _why(search: Search, bubbles: Bubbles) -> str:
    """Name the causes of idle time whose share of the stage time changed most."""
    default, tuned = (bubbles[name] for name in (search.tuning.default, TUNED))
    totals = sum(default.values()), sum(tuned.values())
    changes = {
        cause: tuned[cause] / totals[1] - default[cause] / totals[0]
        for cause in ("computing", *CAUSES)
    }
    largest = sorted(changes, key=lambda cause: -abs(changes[cause]))[:3]
    words = [f"{stage_label(cause)} {100 * changes[cause]:+.1f} points" for cause in largest]
    return f"share of the GPU time, against the run as it is: {', '.join(words)}"
