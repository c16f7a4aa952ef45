"""TD-Pipe's figure 14: the error of predicted output lengths, added up over groups of requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.figures.claims import published_value
from experiments.figures.study import Drawing, Study
from experiments.figures.style import grid_lines
from experiments.run_file.yaml_file import find
from traces import load_trace
from traces.classifier import GROUP_SIZES, LengthClasses, score
from traces.predict import Mean, Noisy, Predictor, train
from traces.samples import random_stream
from traces.trace import Trace

SHOWN = ("predictor", "seed", "accuracy", "group", "error")
CLAIM, AT = "tdpipe-predictor", 256


def make(study: Study) -> Drawing:
    """Score predictors on the requests that fit, as often as there are seeds."""
    rows = [row for seed in study.seeds for row in _scores(study, _served(study, seed), seed)]
    table = pd.DataFrame(rows)
    figure = _draw(table, study.plan.published)
    return Drawing(figure, table, SHOWN, _claims(study, table))


def _served(study: Study, seed: int) -> Trace:
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
    texts = None if trace.texts is None else [trace.texts[row] for row in kept.tolist()]
    return replace(
        trace,
        prompt_tokens=trace.prompt_tokens[kept],
        output_tokens=trace.output_tokens[kept],
        texts=texts,
    )


def _scores(study: Study, trace: Trace, seed: int) -> Iterator[dict[str, Any]]:
    yield from _trained(trace, seed)
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    classes = LengthClasses.of(outputs)
    noisy = {_noisy(accuracy): Noisy(accuracy, seed) for accuracy in study.numbers["accuracies"]}
    predictors: dict[str, Predictor] = {"mean of all": Mean(), **noisy}
    for name, predictor in predictors.items():
        predicted = predictor.predict(prompts, outputs, None)
        found = score(predicted, outputs, classes, random_stream(seed, "groups"))
        yield from _rows(name, seed, found)


def _trained(trace: Trace, seed: int) -> Iterator[dict[str, Any]]:
    if find_spec("sklearn") is None:
        found = {"class_accuracy": math.nan, "accumulated_error": {AT: math.nan}}
        yield from _rows("classifier (needs evenflow[predict])", seed, found)
        return
    _, report = train(trace, seed)
    name = "length only" if report["features"] == "length" else "text and length"
    yield from _rows(name, seed, report["classifier"])


def _noisy(accuracy: float) -> str:
    return f"noisy, {accuracy:.2%} right"


def _rows(predictor: str, seed: int, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group, error in found["accumulated_error"].items():
        place = {"predictor": predictor, "seed": seed, "accuracy": found["class_accuracy"]}
        yield {**place, "group": group, "error": error}


def _draw(table: pd.DataFrame, with_published: bool) -> Figure:
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, rows in table.groupby("predictor", sort=False):
        values = 100 * rows.groupby("group").error.agg(["mean", "min", "max"])
        right = rows.accuracy.mean()
        known = str(name).startswith("noisy")
        label = str(name) if known else f"{name}, {right:.1%} right"
        (line,) = axes.plot(values["mean"], marker=".", ls="-" if known else ":", label=label)
        axes.fill_between(
            values.index, values["min"], values["max"], color=line.get_color(), alpha=0.2
        )
    if with_published:
        published = [100 * error for error in published_value(CLAIM)["error256"]]
        axes.plot([AT] * len(published), published, "kx", label=f"published, {AT} requests")
    axes.set_xscale("log", base=2)
    axes.set_xticks(GROUP_SIZES, [str(size) for size in GROUP_SIZES])
    axes.set(xlabel="requests added up", ylabel="error of their total (%)", ylim=(0, None))
    axes.legend(fontsize=8)
    grid_lines([axes])
    return figure


def _claims(study: Study, table: pd.DataFrame) -> dict[str, Any]:
    mean = table[table.group == AT].groupby("predictor", sort=False)[["accuracy", "error"]].mean()
    read = float(mean.accuracy.iloc[0])
    errors = [float(mean.error[_noisy(each)]) for each in study.numbers["accuracies"]]
    return {CLAIM: {"accuracy": [read] * len(errors), "error256": errors}}
