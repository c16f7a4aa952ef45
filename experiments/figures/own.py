"""Tables and pictures of single figures that are more than their YAML can say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.costs import decode_work
from evenflow.errors import UsageError
from evenflow.schedulers import parameters, policy
from experiments.figures.axes import Case, cases_of, pairs, poisson, served, traces
from experiments.figures.claims import published_value
from experiments.figures.iterations import iteration, world_of
from experiments.figures.study import Drawing, Study
from experiments.figures.style import COLORS, MARKERS, grid_lines
from experiments.figures.tables import SEARCH, run_cases, tbt_slo
from experiments.report.plots import panels
from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import find
from traces import load_trace

TURN = 5.0
"""TTFT has turned where its mean is so many times that at the lowest rate."""


def turning_points(study: Study, table: pd.DataFrame) -> pd.Series[float]:
    """Return for each row the largest rate before its system's TTFT turns there, by mean TTFT."""
    group = ["pair", "trace", "system"]
    mean = table.groupby([*group, "rate"])["mean_ttft_ms"].mean().sort_index()
    lowest = mean.groupby(group).transform("first")
    turned = (mean > TURN * lowest).groupby(group).cummax()
    last = mean[~turned].reset_index("rate").groupby(group)["rate"].max()
    return last.reindex(pd.MultiIndex.from_frame(table[group])).set_axis(table.index)


def over_smallest(study: Study, table: pd.DataFrame) -> pd.Series[float]:
    """Return for each row its mean throughput over that of the fewest GPUs that hold the model."""
    group = ["pair", "system", "gpus"]
    mean = table.groupby(group)["total_token_throughput"].mean()
    ratio = mean / mean.groupby(group[:2]).transform("first")  # the first that is no NaN
    return ratio.reindex(pd.MultiIndex.from_frame(table[group])).set_axis(table.index)


def default(study: Study, table: pd.DataFrame) -> list[object]:
    """Return for each row the default of the policy's parameter that it varies."""
    known = parameters(policy(study.policy(next(iter(study.plan.keys.systems)))))
    return [known[name].default for name in table.parameter]


def gpu_of_pair(study: Study, table: pd.DataFrame) -> pd.Series[str]:
    """Return the GPU of each row's pair."""
    return table.pair.str.partition(" + ")[0]


# -- gLLM, figure 14 ------------------------------------------------------------------------------


def attainment(study: Study) -> pd.DataFrame:
    """Run every system at every rate; return a row for each run and each pair of limits.

    Limits (ms of TTFT and TPOT) are those given, or multiples of the first system's latency at the
    lowest rate of the place.
    """
    places: dict[tuple[str, str], list[Case]] = {}
    for case in cases_of(study):
        places.setdefault((case.values["pair"], case.values["trace"]), []).append(case)
    parts = []
    for cases in places.values():
        limits = study.numbers["limits"] or _multiples(study, cases[0])
        limits = [(float(ttft), float(tpot)) for ttft, tpot in limits]
        table = run_cases(study, cases, "within", {"limits": limits})
        table = table[table.error.isna()]
        for index, (ttft, tpot) in enumerate(limits):
            attained = [shares[index] for shares in table.attained]
            words = f"TTFT {ttft:g} ms, TPOT {tpot:g} ms"
            parts.append(table.assign(limits=words, attained=attained))
    return pd.concat(parts, ignore_index=True)


def _multiples(study: Study, first: Case) -> list[tuple[float, float]]:
    idle = run_cases(study, [first], "overview")
    ttft, tpot = idle["mean_ttft_ms"].mean(), idle["mean_tpot_ms"].mean()
    return [
        (float(f"{scale * ttft:.2g}"), float(f"{scale * tpot:.2g}"))
        for scale in study.numbers["limit_scales"]
    ]


# -- gLLM, figure 11 ------------------------------------------------------------------------------

PERCENTILES = (5, 25, 50, 75, 95, 99)
BINS = 60


def lengths(study: Study) -> Drawing:
    """Load or draw each trace and compare its lengths; nothing is simulated."""
    limit, seed = study.numbers["requests"], study.seeds[0]
    tokens: dict[tuple[str, str], np.ndarray] = {}
    for label, keys in traces(study).items():
        path = find(keys["workload"]["trace"], study.plan.beside)
        trace = load_trace(path, limit=limit, seed=seed)
        tokens[label, "prompt"] = trace.prompt_tokens
        tokens[label, "output"] = trace.output_tokens
    table = pd.DataFrame(
        {"trace": label, "side": side, "requests": len(own), "mean": own.mean()}
        | {f"p{q}": float(np.percentile(own, q)) for q in PERCENTILES}
        for (label, side), own in tokens.items()
    )
    table["over_first"] = table["mean"] / table.groupby("side")["mean"].transform("first")
    return Drawing(_histograms(tokens), table)


def _histograms(tokens: dict[tuple[str, str], np.ndarray]) -> Figure:
    figure, cells = panels(2, 5, 4)
    for axes, side in zip(cells, ("prompt", "output"), strict=True):
        shown = {label: own for (label, one), own in tokens.items() if one == side}
        most = max(np.percentile(own, 99) for own in shown.values())
        edges = np.linspace(0, most, BINS + 1)
        for label, own in shown.items():
            percent = 100 * np.histogram(own, edges)[0] / len(own)
            words = f"{label}: mean {own.mean():.0f}"
            axes.stairs(percent, edges, fill=True, alpha=0.5, label=words)
        axes.set(xlabel=f"{side} tokens (to the largest P99)", xlim=(0, most))
        axes.legend()
    cells[0].set_ylabel("requests (%)")
    grid_lines(cells)
    return figure


# -- Sarathi-Serve, figure 13 ---------------------------------------------------------------------


def layouts(study: Study) -> pd.DataFrame:
    """Search the capacity of each system on its layout, then predict decodes alone on each layout.

    The first rows are the capacities, the last the times between tokens.
    """
    found = run_cases(study, cases_of(study))
    found["layout"] = [_layout(study, label) for label in found.system]
    return pd.concat([found, pd.DataFrame(_decodes(study))], ignore_index=True)


def _decodes(study: Study) -> Iterator[dict[str, object]]:
    """A pipeline has a batch a stage in flight: its requests get a token when theirs is through."""
    one, context = served(study)[0], int(study.numbers["decode_context"])
    first_on: dict[str, str] = {}
    for label in study.plan.keys.systems:
        first_on.setdefault(_layout(study, label), label)
    for layout, system in first_on.items():
        seconds = iteration(world_of(study, one.keys, study.system(system)))
        for batch in study.numbers["decode_batches"]:
            tbt_s = seconds(decode_work(batch, batch * context))
            yield {"layout": layout, "system": system, "decode_batch": batch, "tbt_ms": 1e3 * tbt_s}


def _layout(study: Study, label: str) -> str:
    keys = {**study.plan.run.data, **study.system(label)}
    return f"TP{keys['tensor_parallel']}-PP{keys['stages']}"


# -- Sarathi-Serve, table 4 -----------------------------------------------------------------------


def shares_of_capacity(study: Study) -> pd.DataFrame:
    """Find the capacity of each data set, then run every system at shares of it."""
    numbers = study.numbers
    under = cases_of(study, ("deployment", "dataset", "slo"))
    under = [case for case in under if case.served == under[0].served]
    budget = {"scheduler": {"name": "sarathi", "token_budget": numbers["token_budget"]}}
    cases = [
        case.at("slo", "", budget)
        .at("load", load, poisson(rate))
        .at("rate", rate, {})
        .at("system", label, {})
        for case, most in zip(under, _carried(study, under), strict=True)
        for load in numbers["loads"]
        for rate in [round(load * most, 3)]
        for label in study.plan.keys.systems
    ]
    table = run_cases(study, cases, columns=("dataset", "load", "rate", "system"))
    table["ttft_p50_s"] = table.median_ttft_ms / 1e3
    table["tbt_p99_s"] = table.p99_itl_ms / 1e3
    return table


def _carried(study: Study, cases: list[Case]) -> list[float]:
    """Return the rate that both techniques together carry within the strict limit, by case."""
    few = {"workload": {"requests": study.numbers["capacity_requests"]}}
    both = [case.at("system", "both", {}).at("few", "", few) for case in cases]
    table = run_cases(study, both, SEARCH, columns=("dataset",))
    found = table.groupby("dataset", sort=False).capacity.mean()
    if not (found > 0).all():
        limits = tbt_slo(both[0].tbt_s or 0.0, study.numbers["median_queue_s"])
        ends = ", ".join(dict.fromkeys(table.status))
        raise UsageError(
            f"the search for a rate with {limits[0]} ended: {ends}; a larger "
            "study.capacity_requests may tell"
        )
    return [float(rate) for rate in found]


# -- TD-Pipe's readings ---------------------------------------------------------------------------

OUTPUT, BEST, RATE = "offline_output_throughput", "TD-Pipe", "output tokens/s"


def readings(study: Study) -> pd.DataFrame:
    """Run every system under every reading, and TD-Pipe on half of the GPUs besides."""
    if study.gpus < 2:
        raise UsageError("stages: this figure compares all GPUs with half of them; give at least 2")
    runs = study.run(_under_readings(study), ("reading", "system", "gpus"))
    return ratios(runs, study.gpus)


def _under_readings(study: Study) -> dict[tuple[str, str, int], RunConfig]:
    pair = next(iter(pairs(study).values()))
    wanted = [(label, study.gpus) for label in study.plan.keys.systems]
    cases = {}
    for reading, given in study.numbers["readings"].items():
        keys = {key: value for key, value in given.items() if key != "of"}
        for label, gpus in [*wanted, (BEST, study.gpus // 2)]:
            layer = keys if label in given.get("of", [label]) else {}
            cases[reading, label, gpus] = study.config(pair, study.system(label, gpus), layer)
    return cases


def ratios(runs: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Return a row for each reading, quantity and seed: TD-Pipe over each system, its scaling."""
    found = []
    for (reading, seed), rows in runs.groupby(["reading", "seed"], sort=False):
        whole, half = (rows[rows.gpus == n].set_index("system")[OUTPUT] for n in (gpus, gpus // 2))
        own = float(whole[BEST])
        values = {f"over {label}": own / rate for label, rate in whole.drop(BEST).items()}
        values |= {scaling(gpus): own / float(half[BEST]), RATE: own}
        found += [(reading, name, seed, value) for name, value in values.items()]
    return pd.DataFrame(found, columns=["reading", "quantity", "seed", "value"])


def scaling(gpus: int) -> str:
    """Return what TD-Pipe's throughput on all GPUs over that on half of them is called."""
    return f"{gpus} GPUs over {gpus // 2}"


def draw_readings(study: Study, table: pd.DataFrame) -> Figure:
    """Draw a line a reading: ratios, the scaling and the rate, with the published ones dashed."""
    names = list(dict.fromkeys(table.reading))
    figure = Figure(figsize=(13, 1.6 + 0.36 * len(names)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=[2.4, 1, 1])
    best: dict[str, float] = published_value("tdpipe-best-case")
    for label in [label for label in COLORS if f"over {label}" in set(table.quantity)]:
        value = best.get(label.lower().replace("+", "_")) if study.plan.published else None
        _dots(left, table, f"over {label}", label, value)
    title = f"TD-Pipe over each system, {study.gpus} x {next(iter(pairs(study)))}"
    left.set(title=title, xlabel="ratio of output tokens/s")
    words = "dashed: published, largest of all pairs" if study.plan.published else None
    left.legend(fontsize=8, title=words, title_fontsize=8)
    claims = {scaling(study.gpus): "tdpipe-superlinear", RATE: "tdpipe-l20-32b"}
    for axes, (quantity, claim) in zip((middle, right), claims.items(), strict=True):
        published = published_value(claim) if study.plan.published else None
        _dots(axes, table, quantity, BEST, published)
        axes.set(title=BEST, xlabel=quantity)
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.invert_yaxis()
    grid_lines(figure.axes)
    return figure


def _dots(
    axes: Axes, table: pd.DataFrame, quantity: str, label: str, published: float | None
) -> None:
    rows = table[table.quantity == quantity].groupby("reading", sort=False).value
    mean = rows.mean()
    reach = [mean - rows.min(), rows.max() - mean]
    look: dict[str, Any] = {"color": COLORS[label], "marker": MARKERS[label], "markersize": 5}
    axes.errorbar(mean, range(len(mean)), xerr=reach, ls="", capsize=2, label=quantity, **look)
    if published is not None:
        axes.axvline(published, color=COLORS[label], ls="--", lw=0.9)
