"""Classes of output lengths, and how good a prediction of lengths is. Knows no predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traces.trace import Floats, Ints

PERCENTILES = (25, 50, 75, 99)
NUM_CLASSES = len(PERCENTILES) + 1
GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


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
        found: Ints = np.searchsorted(self.edges, tokens, side="right").astype(np.int64)
        return found

    def tokens(self, classes: Ints) -> Ints:
        """Return what is predicted for each class, [n], in whole tokens, at least 1."""
        rounded: Ints = np.maximum(np.rint(self.means[classes]), 1).astype(np.int64)
        return rounded


def accumulated_error(
    predicted: Ints,
    true: Ints,
    rng: np.random.Generator,
    group_sizes: Sequence[int] = GROUP_SIZES,
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
