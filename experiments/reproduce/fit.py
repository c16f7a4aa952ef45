"""A search for the CPU time of an engine: the constants that bring simulations nearest to targets.

A Gauss-Newton search over log(simulated / measured), none of the constants below 0; large
deviations count less (soft L1). A simulation is not smooth, as each change makes other
micro-batches. Slopes are those of a plane through all points tried nearby. Intervals are those of
least squares with deviations that differ in size (White 1980). A constant that the targets do not
determine is left out. Intervals reach over what the others were beside it, as one may have taken
its time. Knows no form of results.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from evenflow.config.yaml_file import Patch
from evenflow.errors import UsageError
from evenflow.results.load import student_quantile
from evenflow.results.run import Floats
from evenflow.study.fair import LEVEL
from evenflow.study.trials import How, Search, Study, Trial, Variant
from evenflow.study.trials import run as search

Answer = TypeVar("Answer")

CONSTANTS = {
    "schedule_s": 1e-3,
    "per_row_s": 5e-5,
    "front_end_latency_s": 2e-3,
    "front_end_s": 2e-3,
    "per_prefill_s": 2e-3,
    "per_new_request_s": 2e-3,
    "per_prompt_token_s": 5e-6,
}
"""What is looked for, and what makes a difference of it. A constant is known when its interval
reaches no further than this, or than half of itself. Of the undetermined constants the last is left
out, then the last of those still undetermined."""

SOFT = 0.1
"""Deviations above this share count less."""

STEPS, LENGTHS, GAIN = 8, (1.0, 0.5), 0.01
"""The most steps, each tried at these lengths, until one gains less than this share."""

STARTS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Starts of the first constant where all are hidden, as nothing is known around 0."""

FARTHEST = 10.0
"""A step goes no further, in units."""

SLOPE = 2.0
"""How far a constant is moved to see what changes, in its unit."""

TINY = 1e-12

ALIKE = 1e-3
"""The share of the larger effect by which those of two constants have to differ."""

Asking: TypeAlias = Generator[Sequence[Variant], list[Trial], Answer]
"""A part of a search, which comes to an answer."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant in seconds, and the ends of its 95 % interval; None: undetermined."""

    name: str
    value: float
    ends: tuple[float, float] | None


def nearest_of(study: Study, fits: Sequence[Fit], how: How) -> Fit:
    """Return the fit nearest to its targets, once all are found."""
    with how.simulator("calibrate", None) as simulator:
        for fit in fits:
            search(study, simulator, fit.search())
    return min(fits, key=lambda fit: fit.best.cost)


class Compared(Protocol):
    """A run to simulate, the keys of `patch`, and the deviations from its target."""

    @property
    def patch(self) -> Patch: ...
    def deviations(self, values: Mapping[str, Any]) -> Floats: ...


class FittedConstants(NamedTuple):
    """Constants by their position in CONSTANTS, in units, and the deviations of runs with them."""

    units: Floats
    parts: list[Floats]

    @property
    def deviations(self) -> Floats:
        """The deviations of all runs, one after the other."""
        return np.concatenate(self.parts)

    @property
    def cost(self) -> float:
        """The sum of soft squares, in which what is far off counts less."""
        return float(np.sum(2 * SOFT**2 * (np.sqrt(1 + (self.deviations / SOFT) ** 2) - 1)))


class Plane(NamedTuple):
    """Deviations around some constants: slopes by a unit of each, [deviations, free].

    `level` is what they are there, `scatter` how far simulations are from the plane.
    """

    slopes: Floats
    level: Floats
    scatter: Floats


@dataclass(slots=True)
class Fit:
    """A search for the constants; `kept` are keys of the runtime that stay as they are.

    `left_out` are the positions in CONSTANTS of constants not searched, or not determined.
    """

    targets: Sequence[Compared]
    kept: Mapping[str, Any]
    left_out: list[int] = field(default_factory=list)
    tried: list[FittedConstants] = field(default_factory=list)
    ideal: FittedConstants = field(init=False)
    best: FittedConstants = field(init=False)
    half_widths: Floats = field(init=False)
    low: Floats = field(default_factory=lambda: np.full(len(CONSTANTS), np.inf))
    high: Floats = field(default_factory=lambda: np.full(len(CONSTANTS), -np.inf))

    def search(self) -> Search:
        """Request simulations until no step gains enough and no constant is undetermined."""
        starts = [units * np.eye(len(CONSTANTS))[0] for units in STARTS]
        self.ideal, *found = yield from self._at(starts if self._hidden else starts[:1])
        self.best = min([self.ideal, *found], key=lambda point: point.cost)
        while self._free:
            yield from self._descend()
            self._widen()
            reach = self.half_widths / np.maximum(1.0, self.best.units / 2)
            unknown = np.flatnonzero(reach > 1).tolist()
            if not unknown:
                return
            self.left_out.append(unknown[-1])
            self.tried.clear()
            units = self.best.units.copy()
            units[unknown[-1]] = 0.0
            (self.best,) = yield from self._at([units])

    def _descend(self) -> Asking[None]:
        """Step on from the best point as long as steps gain."""
        for _ in range(STEPS):
            plane = yield from self._plane()
            step = self._step(plane)
            points = yield from self._at([self.best.units + share * step for share in LENGTHS])
            nearest = min(points, key=lambda point: point.cost)
            gain = 1 - nearest.cost / self.best.cost if self.best.cost else 0.0
            if gain > 0:
                self.best = nearest
            if gain < GAIN:
                break
        plane = yield from self._plane()
        self.half_widths = self._reach(plane) + np.abs(self._step(plane))

    def _widen(self) -> None:
        """Let the intervals reach over what they are with the constants that are free now."""
        width = np.where(np.isfinite(self.half_widths), self.half_widths, -np.inf)
        self.low = np.minimum(self.low, self.best.units - width)
        self.high = np.maximum(self.high, self.best.units + width)

    def _plane(self) -> Asking[Plane]:
        """Return how deviations change around the best.

        Constants are moved from the best, one at a time. The plane lies nearest to all points
        tried; those far away count less.
        """
        moved = [self.best.units + SLOPE * np.eye(len(CONSTANTS))[index] for index in self._free]
        yield from self._at(moved)
        apart = np.array([point.units for point in self.tried])[:, self._free]
        apart = apart - self.best.units[self._free]
        nearness = 1 / (1 + (apart**2).sum(axis=1) / SLOPE**2)
        sides = np.column_stack([np.ones(len(apart)), apart]) * nearness[:, None]
        values = np.array([point.deviations for point in self.tried]) * nearness[:, None]
        plane = np.linalg.lstsq(sides, values, rcond=None)[0]
        left = max(1.0, float(np.sum(nearness**2)) - sides.shape[1])
        scatter = np.sqrt(((values - sides @ plane) ** 2).sum(axis=0) / left)
        return Plane(plane[1:].T, plane[0], scatter)

    @property
    def _hidden(self) -> bool:
        """Whether CPU time shows only where it is long, so that nothing determines it around 0."""
        return self.kept.get("holds") == "nothing"

    @property
    def _free(self) -> list[int]:
        return [index for index in range(len(CONSTANTS)) if index not in self.left_out]

    def _step(self, plane: Plane) -> Floats:
        """Return the best step on a plane, to no constant below 0."""
        from scipy.optimize import lsq_linear

        slopes, level = plane.slopes, plane.level
        root = np.sqrt(_weights(level))
        bounds = -self.best.units[self._free] - TINY, FARTHEST
        found = lsq_linear(slopes * root[:, None], -level * root, bounds=bounds)
        step = np.zeros(len(CONSTANTS))
        step[self._free] = np.maximum(found.x, -self.best.units[self._free])
        return step

    def _reach(self, plane: Plane) -> Floats:
        """Return how far each constant may be off, infinite where it is undetermined.

        From the slopes, the deviations left and the scatter of simulations, which measurements
        have, too. It is at least as far as constants tried that fit as well.
        """
        slopes, level, scatter = plane
        count, free = len(level), len(self._free)
        reach = np.zeros(len(CONSTANTS))
        reach[self._free] = np.inf
        felt = np.sqrt(np.mean(slopes**2, axis=0))
        if count - free < 2 or not felt.all():
            reach[self._free] = np.where((felt > 0) & (count - free >= 2), 0.0, np.inf)
            return reach
        _, sizes, mixes = np.linalg.svd(slopes / felt, full_matrices=False)
        mixed = np.abs(mixes[sizes < ALIKE * sizes[0]]).max(axis=0, initial=0.0)
        weights = _weights(level)
        bread = np.linalg.pinv(slopes.T @ (slopes * weights[:, None]))
        scores = slopes * (weights * np.hypot(self.best.deviations, scatter))[:, None]
        covariance = bread @ (scores.T @ scores) @ bread * count / (count - free)
        sure = student_quantile((1 + LEVEL) / 2, count - free)
        width = sure * np.sqrt(np.diag(covariance))
        reach[self._free] = np.where(mixed > 0.1, np.inf, width)
        alike = (1 + sure**2 / (count - free)) * self.best.cost
        tried = [point.units for point in self.tried if point.cost <= alike]
        apart = np.abs(np.array([self.best.units, *tried]) - self.best.units).max(axis=0)
        found: Floats = np.maximum(reach, apart)
        return found

    def _at(self, points: Sequence[Floats]) -> Asking[list[FittedConstants]]:
        """Request simulations of all runs with each of these constants."""
        trials = yield [
            Variant({}, {**target.patch, "runtime": self.runtime(units)})
            for units in points
            for target in self.targets
        ]
        for trial in trials:
            if trial.errors:
                raise UsageError(f"calibrate: a run cannot be simulated: {trial.errors[0]}")
        pairs = zip([*self.targets] * len(points), trials, strict=True)
        off = [target.deviations(trial.records[0].values) for target, trial in pairs]
        each = len(self.targets)
        found = [FittedConstants(u, off[n * each : (n + 1) * each]) for n, u in enumerate(points)]
        self.tried += found
        return found

    def runtime(self, units: Floats) -> dict[str, Any]:
        """Return the keys of `runtime` that these constants make."""
        pairs = zip(CONSTANTS.items(), units.tolist(), strict=True)
        return {**self.kept, **{name: value * unit for (name, unit), value in pairs}}

    def known(self) -> dict[str, Any]:
        """Return the keys of `runtime` that the results determine; none if no constant is."""
        unknown = {name for index, name in enumerate(CONSTANTS) if index in self.left_out}
        keys = self.runtime(self.best.units)
        told = {name: value for name, value in keys.items() if name not in unknown}
        return told if self._free else {}

    def constants(self) -> list[Constant]:
        """Return the constants found, and the ones that the results do not determine."""
        found = zip(CONSTANTS.items(), self.best.units, self.low, self.high, strict=True)
        return [
            Constant(
                name,
                float(value * unit),
                None
                if index in self.left_out
                else (max(0.0, float(low * unit)), float(high * unit)),
            )
            for index, ((name, unit), value, low, high) in enumerate(found)
        ]


def _weights(deviations: Floats) -> Floats:
    weights: Floats = 1 / np.sqrt(1 + (deviations / SOFT) ** 2)
    return weights
