"""Measure how long the attribution of idle time takes, on as many micro-batches as a long run has.

Run it from the repository: `python -m benchmarks.bench_bubbles`.
"""

from __future__ import annotations

import time

import numpy as np

from evenflow.results.bubbles import attribute
from evenflow.results.run import RunResult
from tools.draw_docs import tandem

DEPTH, REQUEST_BATCHES = 4, 38  # micro-batches for each request, as on the Azure conversation trace


def busy_run(count: int) -> RunResult:
    """Return `count` uneven micro-batches on four stages with links, preparation and waits."""
    rng = np.random.default_rng(0)
    ready_s = np.cumsum(rng.exponential(0.012, count))
    waits = np.sort(rng.uniform(0, ready_s[-1], count // 3)).tolist()
    return tandem(
        rng.exponential(0.01, (count, 1)) * rng.uniform(0.8, 1.2, (count, DEPTH)),
        ready_s=ready_s,
        cap=DEPTH,
        link_s=0.001,
        prepare_s=0.0005,
        prefill_tokens=rng.integers(0, 2, count).tolist(),
        waits=[(at, "work") for at in waits],
        arrival_s=ready_s[::REQUEST_BATCHES].tolist(),
    )


def main() -> None:
    """Print one line per number of micro-batches: seconds (best of three), pieces."""
    for count in (1_000, 10_000, 152_000):
        result = busy_run(count)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            bubbles = attribute(result)
            seconds.append(time.perf_counter() - begin)
        print(f"{count:>8,} micro-batches {min(seconds):7.3f} s {len(bubbles.stage):>10,} pieces")


if __name__ == "__main__":
    main()
