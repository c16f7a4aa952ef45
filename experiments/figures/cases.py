"""The cases of a figure, axis by axis, and its table: cases run or searched over the seeds.

An axis is one of AXES, or a name under the figure's `axes`. Its values are from a number of the
study: labels with their keys, or values of one key. Draws nothing.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evenflow.config.run import RunConfig, with_
from evenflow.config.yaml_file import Document, patched
from evenflow.costs.estimates import REFERENCE
from evenflow.errors import MOST_RUNS, LostProcessError, UsageError, is_count
from evenflow.experiments.figures.formulas import filled
from evenflow.experiments.figures.iterations import iteration, world_of
from evenflow.experiments.figures.schema import Layer, OwnAxis, gpu_name, layered, without_links
from evenflow.experiments.figures.study import FigureStudy
from evenflow.study.capacity import CapacityQuestion, capacity_of
from evenflow.study.slo import Condition

if TYPE_CHECKING:
    import pandas as pd

LAYERS = ("pair", "deployment", "dataset", "trace", "slo", "load", "rate", "system")
"""The order in which the axes' keys lie over each other; a figure's own axes lie over all."""

HARDWARE = frozenset({"gpu", "stages", "tensor_parallel", "link", "nodes"})
"""Keys of a run that make another deployment of a published one."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on its GPUs: keys of a run, the limit on P99 TBT and the token budget by SLO."""

    label: str
    keys: Layer
    slo_s: Mapping[str, float]
    budgets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a figure. `values` fill the columns of its row, `layers` are keys by axis.

    `gpus`: how many it is on, if not all. `served` and `tbt_s`: its deployment, and the limit on
    P99 TBT that it is searched under.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=dict)
    gpus: int | None = None
    served: ServedModel | None = None
    tbt_s: float | None = None

    def at(self, axis: str, value: Any, keys: Layer | None = None, **more: Any) -> Case:
        """Return the case at a value of one more axis."""
        values = {**self.values, axis: value}
        return replace(self, values=values, layers={**self.layers, axis: keys or {}}, **more)

    def each(self, axis: str, values: Mapping[Any, Layer]) -> list[Case]:
        """Return the case at each value of one more axis, with that value's keys."""
        return [self.at(axis, value, keys) for value, keys in values.items()]

    def config(self, study: FigureStudy) -> RunConfig:
        """Return the run of the case; without an axis of systems it is the figure's first one."""
        layers = dict(self.layers)
        label = self.values.get("system", next(iter(study.labels), None))
        if label is not None:
            keys = study.keys_of(label) if self.served else study.system(label, self.gpus)
            layers["system"] = keys
        order = {name: index for index, name in enumerate(LAYERS)}
        names = sorted(layers, key=lambda name: order.get(name, len(order)))
        return study.config(*(layers[name] for name in names))


def cases_of(study: FigureStudy, vary: Iterable[str] | None = None) -> list[Case]:
    """Return the figure's cases, the last axis fastest."""
    found = [Case()]
    for name in study.plan.keys.vary if vary is None else vary:
        if name == "load":
            found = list(_under_load(study, found))
        elif name in AXES:
            found = [case for under in found for case in AXES[name](study, under)]
        else:
            axis = study.plan.keys.axes.get(name, OwnAxis())
            found = [case for under in found for case in _own(study, under, name, axis)]
        if len(found) * len(study.seeds) > MOST_RUNS:
            raise UsageError(f"vary: {name}: more than {MOST_RUNS} runs; fewer values are right")
    return found


def _slos(study: FigureStudy, case: Case) -> Iterator[Case]:
    """Each limit of the deployment, with the token budget under it for Sarathi's policy."""
    assert case.served is not None  # a deployment has its limits
    for label, limit_s in case.served.slo_s.items():
        budget = {"name": "sarathi", "token_budget": case.served.budgets[label]}
        yield case.at("slo", label, {"scheduler": budget}, tbt_s=limit_s)


def _limits(study: FigureStudy, case: Case) -> Iterator[Case]:
    """Limits equally spaced from the strict to the relaxed one."""
    assert case.served is not None  # a deployment has its limits
    ends = case.served.slo_s["strict"], case.served.slo_s["relaxed"]
    if not is_count(count := study.numbers["limits"], MOST_RUNS):
        raise UsageError(f"study.limits: should be a whole number, at most {MOST_RUNS}")
    for limit_s in map(float, np.linspace(*ends, count)):
        yield case.at("slo_s", limit_s, tbt_s=limit_s)


def _parameters(study: FigureStudy, case: Case) -> Iterator[Case]:
    """One parameter of the policy at a time, from `study.vary`."""
    name = study.policy(study.labels[0])
    for parameter, values in study.numbers["vary"].items():
        for value in values:
            keys = {"scheduler": {"name": name, parameter: value}}
            yield case.at("parameter", parameter, keys).at("value", value)


AXES: Mapping[str, Callable[[FigureStudy, Case], Iterable[Case]]] = {
    "pair": lambda study, case: case.each("pair", pairs(study)),
    "trace": lambda study, case: case.each("trace", traces(study)),
    "system": lambda study, case: case.each("system", {label: {} for label in study.labels}),
    "gpus": lambda study, case: [case.at("gpus", n, gpus=n) for n in study.gpu_counts],
    "rate": lambda study, case: [case.at("rate", r, poisson(r)) for r in study.numbers["rates"]],
    "deployment": lambda study, case: [
        case.at("deployment", one.label, one.keys, served=one) for one in served(study)
    ],
    "dataset": lambda study, case: case.each("dataset", datasets(study)),
    "slo": _slos,
    "slo_s": _limits,
    "parameter": _parameters,
}


def _own(study: FigureStudy, case: Case, name: str, axis: OwnAxis) -> Iterator[Case]:
    """An axis of the figure's own: numbers of its study, as values of one key or as keys."""
    of = axis.of or f"{name}s"
    given = study.numbers.get(of, {})
    if not given and not axis.more:
        raise UsageError(
            f"vary: {name}: should be one of {', '.join(('load', *AXES))}, or have its values "
            f"in study.{of}"
        )
    for value in given:
        label = filled(axis.words, {"": value}, f"axes.{name}.words") if axis.words else value
        if axis.key is not None:
            yield case.at(name, label, patched(Document("", {}, {}), {axis.key: value}).data)
            continue
        keys = dict(given[value])
        gpus = keys.pop("gpus", case.gpus)
        yield case.at(name, label, keys, gpus=gpus)
    yield from case.each(name, axis.more)


def poisson(rate: float) -> Layer:
    """Return the keys of Poisson arrivals at a rate in requests/s."""
    return {"workload": {"arrivals": {"kind": "poisson", "rate": float(rate)}}}


def _under_load(study: FigureStudy, under: list[Case]) -> Iterator[Case]:
    """Each case at shares of the rate that the figure's first system carries when saturated.

    Where that cannot run there is no case. `load` is what the rate, of two digits, is of it.
    """
    digits = study.plan.keys.axes.get("load", OwnAxis()).digits
    offline = {"workload": {"arrivals": "offline"}}
    probes = {(n,): case.at("load", 0, offline).config(study) for n, case in enumerate(under)}
    carried = study.run(probes, ("case",)).groupby("case")["request_throughput"].mean()
    for number, case in enumerate(under):
        most = float(carried[number])
        for rate in [] if math.isnan(most) else rates(study, most):
            load = round(rate / most, digits)
            yield case.at("load", load, poisson(rate)).at("rate", rate)


def rates(study: FigureStudy, saturated_per_s: float) -> list[float]:
    """Return the figure's rates in requests per second, given the rate of saturation."""
    given = study.numbers["rates"]
    if given is not None:
        return [float(rate) for rate in given]
    return [float(f"{load * saturated_per_s:.2g}") for load in study.numbers["loads"]]


def pairs(study: FigureStudy) -> dict[str, Layer]:
    """Return the keys of each of `study.pairs`, [GPU, model, machine], by its label in the figure.

    Without a machine it is the GPU's own.

    Raises UsageError for an unknown pair.
    """
    run: Layer = study.plan.run.data
    found: dict[str, Layer] = {}
    for pair in study.numbers["pairs"]:
        if not isinstance(pair, list) or len(pair) not in (2, 3):
            raise UsageError(
                f"study.pairs: {pair} is none; write [GPU, model] or [GPU, model, machine]"
            )
        gpu, model = run.get("gpu", pair[0]), run.get("model", pair[1])
        found[f"{gpu_name(gpu)} + {model}"] = {
            "gpu": gpu,
            "model": model,
            **({"machine": pair[2]} if len(pair) > 2 and "gpu" not in run else {}),
        }
    return found


def traces(study: FigureStudy) -> dict[str, Layer]:
    """Return the keys of the figure's traces by label: a trace, or a trace's longest request.

    A trace that the run has itself is the only one.
    """
    own = study.plan.run.data.get("workload", {}).get("trace")
    given = study.numbers["traces"] if own is None else {own: own}
    return {
        label: {"workload": {"trace": of}}
        if isinstance(of, str)
        else {"workload": {"trace": label}, "max_model_len": of}
        for label, of in given.items()
    }


def datasets(study: FigureStudy) -> dict[str, Layer]:
    """Return the keys of the figure's data sets by label; a trace set by hand is the only one."""
    by_hand = study.plan.by_hand
    trace = by_hand.get("workload", {}).get("trace")
    given = study.numbers["datasets"] if trace is None else {str(trace): {}}
    return {
        label: layered(keys, {key: by_hand[key] for key in keys if key in by_hand})
        for label, keys in given.items()
    }


def served(study: FigureStudy) -> list[ServedModel]:
    """Return the figure's deployments.

    A limit not given, or not for the hardware set by hand, is by Sarathi-Serve's rule. That is
    `study.slo_iterations` (by SLO) times the reference iteration, by prediction. One set by hand
    stays. `study.budgets` are those of a deployment without its own. Raises UsageError where a
    relaxed limit is below the strict one.
    """
    model = study.plan.by_hand.get("model")
    given = study.numbers["deployments"] if model is None else {str(model): {}}
    return [_served(study, label, entry) for label, entry in given.items()]


def _served(study: FigureStudy, label: str, entry: Mapping[str, Any]) -> ServedModel:
    by_hand, own, slo_s = study.plan.by_hand, entry.get("run", {}), entry.get("slo_s", {})
    keys = layered(without_links(own) if "gpu" in by_hand else own, by_hand)
    other_hardware = not HARDWARE.isdisjoint(by_hand)
    shown = label
    if other_hardware or "model" in by_hand:  # what it is made of
        model = str({**study.plan.run.data, **keys}["model"])
        shown = " ".join([model, *layout_of(study, keys).split(", ")[1:]])
    if not slo_s or other_hardware:
        own_s = f"study.deployments.{label}.slo_s"
        kept = {name: s for name, s in slo_s.items() if study.plan.sets(f"{own_s}.{name}")}
        reference_s = iteration(world_of(study, keys))(REFERENCE)
        rule = study.numbers["slo_iterations"]
        slo_s = {name: n * reference_s for name, n in rule.items()} | kept
    strict_s, relaxed_s = slo_s["strict"], slo_s.get("relaxed", math.inf)
    if relaxed_s < strict_s:
        raise UsageError(
            f"{shown}: the relaxed limit on P99 TBT, {relaxed_s:.3g} s, is below the strict one, "
            f"{strict_s:.3g} s; set both in study.deployments.LABEL.slo_s"
        )
    return ServedModel(shown, keys, slo_s, {**study.numbers["budgets"], **entry.get("budgets", {})})


def layout_of(study: FigureStudy, keys: Layer) -> str:
    """Return the GPU of a deployment, and its ranks and stages where there are several."""
    run = {**study.plan.run.data, **keys}
    ranks, stages = run.get("tensor_parallel", 1), run.get("stages", 1)
    parts = [f"TP{ranks}"] * (ranks != 1) + [f"PP{stages}"] * (stages != 1)
    return ", ".join([gpu_name(run["gpu"]), *filter(None, ["-".join(parts)])])


SEARCH = "capacity"
"""The measure that is no measure of one run, but the largest rate within the limits."""


def table_of(study: FigureStudy) -> pd.DataFrame:
    """Run a figure's cases, or call the function that has its rows; add the columns it asks for.

    The columns up to `seed` say which run a row is of.
    """
    keys = study.plan.keys
    if keys.table:
        table: pd.DataFrame = function(keys.table, "study")(study)
    else:
        table = run_cases(study, cases_of(study))
    for name, made_by in keys.add.items():
        table[name] = function(made_by, "study", "table")(study, table)
    if keys.over is not None:
        ratios = over(table, keys.over.of, keys.over.reference)
        table[list(ratios.columns)] = ratios
    return table


def run_cases(
    study: FigureStudy,
    cases: list[Case],
    measure: str | None = None,
    more: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Run cases with every seed; return their rows. `measure` is by default the figure's.

    `more` are its arguments, by default the values of the case, or numbers of the study, named by
    `args`. `columns` are filled by a case's values, by default all.
    """
    keys = study.plan.keys
    columns = columns or keys.columns or list(cases[0].values)
    runs = {tuple(case.values[name] for name in columns): case for case in cases}
    measure = measure or keys.measure
    if measure == SEARCH:
        queue_s = study.numbers["median_queue_s"]
        asked = {
            key: (case.config(study), tbt_slo(case.tbt_s or 0.0, queue_s))
            for key, case in runs.items()
        }
        return capacities(study, asked, columns)
    configs = {key: case.config(study) for key, case in runs.items()}
    args = {
        key: more
        or {
            name: of if isinstance(of, list) else case.values.get(of, study.numbers.get(of))
            for name, of in keys.args.items()
        }
        for key, case in runs.items()
    }
    made = function(measure, "outcome")
    _require_args(measure, made, next(iter(args.values())))
    return study.run(configs, columns, made, args)


def _require_args(name: str, measure: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise UsageError unless a measure takes these arguments, and needs no other."""
    _, *takes = inspect.signature(measure).parameters.values()
    needs = {each.name for each in takes if each.default is each.empty}
    if not needs <= args.keys() <= {each.name for each in takes}:
        given = f"{', '.join(args) or 'none'}; it takes {', '.join(each.name for each in takes)}"
        raise UsageError(f"args: measure {name} needs {', '.join(needs) or 'none'}, not {given}")


def exploded(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return columns of runs with a row for each value of their equally long lists."""
    table = table.loc[table.error.isna(), list(columns)]
    while lists := [name for name in columns if isinstance(table[name].iloc[0], list)]:
        table = table.explode(lists)
    return table


def over(
    table: pd.DataFrame, columns: Mapping[str, str], reference: Mapping[str, Any]
) -> pd.DataFrame:
    """Return columns by name over those of the run at `reference`, all else of the run equal."""
    import pandas as pd

    chosen = pd.Series(True, table.index)
    for name, value in reference.items():
        named = isinstance(value, str) and value in table
        chosen &= table[name] == (table[value] if named else value)
    run = [name for name in table.loc[:, :"seed"].columns if name not in reference]
    base = table.loc[chosen, [*run, *columns.values()]]
    known = table[run].merge(base, on=run, how="left").set_index(table.index)
    return pd.DataFrame({name: table[of] / known[of] for name, of in columns.items()})


MODULES = ("measures", "micro_batches", "own")
"""The modules of the functions that a figure's file may name."""


def function(name: str, *takes: str) -> Callable[..., Any]:
    """Return the function that a figure names: MODULE.FUNCTION, or one of the measures.

    `takes`: what its first parameters are called; a measure may have more. UsageError for any other
    name, and for what is no public function of one of MODULES.
    """
    module, _, own = name.rpartition(".")
    made = None
    if (module := module or "measures") in MODULES and not own.startswith("_"):
        found = importlib.import_module(f"evenflow.experiments.figures.{module}")
        made = vars(found).get(own)
    if not inspect.isfunction(made) or made.__module__ != found.__name__:
        raise UsageError(f"{name}: no such function for a figure, like measures.seat_use")
    given = tuple(inspect.signature(made).parameters)
    of = given[:1] if takes == ("outcome",) else given
    if of != takes:
        raise UsageError(f"{name}: is not a function of {' and '.join(takes)}, as is right here")
    return made


AT_ONCE = 4
"""Searches side by side: each waits for its own probes, and the processes should not."""

KNEE = ("p99_itl_ms", "median_queue_ms", "total_token_throughput", "steady_total_token_throughput")
"""What is kept of the run at the capacity."""

Asked = tuple[RunConfig, tuple[Condition, ...]]


def tbt_slo(tbt_s: float, queue_s: float) -> tuple[Condition, ...]:
    """Return Sarathi-Serve's SLO: limits on P99 TBT and on the median scheduling delay."""
    return Condition("p99_itl_ms", 1e3 * tbt_s), Condition("median_queue_ms", 1e3 * queue_s)


def capacities(
    study: FigureStudy, cases: Mapping[tuple[Any, ...], Asked], names: Sequence[str]
) -> pd.DataFrame:
    """Search the capacity of every case; return a row for each and each seed, in order.

    `names` are the columns that a case's key fills. `capacity` (requests/s) is 0 where even a rate
    at which requests do not meet fails. It is missing where the run is too short to tell (`status`)
    or cannot be (`error`). `fails_at` is the rate just above, `failed` what fails there. KNEE are
    numbers of the run at the capacity; with `enough_requests` its length would not matter. Seeds
    count up from the first of the figure's. Raises a UsageError when no case can be run.
    """
    threads = ThreadPoolExecutor(AT_ONCE)
    try:
        found = list(threads.map(lambda asked: _search(study, *asked), cases.values()))
    finally:  # when interrupted, those that run end as soon as the processes are gone
        threads.shutdown(wait=False, cancel_futures=True)
    from pandas import DataFrame

    table = DataFrame(
        {**dict(zip(names, key, strict=True)), "seed": seed, **row}
        for key, rows in zip(cases, found, strict=True)
        for seed, row in zip(study.seeds, rows, strict=True)
    )
    table = study.noted([config for config, _ in cases.values()], table)
    table["capacity"] = table["capacity"].astype(float)
    return table


def _search(
    study: FigureStudy, config: RunConfig, slo: tuple[Condition, ...]
) -> list[dict[str, Any]]:
    seeded = with_(config, {"workload.seed": study.seeds[0]})
    tolerance, count = float(study.numbers["tolerance"]), len(study.seeds)
    asked = CapacityQuestion(
        seeded, slo, study.plan.beside, tolerance, count, allow_refused=study.plan.allow_refused
    )
    try:
        answer = capacity_of(asked, study.simulator, curve=())
    except LostProcessError:
        raise
    except UsageError as error:
        return [{"error": str(error)}] * count
    study.note_served([answer.served])
    kv_pages = answer.provenance["deployment"]["kv_pages"]
    shared = {"limit_ms": slo[0].limit, "kv_pages": kv_pages, "error": None}
    runs = {(each.trial.labels["replication"], each.rate): each.values for each in answer.measured}
    return [
        {
            "capacity": 0.0 if end.status == "never" else end.rate,
            "fails_at": end.fails_at,
            "failed": " ".join(end.failed),
            "status": end.status,
            "enough_requests": end.enough_requests,
            **{name: runs.get((index, end.rate or 0.0), {}).get(name) for name in KNEE},
            **shared,
        }
        for index, end in enumerate(answer.searches)
    ]
