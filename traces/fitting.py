"""Maximum-likelihood fits of lengths and gaps, and how far each family is from the data.

Fits have location 0 and treat whole numbers as continuous. Real traces are capped and bimodal: look
at the Kolmogorov-Smirnov distances before trusting a family; `traces.synthetic` uses quantiles
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from evenflow.errors import UsageError
from traces.trace import Floats

FIT_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
BISECTIONS = 200


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
