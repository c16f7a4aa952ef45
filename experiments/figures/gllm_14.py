"""gLLM's figure 14: the share of requests within limits on TTFT and TPOT, against the rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evenflow.results.metrics import request_metrics
from experiments.figures.layers import Keys
from experiments.figures.loads import Place, places, rates, saturated
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import grid_lines, whiskers
from experiments.runs import Outcome

SHARE = "attained"
Limits = tuple[float, float]
"""Milliseconds of TTFT and of TPOT that a request may take."""


def make(study: Study) -> Drawing:
    """Run every system at every rate, and count the requests within each pair of limits."""
    where = places(study)
    most = saturated(study, where)
    parts = [
        _attained(study, place, keys, most[place])
        for place, keys in where.items()
        if not math.isnan(most[place])  # else the model does not fit
    ]
    table = pd.concat(parts, ignore_index=True)
    shown = (*Place._fields, "limits", "rate", "system", "seed", SHARE, "total_token_throughput")
    return Drawing(_draw(table), table, shown)


def _attained(study: Study, place: Place, keys: Keys, most: float) -> pd.DataFrame:
    """Return a row for each pair of limits and each run at one place."""
    offered = rates(study, most)
    limits = _limits(study, keys, offered[0])
    cases = {
        (*place, rate, label): study.config(keys, study.system(label), _arrivals(rate))
        for rate in offered
        for label in study.plan.keys.systems
    }
    table = study.run(cases, (*Place._fields, "rate", "system"), within, limits=limits)
    table = table[table.error.isna()]
    return pd.concat(
        table.assign(
            limits=f"TTFT {ttft:g} ms, TPOT {tpot:g} ms",
            **{SHARE: [shares[index] for shares in table[SHARE]]},
        )
        for index, (ttft, tpot) in enumerate(limits)
    )


def _arrivals(rate: float) -> Keys:
    return {"workload": {"arrivals": {"kind": "poisson", "rate": rate}}}


def _limits(study: Study, keys: Keys, rate: float) -> list[Limits]:
    """Return the limits given, or multiples of the first system's latency at `rate`."""
    given = study.numbers["limits"]
    if given is not None:
        return [(float(ttft), float(tpot)) for ttft, tpot in given]
    first = study.system(next(iter(study.plan.keys.systems)))
    idle = study.run({(): study.config(keys, first, _arrivals(rate))}, ())
    ttft, tpot = idle["mean_ttft_ms"].mean(), idle["mean_tpot_ms"].mean()
    return [
        (float(f"{scale * ttft:.2g}"), float(f"{scale * tpot:.2g}"))
        for scale in study.numbers["limit_scales"]
    ]


def within(outcome: Outcome, limits: list[Limits]) -> dict[str, Any]:
    """Return the share of requests within each pair of limits; a TPOT that is none is within."""
    latency = request_metrics(outcome.result)
    shares = []
    for ttft_ms, tpot_ms in limits:
        in_time = 1e3 * latency.ttft_s <= ttft_ms
        shares.append(float((in_time & ~(1e3 * np.nan_to_num(latency.tpot_s) > tpot_ms)).mean()))
    return {**overview(outcome), SHARE: shares}


def _draw(table: pd.DataFrame) -> Figure:
    groups = list(table.groupby([*Place._fields, "limits"], sort=False))
    figure = Figure(figsize=(max(6.0, 3.8 * len(groups)), 4.0), layout="constrained")
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, ((pair, trace, limits), own) in zip(grid, groups, strict=True):
        percent = own.assign(**{SHARE: 100 * own[SHARE]})
        for label, runs in percent.groupby("system", sort=False):
            whiskers(axes, runs, "rate", SHARE, str(label))
        axes.set(xlabel="request rate (1/s)", xlim=(0, None), ylim=(0, 104))
        axes.set_title(f"{pair}, {trace}\n{limits}", fontsize=9)
    grid[0].set_ylabel("requests within both limits (%)")
    grid[0].legend(fontsize=8)
    grid_lines(figure.axes)
    return figure
