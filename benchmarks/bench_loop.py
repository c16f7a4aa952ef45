"""How fast the event loop is, beside the same number of bare SimPy timeouts in the same run.

Azure-conv-like requests on four stages with affine costs, at the rate of the trace and at 4 times
that. Times are CPU seconds of this process, the best of a few runs; the ratio is what holds on
another machine. `python benchmarks/bench_loop.py [--scaling] [--against PYTHON]`: that is the
interpreter of an environment with another build, which takes turns with this one.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import simpy

from evenflow.compiled import is_compiled
from evenflow.core import batcher
from evenflow.costs import AffineCost
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.sim import World, simulate
from evenflow.traces import Poisson, load_trace, make_requests
from evenflow.types import Request

DEPTH = 4
OWN_RATE_PER_S = 5.9
MAX_MODEL_LEN = 32_768


def requests(count: int, speed: float) -> list[Request]:
    trace = load_trace("azure-conv-sample", limit=count)
    return make_requests(trace, Poisson(rate=OWN_RATE_PER_S * speed), count, seed=0)


def world(policy: str, given: list[Request], pages: int = 25_000) -> World:
    return World(
        requests=given,
        make_scheduler=lambda: create(policy, {}, max_model_len=MAX_MODEL_LEN),
        costs=AffineCost(0.005, 0.00002, DEPTH),
        depth=DEPTH,
        total_pages=pages,
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=DEPTH,
    )


def best_of(runs: int, work: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(runs):
        started = time.process_time()
        outcome = work()
        times.append(time.process_time() - started)
    return min(times), outcome


def bare_timeouts(count: int) -> None:
    def tick(env: simpy.Environment) -> Iterator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(tick(env))
    env.run()


def measure(label: str, count: int, speed: float, policy: str, pages: int = 25_000) -> None:
    result: RunResult
    given = requests(count, speed)
    seconds, result = best_of(3, lambda: simulate(world(policy, given, pages)))
    batches = len(result.scheduled_s)
    bare_s, _ = best_of(3, lambda: bare_timeouts(batches))
    build = "compiled" if is_compiled(batcher.__name__) else "Python"
    print(
        f"{policy:17s} {label:22s} {build:8s} {len(given) / seconds:8,.0f} requests/s"
        f" {batches / seconds:9,.0f} micro-batches/s  {batches / len(given):5.1f} a request"
        f"  {seconds / bare_s:5.1f} x bare timeouts ({batches / bare_s:,.0f}/s)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scaling", action="store_true", help="also by requests and by pages")
    parser.add_argument("--against", metavar="PYTHON", help="of an environment with another build")
    parser.add_argument("--row", type=int, help="only this row, from 0")
    arguments = parser.parse_args()
    rows: list[tuple[Any, ...]] = [
        (f"4,000 at {speed} x its rate", 4_000, speed, policy)
        for speed in (1, 4)
        for policy in ("token_throttling", "sarathi")
    ]
    if arguments.scaling:
        for count in (1_000, 2_000, 4_000, 8_000, 16_000):
            rows.append((f"{count:,} requests", count, 1, "token_throttling"))
        for pages in (10_000, 100_000, 1_000_000):
            rows.append((f"{pages:,} pages", 4_000, 1, "token_throttling", pages))
    chosen = range(len(rows)) if arguments.row is None else [arguments.row]
    for index in chosen:
        measure(*rows[index])
        if arguments.against:  # -P: of its own packages, not of this folder's
            words = ["--row", str(index), *(["--scaling"] if arguments.scaling else [])]
            subprocess.run([arguments.against, "-P", __file__, *words], check=True)


if __name__ == "__main__":
    main()
