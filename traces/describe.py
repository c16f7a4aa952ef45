"""Summaries and fits of a trace, and its conversion to another format.

Fits are of maximum likelihood, have location 0 and treat whole numbers as continuous. Real traces
are capped and bimodal: look at the Kolmogorov-Smirnov distances before trusting a family;
`evenflow.traces.trace` uses quantiles instead. Knows only the format it writes.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.errors import within_a_run
from evenflow.files import write_new
from evenflow.traces.trace import Floats, Ints, Trace

ROUNDING = 1e-6
"""Values that differ by a smaller share, as the gaps of an even rate do, are equal."""

FIT_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def info(trace: Trace) -> dict[str, Any]:
    """Return a summary of a trace, ready for JSON; None where a number has no meaning.

    `span_s` is from the first arrival to the last, `rate_per_s` the arrivals after the first over
    it. `gap_cv` is the coefficient of variation of the times between arrivals. UsageError for an
    arrival after LATEST_S.
    """
    within_a_run(trace.last_s, f"trace {trace.name}")
    origin = {key: getattr(trace, key) for key in ("name", "format", "path", "sha256", "rows_read")}
    return {
        **origin,
        "requests": len(trace),
        "dropped": trace.dropped,
        "reordered": trace.reordered,
        "doubts": list(trace.doubts),
        "unread": list(trace.unread),
        **arrival_summary(trace.arrival_s),
        "prompt_tokens": length_summary(trace.prompt_tokens),
        "output_tokens": length_summary(trace.output_tokens),
        "spearman": spearman(trace.prompt_tokens, trace.output_tokens),
        "neighbours": {
            "prompt": _neighbours(trace.prompt_tokens),
            "output": _neighbours(trace.output_tokens),
        },
    }


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
    from pandas import Series

    return float(np.corrcoef(Series(first).rank(), Series(second).rank())[0, 1])


def fit(trace: Trace) -> dict[str, dict[str, Any]]:
    """Return quantiles and lognormal, gamma and Weibull fits of each field of a trace.

    The fields are `input_tokens`, `output_tokens` and `interarrival_s` (where there are times); for
    the keys see `fit_values`. UsageError for an arrival after LATEST_S.
    """
    within_a_run(trace.last_s, f"trace {trace.name}")
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
    `weib_scale`. Each has its KS distance (`ln_ks`, ...), `exp_ks` is that of the exponential of
    the same mean. Then come the families of least AIC and least KS. They are None unless all values
    are above 0 and differ by more than rounding.
    """
    mean, std = float(values.mean()), float(values.std())
    result: dict[str, Any] = {"n": len(values), "mean": mean, "std": std}
    result["cv"] = std / mean if mean else None
    quantiles = np.percentile(values, FIT_PERCENTS).tolist()
    result |= {f"q{p:g}": value for p, value in zip(FIT_PERCENTS, quantiles, strict=True)}
    fittable = values.min() > 0 and np.ptp(values) > ROUNDING * values.max()
    return result | (fit_families(values) if fittable else dict.fromkeys(FIT_KEYS))


FIT_KEYS = (
    *("ln_mu", "ln_sigma", "ln_ks", "gamma_k", "gamma_theta", "gamma_ks"),
    *("weib_shape", "weib_scale", "weib_ks", "exp_ks", "best_aic", "best_ks"),
)


def fit_families(values: Floats) -> dict[str, Any]:
    """Return the fits of positive values that differ."""
    from scipy import stats
    from scipy.optimize import fmin

    # scipy has no closed form of Weibull's; its search ends early by default.
    search = partial(fmin, xtol=1e-9, ftol=1e-9, disp=False)
    sigma, _, median = stats.lognorm.fit(values, floc=0)
    k, _, theta = stats.gamma.fit(values, floc=0)
    shape, _, scale = stats.weibull_min.fit(values, floc=0, optimizer=search)
    fitted = {
        "lognormal": stats.lognorm(sigma, scale=median),
        "gamma": stats.gamma(k, scale=theta),
        "weibull": stats.weibull_min(shape, scale=scale),
        "exponential": stats.expon(scale=values.mean()),
    }
    distances = {f: stats.ks_1samp(values, fitted[f].cdf, method="asymp")[0] for f in fitted}
    parameters = {"lognormal": 2, "gamma": 2, "weibull": 2, "exponential": 1}
    aic = {f: 2 * parameters[f] - 2 * fitted[f].logpdf(values).sum() for f in fitted}
    best = min(aic, key=aic.__getitem__), min(distances, key=distances.__getitem__)
    ln_ks, gamma_ks, weib_ks, exp_ks = distances.values()
    fits = (math.log(median), sigma, ln_ks, k, theta, gamma_ks, shape, scale, weib_ks, exp_ks)
    return dict(zip(FIT_KEYS, [*map(float, fits), *best], strict=True))


def convert(trace: Trace, out_path: str | Path) -> Path:
    """Write a trace as a Vidur csv, whole or not at all, and return the path.

    Columns are `num_prefill_tokens`, `num_decode_tokens` and, where the trace has them,
    `arrived_at` (seconds), `max_new` and `priority`. Reading it back gives the same trace, but for
    texts and prefixes. Raises UsageError for a path that cannot be written, and for one where a
    file is.
    """
    columns: dict[str, Iterable[Any] | None] = {
        "arrived_at": trace.arrival_s,
        "num_prefill_tokens": trace.prompt_tokens,
        "num_decode_tokens": trace.output_tokens,
        "max_new": trace.max_new,
        "priority": trace.priority,
    }
    there = {name: list(each) for name, each in columns.items() if each is not None}
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([there, *zip(*there.values(), strict=True)])
    write_new(path := Path(out_path), text.getvalue())
    return path
