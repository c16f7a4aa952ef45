"""Predictors of output lengths: make one, fill in requests, train one and say how good it is.

A trained predictor reads a prompt's words by a small BERT (`traces.encoder`), and is stored as
safetensors. It needs torch. Knows no policy and no order of requests. Whether a prediction is used,
and what for, is the scheduler's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evenflow.errors import UsageError, instead_of, require_not_negative, require_package
from evenflow.files import require_file, write_new
from evenflow.traces.trace import Floats, Ints, Trace, random_stream
from evenflow.types import Request

PERCENTILES = (25, 50, 75, 99)
NUM_CLASSES = len(PERCENTILES) + 1
GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

FORMAT = "evenflow-length-predictor"
MOST_FILE_BYTES = 64 * 2**20
FEWEST_ROWS = 50


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

    Groups are drawn without replacement from the requests, as often as they fill a group. Sizes
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


# -- the kinds of predictors ---------------------------------------------------------------------


class Predictor(Protocol):
    """Says how many tokens each request of a run will produce, [n], at least 1.

    It is given the true outputs too: an oracle reads them, a real predictor does not. It takes
    `per_token_s` for each prompt token, one prompt after the other, before a policy sees them.
    """

    @property
    def per_token_s(self) -> float: ...

    def predict(
        self, prompt_tokens: Ints, output_tokens: Ints, texts: Sequence[str] | None
    ) -> Ints: ...


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knows the true length."""

    per_token_s: float = 0.0

    def predict(self, _prompt: Ints, output_tokens: Ints, _texts: Sequence[str] | None) -> Ints:
        return output_tokens


@dataclass(frozen=True, slots=True)
class Mean:
    """Predicts the mean output of the run for every request."""

    per_token_s: float = 0.0

    def predict(self, _prompt: Ints, output_tokens: Ints, _texts: Sequence[str] | None) -> Ints:
        return np.full(len(output_tokens), max(round(float(output_tokens.mean())), 1))


@dataclass(frozen=True, slots=True)
class Noisy:
    """Names the right class of the run's outputs with probability `accuracy`, else another.

    The wrong classes come in proportion to their shares of the outputs. So the class of the few
    longest is not named too often. The prediction is the mean output of the class named; all is
    drawn with `seed`.
    """

    accuracy: float = 0.52
    seed: int = 0
    per_token_s: float = 0.0

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


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """Reads a prompt's text by an encoder; predicts the mean output of the class that it names.

    `vocabulary`: the words that it knows. `encoder`: one of `traces.encoder`. `trained_on` says on
    what, for readers of the file. `per_token_s` was measured where it was trained.
    """

    classes: LengthClasses
    vocabulary: Sequence[str]
    encoder: Any
    trained_on: Mapping[str, Any]
    per_token_s: float = 0.0

    def predict(self, _prompt: Ints, _output: Ints, texts: Sequence[str] | None) -> Ints:
        """Return the predicted output tokens of each text, [n]; UsageError where there is none."""
        from evenflow.traces.encoder import classes_of, ids_of

        if texts is None:
            raise UsageError(
                "predictor: classifier reads prompt texts, and this trace holds none; "
                "use a trace with text, or {kind: noisy, accuracy: ...}"
            )
        return self.classes.tokens(classes_of(self.encoder, ids_of(texts, self.vocabulary)))


def _classifier(path: str, per_token_s: float | None = None) -> Classifier:
    if not isinstance(path, str):
        raise ValueError(f"path is {path!r}; expected the path of a stored classifier")
    stored = load_classifier(Path(path))
    return stored if per_token_s is None else replace(stored, per_token_s=per_token_s)


PREDICTORS: Mapping[str, Callable[..., Predictor]] = {
    "oracle": Oracle,
    "mean": Mean,
    "noisy": Noisy,
    "classifier": _classifier,
}
"""The kinds of predictors by name; their parameters are their options."""


def make_predictor(spec: str | Mapping[str, Any]) -> Predictor:
    """Make a predictor from a kind in PREDICTORS, or a mapping of `kind` and its options.

    Raises UsageError for an unknown kind or option, and for a file that cannot be loaded.
    """
    options = dict(spec) if isinstance(spec, Mapping) else {"kind": spec}
    if "kind" not in options:
        raise UsageError(f'predictor: the key "kind" is missing; known: {", ".join(PREDICTORS)}')
    kind = options.pop("kind")
    if not isinstance(kind, str) or kind not in PREDICTORS:
        raise UsageError(f'predictor "{kind}" is unknown; {instead_of(kind, PREDICTORS)}')
    try:
        made = PREDICTORS[kind](**options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"predictor {kind}: {error}") from error
    require_not_negative(f"predictor {kind}", per_token_s=made.per_token_s)
    return made


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


# -- a classifier's file and its training --------------------------------------------------------


class ClassifierFile(BaseModel):
    """Keys of a classifier's file beside its weights; they are those of a Classifier."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    edges: list[float] = Field(min_length=NUM_CLASSES - 1, max_length=NUM_CLASSES - 1)
    means: list[float] = Field(min_length=NUM_CLASSES, max_length=NUM_CLASSES)
    vocabulary: list[str]
    trained_on: dict[str, Any]
    per_token_s: float = Field(ge=0)


def save_classifier(classifier: Classifier, path: Path) -> None:
    """Write a classifier as safetensors: numbers and words, and nothing that could run."""
    from safetensors.torch import save

    told = ClassifierFile(
        edges=classifier.classes.edges.tolist(),
        means=classifier.classes.means.tolist(),
        vocabulary=list(classifier.vocabulary),
        trained_on=dict(classifier.trained_on),
        per_token_s=classifier.per_token_s,
    )
    write_new(path, save(classifier.encoder.state_dict(), {FORMAT: told.model_dump_json()}))


def load_classifier(path: Path) -> Classifier:
    """Read what `save_classifier` wrote. Raises UsageError for anything else, pickles included."""
    try:
        require_file(path)
        if path.stat().st_size > MOST_FILE_BYTES:
            raise UsageError(f"predictor {path}: over {MOST_FILE_BYTES >> 20} MiB; refused")
        told, weights = _read(path)
    except OSError as error:
        raise UsageError(f"predictor {path}: cannot be read ({error.strerror or error})") from error
    if told is None:
        raise UsageError(f"predictor {path}: not a file of evenflow traces predict; refused")
    try:
        return _checked(ClassifierFile.model_validate_json(told), weights)
    except ValidationError as error:
        words = f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
    except ValueError as error:
        words = str(error)
    raise UsageError(f"predictor {path}: damaged ({words}); train it again")


def _read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return what a file says and its weights; None and nothing for one of another kind."""
    _require_torch(f"predictor {path}")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told = (file.metadata() or {}).get(FORMAT)
            return told, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return None, {}


def _checked(told: ClassifierFile, weights: Mapping[str, Any]) -> Classifier:
    from evenflow.traces.encoder import restored

    classes = LengthClasses(np.array(told.edges), np.array(told.means))
    if (np.diff(classes.edges) < 0).any() or (classes.means < 0).any():
        raise ValueError("edges or means")
    encoder = restored(weights, len(told.vocabulary), NUM_CLASSES)
    return Classifier(classes, told.vocabulary, encoder, told.trained_on, told.per_token_s)


def _require_torch(who: str) -> None:
    for package in ("torch", "safetensors"):
        require_package(package, who, "torch safetensors")


def split(count: int, seed: int) -> list[Ints]:
    """Return the rows to train on, 60 %, to validate on and to test on, 20 % each, drawn."""
    order = random_stream(seed, "split").permutation(count)
    return np.split(order, [count * 6 // 10, count * 8 // 10])


def train(trace: Trace, seed: int = 0) -> tuple[Classifier, dict[str, Any]]:
    """Train a classifier on 60 % of a trace with texts; return it and its scores, ready for JSON.

    Another 20 % say when to end, the last 20 % are tested on. Scores are the class accuracy, the
    accumulated error by group size (TD-Pipe, figure 14), and the seconds that it takes. Beside them
    are those of the training set's mean, and of the best single class. Needs torch.
    """
    if len(trace) < FEWEST_ROWS:
        raise UsageError(
            f"trace {trace.name}: {len(trace)} requests; training needs {FEWEST_ROWS} or more"
        )
    if trace.texts is None:
        raise UsageError(
            f"trace {trace.name}: has no prompt texts to learn from; "
            "predictor: {kind: noisy, accuracy: ...} takes an accuracy of yours"
        )
    _require_torch("training a predictor")
    training, validation, test = split(len(trace), seed)
    classifier = _fitted(trace, trace.texts, training, validation, seed)
    begun = time.perf_counter()
    predicted = classifier.predict(test, test, [trace.texts[row] for row in test.tolist()])
    took_s = time.perf_counter() - begun
    timed = replace(classifier, per_token_s=took_s / float(trace.prompt_tokens[test].sum()))
    mean = np.full(len(test), round(float(trace.output_tokens[training].mean())))
    return timed, _report(trace, timed, {"classifier": predicted, "mean": mean}, test, seed)


def _fitted(
    trace: Trace, texts: Sequence[str], training: Ints, validation: Ints, seed: int
) -> Classifier:
    from evenflow.traces import encoder

    classes = LengthClasses.of(trace.output_tokens[training])
    labels = classes.class_of(trace.output_tokens)
    if len(set(labels[training].tolist())) == 1:
        raise UsageError("all outputs of the training set are of one length class; nothing to fit")
    words = encoder.vocabulary_of([texts[row] for row in training.tolist()])
    ids = encoder.ids_of(texts, words)
    known, held = (
        encoder.Sample([ids[row] for row in rows.tolist()], labels[rows])
        for rows in (training, validation)
    )
    fitted = encoder.fitted(len(words), NUM_CLASSES, known, held, seed)
    origin = {"trace": trace.name, "sha256": trace.sha256, "requests": len(training), "seed": seed}
    return Classifier(classes, words, fitted, origin)


def _report(
    trace: Trace, classifier: Classifier, predictions: Mapping[str, Ints], test: Ints, seed: int
) -> dict[str, Any]:
    classes, outputs = classifier.classes, trace.output_tokens[test]
    labels = np.bincount(classes.class_of(outputs), minlength=NUM_CLASSES)
    return {
        "trace": trace.name,
        "requests": {"train": classifier.trained_on["requests"], "test": len(test)},
        "class_edges_tokens": classes.edges.tolist(),
        "class_means_tokens": classes.means.tolist(),
        "largest_class_share": float(labels.max() / len(outputs)),
        "seconds_per_prompt_token": classifier.per_token_s,
        **{
            name: score(predicted, outputs, classes, random_stream(seed, "groups"))
            for name, predicted in predictions.items()
        },
    }
