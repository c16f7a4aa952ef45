"""Request rates that fit a deployment: shares of the rate that one system carries when saturated.

A figure's `study` has `traces` (by label in the figure), `requests`, `loads`, and `rates`: requests
per second to use in place of those shares. Knows no plot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from experiments.figures.layers import Keys
from experiments.figures.pairs import pairs
from experiments.figures.study import Study, overview
from experiments.run_file.run import RunConfig


class Place(NamedTuple):
    """A pair of GPU and model, and a trace, by their labels in the figure."""

    pair: str
    trace: str


def traces(study: Study) -> dict[str, str]:
    """Return the figure's traces by label; one that the run has itself is the only one."""
    own = study.plan.run.data.get("workload", {}).get("trace")
    return dict(study.numbers["traces"]) if own is None else {own: own}


def places(study: Study) -> dict[Place, Keys]:
    """Return the keys of each pair with each trace."""
    return {
        Place(pair, label): {
            **keys,
            "workload": {"trace": trace, "requests": study.numbers["requests"]},
        }
        for pair, keys in pairs(study).items()
        for label, trace in traces(study).items()
    }


def saturated(study: Study, where: Mapping[Place, Keys]) -> dict[Place, float]:
    """Return the requests per second of the figure's first system when all wait at the start.

    A mean over the seeds; NaN where none of them ran.
    """
    first = next(iter(study.plan.keys.systems))
    offline = {"workload": {"arrivals": "offline"}}
    cases: dict[tuple[Any, ...], RunConfig] = {
        key: study.config(keys, study.system(first), offline) for key, keys in where.items()
    }
    table = study.run(cases, Place._fields)
    mean = table.groupby(list(Place._fields))["request_throughput"].mean()
    return {place: float(mean[place.pair, place.trace]) for place in where}


def under_load(
    study: Study, measure: Callable[..., dict[str, Any]] = overview, **more: Any
) -> pd.DataFrame:
    """Run every system at every rate, everywhere; return a row a run, with its `load` and `rate`.

    `load` is the rate over that at which the figure's first system saturates. Rates are rounded to
    two digits. `measure` and `more` are as in `Study.run`.
    """
    where = places(study)
    most = saturated(study, where)
    cases = {}
    for place, keys in where.items():
        if math.isnan(most[place]):  # the model does not fit
            continue
        for rate in rates(study, most[place]):
            arrivals = {"workload": {"arrivals": {"kind": "poisson", "rate": rate}}}
            for label in study.plan.keys.systems:
                key = (*place, round(rate / most[place], 3), rate, label)
                cases[key] = study.config(keys, study.system(label), arrivals)
    return study.run(cases, (*Place._fields, "load", "rate", "system"), measure, **more)


def rates(study: Study, saturated_per_s: float) -> list[float]:
    """Return the figure's rates in requests per second, given the rate of saturation."""
    given = study.numbers["rates"]
    if given is not None:
        return [float(rate) for rate in given]
    return [float(f"{load * saturated_per_s:.2g}") for load in study.numbers["loads"]]
