"""How often the interval of replications of a trace file has the right answer in it.

`python -m benchmarks.coverage` from the repository prints the table of docs/sweeps.md in a minute:
trace files of lengths drawn independently, or each like the one before, and Poisson arrivals at one
server that takes a time in proportion to the tokens. Right are the mean length and, of independent
lengths, the mean wait by Pollaczek and Khinchine. Intervals are of 90 %.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np

from evenflow.config.run import RunConfig, with_
from evenflow.results.load import student_quantile
from evenflow.study.fair import LEVEL, interval
from evenflow.study.trials import Redrawn, replications
from evenflow.types import Request

FILES = 200
COUNT, SIZE = 5, 200
WARM_UP = 50
"""Requests whose wait is left out: they find the server idle more often than others."""

MEAN, LOAD, SHARE = 100.0, 0.5, 0.9
SIGMA = 0.5
"""Of the logarithm of a length."""


def write(path: Path, seed: int, alike: float) -> None:
    """Write a trace of log-normal lengths; `alike`: the correlation of neighbours' logarithms."""
    noise = np.random.default_rng(seed).standard_normal(COUNT * SIZE)
    logs = [noise[0]]
    for each in noise[1:]:
        logs.append(alike * logs[-1] + math.sqrt(1 - alike**2) * each)
    lengths = MEAN * np.exp(SIGMA * np.array(logs) - SIGMA**2 / 2)
    rows = (f"{at},{max(round(tokens), 1)},1" for at, tokens in enumerate(lengths))
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")


def measured(requests: list[Request]) -> tuple[float, float]:
    """Return the mean length, and the mean wait in seconds by Lindley's equation."""
    took = LOAD / MEAN * np.array([each.prompt_tokens for each in requests])
    slack = took[:-1] - np.diff([each.arrival_s for each in requests])
    falls = np.concatenate([[0.0], np.cumsum(slack)])
    waits = falls - np.minimum.accumulate(falls)
    return float(np.mean(took)) * MEAN / LOAD, float(waits[WARM_UP:].mean())


def right() -> tuple[float, float]:
    """Return the true mean length and mean wait: load 1/2, rate 1/s."""
    return MEAN, LOAD**2 * math.exp(SIGMA**2) / (2 * (1 - LOAD))


def covered(asked: Redrawn | None, alike: float, files: int) -> tuple[float, float]:
    """Return the shares of files whose interval has the mean length, and the mean wait, in it."""
    narrower = student_quantile((1 + SHARE) / 2, COUNT - 1)
    narrower /= student_quantile((1 + LEVEL) / 2, COUNT - 1)
    hits = np.zeros(2)
    with tempfile.TemporaryDirectory() as scratch:
        beside = Path(scratch)
        for seed in range(files):
            write(beside / "trace.csv", seed, alike)
            parts = replications(COUNT, asked)(config := run(COUNT * seed))
            runs = [with_(config, part.patch).workload.load(beside).requests for part in parts]
            for index, values in enumerate(zip(*map(measured, runs), strict=True)):
                found = interval(values)
                hits[index] += abs(found.mean - right()[index]) <= narrower * found.half_width
    length, wait = hits / files
    return float(length), float(wait)


def run(seed: int) -> RunConfig:
    """Return a run of the trace file."""
    arrivals = {"kind": "poisson", "rate": 1.0}
    workload = {"trace": "trace.csv", "requests": SIZE, "seed": seed, "arrivals": arrivals}
    costs = {"kind": "affine", "base_s": 0.01, "per_token_s": 0.0}
    return RunConfig.model_validate(
        {"stages": 1, "costs": costs, "kv": {"pages": 9}, "max_model_len": 99, "scheduler": "vllm"}
        | {"workload": workload}
    )


def main() -> None:
    """Print the table."""
    print("| lengths | `replicate` | mean length | mean wait |\n|---|---|---|---|")
    for words, alike in (("independent", 0.0), ("neighbours alike (0.8)", 0.8)):
        for asked in (None, "seeds"):
            length, wait = covered(asked, alike, FILES)
            told = f"{wait:.0%}" if not alike else "-"
            print(f"| {words} | {asked or 'windows'} | {length:.0%} | {told} |", flush=True)


if __name__ == "__main__":
    main()
