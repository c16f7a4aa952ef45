"""Figures of scenarios: a few requests that the figure's numbers describe, or lengths predicted.

Each makes its own table; nothing is swept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from evenflow.errors import UsageError
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.specs.gpu import link
from evenflow.specs.model import model
from evenflow.types import Request
from experiments.figures.claims import published_value
from experiments.figures.layers import Keys
from experiments.figures.panels import Panel, draw, draw_panel
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.figures.tables import table_of
from experiments.run_file.build import build
from experiments.run_file.yaml_file import find
from sim import simulate
from traces import load_trace
from traces.predict import LengthClasses, Mean, Noisy, Predictor, score, train
from traces.trace import Trace, random_stream


def played(study: Study, requests: list[Request], *layers: Keys) -> RunResult:
    """Simulate requests on the figure's run with `layers` over it."""
    return simulate(build(study.config(*layers), requests, study.plan.beside).world)


# -- work stealing --------------------------------------------------------------------------------

ENDS_AT_ONCE, LASTS = 2, 50
"""Output tokens: the first comes with the prefill, the second with the first decode step."""


def stealing(study: Study) -> Drawing:
    """Play the example: as many batches as stages, of which some requests end at once."""
    numbers = study.numbers
    requests = example(numbers["batch_rows"], numbers["finished"])
    table = first_rounds(played(study, requests, {"stages": study.gpus}), numbers["rounds"])
    first = table[table["round"] == 1]
    claim = {"average": first.average.tolist(), "submitted": first.submitted.tolist()}
    names = "batch " + table.batch.astype(str) + "\nround " + table["round"].astype(str)
    figure = draw(study.plan.keys.plot, table.assign(name=names), numbers)
    axes, places = figure.axes[0], np.arange(len(table))
    axes.step(places, table.average, where="mid", color="#d9730d", label="average of live requests")
    axes.plot(places, table.withheld, color="0.4", marker=".", ls=":", label="withheld so far")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.17), frameon=False)
    return Drawing(figure, table, claims={"tdpipe-stealing-example": claim})


def example(batch_rows: int, finished: list[int]) -> list[Request]:
    """Return `batch_rows` requests a batch; the first `finished` of it end in a decode step."""
    outputs = [
        ENDS_AT_ONCE if row < short else LASTS for short in finished for row in range(batch_rows)
    ]
    return [Request(number, 0.0, 8, tokens) for number, tokens in enumerate(outputs)]


def first_rounds(result: RunResult, rounds: int) -> pd.DataFrame:
    """Return a row for each decode batch that returns in the first `rounds` of them.

    `average` is that of the live requests over the batches; `withheld` counts those kept back.
    """
    shown, depth = rounds * result.depth, result.depth
    sent = result.decode_tokens[result.decode_tokens > 0]
    back_s = result.returned_s[result.decode_tokens > 0][:shown]
    ended = np.searchsorted(np.sort(result.completion_s), back_s, side="right")
    returned, submitted = sent[:shown] - np.diff(ended, prepend=0), sent[depth : depth + shown]
    return pd.DataFrame(
        {
            "round": np.arange(shown) // depth + 1,
            "batch": np.arange(shown) % depth,
            "returned": returned,
            "average": (len(result.completion_s) - ended) / depth,
            "submitted": submitted,
            "withheld": np.cumsum(returned - submitted),
        }
    )


# -- a long prompt among requests that decode -----------------------------------------------------

USUAL_STEPS = 100
"""Output tokens that every decoding request has when the prompt arrives, about."""
BEFORE_MS, AFTER_MS = 150, 450
"""What is shown around the prompt's arrival."""


def long_prompt(study: Study) -> Drawing:
    """Simulate the prompt under each system, and in chunks of every size under the last."""
    if study.plan.run.data["stages"] != 1:
        raise UsageError("stages: this figure is of one stage; give more GPUs as tensor_parallel")
    numbers, labels = study.numbers, list(study.plan.keys.systems)
    last = labels[-1]
    results = {label: _joined_by_prompt(study, label, None) for label in labels[:-1]}
    results[last] = _joined_by_prompt(study, last, numbers["chunk_tokens"])
    rows = [{"system": label, **gaps(result)} for label, result in results.items()]
    for chunk in numbers["all_chunks"]:
        result = _joined_by_prompt(study, last, chunk)
        rows.append({"system": f"{last} of {chunk}", **gaps(result)})
    table = pd.DataFrame(rows)
    return Drawing(_draw_gaps(study.plan.keys.plot, results, table), table)


def _joined_by_prompt(study: Study, label: str, chunk: int | None) -> RunResult:
    """Run the decoding requests and the prompt; a budget has room for them beside a chunk."""
    numbers = study.numbers
    decodes = numbers["decodes"]
    budget = {} if chunk is None else {"scheduler": {"token_budget": chunk + decodes}}
    layers = study.system(label), budget
    short = numbers["decode_prompt_tokens"]
    many = [Request(number, 0.0, short, 4 * USUAL_STEPS) for number in range(decodes)]
    alone = played(study, many, *layers)
    arrival_s = float(alone.returned_s[alone.decode_tokens == decodes][USUAL_STEPS])
    prompt = Request(decodes, arrival_s, numbers["prompt_tokens"], 2)
    return played(study, [*many, prompt], *layers)


def steps_of_prompt(result: RunResult) -> slice:
    """Return which micro-batches compute the request that arrived last."""
    after = result.scheduled_s >= result.arrival_s.max()
    found = np.flatnonzero(after & (result.prefill_tokens > 0))
    return slice(int(found[0]), int(found[-1]) + 1)


def gaps(result: RunResult) -> dict[str, float]:
    """Return how the last prompt is computed, and the times between tokens of those that decode."""
    part = steps_of_prompt(result)
    took_ms = 1e3 * (result.end_s - result.start_s)[part, 0]
    gaps_ms = 1e3 * np.diff(result.returned_s[result.decode_tokens > 0])
    return {
        "chunk_tokens": int(result.prefill_tokens[part].max()),
        "steps": part.stop - part.start,
        "chunk_ms": float(took_ms.mean()),
        "prompt_ms": float(took_ms.sum()),
        "longest_gap_ms": float(gaps_ms[USUAL_STEPS // 2 :].max()),
        "usual_gap_ms": float(np.median(gaps_ms)),
    }


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


# -- predicted lengths ----------------------------------------------------------------------------

CLAIM, AT = "tdpipe-predictor", 256


def predictors(study: Study) -> Drawing:
    """Score predictors on the requests that fit, as often as there are seeds."""
    rows = [row for seed in study.seeds for row in _scores(study, _that_fit(study, seed), seed)]
    table = pd.DataFrame(rows)
    mean = table[table.group == AT].groupby("predictor", sort=False)[["accuracy", "error"]].mean()
    read = float(mean.accuracy.iloc[0])
    errors = [float(mean.error[_noisy(each)]) for each in study.numbers["accuracies"]]
    claims = {CLAIM: {"accuracy": [read] * len(errors), "error256": errors}}
    return Drawing(_draw_errors(study, table), table, claims=claims)


def _that_fit(study: Study, seed: int) -> Trace:
    """Return the trace without the requests that `max_model_len` refuses."""
    config = study.config()
    given = config.workload
    trace = load_trace(
        find(given.trace, study.plan.beside),
        format=given.format,
        limit=given.requests,
        tokenizer=given.tokenizer,
        filter=given.filter,
        seed=seed,
        keep_text=True,
    )
    longest = config.max_model_len or np.inf
    kept = np.flatnonzero(trace.prompt_tokens + trace.output_tokens <= longest)
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[kept],
        output_tokens=trace.output_tokens[kept],
        texts=None if trace.texts is None else [trace.texts[row] for row in kept.tolist()],
    )


def _scores(study: Study, trace: Trace, seed: int) -> Iterator[dict[str, Any]]:
    yield from _trained(trace, seed)
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    classes = LengthClasses.of(outputs)
    noisy = {_noisy(accuracy): Noisy(accuracy, seed) for accuracy in study.numbers["accuracies"]}
    known: dict[str, Predictor] = {"mean of all": Mean(), **noisy}
    for name, predictor in known.items():
        predicted = predictor.predict(prompts, outputs, None)
        scores = score(predicted, outputs, classes, random_stream(seed, "groups"))
        yield from _by_group(name, seed, scores)


def _trained(trace: Trace, seed: int) -> Iterator[dict[str, Any]]:
    if find_spec("sklearn") is None:
        none = {"class_accuracy": math.nan, "accumulated_error": {AT: math.nan}}
        yield from _by_group("classifier (needs evenflow[predict])", seed, none)
        return
    _, report = train(trace, seed)
    name = "length only" if report["features"] == "length" else "text and length"
    yield from _by_group(name, seed, report["classifier"])


def _noisy(accuracy: float) -> str:
    return f"noisy, {accuracy:.2%} right"


def _by_group(predictor: str, seed: int, scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group, error in scores["accumulated_error"].items():
        place = {"predictor": predictor, "seed": seed, "accuracy": scores["class_accuracy"]}
        yield {**place, "group": group, "error": error}


def _draw_errors(study: Study, table: pd.DataFrame) -> Figure:
    right = table.groupby("predictor").accuracy.transform("mean").map("{:.1%}".format)
    known = table.predictor.str.startswith("noisy")
    labels = table.predictor.where(known, table.predictor + ", " + right + " right")
    shown = table.assign(label=labels, percent=100 * table.error)
    figure = draw(study.plan.keys.plot, shown, study.numbers)
    if study.plan.published:
        (axes,) = figure.axes
        published = [100 * error for error in published_value(CLAIM)["error256"]]
        axes.plot(
            [AT] * len(published), published, "kx", zorder=3, label=f"published, {AT} requests"
        )
        axes.legend(fontsize=8)
    return figure


# -- prompts and decodes on GPUs of their own -----------------------------------------------------

MOVED = "mean_transfer_ms"
CONTEXTS = tuple(2**power for power in range(8, 16))


def disaggregation(study: Study) -> Drawing:
    """Run each system at each rate, and one request whose KV is the text's 224 MB."""
    table, moved_ms = table_of(study), example_ms(study)
    shown, run = pd.concat([_transfers(study), table]), study.plan.run.data
    words = {"gpus": study.gpus, "gpu": run["gpu"], "model": run["model"]}
    figure, given = draw(study.plan.keys.plot, shown, words), study.numbers["example"]
    axes, size = figure.axes[0], given["tokens"] * given["bytes_per_token"] / 1e6
    text = f"{size:.0f} MB at {given['bandwidth_gb_s']} GB/s: {moved_ms:.2f} ms"
    axes.plot([given["tokens"]], [moved_ms], "k*", markersize=10, zorder=3, label=text)
    axes.legend(fontsize=7)
    return Drawing(figure, table, study.plan.keys.shown, {"blog-transfer": moved_ms})


def _transfers(study: Study) -> pd.DataFrame:
    """Return the time of a context's KV over each link."""
    spec = model(find(study.plan.run.data["model"], study.plan.beside))
    return pd.DataFrame(
        {"link": name, "context": tokens, "transfer_ms": 1e3 * link(name).transfer_s(size)}
        for name in study.numbers["links"]
        for tokens in CONTEXTS
        for size in [spec.kv_bytes_per_token() * tokens]
    )


def example_ms(study: Study) -> float:
    """Return the milliseconds that the example's KV crosses the link between two simulated pools.

    Each pool is one stage; nothing else is on the way.
    """
    given = study.numbers["example"]
    keys = {
        "model": None,
        "gpu": None,
        "link": None,
        "stages": 2,
        "costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 0.0},
        "kv": {"page_tokens": 16, "pages": 2 * given["tokens"]},
        "scheduler": {
            "name": "distserve",
            "kv_bytes_per_token": given["bytes_per_token"],
            "transfer_link": {"bandwidth_gb_s": given["bandwidth_gb_s"], "latency_us": 0},
        },
    }
    return float(summarize(played(study, [Request(0, 0.0, given["tokens"], 2)], keys))[MOVED])
