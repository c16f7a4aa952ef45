"""The cases of a figure: what its `vary` makes of the run, axis by axis. Runs nothing but a probe.

An axis is one of AXES, or a name under the figure's `axes`, whose values are a number of the study:
labels with the keys that they stand for, or values of one key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenflow.errors import UsageError
from experiments.figures.iterations import REFERENCE, iteration, world_of
from experiments.figures.layers import Keys, gpu_name, layered, without_links
from experiments.figures.schema import OwnAxis
from experiments.figures.study import Study
from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import Document, patched

LAYERS = ("pair", "deployment", "dataset", "trace", "slo", "load", "rate", "system")
"""The order in which the axes' keys lie over each other; a figure's own axes lie over all."""


HARDWARE = frozenset({"gpu", "stages", "tensor_parallel", "link", "nodes"})
"""Keys of a run that make another deployment of a published one."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model on its GPUs: keys of a run, the limit on P99 TBT and the token budget by SLO."""

    label: str
    keys: Keys
    slo_s: Mapping[str, float]
    budgets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a figure. `values` fill the columns of its row, `layers` are keys by axis.

    `gpus`: how many it is on, if not all. `served` and `tbt_s`: its deployment, and the limit on
    P99 TBT that it is searched under.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Keys] = field(default_factory=dict)
    gpus: int | None = None
    served: Served | None = None
    tbt_s: float | None = None

    def at(self, axis: str, value: Any, keys: Keys, **more: Any) -> Case:
        """Return the case at a value of one more axis."""
        values = {**self.values, axis: value}
        return replace(self, values=values, layers={**self.layers, axis: keys}, **more)

    def config(self, study: Study) -> RunConfig:
        """Return the run of the case; without an axis of systems it is the figure's first one."""
        layers = dict(self.layers)
        label = self.values.get("system", next(iter(study.plan.keys.systems), None))
        if label is not None:
            keys = study.keys_of(label) if self.served else study.system(label, self.gpus)
            layers["system"] = keys
        order = {name: index for index, name in enumerate(LAYERS)}
        names = sorted(layers, key=lambda name: order.get(name, len(order)))
        return study.config(*(layers[name] for name in names))


Axis = Callable[[Study, Case], Iterator[Case]]


def cases_of(study: Study, vary: Iterable[str] | None = None) -> list[Case]:
    """Return the figure's cases, the last axis fastest."""
    found = [Case()]
    for name in study.plan.keys.vary if vary is None else vary:
        if name == "load":
            found = list(_under_load(study, found))
        else:
            axis = AXES.get(name) or _own(name, study.plan.keys.axes.get(name, OwnAxis()))
            found = [case for under in found for case in axis(study, under)]
    return found


def _pairs(study: Study, case: Case) -> Iterator[Case]:
    for label, keys in pairs(study).items():
        yield case.at("pair", label, keys)


def _traces(study: Study, case: Case) -> Iterator[Case]:
    for label, keys in traces(study).items():
        yield case.at("trace", label, keys)


def _systems(study: Study, case: Case) -> Iterator[Case]:
    for label in study.plan.keys.systems:
        yield case.at("system", label, {})


def _gpus(study: Study, case: Case) -> Iterator[Case]:
    for count in study.gpu_counts:
        yield case.at("gpus", count, {}, gpus=count)


def _rates(study: Study, case: Case) -> Iterator[Case]:
    for rate in study.numbers["rates"]:
        yield case.at("rate", rate, poisson(float(rate)))


def _deployments(study: Study, case: Case) -> Iterator[Case]:
    for one in served(study):
        yield case.at("deployment", one.label, one.keys, served=one)


def _datasets(study: Study, case: Case) -> Iterator[Case]:
    for label, keys in datasets(study).items():
        yield case.at("dataset", label, keys)


def _slos(study: Study, case: Case) -> Iterator[Case]:
    """Each limit of the deployment, with the token budget under it for Sarathi's policy."""
    assert case.served is not None  # a deployment has its limits
    for label, limit_s in case.served.slo_s.items():
        budget = {"name": "sarathi", "token_budget": case.served.budgets[label]}
        yield case.at("slo", label, {"scheduler": budget}, tbt_s=limit_s)


def _limits(study: Study, case: Case) -> Iterator[Case]:
    """Limits equally spaced from the strict to the relaxed one."""
    assert case.served is not None  # a deployment has its limits
    ends = case.served.slo_s["strict"], case.served.slo_s["relaxed"]
    for limit_s in map(float, np.linspace(*ends, study.numbers["limits"])):
        yield case.at("slo_s", limit_s, {}, tbt_s=limit_s)


def _parameters(study: Study, case: Case) -> Iterator[Case]:
    """One parameter of the policy at a time, from `study.vary`."""
    name = study.policy(next(iter(study.plan.keys.systems)))
    for parameter, values in study.numbers["vary"].items():
        for value in values:
            keys = {"scheduler": {"name": name, parameter: value}}
            yield case.at("parameter", parameter, keys).at("value", value, {})


def _own(name: str, axis: OwnAxis) -> Axis:
    """An axis of the figure's own: numbers of its study, as values of one key or as keys."""

    def cases(study: Study, case: Case) -> Iterator[Case]:
        given = study.numbers.get(axis.of or f"{name}s", {})
        if not given and not axis.more:
            raise UsageError(
                f"vary: {name}: should be one of {', '.join(('load', *AXES))}, or have its values "
                f"in study.{axis.of or f'{name}s'}"
            )
        for value in given:
            keys = dict(given[value]) if axis.key is None else {}
            gpus = keys.pop("gpus", case.gpus)
            if axis.key is not None:
                keys = patched(Document("", {}, {}), {axis.key: value}).data
            label = axis.words.format(value) if axis.words else value
            yield case.at(name, label, keys, gpus=gpus)
        for label, keys in axis.more.items():
            yield case.at(name, label, keys)

    return cases


AXES: Mapping[str, Axis] = {
    "pair": _pairs,
    "trace": _traces,
    "system": _systems,
    "gpus": _gpus,
    "rate": _rates,
    "deployment": _deployments,
    "dataset": _datasets,
    "slo": _slos,
    "slo_s": _limits,
    "parameter": _parameters,
}


def poisson(rate: float) -> Keys:
    """Return the keys of Poisson arrivals at a rate in requests/s."""
    return {"workload": {"arrivals": {"kind": "poisson", "rate": rate}}}


def _under_load(study: Study, under: list[Case]) -> Iterator[Case]:
    """Each case at shares of the rate that the figure's first system carries when saturated.

    Where that cannot run there is no case. `load` is what the rate, of two digits, is of it.
    """
    digits = study.plan.keys.axes.get("load", OwnAxis()).digits
    for case, most in zip(under, saturated(study, under), strict=True):
        for rate in [] if math.isnan(most) else rates(study, most):
            load = round(rate / most, digits)
            yield case.at("load", load, poisson(rate)).at("rate", rate, {})


def saturated(study: Study, cases: list[Case]) -> list[float]:
    """Return the requests per second of each case when all wait at the start, a mean over seeds."""
    offline = {"workload": {"arrivals": "offline"}}
    probes = {(n,): case.at("load", 0, offline).config(study) for n, case in enumerate(cases)}
    table = study.run(probes, ("case",))
    mean = table.groupby("case")["request_throughput"].mean()
    return [float(mean[n]) for n in range(len(cases))]


def rates(study: Study, saturated_per_s: float) -> list[float]:
    """Return the figure's rates in requests per second, given the rate of saturation."""
    given = study.numbers["rates"]
    if given is not None:
        return [float(rate) for rate in given]
    return [float(f"{load * saturated_per_s:.2g}") for load in study.numbers["loads"]]


# -- what the axes are made of, under what is set by hand ------------------------------------------


def pairs(study: Study) -> dict[str, Keys]:
    """Return the keys of each of `study.pairs`, [GPU, model], by its label in the figure.

    Raises UsageError for a pair that is none.
    """
    run: Mapping[str, Any] = study.plan.run.data
    found: dict[str, Keys] = {}
    for pair in study.numbers["pairs"]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UsageError(f"study.pairs: {pair} is no pair; write [GPU, model]")
        gpu, model = run.get("gpu", pair[0]), run.get("model", pair[1])
        found[f"{gpu_name(gpu)} + {model}"] = {"gpu": gpu, "model": model}
    return found


def traces(study: Study) -> dict[str, Keys]:
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


def served(study: Study) -> list[Served]:
    """Return the figure's deployments.

    A limit that is not given, or not for the hardware set by hand, is by Sarathi-Serve's rule:
    `study.slo_iterations` (by SLO) times the reference iteration, by prediction. One set by hand
    stays. `study.budgets` are those of a deployment without its own. Raises UsageError where a
    relaxed limit is below the strict one.
    """
    by_hand = study.plan.by_hand
    given: Mapping[str, Any] = study.numbers["deployments"]
    if "model" in by_hand:
        given = {str(by_hand["model"]): {}}
    return [_one(study, label, entry, by_hand) for label, entry in given.items()]


def datasets(study: Study) -> dict[str, Keys]:
    """Return the keys of the figure's data sets by label; a trace set by hand is the only one."""
    by_hand = study.plan.by_hand
    trace = by_hand.get("workload", {}).get("trace")
    given = study.numbers["datasets"] if trace is None else {str(trace): {}}
    return {
        label: layered(keys, {key: by_hand[key] for key in keys if key in by_hand})
        for label, keys in given.items()
    }


def _one(study: Study, label: str, entry: Mapping[str, Any], by_hand: Keys) -> Served:
    own = entry.get("run", {})
    keys = layered(without_links(own) if "gpu" in by_hand else own, by_hand)
    slo_s = dict(entry.get("slo_s", {}))
    if not slo_s or not HARDWARE.isdisjoint(by_hand):
        own_s = f"study.deployments.{label}.slo_s"
        kept = {name: s for name, s in slo_s.items() if study.plan.sets(f"{own_s}.{name}")}
        reference_s = iteration(world_of(study, keys))(REFERENCE)
        rule = study.numbers["slo_iterations"]
        slo_s = {name: n * reference_s for name, n in rule.items()} | kept
    budgets = {**study.numbers["budgets"], **entry.get("budgets", {})}
    shown = _name(study, label, keys, by_hand)
    _check_order(shown, slo_s)
    return Served(shown, keys, slo_s, budgets)


def _check_order(label: str, slo_s: Mapping[str, float]) -> None:
    strict_s, relaxed_s = slo_s["strict"], slo_s.get("relaxed", math.inf)
    if relaxed_s < strict_s:
        raise UsageError(
            f"{label}: the relaxed limit on P99 TBT, {relaxed_s:.3g} s, is below the strict one, "
            f"{strict_s:.3g} s; set both in study.deployments.LABEL.slo_s"
        )


def _name(study: Study, label: str, keys: Keys, by_hand: Keys) -> str:
    """Return a deployment's label; of other hardware, what it is made of."""
    if HARDWARE.isdisjoint(by_hand) and "model" not in by_hand:
        return label
    model = str({**study.plan.run.data, **keys}["model"])
    ranks_and_stages = layout_of(study, keys).split(", ")[1:]
    return " ".join([model, *ranks_and_stages])


def layout_of(study: Study, keys: Keys) -> str:
    """Return the GPU of a deployment, and its ranks and stages where there are several."""
    run = {**study.plan.run.data, **keys}
    ranks, stages = run.get("tensor_parallel", 1), run.get("stages", 1)
    parts = [f"TP{ranks}"] * (ranks != 1) + [f"PP{stages}"] * (stages != 1)
    return ", ".join([gpu_name(run["gpu"]), *filter(None, ["-".join(parts)])])
