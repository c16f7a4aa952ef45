"""Pictures of docs/processes-checked.md: a straggler, a death, an autoscaler, and their numbers.

`python -m tools.draw_processes [straggler] [death] [autoscaler]` draws these, or all three, into
docs/figures and prints the tables. The autoscaler's needs the Azure code trace in EVENFLOW_SHARED.
Takes ten minutes on one core.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import evenflow as ef
from evenflow.results.metrics import request_metrics
from evenflow.study.runs import SimulatedRun

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SHARED = Path(os.environ.get("EVENFLOW_SHARED", ROOT.parent / "shared"))

POLICIES = {
    "token_throttling": {"name": "token_throttling"},
    "sarathi": {"name": "sarathi", "token_budget": 2048},
    "vllm_v1": {"name": "vllm_v1", "async_scheduling": False},
}
FACTORS = (1.0, 1.25, 1.5, 2.0)
FLEETS = (2, 3, 4, 6, 8)
START_S = 120.0


def row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def straggler() -> Figure:
    """Draw what a slow stage 2 of 4 costs each policy."""
    figure = Figure((7.2, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, policy in POLICIES.items():
        e2el_s, rates = [], []
        for factor in FACTORS:
            slow = [{"name": "straggler", "stage": 2, "factor": factor}]
            keys = {"workload.requests": 400, "processes": slow if factor > 1 else None}
            run = ef.simulate(QUICKSTART, scheduler=policy, set=keys)
            e2el_s.append(run.summary["mean_e2el_ms"] / 1e3)
            rates.append(run.summary["output_throughput"])
            row(name, factor, f"{e2el_s[-1]:.1f} s", f"{rates[-1]:.0f}")
        open_ring = {"marker": "o", "markersize": 11, "fillstyle": "none"}  # others lie upon it
        look: dict[str, Any] = open_ring if name == "sarathi" else {"marker": "o"}
        left.plot(FACTORS, e2el_s, label=name, **look)
        right.plot(FACTORS, rates, label=name, **look)
    left.set_ylabel("mean E2EL (s)")
    right.set_ylabel("output tokens/s")
    for axes in (left, right):
        axes.set_xlabel("stage 2 takes so many times as long")
        axes.set_ylim(0, None)
    left.legend(frameon=False)
    return figure


def death() -> Figure:
    """Draw TTFT around a death at 300 s, on eight stages and on two times four."""
    figure = Figure((7.2, 2.8), layout="constrained")
    axes = figure.subplots()
    for name, stages, count in (("PP8", 8, 1), ("2 x PP4", 4, 2)):
        keys = {"stages": stages, "replicas.count": count}
        run = ef.simulate(QUICKSTART, set=keys | BUSY, processes=[dies])
        arrived_s, ttft_s = run.result.arrival_s, request_metrics(run.result).ttft_s
        row(name, f"{ttft_s.mean():.1f} s", f"{(ttft_s > 2).mean():.1%}")
        axes.scatter(arrived_s, ttft_s, s=3, label=name, alpha=0.6)
    axes.axvspan(300, 360, color="0.9", zorder=0)
    axes.set(xlabel="arrival (s); dead from 300 to 360", ylabel="TTFT (s)", xlim=(200, 600))
    axes.legend(frameon=False, markerscale=4)
    return figure


BUSY: dict[str, Any] = {
    "workload.requests": 3600,
    "workload.arrivals": {"kind": "poisson", "rate": 6.0},
    "replicas.router": "least_outstanding",
}


def dies(world: Any) -> Any:
    """Let the first pipeline die at 300 s, and serve again a minute later."""
    yield world.env.timeout(300.0)
    world.replicas[0].fail(60.0)


def autoscaler() -> Figure:
    """Draw the requests, the replicas and what they cost, beside fleets that stay."""
    figure = Figure((7.2, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1)
    follows: dict[str, Any] = {
        "name": "autoscaler",
        "target": 8.0,
        "min_replicas": 2,
        "max_replicas": 8,
        "start_s": START_S,
    }
    scaled = fleet(2, [follows])
    times_s, counts, hours = replicas_over(scaled, 2)
    arrivals_s = scaled.result.arrival_s
    per_minute = np.histogram(arrivals_s, np.arange(0, arrivals_s[-1] + 60, 60))[0] / 60
    above.stairs(per_minute, np.arange(len(per_minute) + 1), color="0.6", label="requests/s")
    above.step(times_s / 60, counts, where="post", label="replicas that serve")
    above.set(xlabel="minutes", ylim=(0, None))
    above.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    point(below, "autoscaler", scaled, hours, marker="*")
    for count in FLEETS:
        run = fleet(count)
        point(below, f"{count} replicas", run, count * run.result.returned_s[-1] / 3600, marker="o")
    below.set(xlabel="GPU-hours", ylabel="P99 TTFT (s)", xlim=(0, 6), ylim=(0, None))
    return figure


def fleet(count: int, processes: list[Any] | None = None) -> SimulatedRun:
    """Return a run of the Azure code trace on `count` replicas of one GPU."""
    run = {
        "model": "Llama-3.1-8B",
        "gpu": "L20",
        "stages": 1,
        "scheduler": POLICIES["vllm_v1"],
        "replicas": {"count": count, "router": "least_outstanding"},
        "workload": {"trace": str(SHARED / "traces" / "AzureLLMInferenceTrace_code.csv")},
    }
    simulated: SimulatedRun = ef.simulate(run, processes=processes)
    return simulated


def replicas_over(run: SimulatedRun, first: int) -> tuple[Any, Any, float]:
    """Return when how many replicas served, and their GPU-hours, with those that start."""
    steps = {"add": 1, "drain": -1}
    changes = [
        (mark.time_s, steps[mark.kind]) for mark in run.result.marks or () if mark.kind in steps
    ]
    end_s = float(run.result.returned_s[-1])
    times_s = np.array([0.0, *(at_s for at_s, _ in changes), end_s])
    counts = first + np.cumsum([0, *(step for _, step in changes), 0])
    starting_s = START_S * sum(step > 0 for _, step in changes)
    return times_s, counts, float(np.diff(times_s) @ counts[:-1] + starting_s) / 3600


def point(axes: Any, name: str, run: SimulatedRun, hours: float, marker: str) -> None:
    summary, ttft_s = run.summary, request_metrics(run.result).ttft_s
    late_s = summary["p99_ttft_ms"] / 1e3
    within = f"{(ttft_s <= 2).mean():.1%}"
    row(name, f"{hours:.2f}", f"{summary['mean_ttft_ms'] / 1e3:.2f} s", f"{late_s:.2f} s", within)
    axes.plot(hours, late_s, marker, color="C0" if marker == "*" else "0.4", markersize=9)
    axes.annotate(name, (hours, late_s), (6, 3), textcoords="offset points", fontsize=8)


DRAWN = {"straggler": straggler, "death": death, "autoscaler": autoscaler}

if __name__ == "__main__":
    for asked in sys.argv[1:] or DRAWN:
        path = FIGURES / f"processes-{asked}.png"
        DRAWN[asked]().savefig(path, dpi=90, metadata={"Software": None})
