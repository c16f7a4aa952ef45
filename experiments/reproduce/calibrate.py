"""Find the CPU time of an engine from a benchmark's results: the constants of a `runtime`.

Given are a deployment (RUN.yaml) and its measurements (the results). The constants bring the
simulation nearest to the measured TTFT and TPOT (`fit`). Here: what is compared, and what is unfair
about it. Knows no form of results and no command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Document, Patch
from evenflow.errors import UsageError
from evenflow.experiments.reproduce import served
from evenflow.experiments.reproduce.fit import CONSTANTS, Constant, Fit, FittedConstants, nearest_of
from evenflow.experiments.reproduce.measured import MeasuredRun
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import number, percent
from evenflow.results.metrics import request_metrics
from evenflow.results.outcome import Outcome, Served
from evenflow.results.run import Floats
from evenflow.runtimes import Holds
from evenflow.study.fair import Side, alone, marked
from evenflow.study.trials import How, Study

GROUPS = 20
"""Number of groups that the requests of a run are put into."""

ROUNDS = 5
"""Requests a client, of a closed loop with unknown requests."""

CUT_SHARE, SOONER = 0.2, 0.7
"""When a comparison is doubted: from this share of the requests; with this much less time."""

APART = 2.0
"""Runs differ in load when the requests that decode at once, at P90, differ by this factor."""

LATENCIES, MEANS = ("ttft_ms", "tpot_ms"), ("mean_ttft_ms", "mean_tpot_ms")


@dataclass(frozen=True, slots=True, repr=False)
class Calibrated(Shown):
    """The constants that fit results best.

    `runtime` is what to paste into a RUN.yaml, empty where the results tell none of it. `off` are
    the median deviations by latency, without any CPU time and with these constants. `doubts` what
    makes the comparison of a run unfair.
    """

    runtime: Mapping[str, Any]
    constants: Sequence[Constant]
    off: Mapping[str, tuple[float, float]]
    doubts: Sequence[tuple[str, str]]

    def told(self) -> Iterator[str | Table]:
        rows = []
        for constant in self.constants:
            ends = constant.ends
            told = [number(1e6 * value) for value in (constant.value, *(ends or ()))]
            rows.append([constant.name, *(told if ends else ["the results", "cannot", "tell"])])
        yield Table(("microseconds", "", "at least", "at most"), rows)
        offs = [
            [
                name.upper().replace("_", " ").removesuffix(" MS"),
                *(percent(v, 1, sign=False) for v in off),
            ]
            for name, off in self.off.items()
        ]
        yield Table(("median off", "no CPU time", "with these"), offs)
        yield from (Aside(f"{label}: {marked([doubt])[0]}") for label, doubt in self.doubts)
        if not self.runtime:
            what = "requests one by one, at several loads"
            yield Aside(f"no runtime: the results tell none; give {what}")
            return
        known = self.runtime.items()
        keys = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in known}
        yield f"runtime: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}"


def latencies(outcome: Outcome) -> dict[str, Any]:
    """Return the TTFT and TPOT of each request in ms, in order of arrival; means and counts."""
    of = request_metrics(outcome.result)
    order = np.argsort(outcome.result.request_id)
    return {name: outcome.summary[name] for name in (*MEANS, "completed", "failed")} | {
        "ttft_ms": (1e3 * of.ttft_s[order]).tolist(),
        "tpot_ms": (1e3 * of.tpot_s[order]).tolist(),
    }


def calibrate(
    document: Document, beside: Path, runs: Sequence[MeasuredRun], how: How
) -> Calibrated:
    """Return the constants with which a run of these keys comes nearest to measured `runs`.

    What the host's time holds up is the run's own `runtime.holds`, or whatever fits best. Relative
    paths start from `beside`. Raises UsageError where nothing can be compared.
    """
    given = document.data.get("runtime")
    kept = {k: v for k, v in given.items() if k not in CONSTANTS} if isinstance(given, dict) else {}
    with TemporaryDirectory() as scratch:
        targets = [
            CalibrationTarget(run, served(run, Path(scratch) / f"{index}.csv", ROUNDS))
            for index, run in enumerate(runs)
        ]
        study = Study(document, beside, measure=latencies)
        configs = [study.config(target.patch) for target in targets]
        fits = [Fit(targets, {**kept, "holds": holds}) for holds in _holds(kept, configs[0])]
        best = nearest_of(study, fits, how)
    compared = zip(runs, configs, targets, best.ideal.parts, strict=True)
    doubts = [
        (run.label, doubt)
        for run, config, target, ideal in compared
        for doubt in unfair(run, config, target.by_latency(ideal))
    ]
    doubts += [(runs[0].label, words) for words in one_load(targets)]
    ends = [_by_latency(targets, found) for found in (best.ideal, best.best)]
    off = {name: (_median(ends[0][name]), _median(ends[1][name])) for name in ends[0]}
    return Calibrated(best.known(), best.constants(), off, doubts)


def _holds(kept: Mapping[str, Any], config: RunConfig) -> Sequence[str]:
    """Return what the host's time may hold up: as given, or all that makes a difference."""
    if "holds" in kept:
        return [kept["holds"]]
    return [each for each in get_args(Holds) if each != "stage0" or config.num_stages > 1]


def unfair(run: MeasuredRun, config: RunConfig, ideal: Mapping[str, Floats]) -> list[str]:
    """Say why comparing a measured run with its simulation is unfair.

    `ideal`: log(simulated / measured) by latency, with no CPU time at all.
    """
    said, requests = list(run.doubts), run.requests
    if "ttft_ms" in requests:
        outputs = requests["output_tokens"]
        cut = int((outputs == outputs.max()).sum())
        said += alone(run.label, Side({"completed": len(requests)}))
        if outputs.nunique() > 1 and cut > CUT_SHARE * len(requests):
            said.append(f"{cut} outputs have the most tokens of all, {outputs.max()}: cut short?")
        done_s = requests["arrival_s"] + requests["e2el_ms"] / 1e3
        late = (done_s > requests["arrival_s"].max()).mean()
        if config.workload.arrivals.kind != "closed" and late > 0.5:
            said.append("when the last request came, most were not done: TTFT is the queue's")
    sooner = np.mean(ideal["TTFT"] > np.log(1 / SOONER))
    if sooner > CUT_SHARE:
        said.append(
            "first tokens came much sooner than their prompts can be computed: caches were "
            "warm, or the costs are too slow"
        )
    if len(ideal["TPOT"]) and np.median(ideal["TPOT"]) > 0:
        said.append("tokens came faster than the costs allow without any CPU time")
    return said


def one_load(targets: Sequence[CalibrationTarget]) -> Iterator[str]:
    """Warn that runs are of about one load.

    They hardly separate the time of a micro-batch from that of its rows, and intervals know no
    other load.
    """
    known = [target.loads for target in targets if len(target.loads)]
    most = [float(np.quantile(loads, 0.9)) for loads in known]
    if not most or max(most) < APART * min(most):
        words = f" of at most {max(most):.0f} requests at once" if most else ""
        yield (
            f"one load{words}: schedule_s, per_row_s and per_prefill_s may trade against each "
            "other by more than their intervals; results at a quarter or four times of it tell"
        )


class CalibrationTarget:
    """A measured run's values to compare with: TTFT by length of the prompt, TPOT by load.

    Requests are put into groups, as the latencies of a single one are a matter of luck. TTFT is the
    group's geometric mean, TPOT that of all its tokens. Of a run of which only means are known,
    those are compared.
    """

    def __init__(self, measured: MeasuredRun, patch: Patch) -> None:
        self.label, self.patch = measured.label, patch
        table = measured.requests
        self._one_by_one = "ttft_ms" in table
        self.loads: Floats = _load(table) if self._one_by_one else np.empty(0)
        if self._one_by_one:
            self._gaps = table["output_tokens"].to_numpy() - 1.0
            self._prompts = _groups(table["input_tokens"].to_numpy())
            self._loads = _groups(self.loads)
            logs = self._logs({name: table[name].to_numpy(float) for name in LATENCIES})
        else:
            logs = self._logs({name: measured.metrics.get(name, np.nan) for name in MEANS})
        self.known = np.isfinite(logs)
        self._measured = logs[self.known]
        if not self.known.any():
            raise UsageError(f"{measured.label}: has neither TTFT nor TPOT to compare with")

    def deviations(self, values: Mapping[str, Any]) -> Floats:
        """Return log(simulated / measured) of each group: of TTFT, then of TPOT.

        UsageError where the simulation does not serve what was served.
        """
        served = Served.of(values)
        if served.is_unfair:
            raise UsageError(
                f"{self.label}: simulated, {served}, and all were served when it was measured; "
                "give the max_model_len and the KV pages that it had"
            )
        return np.nan_to_num(self._logs(values)[self.known] - self._measured)

    def _logs(self, values: Mapping[str, Any]) -> Floats:
        """Return the logs of both latencies by group; NaN where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            if not self._one_by_one:
                means = (values[name] for name in MEANS)
                return np.log([math.nan if mean is None else float(mean) for mean in means])
            ttft, tpot = (np.asarray(values[name], dtype=float) for name in LATENCIES)
            firsts = _sum(self._prompts, np.log(ttft)) / _sum(self._prompts, ttft / ttft)
            gaps = np.where(np.isfinite(tpot), self._gaps, 0.0)
            tokens = _sum(self._loads, tpot * gaps) / _sum(self._loads, gaps)
            return np.concatenate([firsts, np.log(tokens)])

    def by_latency(self, deviations: Floats) -> dict[str, Floats]:
        """Return the deviations of each latency."""
        kinds = np.repeat([0, 1], len(self.known) // 2)[self.known]
        return {name: deviations[kinds == kind] for kind, name in enumerate(("TTFT", "TPOT"))}


def _groups(values: Floats | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the group of each request, so that equally many, with like values, are together."""
    ranks: NDArray[np.int64] = np.argsort(np.argsort(values, kind="stable"))
    return ranks * min(GROUPS, len(ranks)) // len(ranks)


def _sum(groups: NDArray[np.int64], values: Floats) -> Floats:
    """Return the sum of each group, without what is not finite."""
    kept = np.where(np.isfinite(values), values, 0.0)
    found: Floats = np.bincount(groups, kept).astype(float)
    return found


def _load(requests: pd.DataFrame) -> Floats:
    """Return the mean number of requests that decode beside each while it decodes."""
    start_s = (requests["arrival_s"] + requests["ttft_ms"] / 1e3).to_numpy()
    stop_s = (requests["arrival_s"] + requests["e2el_ms"] / 1e3).to_numpy()
    together_s = [
        np.maximum(0.0, np.minimum(stop_s, stop) - np.maximum(start_s, start)).sum()
        for start, stop in zip(start_s, stop_s, strict=True)
    ]
    found: Floats = np.array(together_s) / np.maximum(stop_s - start_s, 1e-9)
    return found


def _by_latency(
    targets: Sequence[CalibrationTarget], found: FittedConstants
) -> dict[str, list[Floats]]:
    parts: dict[str, list[Floats]] = {}
    for target, deviations in zip(targets, found.parts, strict=True):
        for name, own in target.by_latency(deviations).items():
            parts.setdefault(name, []).append(own)
    return parts


def _median(deviations: Sequence[Floats]) -> float:
    return float(np.median(np.abs(np.expm1(np.concatenate(deviations)))))
