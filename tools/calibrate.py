"""Fit the three efficiencies of a GPU's roofline to measured times, and say how far off they are.

`python -m tools.calibrate l20 FOLDER`: whole models measured on L20 (the folder of the measured
files), fitted on each and both; the published facts, and the figure. `silicon`: measured operators
of real GPUs, fitted on some models and checked on others (needs the extra `silicon`). `vidur FILE`:
linear operators that Vidur published (MIT licence, not carried here),
data/profiling/compute/a40/meta-llama/Llama-2-70b-hf/mlp.csv of github.com/microsoft/vidur, commit
e26eb8f: medians of one layer on 1, 2, 4 and 8 ranks, without attention. `host`: the constants of
`runtime`, by the search of `evenflow calibrate`, from a stated part of the measured runs of
`evenflow reproduce`: `host ENTRY... --part WORD` fits on those whose names end with one of them
(`even`: every other one, from the first), those of `--find` alone, to come near to the metrics
that have a goal, each in units of it; the rest is reported apart.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from evenflow.costs import RooflineCost, StageCost, Work, decode_work, prefill_work
from evenflow.costs.roofline import Rates, linear_s
from evenflow.costs.silicon.cost import GPUS, silicon_cost, silicon_source
from evenflow.errors import UsageError
from evenflow.experiments.reproduce import MeasuredCase, cases_of, chosen, data_folder
from evenflow.experiments.reproduce.fit import CONSTANTS, Fit, nearest_of
from evenflow.profiler.importers import import_files
from evenflow.report.plots import finish, key, panels
from evenflow.report.tables import markdown_table, percent
from evenflow.results.run import Floats
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import GpuSpec, gpu
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec
from evenflow.study.trials import How, Study, Variant
from tools.published_facts import facts_table, published_facts

HEADS = (
    *("GPU", "efficiencies", "compute", "bandwidth", "overhead per layer"),
    *("mean error", "P95", "worst", "predicts"),
)


class Efficiencies(NamedTuple):
    """What a fit yields: shares of the two peaks, seconds per layer that neither explains."""

    compute: float
    bandwidth: float
    per_layer_overhead_s: float

    def on(self, spec: GpuSpec) -> GpuSpec:
        """Return the GPU with these efficiencies."""
        return replace(
            spec,
            compute_efficiency=self.compute,
            bandwidth_efficiency=self.bandwidth,
            per_layer_overhead_s=self.per_layer_overhead_s,
        )


def bundled(spec: GpuSpec) -> Efficiencies:
    """Return the efficiencies that the GPU table carries."""
    return Efficiencies(
        spec.compute_efficiency, spec.bandwidth_efficiency, spec.per_layer_overhead_s
    )


class Errors(NamedTuple):
    """Absolute relative errors of predicted against measured times, as shares of the measured."""

    mean: float
    p95: float
    worst: float


class Times(NamedTuple):
    """Measured seconds of work of these `sizes`, and what the roofline says of them on a GPU."""

    name: str
    sizes: Sequence[Any]
    seconds: Floats
    roofline: Callable[[GpuSpec, Sequence[Any]], Floats]

    def predicted(self, base: GpuSpec, efficiencies: Efficiencies) -> Floats:
        """Return the predicted seconds of each size."""
        return self.roofline(efficiencies.on(base), self.sizes)

    def errors(self, base: GpuSpec, efficiencies: Efficiencies) -> Errors:
        """Return how far the prediction is from what was measured."""
        off = np.abs(self.predicted(base, efficiencies) / self.seconds - 1)
        return Errors(float(off.mean()), float(np.percentile(off, 95)), float(off.max()))


def fit(times: Sequence[Times], base: GpuSpec) -> Efficiencies:
    """Return the efficiencies with the least squared relative error; every size counts the same."""

    def off(candidate: Efficiencies) -> Floats:
        return np.concatenate([one.predicted(base, candidate) / one.seconds - 1 for one in times])

    return _least_squares(off, (0.9, 0.9, 1.0))


def soft_fit(times: Sequence[Times], base: GpuSpec) -> Efficiencies:
    """Return the efficiencies of least relative error, soft: few sizes far off decide little."""

    def off(candidate: Efficiencies) -> Floats:
        ratios = [one.predicted(base, candidate) / one.seconds for one in times]
        return np.log(np.concatenate(ratios))

    return _least_squares(off, (0.7, 0.8, 0.5), loss="soft_l1", f_scale=0.05)


def _least_squares(
    off: Callable[[Efficiencies], Floats], start: tuple[float, float, float], **how: Any
) -> Efficiencies:
    """`start`: compute, bandwidth, and the overhead in units of 0.1 ms; `how` as scipy has it."""
    from scipy.optimize import least_squares

    def read(values: Floats) -> Efficiencies:
        return Efficiencies(float(values[0]), float(values[1]), float(values[2]) * 1e-4)

    bounds = ((0.1, 0.1, 0), (1.5, 1.5, 100))
    return read(least_squares(lambda values: off(read(values)), start, bounds=bounds, **how).x)


def row(label: str, base: GpuSpec, efficiencies: Efficiencies, times: Times) -> list[str]:
    """Return a row of the table: efficiencies, and how far off they are from measured times."""
    compute, bandwidth, overhead_s = efficiencies
    mean, p95, worst = times.errors(base, efficiencies)
    reached = f"{compute:.4f}", f"{bandwidth:.4f}", f"{overhead_s * 1e6:.1f} us"
    return [base.name, label, *reached, f"{mean:.2%}", f"{p95:.2%}", f"{worst:.1%}", times.name]


# -- whole models on L20 --------------------------------------------------------------------------

FILES = {"Qwen2.5-32B": "tdpipe_L20-Qwen2.5-32B.csv", "Llama2-13B": "tdpipe_L20-Llama-13B.csv"}
"""Model -> its file of measured times."""


def whole_model(spec: ModelSpec, tokens: Sequence[int], seconds: Floats) -> Times:
    """Return seconds of a whole model, embedding and head included, for prompts, one a batch."""

    def roofline(base: GpuSpec, sizes: Sequence[int]) -> Floats:
        cost = RooflineCost(Deployment(spec, base, (spec.num_layers,)))
        return np.array([cost.times(prefill_work(size))[0] for size in sizes])

    return Times(spec.name, tokens, seconds, roofline)


def read_lengths(path: Path, spec: ModelSpec) -> Times:
    """Read a file with the columns `Total Length` (tokens) and `Execute Time` (milliseconds).

    Most of its lengths are over one tile (128 tokens): those decide a fit.
    """
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a table of length and time ({error})") from error
    return whole_model(spec, [int(tokens) for tokens in table[:, 0]], table[:, 1] / 1000)


def l20_table(profiles: Sequence[Times], base: GpuSpec) -> str:
    """Return the table of fits: each model alone and both, against each model."""
    rows = []
    for some in [*([profile] for profile in profiles), list(profiles)]:
        label, found = " + ".join(profile.name for profile in some), fit(some, base)
        rows += [row(f"fitted on {label}", base, found, profile) for profile in profiles]
    return markdown_table(HEADS, rows)


def draw_l20(profiles: Sequence[Times], base: GpuSpec, path: Path) -> None:
    """Write the figure: measured and predicted time per length, each model from the other's fit."""
    count = len(profiles)
    how: dict[str, Any] = {"columns": count, "sharex": True, "height_ratios": (3, 1)}
    figure, cells = panels(2 * count, 5.5, 3, **how)
    for top, bottom, profile in zip(cells[:count], cells[count:], profiles, strict=True):
        others = [each for each in profiles if each is not profile]
        predicted = profile.predicted(base, fit(others, base))
        off = predicted / profile.seconds - 1
        top.plot(profile.sizes, profile.seconds * 1000, ".", ms=2.5, color="0.6", label="measured")
        label = f"predicted, fitted on {others[0].name}"
        top.plot(profile.sizes, predicted * 1000, "-", lw=1.2, color="C3", label=label)
        title = f"{profile.name} on {base.name}: mean error {np.abs(off).mean():.1%}"
        finish(top, title, grid="x")
        top.set_ylim(bottom=0)
        key(top, loc="upper left")
        bottom.plot(profile.sizes, off * 100, "-", lw=0.8, color="C3")
        bottom.axhline(0, color="0.3", lw=0.6)
        bottom.set(ylim=(-25, 25), xticks=range(0, 2049, 256))
        bottom.set_xlabel("tokens in one prefill micro-batch")
        finish(bottom, grid="x")
    cells[0].set_ylabel("whole model, ms")
    cells[count].set_ylabel("error, %")
    figure.savefig(path)


def _l20(given: argparse.Namespace) -> None:
    base = gpu("L20")
    profiles = [read_lengths(given.folder / file, model(name)) for name, file in FILES.items()]
    print(l20_table(profiles, base))
    print(facts_table(published_facts()))
    given.figure.parent.mkdir(parents=True, exist_ok=True)
    draw_l20(profiles, base, given.figure)
    print(f"\n{given.figure}")


# -- operators measured on real GPUs --------------------------------------------------------------

FITTED_ON = ("Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B")
CHECKED_ON = ("Mistral-7B", "Qwen2.5-32B", "Llama2-13B")

WORKS: tuple[Work, ...] = (
    *(
        decode_work(rows, rows * context)
        for rows in (1, 4, 16, 64, 128, 256)
        for context in (128, 512, 1024, 2048)
        if rows * context <= 256 * 1024
    ),
    *(
        prefill_work(tokens, context)
        for tokens in (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
        for context in (0, 2048)
    ),
)
"""Micro-batches that engines send: decode steps and prompt chunks, with and without context."""


def operators(base: GpuSpec, names: Sequence[str], framework: str = "vllm") -> Times:
    """Return the seconds of WORKS by the measured operators, for each model whole on one GPU."""

    def seconds(cost: Callable[[Deployment], StageCost], spec: GpuSpec) -> Floats:
        specs = [model(name) for name in names]
        costs = [cost(Deployment(each, spec, (each.num_layers,))) for each in specs]
        return np.array([each.times(work)[0] for each in costs for work in WORKS])

    measured = seconds(lambda each: silicon_cost(each, silicon_source(each, framework)), base)
    return Times(", ".join(names), WORKS, measured, lambda spec, _: seconds(RooflineCost, spec))


def _silicon(given: argparse.Namespace) -> None:
    rows = []
    for base in map(gpu, GPUS):
        checked, fitted = operators(base, CHECKED_ON), soft_fit([operators(base, FITTED_ON)], base)
        rows += fitted_and_bundled(base, fitted, checked)
    print(markdown_table(HEADS, rows), end="")


def fitted_and_bundled(base: GpuSpec, fitted: Efficiencies, times: Times) -> list[list[str]]:
    """Return the rows of a fit and of what the table of GPUs carries, against the same times."""
    pairs = {"fitted": fitted, "bundled": bundled(base)}
    return [row(label, base, found, times) for label, found in pairs.items()]


# -- linear operators that Vidur published --------------------------------------------------------

LINEARS = ("linear_qkv", "linear_o", "linear_up", "linear_down")
TILE_TOKENS = 128


def layers(spec: ModelSpec, sizes: Sequence[tuple[int, int]], seconds: Floats) -> Times:
    """Return seconds of the four linear operators of a layer, by (tokens, ranks).

    The roofline's have the overhead of a layer included.
    """

    def roofline(base: GpuSpec, sizes: Sequence[tuple[int, int]]) -> Floats:
        rates = Rates.of(base)
        linears_s = [
            sum(
                linear_s(tokens, shape, spec.dtype_bytes, TILE_TOKENS, rates)
                for shape in spec.linear_shapes(ranks)
            )
            for tokens, ranks in sizes
        ]
        return base.per_layer_overhead_s + np.array(linears_s)

    return Times(spec.name, sizes, seconds, roofline)


def read_layers(path: Path, spec: ModelSpec) -> Times:
    """Read Vidur's file; UsageError where it has no size with all four operators."""
    profile = import_files([path], spec, "as in the file", "float16").profile
    found: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for point in profile.points:
        if point.operator in LINEARS:
            assert point.tokens is not None  # the importer gives linear operators their tokens
            found[point.tokens, point.ranks][point.operator] = point.median_s
    whole = {size: sum(times.values()) for size, times in found.items() if len(times) == 4}
    if not whole:
        raise UsageError(f"{path}: no number of tokens has all of {', '.join(LINEARS)}")
    return layers(spec, list(whole), np.array(list(whole.values())))


def _vidur(given: argparse.Namespace) -> None:
    times, base = read_layers(given.file, model(given.model)), gpu(given.gpu)
    rows = fitted_and_bundled(base, soft_fit([times], base), times)
    print(f"{len(times.sizes)} sizes (tokens, ranks) of {given.model} on {given.gpu}\n")
    print(markdown_table(HEADS, rows), end="")


# -- the host's time, from measured runs -----------------------------------------------------------

GOAL = 0.05
"""A deviation of a metric with this goal counts as it is; one with twice the goal, half."""


class Goals:
    """The metrics of a measured run that have a goal."""

    def __init__(self, case: MeasuredCase) -> None:
        self.case = case
        self.patch = dict(case.config.document().data)

    def errors(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return log(simulated / measured) of each metric that has a goal."""
        measured, goals = self.case.measured.metrics, self.case.entry.keys.metrics
        known = [metric for metric, goal in goals.items() if goal and metric in measured]
        return {metric: float(np.log(values[metric] / measured[metric])) for metric in known}

    def deviations(self, values: Mapping[str, Any]) -> Floats:
        """Return the errors, in units of their goals."""
        goals = self.case.entry.keys.metrics
        errors = self.errors(values).items()
        return np.array([error * GOAL / (goals[metric] or GOAL) for metric, error in errors])


def report(errors: Sequence[Mapping[str, float]]) -> str:
    """Return a table of the errors by metric: mean, median and P90 of their size, worst."""
    rows = []
    for metric in errors[0] if errors else ():
        own = np.exp([each[metric] for each in errors]) - 1
        sizes = np.abs(own)
        values = (own.mean(), np.median(sizes), np.quantile(sizes, 0.9), sizes.max())
        rows.append([metric, str(len(own)), *map(percent, values)])
    return markdown_table(["metric", "runs", "mean error", "median off", "P90 off", "worst"], rows)


def _host(given: argparse.Namespace) -> None:
    """Fit on the part, print the constants, and the errors of the part and of the rest."""
    data = data_folder(given.data)
    with TemporaryDirectory() as scratch:
        cases = [case for e in chosen(given.names) for case in cases_of(e, data, Path(scratch))]
        runs = [Goals(case) for case in cases[:: given.every]]
        part = [run for index, run in enumerate(runs) if _is_in(run, index, given.part)]
        study = Study(runs[0].case.config, Path())
        left_out = [index for index, name in enumerate(CONSTANTS) if name not in given.find]
        best = nearest_of(study, [Fit(part, {"holds": given.holds}, left_out)], How())
        runtime = best.runtime(best.best.units)
        with How().simulator("host", len(runs)) as simulator:
            tried = [Variant({}, {**run.patch, "runtime": runtime}) for run in runs]
            trials = simulator.trials(study, tried)
    known = [each for each in best.constants() if each.ends is not None and each.name in given.find]
    words = "".join(f"{each.name}: {each.value:.3g}, " for each in known)
    print(f"runtime: {{{words}holds: {given.holds}}}  # {len(known)} of {len(given.find)} told")
    for each in known:
        least, most = each.ends or (0.0, 0.0)
        print(f"# {each.name}: {least:.3g} to {most:.3g}")
    errors = [run.errors(trial.records[0].values) for run, trial in zip(runs, trials, strict=True)]
    for words, is_part in (("fitted on", True), ("the rest", False)):
        some = [each for run, each in zip(runs, errors, strict=True) if (run in part) == is_part]
        print(f"\n{words}\n\n{report(some)}")


def _is_in(run: Goals, index: int, part: Sequence[str]) -> bool:
    return ("even" in part and index % 2 == 0) or run.case.measured.label.endswith(tuple(part))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the fits, and the efficiencies that `gpus.csv` carries, with their errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sources = parser.add_subparsers(required=True)
    l20 = sources.add_parser("l20")
    l20.add_argument("folder", type=Path, help="holds the measured files")
    l20.add_argument("--figure", type=Path, default=Path("docs/figures/l20_calibration.png"))
    l20.set_defaults(run=_l20)
    sources.add_parser("silicon").set_defaults(run=_silicon)
    host = sources.add_parser("host", help="the constants of runtime, from measured runs")
    host.add_argument("names", nargs="+", help="entries of evenflow reproduce")
    host.add_argument("--part", nargs="+", required=True, help="ends of names, or even")
    host.add_argument("--find", nargs="+", required=True, choices=CONSTANTS, help="constants")
    host.add_argument("--holds", default="engine", choices=("engine", "stage0", "nothing"))
    host.add_argument("--every", type=int, default=1, help="look at every so many runs")
    host.add_argument("--data", type=Path)
    host.set_defaults(run=_host)
    vidur = sources.add_parser("vidur")
    vidur.add_argument("file", type=Path, help="Vidur's mlp.csv")
    vidur.add_argument("--gpu", default="A40")
    vidur.add_argument("--model", default="Llama2-70B")
    vidur.set_defaults(run=_vidur)
    given = parser.parse_args(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
