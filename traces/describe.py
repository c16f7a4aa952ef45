"""What a trace is like, in numbers: summaries and fits; and writing one out.

Fits are of maximum likelihood, have location 0 and treat whole numbers as continuous. Real traces
are capped and bimodal: look at the Kolmogorov-Smirnov distances before trusting a family;
`traces.samples` uses quantiles instead. Knows only the format it writes.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.errors import UsageError, instead_of
from traces.trace import Floats, Ints, Trace

FIT_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def info(trace: Trace) -> dict[str, Any]:
    """Return a summary of a trace, ready for JSON; None where a number has no meaning.

    `span_s` is from the first arrival to the last, `rate_per_s` the arrivals after the first over
    it, and `gap_cv` the coefficient of variation of the times between arrivals.
    """
    summary: dict[str, Any] = {
        "name": trace.name,
        "format": trace.format,
        "path": trace.path,
        "sha256": trace.sha256,
        "rows_read": trace.rows_read,
        "requests": len(trace),
        "dropped": trace.dropped,
        "reordered": trace.reordered,
    }
    summary |= arrival_summary(trace.arrival_s)
    summary["prompt_tokens"] = length_summary(trace.prompt_tokens)
    summary["output_tokens"] = length_summary(trace.output_tokens)
    summary["spearman"] = spearman(trace.prompt_tokens, trace.output_tokens)
    return summary


def arrival_summary(arrival_s: Floats | None) -> dict[str, float | None]:
    """Return span, rate and burstiness of arrival times; all None where there is no span."""
    if arrival_s is None or arrival_s[-1] == arrival_s[0]:
        return dict.fromkeys(("span_s", "rate_per_s", "gap_cv"))
    gaps_s = np.diff(arrival_s)
    return {
        "span_s": float(arrival_s[-1] - arrival_s[0]),
        "rate_per_s": float(1 / gaps_s.mean()),
        "gap_cv": float(gaps_s.std() / gaps_s.mean()),
    }


def length_summary(tokens: Ints) -> dict[str, float]:
    """Return the mean, percentiles (linear) and extremes of lengths in tokens."""
    p50, p90, p99 = np.percentile(tokens, [50, 90, 99])
    return {
        "mean": float(tokens.mean()),
        "min": int(tokens.min()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(tokens.max()),
        "total": int(tokens.sum()),
    }


def spearman(first: Ints, second: Ints) -> float | None:
    """Return the rank correlation, ties at their mean rank; None if either column is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(mean_ranks(first), mean_ranks(second))[0, 1])


def mean_ranks(values: Ints) -> Floats:
    """Return the rank of each value, equal values sharing the mean of theirs, [n]."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def fit(trace: Trace) -> dict[str, dict[str, Any]]:
    """Return quantiles and lognormal, gamma and Weibull fits of each field of a trace.

    The fields are `input_tokens`, `output_tokens` and `interarrival_s` (where there are times); for
    the keys see `fit_values`. Needs the extra `fit` (scipy).
    """
    columns: dict[str, Ints | Floats] = {
        "input_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
    }
    if trace.arrival_s is not None and len(trace) > 1:
        columns["interarrival_s"] = np.diff(trace.arrival_s)
    result = {name: fit_values(values.astype(np.float64)) for name, values in columns.items()}
    correlation = spearman(trace.prompt_tokens, trace.output_tokens)
    for name in ("input_tokens", "output_tokens"):
        result[name]["spearman_in_out"] = correlation
    return result


def fit_values(values: Floats) -> dict[str, Any]:
    """Return n, mean, std, cv, q0 to q100 (linear) and the fits of one column of numbers.

    Fits: lognormal `ln_mu`, `ln_sigma`; gamma `gamma_k`, `gamma_theta`; Weibull `weib_shape`,
    `weib_scale`; each with its KS distance (`ln_ks`, ..., `exp_ks` for the exponential of the same
    mean), and the families of least AIC and least KS. They are None unless all values are above 0
    and not all equal.
    """
    mean, std = float(values.mean()), float(values.std())
    result: dict[str, Any] = {"n": len(values), "mean": mean, "std": std}
    result["cv"] = std / mean if mean else None
    quantiles = np.percentile(values, FIT_PERCENTS).tolist()
    result |= {f"q{p:g}": value for p, value in zip(FIT_PERCENTS, quantiles, strict=True)}
    fittable = values.min() > 0 and np.ptp(values) > 0
    return result | (fit_families(values) if fittable else dict.fromkeys(FIT_KEYS))


FIT_KEYS = (
    *("ln_mu", "ln_sigma", "ln_ks", "gamma_k", "gamma_theta", "gamma_ks"),
    *("weib_shape", "weib_scale", "weib_ks", "exp_ks", "best_aic", "best_ks"),
)


FAMILIES = {
    "lognormal": "lognorm",
    "gamma": "gamma",
    "weibull": "weibull_min",
    "exponential": "expon",
}
"""What scipy calls each family."""


def fit_families(values: Floats) -> dict[str, Any]:
    """Return the fits of positive values that are not all equal."""
    try:
        from scipy import optimize, stats
    except ImportError as error:
        raise UsageError("fitting needs scipy; pip install 'evenflow[fit]'") from error
    found: dict[str, list[float]] = {}
    aic, distances = {}, {}
    for name, family in FAMILIES.items():
        parameters = (
            weibull(np.log(values), optimize.brentq)
            if name == "weibull"  # scipy's own search ends early where values are far apart
            else getattr(stats, family).fit(values, floc=0)
        )
        found[name] = [float(each) for each in (*parameters[:-2], parameters[-1])]
        likelihood = getattr(stats, family).logpdf(values, *parameters).sum()
        aic[name] = 2 * len(found[name]) - 2 * likelihood
        test = stats.kstest(values, family, parameters, method="asymp")
        distances[name] = float(test.statistic)
    sigma, median = found["lognormal"]
    found["lognormal"] = [math.log(median), sigma]
    columns = [[*found[name], distances[name]] for name in ("lognormal", "gamma", "weibull")]
    best = [min(scores, key=scores.__getitem__) for scores in (aic, distances)]
    fits = [*itertools.chain(*columns), distances["exponential"], *best]
    return dict(zip(FIT_KEYS, fits, strict=True))


def weibull(logs: Floats, root: Callable[..., float]) -> tuple[float, float, float]:
    """Return the Weibull shape c of most likelihood, 0 and the scale, from logarithms of values.

    c solves sum(x^c ln x) / sum(x^c) - 1/c = mean(ln x), and scale^c = mean(x^c).
    """
    top = float(logs.max())
    centred = logs - top  # x over its maximum, so that no power overflows

    def balance(log_c: float) -> float:
        powers = np.exp(math.exp(log_c) * centred)
        mean = float((powers * centred).sum() / powers.sum())
        return mean - math.exp(-log_c) - float(centred.mean())

    c = math.exp(root(balance, math.log(1e-6), math.log(1e12), xtol=1e-14))
    return c, 0.0, math.exp(top + math.log(float(np.exp(c * centred).mean())) / c)


def convert(trace: Trace, out_path: str | Path, format: str = "vidur") -> Path:
    """Write a trace as a Vidur csv, whole or not at all, and return the path.

    Columns `arrived_at` (seconds, only where there are times), `num_prefill_tokens`,
    `num_decode_tokens`; reading it back gives the same trace. Raises UsageError for another format
    or a path that cannot be written.
    """
    if format != "vidur":
        raise UsageError(f'cannot write trace format "{format}"; {instead_of(format, ["vidur"])}')
    names = ["num_prefill_tokens", "num_decode_tokens"]
    columns = [trace.prompt_tokens.tolist(), trace.output_tokens.tolist()]
    if trace.arrival_s is not None:
        names.insert(0, "arrived_at")
        columns.insert(0, trace.arrival_s.tolist())
    path = Path(out_path)
    try:
        write_csv(path, names, zip(*columns, strict=True))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def write_csv(path: Path, names: list[str], rows: Iterable[tuple[float, ...]]) -> None:
    """Write a csv under a temporary name beside its place, then move it there."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
