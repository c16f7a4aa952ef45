"""TD-Pipe's comparison: its configurations, what its figures show, and throughput as it counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenflow.config import load_config
from evenflow.costs import AffineCost
from evenflow.metrics import summarize
from evenflow.result import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from experiments.build import build, load_workload
from experiments.tdpipe import EXAMPLES, SYSTEMS
from experiments.tdpipe_figures import (
    busy_over_time,
    count_phases,
    draw_kv_usage,
    draw_utilisation,
)
from sim import World, simulate

ROOT = Path(__file__).parent.parent


def late_pair(depth: int = 2) -> RunResult:
    """Two requests of 10 + 3 tokens from 5 s on: a prefill, two decode steps, 1 s each a stage."""
    return simulate(
        World(
            requests=[Request(0, 5.0, 10, 3), Request(1, 5.0, 10, 3)],
            make_scheduler=lambda: create("vllm", {}, max_model_len=100),
            costs=AffineCost(1.0, 0.0, depth),
            depth=depth,
            total_pages=100,
            max_model_len=100,
        )
    )


@pytest.mark.parametrize("file", SYSTEMS.values())
def test_the_configurations_describe_worlds_that_differ_in_the_system_only(file: str) -> None:
    path = ROOT / EXAMPLES / file
    config = load_config(path, ["workload.requests=20"])
    best = load_config(ROOT / EXAMPLES / SYSTEMS["TD-Pipe"], ["workload.requests=20"])
    assert config.workload == best.workload
    assert (config.model, config.gpu, config.kv) == (best.model, best.gpu, best.kv)
    assert config.num_stages * config.tensor_parallel == 4
    world = build(config, load_workload(config, path.parent).requests, path.parent).world
    assert world.max_in_flight == (None if file == SYSTEMS["TD-Pipe"] else config.num_stages)


def test_a_given_cap_binds_td_pipe_too() -> None:
    path = ROOT / EXAMPLES / SYSTEMS["TD-Pipe"]
    config = load_config(path, ["workload.requests=20", "max_in_flight=3"])
    assert (
        build(config, load_workload(config, path.parent).requests, path.parent).world.max_in_flight
        == 3
    )


def test_offline_throughput_runs_from_the_first_prefill_to_the_last_token() -> None:
    summary = summarize(late_pair())
    # Three micro-batches one after the other through two stages of a second each.
    assert summary["offline_duration"] == 6
    assert summary["offline_output_throughput"] == pytest.approx(6 / 6)
    assert summary["offline_total_throughput"] == pytest.approx(26 / 6)


def test_busy_stages_over_time() -> None:
    result = late_pair()
    # One stage of two is busy at any time from 5 s to 11 s.
    busy = busy_over_time(result, np.array([0.0, 5.0, 5.5, 8.25, 11.0]))
    assert busy.tolist() == pytest.approx([0, 0.5, 0.5, 0.5])
    assert busy_over_time(late_pair(1), np.array([5.0, 6.5, 8.0])).tolist() == [1, 1]


@pytest.mark.parametrize(("letters", "count"), [("P", 1), ("PPDDPD", 2), ("DPPD", 1), ("D", 0)])
def test_phases_are_runs_of_prefills(letters: str, count: int) -> None:
    assert count_phases(np.array([letter == "P" for letter in letters])) == count


def test_the_figures_are_written(tmp_path: Path) -> None:
    result = late_pair()
    draw_kv_usage(result, tmp_path / "kv.png")
    draw_utilisation({"one": result, "other": result}, tmp_path / "busy.png")
    for name in ("kv.png", "busy.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
