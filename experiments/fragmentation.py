"""How much KV memory holds no token: contiguous reservation against pages, policy by policy.

Run it with `python -m experiments.fragmentation`; it prints a table for each trace, beside what a
public text says ("contiguous allocation wastes 20-30 %, paging under 5 %"). Knows no other claim.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenflow.config import RunConfig
from evenflow.config_workload import OfflineArrivals, WorkloadConfig
from evenflow.metrics import summarize
from evenflow.types import Request
from experiments.build import build, load_workload
from sim import simulate

TRACES = {"sharegpt-sample": 2048, "arxiv-sample": 4096}
"""Trace -> the longest prompt and output in it, in tokens: what has to be reserved."""

SCHEDULERS = ("static", "orca", "vllm", "sarathi", "token_throttling")
RESERVING = ("static", "orca")
CLAIMS = {True: "20-30 %", False: "under 5 %"}


class Waste(NamedTuple):
    """A row of the table: `share` of the allocated token slots holds no token."""

    name: str
    reserves: bool
    share: float
    requests_per_s: float | None = None

    def __str__(self) -> str:
        low, high = (0.2, 0.3) if self.reserves else (0.0, 0.05)
        verdict = "as said" if low <= self.share <= high else "not as said"
        rate = "" if self.requests_per_s is None else f"{self.requests_per_s:.2f}"
        allocation = "contiguous" if self.reserves else "paged"
        return (
            f"{self.name:34}{allocation:12}{self.share:8.1%}{CLAIMS[self.reserves]:>12}"
            f"  {verdict:13}{rate:>8}"
        )


def configuration(trace: str, max_model_len: int, requests: int, scheduler: str) -> RunConfig:
    """Return a run of Qwen2.5-32B on four L20, all requests waiting at time 0."""
    workload = WorkloadConfig(
        trace=trace, requests=requests, arrivals=OfflineArrivals(kind="offline")
    )
    return RunConfig.model_validate(
        {
            "model": "Qwen2.5-32B",
            "gpu": "L20",
            "stages": 4,
            "link": {"bandwidth_gb_s": 20.79, "latency_us": 10},
            "costs": {"kind": "roofline"},
            "max_model_len": max_model_len,
            "scheduler": {"name": scheduler},
            "workload": workload,
        }
    )


def simulated(trace: str, max_model_len: int, requests: int) -> Iterator[Waste]:
    """Yield the waste of each scheduler's run."""
    here = Path()
    workload = load_workload(configuration(trace, max_model_len, requests, "orca"), here)
    for scheduler in SCHEDULERS:
        config = configuration(trace, max_model_len, requests, scheduler)
        summary = summarize(simulate(build(config, workload.requests, here).world))
        share, rate = float(summary["kv_waste_share"]), float(summary["request_throughput"])
        yield Waste(scheduler, scheduler in RESERVING, share, rate)


def known_in_advance(requests: Sequence[Request]) -> Waste:
    """Return the waste of reserving each request's own final length, were it known.

    A request that decodes a token a step fills prompt + output / 2 of its prompt + output slots on
    average, and holds them for a time in proportion to its output.
    """
    prompt = np.array([request.prompt_tokens for request in requests])
    output = np.array([request.output_tokens for request in requests])
    filled = (output * (prompt + output / 2)).sum()
    return Waste(
        "own final length, known (computed)", True, 1 - filled / (output * (prompt + output)).sum()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each trace")
    count = parser.parse_args(arguments).requests
    for trace, max_model_len in TRACES.items():
        print(f"\n{trace}, {count} requests offline; contiguous: {max_model_len} tokens each")
        print(f"{'':34}{'allocation':12}{'wasted':>8}{'said':>12}  {'':13}{'req/s':>8}")
        for waste in simulated(trace, max_model_len, count):
            print(waste)
        config = configuration(trace, max_model_len, count, "orca")
        print(known_in_advance(load_workload(config, Path()).requests))


if __name__ == "__main__":
    main()
