"""What a trace is like, in numbers: summaries and fits; and writing one out.

Fits are of maximum likelihood, have location 0 and treat whole numbers as continuous. Real traces
are capped and bimodal: look at the Kolmogorov-Smirnov distances before trusting a family;
`traces.samples` uses quantiles instead. Knows only the format it writes.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.errors import UsageError, instead_of
from traces.trace import Floats, Ints, Trace

FIT_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
BISECTIONS = 200


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
    summary["neighbours"] = {
        "prompt": _neighbours(trace.prompt_tokens),
        "output": _neighbours(trace.output_tokens),
    }
    return summary


def _neighbours(lengths: Ints) -> float | None:
    """Return the rank correlation of each length with the next; None for fewer than three."""
    return spearman(lengths[:-1], lengths[1:]) if len(lengths) > 2 else None


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


def fit_families(values: Floats) -> dict[str, Any]:
    """Return the fits of positive values that are not all equal."""
    try:
        from scipy import special
    except ImportError as error:
        raise UsageError("fitting needs scipy; pip install 'evenflow[fit]'") from error
    ordered, logs, mean = np.sort(values), np.log(np.sort(values)), float(values.mean())
    mu, sigma = float(logs.mean()), float(logs.std())
    k = gamma_shape(math.log(mean) - mu, special.digamma)
    theta = mean / k
    shape, scale = weibull(logs)
    power = np.exp(shape * (logs - math.log(scale)))
    distances = {
        "lognormal": ks_distance(special.ndtr((logs - mu) / sigma)),
        "gamma": ks_distance(special.gammainc(k, ordered / theta)),
        "weibull": ks_distance(-np.expm1(-power)),
        "exponential": ks_distance(-np.expm1(-ordered / mean)),
    }
    # Mean log-likelihood of each density, from the sufficient statistics where there are such.
    likelihood = {
        "lognormal": -mu - math.log(sigma) - 0.5 * math.log(2 * math.pi) - 0.5,
        "gamma": (k - 1) * mu - k - k * math.log(theta) - math.lgamma(k),
        "weibull": math.log(shape / scale)
        + (shape - 1) * (mu - math.log(scale))
        - float(power.mean()),
        "exponential": -math.log(mean) - 1,
    }
    parameters = {"lognormal": 2, "gamma": 2, "weibull": 2, "exponential": 1}
    aic = {f: 2 * parameters[f] - 2 * len(values) * likelihood[f] for f in likelihood}
    best = min(aic, key=aic.__getitem__), min(distances, key=distances.__getitem__)
    ln_ks, gamma_ks, weib_ks, exp_ks = distances.values()
    fits = (mu, sigma, ln_ks, k, theta, gamma_ks, shape, scale, weib_ks, exp_ks, *best)
    return dict(zip(FIT_KEYS, fits, strict=True))


def gamma_shape(log_mean_less_mean_log: float, digamma: Callable[[float], float]) -> float:
    """Return the maximum-likelihood gamma shape k: ln k - digamma(k) = ln mean(x) - mean(ln x)."""
    return root(lambda k: log_mean_less_mean_log - (math.log(k) - digamma(k)))


def weibull(logs: Floats) -> tuple[float, float]:
    """Return the maximum-likelihood Weibull shape c and scale, from the logarithms of the values.

    c solves sum(x^c ln x) / sum(x^c) - 1/c = mean(ln x), and scale^c = mean(x^c).
    """
    top = float(logs.max())
    centred = logs - top  # x over its maximum, so that no power overflows
    mean_log = float(centred.mean())

    def balance(c: float) -> float:
        powers = np.exp(c * centred)
        return float((powers * centred).sum() / powers.sum()) - 1 / c - mean_log

    c = root(balance)
    return c, math.exp(top + math.log(float(np.exp(c * centred).mean())) / c)


def root(rising: Callable[[float], float]) -> float:
    """Return where an increasing function of a positive number crosses 0, by bisection."""
    low, high = math.log(1e-6), math.log(1e12)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if rising(math.exp(middle)) > 0 else (middle, high)
    return math.exp((low + high) / 2)


def ks_distance(fitted: Floats) -> float:
    """Return the Kolmogorov-Smirnov distance from the fitted probabilities of sorted values."""
    n = len(fitted)
    above = np.arange(1, n + 1) / n - fitted
    return float(max(above.max(), (1 / n - above).max()))


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
