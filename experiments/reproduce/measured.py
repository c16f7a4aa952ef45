"""A measured run: requests with their latencies, or a closed loop with means.

Every form of results becomes this (`forms`). Knows no simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from evenflow.results.metrics import statistics
from evenflow.results.run import Floats
from evenflow.traces.formats import MOST_TOKENS

LATENCIES = ("ttft", "tpot", "e2el")
LENGTHS = ["input_tokens", "output_tokens"]
COLUMNS = ["arrival_s", *LENGTHS, "ttft_ms", "e2el_ms"]
"""What every form says of a request."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """One run that was measured.

    `metrics` are under the keys of vLLM's `bench serve` (ms, and a second). `requests` has a row a
    request: arrival_s, input_tokens, output_tokens and, where they are known, ttft_ms, tpot_ms,
    e2el_ms. `gaps_ms` are all gaps between tokens, in any order. `run` are keys of RUN.yaml that
    the file itself says. `facts` are what a catalogue may choose by, `doubts` what makes a
    comparison unfair.
    """

    label: str
    metrics: Mapping[str, float]
    requests: pd.DataFrame
    gaps_ms: Floats | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    doubts: Sequence[str] = ()


def of_requests(
    label: str,
    requests: pd.DataFrame,
    duration_s: float | None = None,
    gaps_ms: Floats | None = None,
    *,
    doubts: Sequence[str] = (),
    **more: Any,
) -> MeasuredRun:
    """Return a run of the requests that have all of COLUMNS; the others are left out, and doubted.

    Its metrics are those of `bench serve`. `duration_s` is from the first arrival to the last token
    where it is not known. `more` goes to `MeasuredRun`. Raises ValueError where none is left.
    """
    table, left_out = _complete(requests)
    if duration_s is None or not 0 < duration_s < np.inf:
        duration_s = float((table["arrival_s"] + table["e2el_ms"] / 1e3).max())
    metrics: dict[str, float] = {"duration": duration_s, "completed": len(table)}
    metrics["request_throughput"] = len(table) / duration_s
    metrics["output_throughput"] = int(table["output_tokens"].sum()) / duration_s
    latencies = {name: table[f"{name}_ms"].dropna().to_numpy(float) for name in LATENCIES}
    if gaps_ms is not None:
        latencies["itl"] = gaps_ms
    for name, values_ms in latencies.items():
        if len(values_ms):
            found = statistics(name, values_ms / 1e3)
            metrics |= {key: value for key, value in found.items() if value is not None}
    failed = f"{left_out} requests failed or lack a number, and are left out"
    return MeasuredRun(
        label, metrics, table, gaps_ms, doubts=[*doubts, *([failed] if left_out else [])], **more
    )


def _complete(requests: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return the complete requests, from time 0 on with their TPOT, and how many are incomplete."""
    table = requests[COLUMNS].astype(float)
    lacking = [name for name in COLUMNS if not np.isfinite(table[name]).any()]
    if lacking:
        raise ValueError(f"no request has {', '.join(lacking)}")
    lengths, ttft_ms = np.nan_to_num(table[LENGTHS].to_numpy()), table["ttft_ms"].to_numpy()
    counted = ((lengths >= 1) & (lengths <= MOST_TOKENS) & (lengths % 1 == 0)).all(axis=1)
    ordered = (ttft_ms > 0) & (table["e2el_ms"].to_numpy() >= ttft_ms)
    kept = table[np.isfinite(table.to_numpy()).all(axis=1) & counted & ordered]
    if kept.empty:
        raise ValueError("no request has whole numbers of tokens and 0 < TTFT <= E2EL")
    kept = kept.astype(dict.fromkeys(LENGTHS, int))
    kept["arrival_s"] -= kept["arrival_s"].min()
    gaps = kept["output_tokens"] - 1
    kept["tpot_ms"] = ((kept["e2el_ms"] - kept["ttft_ms"]) / gaps.clip(lower=1)).where(gaps > 0)
    return kept.sort_values("arrival_s", kind="stable", ignore_index=True), len(table) - len(kept)


def of_means(
    label: str,
    metrics: Mapping[str, float],
    doubt: str,
    *,
    lengths: Sequence[float] = (),
    clients: float | None = None,
) -> MeasuredRun:
    """Return a run of which only means are known, and why that is in doubt.

    It is a closed loop where the mean lengths, in tokens, and the number of clients are known.
    Raises ValueError where no first token came.
    """
    if metrics["mean_ttft_ms"] == 0:
        raise ValueError("the mean TTFT is 0: no request was answered")
    tokens = [round(length) for length in lengths]
    if clients is None or len(tokens) < 2 or min(tokens) < 1 or clients < 1:
        return MeasuredRun(label, metrics, pd.DataFrame(), doubts=[doubt])
    run = {"workload.arrivals": closed_loop(round(clients))}
    return MeasuredRun(
        label, metrics, pd.DataFrame([tokens], columns=LENGTHS), run=run, doubts=[doubt]
    )


def closed_loop(clients: int) -> dict[str, Any]:
    """Return the arrivals of `clients` clients; each sends when its last request is answered."""
    return {"kind": "closed", "concurrency": clients}


def layout_words(ranks: int, groups: int, stages: int) -> str:
    """Return the usual name of a layout: TP4 x DP2 x PP2, without a DP or PP of one."""
    more = {"DP": groups, "PP": stages}
    return " x ".join([f"TP{ranks}", *(f"{name}{n}" for name, n in more.items() if n > 1)])
