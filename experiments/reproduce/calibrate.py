"""Find the CPU time of an engine from a benchmark's results: the constants of a `runtime`.

Given are a deployment (RUN.yaml) and its measurements (the results); the constants bring the
simulation nearest to the measured TTFT and TPOT. A Gauss-Newton search over log(simulated /
measured), none of the constants below 0; large deviations count less (soft L1). A simulation is not
smooth, as each change makes other micro-batches: slopes are those of a plane through all points
tried nearby. Intervals are those of least squares with deviations that differ in size (White 1980).
A constant that the results do not determine is left out, and reported; intervals reach over what
the others were beside it, as one may have taken its time. Knows no form of results and
no command line.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evenflow.config.run import RunConfig
from evenflow.config.yaml_file import Document, Patch
from evenflow.errors import UsageError
from evenflow.experiments.reproduce import served
from evenflow.experiments.reproduce.measured import MeasuredRun
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import number, percent
from evenflow.results.metrics import request_metrics
from evenflow.results.outcome import Outcome, Served
from evenflow.results.run import Floats
from evenflow.results.student import student_quantile
from evenflow.runtimes import Holds
from evenflow.study.fair import LEVEL, Side, alone, marked
from evenflow.study.trials import How, Search, Study, Trial, Variant
from evenflow.study.trials import run as search

Answer = TypeVar("Answer")

CONSTANTS = {
    "schedule_s": 1e-3,
    "per_row_s": 5e-5,
    "front_end_latency_s": 2e-3,
    "front_end_s": 2e-3,
    "per_prefill_s": 2e-3,
    "per_new_request_s": 2e-3,
    "per_prompt_token_s": 5e-6,
}
"""What is looked for, and what makes a difference of each: a constant is known when its interval
reaches no further than this, or than half of itself. Of the undetermined constants the last is left
out, then the last of those still undetermined."""

GROUPS = 20
"""Number of groups that the requests of a run are put into."""

SOFT = 0.1
"""Deviations above this share count less."""

STEPS, LENGTHS, GAIN = 8, (1.0, 0.5), 0.01
"""The most steps, each tried at these lengths, until one gains less than this share."""

STARTS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Starts of the first constant where all are hidden, as nothing is known around 0."""

FARTHEST = 10.0
"""A step goes no further, in units."""

SLOPE = 2.0
"""How far a constant is moved to see what changes, in its unit."""

TINY = 1e-12

ALIKE = 1e-3
"""The share of the larger effect by which those of two constants have to differ."""

ROUNDS = 5
"""Requests a client, of a closed loop with unknown requests."""

CUT_SHARE, SOONER = 0.2, 0.7
"""When a comparison is doubted: from this share of the requests; with this much less time."""

APART = 2.0
"""Runs differ in load when the requests that decode at once, at P90, differ by this factor."""

LATENCIES, MEANS = ("ttft_ms", "tpot_ms"), ("mean_ttft_ms", "mean_tpot_ms")

Asking: TypeAlias = Generator[Sequence[Variant], list[Trial], Answer]
"""A part of a search, which comes to an answer."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant in seconds, and the ends of its 95 % interval; None: undetermined."""

    name: str
    value: float
    ends: tuple[float, float] | None


@dataclass(frozen=True, slots=True, repr=False)
class Calibrated(Shown):
    """The constants that fit results best.

    `runtime` is what to paste into a RUN.yaml, empty where the results tell none of it. `off` are
    the median deviations by latency, without any CPU time and with these constants; `doubts` what
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


def nearest_of(study: Study, fits: Sequence[Fit], how: How) -> Fit:
    """Return the fit nearest to its targets, once all are found."""
    with how.simulator("calibrate", None) as simulator:
        for fit in fits:
            search(study, simulator, fit.search())
    return min(fits, key=lambda fit: fit.best.cost)


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
    """Warn that runs are of about one load: they hardly separate the time of a micro-batch from
    that of its rows, and intervals know no other load."""
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

    Requests are put into groups, as the latencies of a single one are a matter of luck: TTFT is the
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


class Compared(Protocol):
    """A run to simulate, the keys of `patch`, and the deviations from its target."""

    @property
    def patch(self) -> Patch: ...
    def deviations(self, values: Mapping[str, Any]) -> Floats: ...


class FittedConstants(NamedTuple):
    """Constants by their position in CONSTANTS, in units, and the deviations of runs with them."""

    units: Floats
    parts: list[Floats]

    @property
    def deviations(self) -> Floats:
        """The deviations of all runs, one after the other."""
        return np.concatenate(self.parts)

    @property
    def cost(self) -> float:
        """The sum of soft squares, in which what is far off counts less."""
        return float(np.sum(2 * SOFT**2 * (np.sqrt(1 + (self.deviations / SOFT) ** 2) - 1)))


class Plane(NamedTuple):
    """Deviations around some constants: slopes by a unit of each, [deviations, free]; `level`, what
    they are there; `scatter`, how far simulations are from the plane."""

    slopes: Floats
    level: Floats
    scatter: Floats


@dataclass(slots=True)
class Fit:
    """A search for the constants; `kept` are keys of the runtime that stay as they are.

    `left_out` are the positions in CONSTANTS of constants not searched, or not determined.
    """

    targets: Sequence[Compared]
    kept: Mapping[str, Any]
    left_out: list[int] = field(default_factory=list)
    tried: list[FittedConstants] = field(default_factory=list)
    ideal: FittedConstants = field(init=False)
    best: FittedConstants = field(init=False)
    half_widths: Floats = field(init=False)
    low: Floats = field(default_factory=lambda: np.full(len(CONSTANTS), np.inf))
    high: Floats = field(default_factory=lambda: np.full(len(CONSTANTS), -np.inf))

    def search(self) -> Search:
        """Request simulations until no step gains enough and no constant is undetermined."""
        starts = [units * np.eye(len(CONSTANTS))[0] for units in STARTS]
        self.ideal, *found = yield from self._at(starts if self._hidden else starts[:1])
        self.best = min([self.ideal, *found], key=lambda point: point.cost)
        while self._free:
            yield from self._descend()
            self._widen()
            reach = self.half_widths / np.maximum(1.0, self.best.units / 2)
            unknown = np.flatnonzero(reach > 1).tolist()
            if not unknown:
                return
            self.left_out.append(unknown[-1])
            self.tried.clear()
            units = self.best.units.copy()
            units[unknown[-1]] = 0.0
            (self.best,) = yield from self._at([units])

    def _descend(self) -> Asking[None]:
        """Step on from the best point as long as steps gain."""
        for _ in range(STEPS):
            plane = yield from self._plane()
            step = self._step(plane)
            points = yield from self._at([self.best.units + share * step for share in LENGTHS])
            nearest = min(points, key=lambda point: point.cost)
            gain = 1 - nearest.cost / self.best.cost if self.best.cost else 0.0
            if gain > 0:
                self.best = nearest
            if gain < GAIN:
                break
        plane = yield from self._plane()
        self.half_widths = self._reach(plane) + np.abs(self._step(plane))

    def _widen(self) -> None:
        """Let the intervals reach over what they are with the constants that are free now."""
        width = np.where(np.isfinite(self.half_widths), self.half_widths, -np.inf)
        self.low = np.minimum(self.low, self.best.units - width)
        self.high = np.maximum(self.high, self.best.units + width)

    def _plane(self) -> Asking[Plane]:
        """Return how deviations change around the best.

        Each constant is moved from the best; the plane lies nearest to all that was tried, of which
        what is far away counts less.
        """
        moved = [self.best.units + SLOPE * np.eye(len(CONSTANTS))[index] for index in self._free]
        yield from self._at(moved)
        apart = np.array([point.units for point in self.tried])[:, self._free]
        apart = apart - self.best.units[self._free]
        nearness = 1 / (1 + (apart**2).sum(axis=1) / SLOPE**2)
        sides = np.column_stack([np.ones(len(apart)), apart]) * nearness[:, None]
        values = np.array([point.deviations for point in self.tried]) * nearness[:, None]
        plane = np.linalg.lstsq(sides, values, rcond=None)[0]
        left = max(1.0, float(np.sum(nearness**2)) - sides.shape[1])
        scatter = np.sqrt(((values - sides @ plane) ** 2).sum(axis=0) / left)
        return Plane(plane[1:].T, plane[0], scatter)

    @property
    def _hidden(self) -> bool:
        """Whether CPU time shows only where it is long, so that nothing determines it around 0."""
        return self.kept.get("holds") == "nothing"

    @property
    def _free(self) -> list[int]:
        return [index for index in range(len(CONSTANTS)) if index not in self.left_out]

    def _step(self, plane: Plane) -> Floats:
        """Return the best step on a plane, to no constant below 0."""
        from scipy.optimize import lsq_linear

        slopes, level = plane.slopes, plane.level
        root = np.sqrt(_weights(level))
        bounds = -self.best.units[self._free] - TINY, FARTHEST
        found = lsq_linear(slopes * root[:, None], -level * root, bounds=bounds)
        step = np.zeros(len(CONSTANTS))
        step[self._free] = np.maximum(found.x, -self.best.units[self._free])
        return step

    def _reach(self, plane: Plane) -> Floats:
        """Return how far each constant may be off, infinite where it is undetermined.

        From the slopes, what is left of each deviation and the scatter of simulations, which what
        was measured has too; and at least as far as those constants tried that fit as well.
        """
        slopes, level, scatter = plane
        count, free = len(level), len(self._free)
        reach = np.zeros(len(CONSTANTS))
        reach[self._free] = np.inf
        felt = np.sqrt(np.mean(slopes**2, axis=0))
        if count - free < 2 or not felt.all():
            reach[self._free] = np.where((felt > 0) & (count - free >= 2), 0.0, np.inf)
            return reach
        _, sizes, mixes = np.linalg.svd(slopes / felt, full_matrices=False)
        mixed = np.abs(mixes[sizes < ALIKE * sizes[0]]).max(axis=0, initial=0.0)
        weights = _weights(level)
        bread = np.linalg.pinv(slopes.T @ (slopes * weights[:, None]))
        scores = slopes * (weights * np.hypot(self.best.deviations, scatter))[:, None]
        covariance = bread @ (scores.T @ scores) @ bread * count / (count - free)
        sure = student_quantile((1 + LEVEL) / 2, count - free)
        width = sure * np.sqrt(np.diag(covariance))
        reach[self._free] = np.where(mixed > 0.1, np.inf, width)
        alike = (1 + sure**2 / (count - free)) * self.best.cost
        tried = [point.units for point in self.tried if point.cost <= alike]
        apart = np.abs(np.array([self.best.units, *tried]) - self.best.units).max(axis=0)
        found: Floats = np.maximum(reach, apart)
        return found

    def _at(self, points: Sequence[Floats]) -> Asking[list[FittedConstants]]:
        """Request simulations of all runs with each of these constants."""
        trials = yield [
            Variant({}, {**target.patch, "runtime": self.runtime(units)})
            for units in points
            for target in self.targets
        ]
        for trial in trials:
            if trial.errors:
                raise UsageError(f"calibrate: a run cannot be simulated: {trial.errors[0]}")
        pairs = zip([*self.targets] * len(points), trials, strict=True)
        off = [target.deviations(trial.records[0].values) for target, trial in pairs]
        each = len(self.targets)
        found = [FittedConstants(u, off[n * each : (n + 1) * each]) for n, u in enumerate(points)]
        self.tried += found
        return found

    def runtime(self, units: Floats) -> dict[str, Any]:
        """Return the keys of `runtime` that these constants make."""
        pairs = zip(CONSTANTS.items(), units.tolist(), strict=True)
        return {**self.kept, **{name: value * unit for (name, unit), value in pairs}}

    def known(self) -> dict[str, Any]:
        """Return the keys of `runtime` that the results determine; none if no constant is."""
        unknown = {name for index, name in enumerate(CONSTANTS) if index in self.left_out}
        keys = self.runtime(self.best.units)
        told = {name: value for name, value in keys.items() if name not in unknown}
        return told if self._free else {}

    def constants(self) -> list[Constant]:
        """Return the constants found, and the ones that the results do not determine."""
        found = zip(CONSTANTS.items(), self.best.units, self.low, self.high, strict=True)
        return [
            Constant(
                name,
                float(value * unit),
                None
                if index in self.left_out
                else (max(0.0, float(low * unit)), float(high * unit)),
            )
            for index, ((name, unit), value, low, high) in enumerate(found)
        ]


def _by_latency(
    targets: Sequence[CalibrationTarget], found: FittedConstants
) -> dict[str, list[Floats]]:
    parts: dict[str, list[Floats]] = {}
    for target, deviations in zip(targets, found.parts, strict=True):
        for name, own in target.by_latency(deviations).items():
            parts.setdefault(name, []).append(own)
    return parts


def _weights(deviations: Floats) -> Floats:
    weights: Floats = 1 / np.sqrt(1 + (deviations / SOFT) ** 2)
    return weights


def _median(deviations: Sequence[Floats]) -> float:
    return float(np.median(np.abs(np.expm1(np.concatenate(deviations)))))
