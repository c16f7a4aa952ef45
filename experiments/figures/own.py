"""Tables and pictures of single figures that a YAML cannot express.

What is swept comes from the figure's cases; a few requests of its own from `scenarios`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.config.yaml_file import find
from evenflow.costs import decode_work
from evenflow.errors import UsageError
from evenflow.experiments.figures import scenarios
from evenflow.experiments.figures.cases import (
    SEARCH,
    Case,
    cases_of,
    poisson,
    run_cases,
    served,
    table_of,
    tbt_slo,
    traces,
)
from evenflow.experiments.figures.iterations import iteration, world_of
from evenflow.experiments.figures.looks import COLORS, grid_lines
from evenflow.experiments.figures.measures import stalls
from evenflow.experiments.figures.panels import Panel, draw, draw_panel
from evenflow.experiments.figures.study import Drawing, FigureStudy
from evenflow.report.plots import panels
from evenflow.results.run import RunResult
from evenflow.schedulers import parameters, policy
from evenflow.traces import load_trace, predict
from evenflow.traces.trace import Trace, random_stream

TURN = 5.0
"""TTFT has turned where its mean is this many times that at the lowest rate."""


def turning_points(study: FigureStudy, table: pd.DataFrame) -> pd.Series[float]:
    """Return for each row the largest rate before its system's TTFT turns there, by mean TTFT."""
    group = ["pair", "trace", "system"]
    mean = table.groupby([*group, "rate"])["mean_ttft_ms"].mean().sort_index()
    lowest = mean.groupby(group).transform("first")
    turned = (mean > TURN * lowest).groupby(group).cummax()
    last = mean[~turned].reset_index("rate").groupby(group)["rate"].max()
    return last.reindex(pd.MultiIndex.from_frame(table[group])).set_axis(table.index)


def over_smallest(study: FigureStudy, table: pd.DataFrame) -> pd.Series[float]:
    """Return for each row its mean throughput over that of the fewest GPUs that hold the model."""
    mean = table.groupby(["pair", "system", "gpus"])["total_token_throughput"].transform("mean")
    return mean / mean.groupby([table.pair, table.system]).transform("first")  # that is no NaN


def default(study: FigureStudy, table: pd.DataFrame) -> list[object]:
    """Return for each row the default of the policy's parameter that it varies."""
    known = parameters(policy(study.policy(study.labels[0])))
    return [known[name].default for name in table.parameter]


def gpu_of_pair(study: FigureStudy, table: pd.DataFrame) -> pd.Series[str]:
    return table.pair.str.partition(" + ")[0]


def attainment(study: FigureStudy) -> pd.DataFrame:
    """Run every system at every rate; return a row for each run and each pair of limits.

    Limits are ms of TTFT and TPOT. Where none is given, they are multiples of the first system's
    latency at the lowest rate.
    """
    parts = []
    places = groupby(cases_of(study), lambda case: (case.values["pair"], case.values["trace"]))
    for cases in [list(of_place) for _, of_place in places]:
        limits = study.numbers["limits"] or _multiples(study, cases[0])
        limits = [(float(ttft), float(tpot)) for ttft, tpot in limits]
        table = run_cases(study, cases, "within", {"limits": limits})
        table = table[table.error.isna()]
        for index, (ttft, tpot) in enumerate(limits):
            words, attained = f"TTFT {ttft:g} ms, TPOT {tpot:g} ms", table.attained.str[index]
            parts.append(table.assign(limits=words, attained=attained))
    return pd.concat(parts, ignore_index=True)


def _multiples(study: FigureStudy, first: Case) -> list[tuple[float, float]]:
    idle = run_cases(study, [first], "overview")
    ttft, tpot = idle["mean_ttft_ms"].mean(), idle["mean_tpot_ms"].mean()
    return [
        (float(f"{scale * ttft:.2g}"), float(f"{scale * tpot:.2g}"))
        for scale in study.numbers["limit_scales"]
    ]


PERCENTILES = (5, 25, 50, 75, 95, 99)
BINS = 60


def lengths(study: FigureStudy) -> Drawing:
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


def generation_stalls(study: FigureStudy) -> Drawing:
    """Run the systems at every rate; show tokens over time beside the tail of the latency."""
    numbers = study.numbers
    rates = sorted({*numbers["rates"], numbers["shown_rate"]})
    cases = {
        (label, rate): study.config(study.keys_of(label), poisson(rate))
        for label in study.labels
        for rate in rates
    }
    table = study.run(cases, ("system", "rate"), stalls)
    figure, (left, right) = panels(2, 5, 4.0)
    _draw_generated(left, table, study)
    done = table[table.error.isna()].assign(p99_s=table.p99_itl_ms / 1e3)
    draw_panel(right, Panel.model_validate(study.plan.keys.plot["tail"]), done, numbers)
    grid_lines(figure.axes)
    left.legend(fontsize=8)
    shown = table.drop(columns=["returned_s", "tokens"])
    return Drawing(figure, shown, study.plan.keys.shown)


def _draw_generated(axes: Axes, table: pd.DataFrame, study: FigureStudy) -> None:
    """One seed at one rate, around the longest stall of the first system."""
    numbers = study.numbers
    rows = table[(table.rate == numbers["shown_rate"]) & (table.seed == study.seeds[0])]
    first = rows.iloc[0]
    start_s = first.stall_start_s + first.longest_stall_s / 2 - numbers["shown_s"] / 2
    for label, row in rows.set_index("system").iterrows():
        times_s, tokens = np.array(row.returned_s) - start_s, np.array(row.tokens)
        inside = (times_s >= 0) & (times_s <= numbers["shown_s"])
        new = tokens[inside] - tokens[times_s < 0].max(initial=0)
        axes.step(times_s[inside], new, where="post", label=label, color=COLORS.get(label, "0.3"))
    axes.set(title=f"tokens generated, {numbers['shown_rate']} requests/s")
    axes.set(xlabel="time, s", ylabel="tokens since the left edge", xlim=(0, numbers["shown_s"]))


def layouts(study: FigureStudy) -> pd.DataFrame:
    """Search the capacity of each system on its layout, then predict decodes alone on each layout.

    The first rows are the capacities, the last the times between tokens.
    """
    found = run_cases(study, cases_of(study))
    keys = {label: {**study.plan.run.data, **study.system(label)} for label in study.labels}
    names = {label: f"TP{k['tensor_parallel']}-PP{k['stages']}" for label, k in keys.items()}
    found["layout"] = found.system.map(names)
    return pd.concat([found, pd.DataFrame(_decodes(study, names))], ignore_index=True)


def _decodes(study: FigureStudy, layouts: dict[str, str]) -> Iterator[dict[str, object]]:
    """A pipeline has a batch a stage in flight: its requests get a token when theirs is through."""
    one, context = served(study)[0], int(study.numbers["decode_context"])
    first_on = {layout: label for label, layout in reversed(layouts.items())}
    for layout in dict.fromkeys(layouts.values()):
        system = first_on[layout]
        seconds = iteration(world_of(study, one.keys, study.system(system)))
        for batch in study.numbers["decode_batches"]:
            tbt_s = seconds(decode_work(batch, batch * context))
            yield {"layout": layout, "system": system, "decode_batch": batch, "tbt_ms": 1e3 * tbt_s}


def shares_of_capacity(study: FigureStudy) -> pd.DataFrame:
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
        for label in study.labels
    ]
    table = run_cases(study, cases, columns=("dataset", "load", "rate", "system"))
    table["ttft_p50_s"] = table.median_ttft_ms / 1e3
    table["tbt_p99_s"] = table.p99_itl_ms / 1e3
    return table


def _carried(study: FigureStudy, cases: list[Case]) -> list[float]:
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


def stealing(study: FigureStudy) -> Drawing:
    """Simulate the example: a batch a stage, with some requests that end at once."""
    numbers = study.numbers
    requests = scenarios.example(numbers["batch_rows"], numbers["finished"])
    table = scenarios.first_rounds(
        scenarios.played(study, requests, {"stages": study.gpus}), numbers["rounds"]
    )
    first = table[table["round"] == 1]
    claim = {"average": first.average.tolist(), "submitted": first.submitted.tolist()}
    names = "batch " + table.batch.astype(str) + "\nround " + table["round"].astype(str)
    figure = draw(study.plan.keys.plot, table.assign(name=names), numbers)
    axes, places = figure.axes[0], np.arange(len(table))
    axes.step(places, table.average, where="mid", color="#d9730d", label="average of live requests")
    axes.plot(places, table.withheld, color="0.4", marker=".", ls=":", label="withheld so far")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.17), frameon=False)
    return Drawing(figure, table, claims={"tdpipe-stealing-example": claim})


BEFORE_MS, AFTER_MS = 150, 450
"""What is shown around the prompt's arrival."""


def long_prompt(study: FigureStudy) -> Drawing:
    """Simulate the prompt under each system, and in chunks of every size under the last."""
    if study.plan.run.data["stages"] != 1:
        raise UsageError("stages: this figure is of one stage; give more GPUs as tensor_parallel")
    numbers, labels = study.numbers, study.labels
    last = labels[-1]
    results = {label: scenarios.joined_by_prompt(study, label, None) for label in labels[:-1]}
    results[last] = scenarios.joined_by_prompt(study, last, numbers["chunk_tokens"])
    rows = [{"system": label, **scenarios.gaps(result)} for label, result in results.items()]
    for chunk in numbers["all_chunks"]:
        result = scenarios.joined_by_prompt(study, last, chunk)
        rows.append({"system": f"{last} of {chunk}", **scenarios.gaps(result)})
    table = pd.DataFrame(rows)
    return Drawing(_draw_gaps(study.plan.keys.plot, results, table), table)


def _draw_gaps(
    plot: Mapping[str, Any], results: Mapping[str, RunResult], table: pd.DataFrame
) -> Figure:
    """Draw the gaps around the prompt's arrival, and what `plot` has of chunks of any size."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    grid = figure.subplot_mosaic([[label, "chunks"] for label in results], width_ratios=[1.5, 1])
    colors = ("#d9730d", "#8a4fb0", "#0b5fa5")
    for row, (label, result), color in zip(
        table.to_dict("records"), results.items(), colors, strict=False
    ):
        axes, arrival_s = grid[label], result.arrival_s.max()
        returned_s = result.returned_s[result.decode_tokens > 0]
        at_ms, gap_ms = 1e3 * (returned_s[1:] - arrival_s), 1e3 * np.diff(returned_s)
        shown = (at_ms > -BEFORE_MS) & (at_ms < AFTER_MS)
        axes.vlines(at_ms[shown], 0, gap_ms[shown], color=color, lw=2)
        axes.plot(at_ms[shown], gap_ms[shown], ".", color=color)
        times = f"{row['steps']} x " if row["steps"] > 1 else ""
        axes.set_title(f"{label}: {times}{row['chunk_ms']:.0f} ms", loc="left", fontsize=10)
        axes.set_ylabel("gap (ms)", fontsize=9)
        axes.set_ylim(0, 1.15 * table.longest_gap_ms.max())
    axes.set_xlabel("time since the prompt arrived (ms)")
    draw_panel(grid["chunks"], Panel.model_validate(plot), table[len(results) :], {})
    grid_lines(figure.axes)
    return figure


def predictors(study: FigureStudy) -> pd.DataFrame:
    """Score predictors on the requests that fit, as often as there are seeds."""
    return pd.DataFrame(
        row for seed in study.seeds for row in _scores(study, _that_fit(study, seed), seed)
    )


def _that_fit(study: FigureStudy, seed: int) -> Trace:
    """Return the trace without the requests that `max_model_len` refuses."""
    config = study.config({"workload": {"seed": seed}})
    trace = config.workload.rows(study.plan.beside, config.workload.requests)
    longest = config.max_model_len or np.inf
    kept = np.flatnonzero(trace.prompt_tokens + trace.output_tokens <= longest)
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[kept],
        output_tokens=trace.output_tokens[kept],
    )


def _scores(study: FigureStudy, trace: Trace, seed: int) -> Iterator[dict[str, Any]]:
    yield from _by_group("length only", seed, _of_lengths(trace, seed))
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    classes = predict.LengthClasses.of(outputs)
    known: dict[str, predict.Predictor] = {"mean of all": predict.Mean()}
    for accuracy in study.numbers["accuracies"]:
        known[f"noisy, {accuracy:.2%} right"] = predict.Noisy(accuracy, seed)
    for name, predictor in known.items():
        predicted = predictor.predict(prompts, outputs, None)
        scores = predict.score(predicted, outputs, classes, random_stream(seed, "groups"))
        yield from _by_group(name, seed, scores)


def _of_lengths(trace: Trace, seed: int) -> Mapping[str, Any]:
    """Score naming the most frequent class of prompts about as long, to half an octave."""
    training, _, test = predict.split(len(trace), seed)
    classes = predict.LengthClasses.of(trace.output_tokens[training])
    octaves = (2 * np.log2(trace.prompt_tokens)).astype(int)
    seen = np.zeros((octaves.max() + 1, predict.NUM_CLASSES), dtype=int)
    np.add.at(seen, (octaves[training], classes.class_of(trace.output_tokens[training])), 1)
    named = classes.tokens(seen.argmax(axis=1)[octaves[test]])
    return predict.score(named, trace.output_tokens[test], classes, random_stream(seed, "groups"))


def _by_group(predictor: str, seed: int, scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group, error in scores["accumulated_error"].items():
        place = {"predictor": predictor, "seed": seed, "accuracy": scores["class_accuracy"]}
        yield {**place, "group": group, "error": error}


def disaggregation(study: FigureStudy) -> Drawing:
    """Run each system at each rate, and one request with the text's 224 MB of KV."""
    table, moved_ms = table_of(study), scenarios.example_ms(study)
    shown, run = pd.concat([scenarios.transfers(study), table]), study.plan.run.data
    words = {"gpus": study.gpus, "gpu": run["gpu"], "model": run["model"]}
    figure, given = draw(study.plan.keys.plot, shown, words), study.numbers["example"]
    axes, size = figure.axes[0], given["tokens"] * given["bytes_per_token"] / 1e6
    text = f"{size:.0f} MB at {given['bandwidth_gb_s']} GB/s: {moved_ms:.2f} ms"
    axes.plot([given["tokens"]], [moved_ms], "k*", markersize=10, zorder=3, label=text)
    axes.legend(fontsize=7)
    return Drawing(figure, table, study.plan.keys.shown, {"blog-transfer": moved_ms})
