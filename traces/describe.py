"""What a trace is like, in numbers, and writing one out. Knows only the format it writes."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.errors import UsageError, instead_of
from traces.fitting import fit_values
from traces.trace import Floats, Ints, Trace


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
    the keys see `traces.fitting.fit_values`. Needs the extra `fit` (scipy).
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
