"""What figures compute of what happens within runs, by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenflow.costs import AffineCost
from evenflow.errors import UsageError
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from experiments.figures.axes import pairs
from experiments.figures.make import FOLDER
from experiments.figures.measures import known_in_advance
from experiments.figures.scenarios import steps_of_prompt
from experiments.figures.schema import load_plan
from experiments.figures.series import busy_over_time, phases
from experiments.figures.study import Study
from experiments.run_file.build import build, load_workload
from experiments.run_file.run import load_config
from experiments.study.points import Store
from sim import World, simulate

ROOT = Path(__file__).parent.parent


def late_pair(depth: int = 2, scheduler: str = "vllm", **params: Any) -> RunResult:
    """Two requests of 10 + 3 tokens from 5 s on: a prefill, two decode steps, 1 s each a stage."""
    return simulate(
        World(
            requests=[Request(0, 5.0, 10, 3), Request(1, 5.0, 10, 3)],
            make_scheduler=lambda: create(scheduler, params, max_model_len=100),
            costs=AffineCost(1.0, 0.0, depth),
            depth=depth,
            total_pages=100,
            max_model_len=100,
        )
    )


def study_of(name: str, folder: Path, *overrides: str) -> Study:
    return Study(load_plan(FOLDER / name, overrides), Store(folder), ThreadPoolExecutor(1))


# -- what a figure computes -----------------------------------------------------------------------


def test_offline_throughput_runs_from_the_first_prefill_to_the_last_token() -> None:
    summary = summarize(late_pair())
    # Three micro-batches one after the other through two stages of a second each.
    assert summary["offline_duration"] == 6
    assert summary["offline_output_throughput"] == pytest.approx(6 / 6)
    assert summary["offline_total_throughput"] == pytest.approx(26 / 6)


def test_busy_stages_over_time() -> None:
    # One stage of two is busy at any time from 5 s to 11 s.
    busy = busy_over_time(late_pair(), np.array([0.0, 5.0, 5.5, 8.25, 11.0]))
    assert busy.tolist() == pytest.approx([0, 0.5, 0.5, 0.5])
    assert busy_over_time(late_pair(1), np.array([5.0, 6.5, 8.0])).tolist() == [1, 1]


def test_a_given_cap_binds_td_pipe_too() -> None:
    path = ROOT / "examples/systems/td_pipe.yaml"
    config = load_config(path, ["workload.requests=20", "max_in_flight=3"])
    world = build(config, load_workload(config, path.parent).requests, path.parent).world
    assert world.max_in_flight == 3  # type: ignore[union-attr]


def test_phases_are_runs_of_one_kind() -> None:
    found = phases([0.2, 0.4, 0.5, 0.3, 0.6], [9, 1, 0, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert found.drop(columns="phase").to_numpy().tolist() == [
        ["prefill", 0, 2, 0.0, 0.0, 0.4],
        ["decode", 2, 2, 2.0, 0.4, 0.3],
        ["prefill", 4, 1, 4.0, 0.3, 0.6],
    ]


def test_reserving_the_known_length_fills_half_of_the_output() -> None:
    assert known_in_advance(np.array([10]), np.array([20])) == pytest.approx(1 / 3)


def test_the_steps_of_the_last_prompt() -> None:
    requests = [Request(0, 0.0, 4, 30), Request(1, 5.0, 10, 2)]
    result = simulate(
        World(
            requests=requests,
            make_scheduler=lambda: create("sarathi", {"token_budget": 6}, max_model_len=100),
            costs=AffineCost(1.0, 0.0, 1),
            depth=1,
            total_pages=100,
            max_model_len=100,
        )
    )
    part = steps_of_prompt(result)
    assert result.prefill_tokens[part].tolist() == [5, 5]


# -- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("study.pairs=[[L20]]", r"is no pair; write \[GPU, model\]"),
        ("study.pairs=[L20]", r"should be a list that is not empty, like \[\[L20, Llama2-13B\]"),
    ],
)
def test_bad_pairs_are_one_line(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        pairs(study_of("tdpipe_11.yaml", tmp_path, override))
