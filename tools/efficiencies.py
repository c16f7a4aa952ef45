"""The three efficiencies of a GPU's roofline: fit them to measured times, and say how far off.

Knows no file and no operator: whoever calls measures, and predicts. Fits need the extra `fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.specs.gpu import GpuSpec

Floats = NDArray[np.float64]


class Efficiencies(NamedTuple):
    """What a fit yields: shares of the two peaks, seconds per layer that neither explains."""

    compute: float
    bandwidth: float
    per_layer_overhead_s: float

    def on(self, spec: GpuSpec) -> GpuSpec:
        """Return the GPU with these efficiencies."""
        return replace(
            spec,
            compute_efficiency=self.compute,
            bandwidth_efficiency=self.bandwidth,
            per_layer_overhead_s=self.per_layer_overhead_s,
        )


class Errors(NamedTuple):
    """Absolute relative errors of predicted against measured times, as shares of the measured."""

    mean: float
    p95: float
    worst: float


def bundled(spec: GpuSpec) -> Efficiencies:
    """Return the efficiencies that the GPU table carries."""
    return Efficiencies(
        spec.compute_efficiency, spec.bandwidth_efficiency, spec.per_layer_overhead_s
    )


def errors_of(predicted: Floats, measured: Floats) -> Errors:
    """Return how far predicted seconds are from measured ones."""
    off = np.abs(predicted / measured - 1)
    return Errors(float(off.mean()), float(np.percentile(off, 95)), float(off.max()))


def least_squares_fit(
    off: Callable[[Efficiencies], Floats], start: tuple[float, float, float], **how: Any
) -> Efficiencies:
    """Return the efficiencies for which the squares of `off` add up to least.

    `start`: compute, bandwidth, and the overhead in units of 0.1 ms; `how` as scipy has it.
    """
    from scipy.optimize import least_squares

    def read(values: Floats) -> Efficiencies:
        return Efficiencies(float(values[0]), float(values[1]), float(values[2]) * 1e-4)

    bounds = ((0.1, 0.1, 0), (1.5, 1.5, 100))
    return read(least_squares(lambda values: off(read(values)), start, bounds=bounds, **how).x)


def soft_fit(predict: Callable[[Efficiencies], Floats], measured: Floats) -> Efficiencies:
    """Return the efficiencies of least relative error, soft: few points far off decide little."""
    return least_squares_fit(
        lambda candidate: np.log(predict(candidate) / measured),
        (0.7, 0.8, 0.5),
        loss="soft_l1",
        f_scale=0.05,
    )
