"""How often a run is called overloaded, and how often it is too short to tell, by load and length.

`python -m benchmarks.overload` from the repository prints the table of docs/capacity.md: queues of
known capacity (M/D/1, M/M/1 and M/M/16) in a few minutes. `--simulated` prints that of simulations
of the Azure sample, whose capacity is what they serve when twice as much arrives: one stage that
serves 16 requests at a time, and four stages that serve hundreds.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.config.build import load_workload
from evenflow.config.run import RunConfig
from evenflow.results.load import growth
from evenflow.study.runs import Job, run_job

SEEDS = 400
SIMULATED = 40
LENGTHS = (200, 400, 1_000, 4_000, 10_000)
LOADS = {"0.5": 0.5, "0.8": 0.8, "0.9": 0.9, "0.95": 0.95, "+5 %": 1 / 0.95, "+15 %": 1 / 0.85}
"""Shares of the capacity; or by how much of what arrives the queue grows."""

RUN: dict[str, Any] = {
    "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 0.00002},
    "kv": {"pages": 25_000},
    "max_model_len": 32_768,
    "runtime": "ideal",
}
RUNS = {
    "16 at a time": RUN | {"stages": 1, "scheduler": {"name": "sarathi", "max_num_seqs": 16}},
    "four stages": RUN | {"stages": 4, "scheduler": {"name": "token_throttling"}},
}

Verdict = Callable[[int, int, float], bool | None]
"""Of a seed, a number of requests and a load: whether it is called overloaded."""


def queue(servers: int, *, exponential: bool) -> Verdict:
    """Return the verdict on Poisson requests that `servers` serve in order of arrival."""

    def verdict(seed: int, count: int, load: float) -> bool | None:
        rng = np.random.default_rng(seed)
        arrived = np.cumsum(rng.exponential(1.0, count))
        took = load * servers * (rng.exponential(1.0, count) if exponential else np.ones(count))
        free, left = [0.0] * servers, np.empty(count)
        for index, (at, service) in enumerate(zip(arrived.tolist(), took.tolist(), strict=True)):
            left[index] = max(at, free[0]) + service
            heapq.heapreplace(free, left[index])
        return growth(arrived, left).overloaded

    return verdict


def served(run: dict[str, Any], seed: int, count: int, rate: float) -> dict[str, Any]:
    """Return the summary of a run of `count` requests that arrive at a rate."""
    workload = {
        "trace": "azure-conv-sample",
        "requests": count,
        "seed": seed,
        "arrivals": {"kind": "poisson", "rate": rate},
    }
    config = RunConfig.model_validate({**run, "workload": workload})
    return run_job(Job(config, load_workload(config, Path()), Path())).summary


def simulated(run: dict[str, Any]) -> Verdict:
    """Return the verdict on a run."""
    roughly = served(run, 0, 1_000, 100.0)["request_throughput"]
    capacity = served(run, 0, 4_000, 2 * roughly)["served_requests_per_s"]

    def verdict(seed: int, count: int, load: float) -> bool | None:
        found = served(run, seed, count, load * capacity)["overloaded"]
        return None if found is None else bool(found)

    return verdict


def rows(name: str, verdict: Verdict, lengths: Sequence[int], seeds: int) -> Iterator[str]:
    """Yield a row a length: per cent that are called overloaded, and that are too short."""
    for count in lengths:
        cells = []
        for load in LOADS.values():
            found = Counter(verdict(seed, count, load) for seed in range(seeds))
            overloaded, short = (100 * found[each] / seeds for each in (True, None))
            cells.append(f"{overloaded:.3g}" + (f" ({short:.3g})" if short else ""))
        yield f"| {name} | {count:,} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true")
    if parser.parse_args().simulated:
        asked = [(name, simulated(run), LENGTHS[:3], SIMULATED) for name, run in RUNS.items()]
    else:
        queues = {"M/D/1": (1, False), "M/M/1": (1, True), "M/M/16": (16, True)}
        models = {name: queue(c, exponential=random) for name, (c, random) in queues.items()}
        asked = [(name, each, LENGTHS, SEEDS) for name, each in models.items()]
    print(f"| queue | requests | {' | '.join(LOADS)} |")
    print("|---" * (2 + len(LOADS)) + "|")
    for each in asked:
        for row in rows(*each):
            print(row, flush=True)


if __name__ == "__main__":
    main()
