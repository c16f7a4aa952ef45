"""gLLM's figure 14: the share of requests within limits on TTFT and TPOT, against the rate."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.loads import Place, places, rates, saturated
from experiments.figures.study import Drawing, Keys, Study
from experiments.figures.style import grid_lines, whiskers

SHARE = "attainment"
Limits = dict[str, float]


def make(study: Study) -> Drawing:
    """Run every system at every rate with the limits as goodput."""
    where = places(study)
    most = saturated(study, where)
    cases = {}
    for place, keys in where.items():
        offered = rates(study, most[place])
        for name, limits in _limits(study, keys, offered[0]).items():
            for rate in offered:
                for label in study.plan.keys.systems:
                    layers = (keys, study.system(label), _arrivals(rate), {"goodput": limits})
                    cases[*place, name, rate, label] = study.config(*layers)
    table = study.run(cases, (*Place._fields, "limits", "rate", "system"))
    table[SHARE] = table["request_goodput"] / table["request_throughput"]
    shown = (*Place._fields, "limits", "rate", "system", "seed", SHARE, "request_goodput")
    return Drawing(_draw(table), table, shown)


def _arrivals(rate: float) -> Keys:
    return {"workload": {"arrivals": {"kind": "poisson", "rate": rate}}}


def _limits(study: Study, keys: Keys, rate: float) -> dict[str, Limits]:
    """Return limits in ms by their words: those given, or multiples of the latency at `rate`."""
    given = study.numbers["limits"]
    if given is not None:
        found = [dict(zip(("ttft", "tpot"), map(float, given), strict=True))]
    else:
        first = study.system(next(iter(study.plan.keys.systems)))
        idle = study.run({(): study.config(keys, first, _arrivals(rate))}, ())
        found = [
            {
                name: float(f"{scale * idle[f'mean_{name}_ms'].mean():.2g}")
                for name in ("ttft", "tpot")
            }
            for scale in study.numbers["limit_scales"]
        ]
    return {f"TTFT {each['ttft']:g} ms, TPOT {each['tpot']:g} ms": each for each in found}


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
