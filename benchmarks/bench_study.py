"""Measure studies: points, sweeps, figures, clusters, memory; each a line of the table of `bench`.

A point is a simulation and what is made of it; a command adds interpreters, tables, pictures and
pages.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import taken
from evenflow.sim import simulate_replicas
from evenflow.study.points import Point, executor_of, simulate_point, simulated
from evenflow.study.runs import Job
from evenflow.study.sweep_file import load_sweep

SWEEP = """\
run:
  model: Qwen2.5-32B
  gpu: L20
  stages: 4
  costs: {{kind: affine, base_s: 0.005, per_token_s: 0.00002}}
  kv: {{pages: 25000}}
  max_model_len: 32768
  runtime: ideal
  scheduler: {{name: token_throttling}}
  workload:
    {{trace: azure-conv-sample, requests: {requests}, arrivals: {{kind: poisson, rate: 5.9}}}}
parameters:
  scheduler.iterations: [4, 8, 12, 16]
  scheduler.max_prefill: {{low: 512, high: 2048, integer: true, steps: {steps}}}
method: grid
objectives: [{{metric: mean_e2el_ms, goal: minimize}}]
"""
FIGURE = ["gllm-15", "--quick"]
EVENFLOW = [sys.executable, "-m", "evenflow"]
CORES = os.cpu_count() or 1

Cells = tuple[str, str, str, str, str]


def points(folder: Path) -> Cells:
    """Compare points with their simulations alone, in turns, in this process."""
    alone_s = whole_s = 0.0
    tried = points_of(folder, steps=3, requests=1000)
    for point in tried:
        world = Job(point.config, point.workload, point.beside).built().world
        alone_s += seconds(simulate_replicas, world)
        whole_s += seconds(simulate_point, point)
    name = f"{len(tried)} points of a sweep: CPU seconds"
    beside = f"their simulations {alone_s:.2f}"
    return name, f"{whole_s:.2f}", beside, f"{whole_s / alone_s:.3f}", "1.02"


def sweeps(folder: Path) -> Cells:
    """Measure how busy a sweep keeps the cores."""
    file = sweep_file(folder, steps=12, requests=4000)
    words = ["sweep", str(file), "--out", str(folder / "sweep")]
    return busy(f"`evenflow sweep` of 48 points on {CORES} cores: CPU seconds", words, folder)


def figures(folder: Path) -> Cells:
    """Measure how busy a figure keeps the cores."""
    words = ["figures", *FIGURE, "--out", str(folder / "figure")]
    name = f"`evenflow {' '.join(words[:3])}` on {CORES} cores: CPU seconds"
    return busy(name, words, folder)


def busy(name: str, words: Sequence[str], folder: Path) -> Cells:
    wall_s, cpu_s, _ = taken([*EVENFLOW, *words], folder)
    beside = f"{CORES} cores for {wall_s:.1f} s"
    return name, f"{cpu_s:.1f}", beside, f"{cpu_s / wall_s / CORES:.2f}", "0.95"


def memory(folder: Path) -> Cells:
    """Measure the memory of a study of 10,000 points, of its largest process."""
    file = sweep_file(folder, steps=2500, requests=1)
    words = ["sweep", str(file), "--out", str(folder / "large")]
    megabytes = taken([*EVENFLOW, *words], folder).megabytes
    ratio = f"{megabytes / 1000:.2f}"
    return "`evenflow sweep` of 10,000 points: peak MB", f"{megabytes:,.0f}", "1 GB", ratio, "1"


def dask(folder: Path) -> Cells:
    """Measure how a Dask cluster of two processes scales: the wall time of one beside theirs."""
    from distributed import LocalCluster

    tried = points_of(folder, steps=6, requests=2000)
    wall_s = []
    for workers in (1, 2):
        own = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": ":0"}
        with (
            LocalCluster(**own) as cluster,
            executor_of(f"dask:{cluster.scheduler_address}") as executor,
        ):
            list(simulated(tried[:workers], executor))  # imports
            began = time.perf_counter()
            list(simulated(tried, executor))
            wall_s.append(time.perf_counter() - began)
    one_s, two_s = wall_s
    name = f"{len(tried)} points, two processes of Dask: seconds"
    return (
        name,
        f"{two_s:.1f}",
        f"half of one process's {one_s:.1f}",
        f"{one_s / 2 / two_s:.2f}",
        "0.9",
    )


def sweep_file(folder: Path, *, steps: int, requests: int) -> Path:
    """Write a sweep of four times `steps` points; return where."""
    file = folder / f"sweep-{steps}.yaml"
    file.write_text(SWEEP.format(steps=steps, requests=requests), encoding="utf-8")
    return file


def points_of(folder: Path, *, steps: int, requests: int) -> list[Point]:
    """Return the points of such a sweep."""
    asked = load_sweep(sweep_file(folder, steps=steps, requests=requests))
    return asked.study.points(asked.known)


def seconds(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    call(*arguments)
    return time.process_time() - began
