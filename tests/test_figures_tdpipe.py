"""TD-Pipe's and the blog's figures: what they compute, by hand, and each of them made small."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evenflow.costs import AffineCost
from evenflow.errors import UsageError
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from experiments.figures.blog_batching import mean_over_max, seat_use
from experiments.figures.blog_disaggregation import example_ms
from experiments.figures.blog_fragmentation import known_in_advance
from experiments.figures.make import FOLDER, make
from experiments.figures.pairs import pairs
from experiments.figures.scenarios import steps_of_prompt
from experiments.figures.schema import load_plan
from experiments.figures.series import busy_over_time, phases
from experiments.figures.study import Study
from experiments.figures.tdpipe_11 import speedups
from experiments.figures.tdpipe_readings import RATE, ratios, scaling
from experiments.run_file.build import build, load_workload
from experiments.run_file.run import load_config
from experiments.runs import Outcome
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


def test_td_pipe_is_compared_pair_by_pair() -> None:
    rows = [("a", "TD-Pipe", 4, 30.0), ("a", "PP+SB", 4, 10.0), ("a", "PP+SB", 2, 1.0)]
    table = pd.DataFrame(rows, columns=["pair", "system", "gpus", "offline_output_throughput"])
    assert speedups(table, 4).to_dict() == {"PP+SB": {"a": 3.0}}


def test_readings_are_compared_seed_by_seed() -> None:
    runs = pd.DataFrame(
        [("r", 0, "TD-Pipe", 4, 30.0), ("r", 0, "PP+SB", 4, 10.0), ("r", 0, "TD-Pipe", 2, 12.0)],
        columns=["reading", "seed", "system", "gpus", "offline_output_throughput"],
    )
    found = ratios(runs, 4).set_index("quantity").value.to_dict()
    assert found == {"over PP+SB": 3.0, scaling(4): 2.5, RATE: 30.0}


def test_seats_that_work() -> None:
    # Two of four seats get a token in each of three micro-batches.
    result = late_pair(1)
    result.provenance["deployment"] = {}
    assert seat_use(Outcome(result, {}, 0.0, (result,)), 4)["seat_use"] == 0.5
    # Batches of two: 1 + 3 tokens in 3 steps, 2 tokens in 2 steps, a seat empty.
    assert mean_over_max(np.array([1, 3, 2]), 2) == 6 / (2 * 5)


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


def test_what_the_run_says_holds_for_every_pair(tmp_path: Path) -> None:
    found = pairs(study_of("tdpipe_11.yaml", tmp_path))
    assert list(found)[:2] == ["L20 + Llama2-13B", "L20 + Qwen2.5-32B"]
    assert found["L20 + Llama2-13B"] == {"gpu": "L20", "model": "Llama2-13B"}
    one = pairs(study_of("tdpipe_11.yaml", tmp_path, "gpu=A100-80G-PCIe", "model=Llama2-13B"))
    assert list(one) == ["A100-80G-PCIe + Llama2-13B"]
    other = pairs(study_of("tdpipe_11.yaml", tmp_path, "gpu={name: L20, memory_gb: 45}"))
    assert len(other) == 3
    assert pairs(study_of("tdpipe_11.yaml", tmp_path, "gpu=H100", "link=nvlink-a100"))


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


# -- each figure, small ---------------------------------------------------------------------------

SMALL = {
    "tdpipe_2": ("study.requests=30",),
    "tdpipe_6": ("study.all_tokens=[64]",),
    "tdpipe_9": (),
    "tdpipe_11": ("study.requests=20", "study.pairs=[[L20, Qwen2.5-32B]]"),
    "tdpipe_12": ("study.requests=30",),
    "tdpipe_13": ("study.requests=30", "study.ratios=[0.5]"),
    "tdpipe_14": ("workload.requests=2000",),
    "tdpipe_15": ("study.requests=30", "study.pairs=[[L20, Qwen2.5-32B]]"),
    "tdpipe_16": ("study.requests=30", "study.ratios=[0.5]"),
    "tdpipe_readings": ("study.requests=20", "study.readings={plain: {}}"),
    "blog_batching": ("study.requests=20", "study.seats=[4]"),
    "blog_chunking": ("study.all_chunks=[1024]", "study.decodes=2"),
    "blog_disaggregation": ("study.requests=10", "study.rates=[2]"),
    "blog_fragmentation": ("study.requests=10",),
}


def made(name: str, folder: Path) -> dict[str, Any]:
    plan = load_plan(FOLDER / f"{name}.yaml", SMALL[name], quick=True)
    with ThreadPoolExecutor(1) as executor:
        make(plan, folder, Store(folder / "points"), executor)
    return dict(json.loads((folder / f"{plan.name}.json").read_text()))


ELSEWHERE = {"tdpipe_9", "tdpipe_11", "blog_disaggregation"}
"""Made by the tests below, which look closer."""


@pytest.mark.parametrize("name", sorted(SMALL.keys() - ELSEWHERE))
def test_a_small_one_is_made(name: str, tmp_path: Path) -> None:
    if name == "tdpipe_14":
        pytest.importorskip("sklearn")
    assert made(name, tmp_path)["title"]
    assert {path.suffix for path in tmp_path.glob(f"{name.replace('_', '-')}.*")} == {
        ".png",
        ".svg",
        ".csv",
        ".json",
    }


def test_the_exact_claims(tmp_path: Path) -> None:
    assert made("tdpipe_9", tmp_path)["claims"]["tdpipe-stealing-example"] == {
        "average": [116, 114, 114, 114],
        "submitted": [80, 114, 114, 114],
    }
    moved_ms = example_ms(study_of("blog_disaggregation.yaml", tmp_path))
    assert moved_ms == pytest.approx(2.24, rel=1e-9)


def test_what_does_not_fit_says_so(tmp_path: Path) -> None:
    made("tdpipe_11", tmp_path)
    table = pd.read_csv(tmp_path / "tdpipe-11.csv")
    assert table[table.gpus == 1].error.str.contains("does not fit").all()
    assert table[table.gpus > 1].error.isna().all()
