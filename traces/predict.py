"""Predictors of output lengths: make one, fill in requests, train one and say how good it is.

A trained predictor is a linear classifier of classes of lengths, stored as JSON: it sees only a
prompt's words and its number of tokens. Training needs scikit-learn; predicting and
loading do not. Knows no policy and no order of requests. Whether a prediction is used, and what
for, is the scheduler's business.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from evenflow.errors import UsageError, instead_of, require_package
from evenflow.files import write_whole
from evenflow.sums import plain_sum
from evenflow.traces.trace import Floats, Ints, Trace, random_stream
from evenflow.types import Request

PERCENTILES = (25, 50, 75, 99)
NUM_CLASSES = len(PERCENTILES) + 1
GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

FORMAT, VERSION = "evenflow-length-predictor", 1
LENGTH_BINS = 32
WORD_BINS = 4096
MOST_FILE_BYTES = 64 * 2**20
NEVER = -1e9
"""The score of a class that the training set does not have."""

WORD = re.compile(r"\w+")

Features = list[dict[int, float]]
"""For each request, the features that are not 0, by their index."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthClasses:
    """[P0, P25), [P25, P50), [P50, P75), [P75, P99), [P99, +) of the outputs of a training set.

    `edges`: the four percentiles, in tokens, rising. `means`: the mean output of each class, which
    is what a predictor of classes predicts (TD-Pipe, after u-Serve).
    """

    edges: Floats
    means: Floats

    @classmethod
    def of(cls, output_tokens: Ints) -> LengthClasses:
        """Return the classes of these outputs. A class without any has the mean of all."""
        edges: Floats = np.percentile(output_tokens, PERCENTILES)
        classes = np.searchsorted(edges, output_tokens, side="right")
        sums = np.bincount(classes, weights=output_tokens, minlength=NUM_CLASSES)
        counts = np.bincount(classes, minlength=NUM_CLASSES)
        means = np.where(counts, sums / np.maximum(counts, 1), output_tokens.mean())
        return cls(edges, means)

    def class_of(self, tokens: Ints) -> Ints:
        """Return the class of each length, [n], from 0."""
        classes: Ints = np.searchsorted(self.edges, tokens, side="right").astype(np.int64)
        return classes

    def tokens(self, classes: Ints) -> Ints:
        """Return what is predicted for each class, [n], in whole tokens, at least 1."""
        rounded: Ints = np.maximum(np.rint(self.means[classes]), 1).astype(np.int64)
        return rounded


def accumulated_error(
    predicted: Ints, true: Ints, rng: np.random.Generator, group_sizes: Sequence[int] = GROUP_SIZES
) -> dict[int, float]:
    """Return, by group size, the mean error of a group's total as a share of its true total.

    Groups are drawn without replacement from the requests, as often as they fill a group; sizes
    above their number are left out. TD-Pipe, figure 14.
    """
    order = rng.permutation(len(true))
    errors = {}
    for size in group_sizes:
        groups = len(true) // size
        if groups:
            chosen = order[: groups * size].reshape(groups, size)
            totals = true[chosen].sum(axis=1)
            off = np.abs(predicted[chosen].sum(axis=1) - totals)
            errors[size] = float((off / totals).mean())
    return errors


def score(
    predicted: Ints, true: Ints, classes: LengthClasses, rng: np.random.Generator
) -> Mapping[str, object]:
    """Return class accuracy, mean absolute error in tokens, and accumulated error."""
    return {
        "class_accuracy": float((classes.class_of(predicted) == classes.class_of(true)).mean()),
        "mean_absolute_error_tokens": float(np.abs(predicted - true).mean()),
        "accumulated_error": accumulated_error(predicted, true, rng),
    }


def features_of(prompt_tokens: Ints, texts: Sequence[str] | None) -> Features:
    """Return the features of prompts: the length's half-octave, its logarithm, hashed words.

    Words count by 1 + ln(count), and all words of a prompt together have length 1.
    """
    features: Features = []
    for index, tokens in enumerate(prompt_tokens.tolist()):
        octaves = math.log2(max(tokens, 1))
        row = {0: octaves / 10, 1 + min(int(2 * octaves), LENGTH_BINS - 1): 1.0}
        if texts is not None:
            row |= _words(texts[index])
        features.append(row)
    return features


def _words(text: str) -> dict[int, float]:
    # zlib.crc32 is the same everywhere, where hash() differs from process to process.
    words = Counter(zlib.crc32(word.encode()) % WORD_BINS for word in WORD.findall(text.lower()))
    weights = {1 + LENGTH_BINS + word: 1 + math.log(count) for word, count in words.items()}
    norm = math.sqrt(plain_sum(weight**2 for weight in weights.values()))
    return {index: weight / norm for index, weight in weights.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """Predicts the mean output of the class with the highest score.

    `weights` [classes, features], `bias` [classes]. `reads_text`: it was trained on words too.
    `trained_on` says on what, for readers of the file.
    """

    classes: LengthClasses
    weights: Floats
    bias: Floats
    reads_text: bool
    trained_on: dict[str, Any]

    def predict(self, prompt_tokens: Ints, texts: Sequence[str] | None = None) -> Ints:
        """Return the predicted output tokens of each prompt, [n].

        Raises UsageError where it reads text and there is none.
        """
        if self.reads_text and texts is None:
            raise UsageError(
                "predictor: classifier was trained on prompt texts, and this trace holds none; "
                "use a trace with text, or train on one without"
            )
        rows = features_of(prompt_tokens, texts if self.reads_text else None)
        scores = np.empty((len(rows), NUM_CLASSES))
        for index, row in enumerate(rows):
            scores[index] = self.bias + self.weights[:, list(row)] @ np.array(list(row.values()))
        return self.classes.tokens(scores.argmax(axis=1))


def fit_classifier(
    prompt_tokens: Ints,
    output_tokens: Ints,
    texts: Sequence[str] | None,
    *,
    strength: float = 1.0,
    trained_on: dict[str, Any] | None = None,
) -> Classifier:
    """Fit a logistic regression to the classes of these outputs. Needs scikit-learn (`predict`).

    `strength` is the inverse of the regularisation. Raises UsageError where all outputs are of one
    class.
    """
    require_package("sklearn", "training a predictor", "scikit-learn")
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    classes = LengthClasses.of(output_tokens)
    labels = classes.class_of(output_tokens)
    if len(set(labels.tolist())) == 1:
        raise UsageError("all outputs of the training set are of one length class; nothing to fit")
    rows = features_of(prompt_tokens, texts)
    width = 1 + LENGTH_BINS + (WORD_BINS if texts is not None else 0)
    values = [value for row in rows for value in row.values()]
    columns = [index for row in rows for index in row]
    starts = np.cumsum([0, *map(len, rows)])
    matrix = csr_matrix((values, columns, starts), shape=(len(rows), width))
    model = LogisticRegression(C=strength, max_iter=1000).fit(matrix, labels)
    weights, bias = np.zeros((NUM_CLASSES, width)), np.full(NUM_CLASSES, NEVER)
    known = model.classes_[-len(model.coef_) :]  # of two classes, the first is the score 0
    bias[model.classes_] = 0.0
    weights[known], bias[known] = model.coef_, model.intercept_
    return Classifier(classes, weights, bias, texts is not None, trained_on or {})


def save_classifier(classifier: Classifier, path: Path) -> None:
    """Write a classifier as JSON: numbers and nothing that could run."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "reads_text": classifier.reads_text,
        "trained_on": classifier.trained_on,
        "edges": classifier.classes.edges.tolist(),
        "means": classifier.classes.means.tolist(),
        "bias": classifier.bias.tolist(),
        "weights": [[float(f"{w:.6g}") for w in row] for row in classifier.weights.tolist()],
    }
    write_whole(path, json.dumps(document))


def load_classifier(path: Path) -> Classifier:
    """Read what `save_classifier` wrote. Raises UsageError for anything else, pickles included."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise UsageError(f"predictor {path}: over {MOST_FILE_BYTES >> 20} MiB; refused")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"predictor {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"predictor {path}: not a file of evenflow traces predict; refused")
    if document.get("version") != VERSION:
        raise UsageError(
            f"predictor {path}: version {document.get('version')!r}, this is version {VERSION}; "
            "train it again with evenflow traces predict"
        )
    try:
        return _checked(document)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"predictor {path}: damaged ({error}); train it again") from None


def _checked(document: dict[str, Any]) -> Classifier:
    reads_text, trained_on = document["reads_text"], document["trained_on"]
    if not isinstance(reads_text, bool) or not isinstance(trained_on, dict):
        raise ValueError("reads_text or trained_on")
    width = 1 + LENGTH_BINS + (WORD_BINS if reads_text else 0)
    edges = _numbers(document, "edges", (NUM_CLASSES - 1,))
    means = _numbers(document, "means", (NUM_CLASSES,))
    bias = _numbers(document, "bias", (NUM_CLASSES,))
    weights = _numbers(document, "weights", (NUM_CLASSES, width))
    if (np.diff(edges) < 0).any() or (means < 0).any():
        raise ValueError("edges or means")
    return Classifier(LengthClasses(edges, means), weights, bias, reads_text, trained_on)


def _numbers(document: dict[str, Any], key: str, shape: tuple[int, ...]) -> Floats:
    values = np.array(document[key], dtype=np.float64)
    if values.shape != shape or not np.isfinite(values).all():
        raise ValueError(key)
    return values


# -- the kinds of predictors, and training -------------------------------------------------------

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
    options = dict(spec) if isinstance(spec, Mapping) else {"kind": spec}
    kind = options.pop("kind", "")
    if not isinstance(kind, str) or kind not in PREDICTORS:
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

    Another 20 % choose the strength of the regularisation, the last 20 % are tested on. Scores are
    the class accuracy and the accumulated error by group size (TD-Pipe, figure 14). Beside them are
    those of the training set's mean, and of the best single class. The rows are shuffled with
    `seed`. Needs scikit-learn.
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
