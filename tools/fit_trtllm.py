"""Fit the host's time of TensorRT-LLM on several stages to the offline runs of a release.

    python -m tools.fit_trtllm 1.2 [--data DIR] [--model Llama-3.3-70B]

Stage 0 is what a full pipeline waits for, so a run takes as much longer as the host spends: the
micro-batches, their rows and the requests admitted at each are the slopes of the three constants.
Each round simulates the runs with the constants so far. Prints them with 95 % intervals, which
assume that the errors left are independent.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear
from scipy.stats import t as student

from evenflow.config.build import build, load_workload
from evenflow.config.run import with_
from evenflow.experiments.reproduce import MeasuredCase, cases_of, data_folder, load_entry
from evenflow.results.run import RunResult
from evenflow.sim import World, simulate

ENTRY = Path(__file__).parent.parent / "experiments" / "reproduce" / "offline-trtllm-stages.yaml"
CONSTANTS = {"schedule_s": 1e-3, "per_row_s": 1e-5, "per_active_s": 1e-6}
"""What is fitted, with the size of each, where the fit begins."""


def slopes(result: RunResult) -> list[float]:
    """Return by how many seconds a run grows with a second of each constant."""
    asked_s = result.scheduled_s
    begun, ended = np.sort(result.first_scheduled_s), np.sort(result.completion_s)
    active = np.searchsorted(begun, asked_s, "right") - np.searchsorted(ended, asked_s, "right")
    rows = result.decode_tokens.sum() + len(result.request_id)  # whole prompts
    return [float(len(asked_s)), float(rows), float(active.sum())]


def simulated(case: MeasuredCase, constants: dict[str, float]) -> RunResult:
    config = with_(case.config, {"runtime": {**constants, "holds": "stage0"}})
    world = build(config, Path(), load_workload(config, Path())).world
    assert isinstance(world, World)
    return simulate(world)


def fit(cases: list[MeasuredCase], rounds: int) -> None:
    """Print the constants after each round, and the errors of the runs before it."""
    scale = np.array([*CONSTANTS.values()])
    found = scale.copy()
    for _ in range(rounds):
        lines, missing = [], []
        for case in cases:
            result = simulated(case, dict(zip(CONSTANTS, found.tolist(), strict=True)))
            tokens = int(result.output_tokens.sum())
            measured_s = tokens / case.measured.metrics["output_throughput"]
            took_s = float(result.completion_s.max())
            lines.append(np.array(slopes(result)) / measured_s)
            missing.append(1 - took_s / measured_s + lines[-1] @ found)
            print(f"{case.measured.label}: {measured_s / took_s - 1:+.1%}")
        matrix: Any = np.array(lines)
        solved = lsq_linear(matrix * scale, np.array(missing), bounds=(0, np.inf))
        found, freedom = solved.x * scale, len(cases) - len(CONSTANTS)
        error = np.sqrt(np.diag(np.linalg.inv(matrix.T @ matrix)) * 2 * solved.cost / freedom)
        for name, value, half in zip(
            CONSTANTS, found, student.ppf(0.975, freedom) * error, strict=True
        ):
            print(f"{name}: {value:.3g} ({max(value - half, 0):.3g} to {value + half:.3g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="Llama-3.3-70B")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    wanted = given.version, given.model
    with tempfile.TemporaryDirectory() as scratch:
        cases = cases_of(load_entry(ENTRY), data_folder(given.data), Path(scratch))
        facts = [
            (str(case.measured.facts["version"]), case.measured.facts["model"]) for case in cases
        ]
        fit([case for case, own in zip(cases, facts, strict=True) if own == wanted], given.rounds)


if __name__ == "__main__":
    main()
