"""Predictors of output lengths: make one, fill in requests, train one and say how good it is.

Knows no policy. Whether a prediction is used, and what for, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from evenflow.errors import UsageError, instead_of
from evenflow.types import Request
from traces.classifier import (
    NUM_CLASSES,
    Classifier,
    LengthClasses,
    fit_classifier,
    load_classifier,
    score,
)
from traces.samples import random_stream
from traces.trace import Ints, Trace

STRENGTHS = (0.1, 1.0, 10.0)
FEWEST_ROWS = 50


class Predictor(Protocol):
    """Says how many tokens each request of a run will produce, [n], at least 1.

    It is given the true outputs too: an oracle reads them, a real predictor does not.
    """

    def predict(
        self, prompt_tokens: Ints, output_tokens: Ints, texts: Sequence[str] | None
    ) -> Ints: ...


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the true length."""

    def predict(self, _prompt: Ints, output_tokens: Ints, _texts: Sequence[str] | None) -> Ints:
        return output_tokens


@dataclass(frozen=True, slots=True)
class Mean:
    """Predicts the mean output of the run for every request."""

    def predict(self, _prompt: Ints, output_tokens: Ints, _texts: Sequence[str] | None) -> Ints:
        return np.full(len(output_tokens), max(round(float(output_tokens.mean())), 1))


@dataclass(frozen=True, slots=True)
class Noisy:
    """Names the right class of the run's outputs with probability `accuracy`, else another.

    The wrong classes come in proportion to their shares of the outputs, so that the class of the
    few longest is not named too often. The prediction is the mean output of the class named; all is
    drawn with `seed`.
    """

    accuracy: float = 0.52
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.accuracy, int | float) or not 0 <= self.accuracy <= 1:
            raise ValueError(f"accuracy is {self.accuracy!r}; expected 0 to 1")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; expected a whole number, 0 or more")

    def predict(self, _prompt: Ints, output_tokens: Ints, _texts: Sequence[str] | None) -> Ints:
        rng = random_stream(self.seed, "predictor")
        classes = LengthClasses.of(output_tokens)
        true = classes.class_of(output_tokens)
        right = rng.random(len(true)) < self.accuracy
        return classes.tokens(np.where(right, true, _another_class(true, rng)))


def _another_class(true: Ints, rng: np.random.Generator) -> Ints:
    """Draw for each request a class that is not its own, by its share; its own if all are alike."""
    odds = np.tile(np.bincount(true, minlength=NUM_CLASSES), (NUM_CLASSES, 1))
    np.fill_diagonal(odds, 0)
    bounds = odds.cumsum(axis=1)[true]
    drawn = rng.random(len(true)) * bounds[:, -1]
    another: Ints = (drawn[:, None] >= bounds).sum(axis=1)
    return np.where(another < NUM_CLASSES, another, true)


@dataclass(frozen=True, slots=True)
class Classified:
    """Reads the prompts only: their text where the classifier was trained on text."""

    classifier: Classifier

    def predict(self, prompt_tokens: Ints, _output: Ints, texts: Sequence[str] | None) -> Ints:
        return self.classifier.predict(prompt_tokens, texts)


def _classified(path: str) -> Classified:
    if not isinstance(path, str):
        raise ValueError(f"path is {path!r}; expected the path of a stored classifier")
    return Classified(load_classifier(Path(path)))


PREDICTORS: Mapping[str, Callable[..., Predictor]] = {
    "oracle": Oracle,
    "mean": Mean,
    "noisy": Noisy,
    "classifier": _classified,
}
"""The kinds of predictors by name; their parameters are their options."""


def make_predictor(spec: str | Mapping[str, Any]) -> Predictor:
    """Make a predictor from a kind in PREDICTORS, or a mapping of `kind` and its options.

    Raises UsageError for an unknown kind or option, and for a file that cannot be loaded.
    """
    options = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = options.pop("kind", "")
    if kind not in PREDICTORS:
        raise UsageError(f'predictor "{kind}" is unknown; {instead_of(kind, PREDICTORS)}')
    try:
        return PREDICTORS[kind](**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"predictor {kind}: {error}") from error


def with_predictions(
    requests: Sequence[Request], predictor: Predictor, texts: Sequence[str] | None = None
) -> list[Request]:
    """Return the requests with `predicted_output_tokens` filled in; `texts` are their prompts."""
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    outputs = np.array([request.output_tokens for request in requests], dtype=np.int64)
    predicted = predictor.predict(prompts, outputs, texts).tolist()
    return [
        replace(request, predicted_output_tokens=tokens)
        for request, tokens in zip(requests, predicted, strict=True)
    ]


def train(trace: Trace, seed: int = 0) -> tuple[Classifier, dict[str, Any]]:
    """Train a classifier on 60 % of a trace; return it with its scores, ready for JSON.

    Another 20 % choose the strength of the regularisation, the last 20 % are tested on: class
    accuracy, and the accumulated error by group size (TD-Pipe, figure 14), beside those of always
    predicting the training set's mean, and of the best class without looking. The rows are shuffled
    with `seed`. Needs scikit-learn.
    """
    if len(trace) < FEWEST_ROWS:
        raise UsageError(
            f"trace {trace.name}: {len(trace)} requests; training needs {FEWEST_ROWS} or more"
        )
    order = random_stream(seed, "split").permutation(len(trace))
    cuts = [len(trace) * 6 // 10, len(trace) * 8 // 10]
    training, validation, test = (_rows(trace, rows) for rows in np.split(order, cuts))
    origin = {"trace": trace.name, "sha256": trace.sha256, "requests": cuts[0], "seed": seed}
    candidates = [
        fit_classifier(*training, strength=strength, trained_on=origin | {"strength": strength})
        for strength in STRENGTHS
    ]
    classifier = max(candidates, key=lambda one: _accuracy(one, *validation))
    return classifier, _report(trace, classifier, training[1], test, seed)


Rows = tuple[Ints, Ints, Sequence[str] | None]


def _rows(trace: Trace, rows: Ints) -> Rows:
    texts = None if trace.texts is None else [trace.texts[row] for row in rows.tolist()]
    return trace.prompt_tokens[rows], trace.output_tokens[rows], texts


def _accuracy(one: Classifier, prompts: Ints, outputs: Ints, texts: Sequence[str] | None) -> float:
    named = one.classes.class_of(one.predict(prompts, texts))
    return float((named == one.classes.class_of(outputs)).mean())


def _report(
    trace: Trace, classifier: Classifier, trained_outputs: Ints, test: Rows, seed: int
) -> dict[str, Any]:
    prompts, outputs, texts = test
    classes = classifier.classes
    mean = np.full(len(outputs), round(float(trained_outputs.mean())))
    labels = np.bincount(classes.class_of(outputs), minlength=NUM_CLASSES)
    predictions = {"classifier": classifier.predict(prompts, texts), "mean": mean}
    return {
        "trace": trace.name,
        "requests": {"train": len(trained_outputs), "test": len(outputs)},
        "features": "text and length" if classifier.reads_text else "length",
        "class_edges_tokens": classes.edges.tolist(),
        "class_means_tokens": classes.means.tolist(),
        "largest_class_share": float(labels.max() / len(outputs)),
        **{
            name: score(predicted, outputs, classes, random_stream(seed, "groups"))
            for name, predicted in predictions.items()
        },
    }
