"""Measure a sweep: CPU seconds of its simulations alone, of its points, and of the whole command.

`python benchmarks/bench_sweep.py` from the repository. A point is a simulation and what is made of
it; the command adds interpreters, tables, pictures and the page. Points and simulations take turns,
so that a machine that does other work slows both.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenflow.sim import simulate_replicas
from evenflow.study.points import simulate_point, workload_of
from evenflow.study.runs import Job
from evenflow.study.sweep_file import load_sweep

SWEEP = """\
run:
  model: Qwen2.5-32B
  gpu: L20
  stages: 4
  costs: {kind: affine, base_s: 0.005, per_token_s: 0.00002}
  kv: {pages: 25000}
  max_model_len: 32768
  runtime: ideal
  scheduler: {name: token_throttling}
  workload: {trace: azure-conv-sample, requests: 1000, arrivals: {kind: poisson, rate: 5.9}}
parameters:
  scheduler.iterations: [4, 8, 12, 16]
  scheduler.max_prefill: {low: 512, high: 2048, log: true, integer: true, steps: 4}
method: grid
objectives: [{metric: mean_e2el_ms, goal: minimize}]
replications: 3
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "sweep.yaml"
        file.write_text(SWEEP, encoding="utf-8")
        asked = load_sweep(file)
        points = asked.study.points(asked.known)
        alone_s = whole_s = 0.0
        for point in points:
            workload = workload_of(point)
            world = Job(point.config, workload, point.beside).built().world
            alone_s += seconds(simulate_replicas, world)
            whole_s += seconds(simulate_point, point)
        command_s, wall_s = command(file, Path(name) / "out")
        print(f"{len(points)} simulations alone {alone_s:8.2f} s")
        print(f"{len(points)} points            {whole_s:8.2f} s, {whole_s / alone_s:.3f} x")
        print(f"the whole command    {command_s:8.2f} s, {command_s / alone_s:.3f} x")
        print(f"{command_s / wall_s:.2f} of {os.cpu_count()} cores were busy")


def seconds(call: Callable[..., Any], *arguments: Any) -> float:
    started = time.process_time()
    call(*arguments)
    return time.process_time() - started


def command(file: Path, out: Path) -> tuple[float, float]:
    """Return CPU seconds of `evenflow sweep` and all its processes, and those of the clock."""
    words = [sys.executable, "-m", "evenflow", "sweep", str(file), "--out", str(out)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall_s


if __name__ == "__main__":
    main()
