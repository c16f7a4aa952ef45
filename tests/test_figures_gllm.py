"""gLLM's figures: what is computed from runs, by hand, and each figure made with tiny numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evenflow.costs import AffineCost
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from evenflow.world import RUNTIMES
from experiments.figures import gllm_12, gllm_14, gllm_15, gllm_16, gllm_capacity, rate_curves
from experiments.figures.decides import prepared
from experiments.figures.decides_3 import PARTS, shares
from experiments.figures.loads import Place, places, rates, traces
from experiments.figures.make import FOLDER, make
from experiments.figures.schema import load_plan
from experiments.figures.series import micro_batches
from experiments.figures.study import Drawing, Study
from experiments.runs import Outcome
from experiments.study.points import Store
from sim import World, simulate

PLACE = {"pair": "P", "trace": "T"}


def outcome(requests: list[Request], depth: int = 2, **more: Any) -> Outcome:
    """Return a run with whole prompts of a second a stage, and what was made of it."""
    world = World(
        requests=requests,
        make_scheduler=lambda: create("sarathi", {"token_budget": 4096}),
        costs=AffineCost(1.0, 0.0, depth),
        depth=depth,
        total_pages=1_000,
        max_model_len=8192,
        max_in_flight=depth,
    )
    result: RunResult = simulate(replace(world, **more))
    result = replace(result, provenance={"deployment": {"kv_pages": 1_000}})
    return Outcome(result, summarize(result), 0.0, (result,))


def study(name: str, tmp_path: Path, *overrides: str) -> Study:
    plan = load_plan(FOLDER / f"{name}.yaml", overrides)
    return Study(plan, Store(tmp_path), ThreadPoolExecutor(1))


def test_rates_are_shares_of_saturation_with_two_digits_or_those_given(tmp_path: Path) -> None:
    figure = study("gllm_10", tmp_path, "study.loads=[0.1, 0.5, 1.0]")
    assert rates(figure, 12.345) == [1.2, 6.2, 12.0]
    assert rates(study("gllm_10", tmp_path, "study.rates=[1, 3]"), 12.345) == [1.0, 3.0]


def test_what_the_run_says_itself_holds_everywhere(tmp_path: Path) -> None:
    figure = study("gllm_13", tmp_path)
    assert [place.pair for place in places(figure)][::2] == [
        "A100-40G + Qwen2.5-14B",
        "A100-40G + Qwen2.5-32B",
        "A800-80G + Llama-3.1-100B",
    ]
    narrow = study(
        "gllm_13", tmp_path, "gpu=A100-40G", "model=Mistral-7B", "workload.trace=arxiv-sample"
    )
    assert list(places(narrow)) == [Place("A100-40G + Mistral-7B", "arxiv-sample")]
    assert traces(narrow) == {"arxiv-sample": "arxiv-sample"}


def test_another_system_under_a_label(tmp_path: Path) -> None:
    figure = study("gllm_10", tmp_path, "systems.vLLM=vllm_v1")
    assert figure.system("vLLM")["dispatch"] == "eager"


def test_ttft_turns_at_five_times_its_lowest_and_stays_turned() -> None:
    table = pd.DataFrame(
        {**PLACE, "system": "S", "rate": rate, "mean_ttft_ms": ttft}
        for rate, ttft in ((1, 10), (2, 40), (3, 60), (4, 45))
    )
    assert rate_curves.turning_points(table).tolist() == [2] * 4


def test_throughput_is_over_the_fewest_gpus_that_hold_the_model() -> None:
    table = pd.DataFrame(
        {"pair": "P", "system": "S", "gpus": gpus, gllm_12.WHOLE: rate}
        for gpus, rate in ((1, np.nan), (2, 50.0), (4, 110.0))
    )
    assert gllm_12.over_smallest(table).tolist()[1:] == [1.0, 2.2]


def test_the_first_system_is_compared_with_each_seed_by_seed() -> None:
    table = pd.DataFrame(
        {**PLACE, "system": system, "seed": seed, gllm_capacity.WHOLE: rate}
        for system, seed, rate in (("A", 0, 20.0), ("A", 1, 30.0), ("B", 0, 10.0), ("B", 1, 10.0))
    )
    assert gllm_capacity.first_over(table, "A").tolist() == [1.0, 1.0, 2.0, 3.0]


def test_the_ablation_is_over_the_same_run_of_gllm() -> None:
    column = dict.fromkeys(gllm_15.METRICS.values(), 0.0)
    table = pd.DataFrame(
        {**PLACE, "load": 1.0, "rate": rate, "seed": 0, "system": system} | dict.fromkeys(column, v)
        for rate, system, v in ((1, "gLLM", 2.0), (1, "x", 3.0), (2, "gLLM", 4.0), (2, "x", 2.0))
    )
    assert gllm_15.over(table, "gLLM")["tpot"].tolist() == [1.0, 1.5, 1.0, 0.5]


def test_sensitivity_is_over_the_default_of_the_same_run() -> None:
    metrics = gllm_16.METRICS.values()
    run = {**PLACE, "rate": 1.0, "load": 1.0, "parameter": "min_prefill", "seed": 0, "default": 32}
    table = pd.DataFrame(
        run | {"value": value} | dict.fromkeys(metrics, metric)
        for value, metric in ((16, 9.0), (32, 10.0), (64, 12.0))
    )
    assert gllm_16.normalised(table)["TTFT"].tolist() == pytest.approx([0.9, 1.0, 1.2])


def test_attainment_counts_requests_within_both_limits() -> None:
    """Two stages of a second: TTFT 2 s for both, TPOT 2 s for the one with three tokens."""
    run = outcome([Request(0, 0.0, 10, 3), Request(1, 0.0, 10, 1)])
    found = gllm_14.within(run, [(2500, 2500), (2500, 1500), (1500, 2500)])
    assert found[gllm_14.SHARE] == [1.0, 0.5, 0.0]


def test_preparation_that_is_coupled_is_read_back_and_hidden_work_is_none() -> None:
    requests = [Request(index, 0.1 * index, 10, 20) for index in range(12)]
    coupled = prepared(outcome(requests, overheads=RUNTIMES["vllm"]))
    assert coupled["prepare_over_execute"] == pytest.approx(0.17)
    assert prepared(outcome(requests))["prepare_over_execute"] == pytest.approx(0.0)


def test_shares_of_stage_time_add_up() -> None:
    found = shares(outcome([Request(0, 0.0, 10, 1)]))
    assert sum(found[name] for name in PARTS) == pytest.approx(1.0)
    assert found["busy"] == pytest.approx(0.5)  # two stages, one after the other


def test_the_middle_of_a_run() -> None:
    run = outcome([Request(0, 0.0, 10, 5)], depth=1)
    found = micro_batches(run, ["batch", "decode_tokens"], batches=3, bins=2)
    assert found["batch"] == [1, 2, 3]
    assert found["decode_tokens"] == [1, 1, 1]
    assert found["mean_change"] == 0
    assert found["busy"] == pytest.approx([1.0, 1.0])


def test_the_case_study_keeps_the_micro_batches_asked_for() -> None:
    found = micro_batches(
        outcome([Request(0, 0.0, 10, 3)]), ["batch", "start_s"], first=1, batches=1
    )
    assert found["batch"] == [1]
    assert found["start_s"] == [[2.0, 3.0]]


TINY: dict[str, tuple[str, ...]] = {
    "gllm_1": ("study.batches=10", "study.loads=[0.5]"),
    "gllm_8": (),
    "gllm_10": ("study.loads=[0.5, 1]", "study.pairs=[[L20, Qwen2.5-14B]]"),
    "gllm_11": (),
    "gllm_14": ("study.loads=[0.5, 1]",),
    "gllm_15": ("study.loads=[1.0]",),
    "gllm_16": ("study.loads=[1.0]", "study.vary={min_prefill: [16, 32]}"),
    "gllm_capacity": (),
    "decides_3": (),
    "decides_4": (),
}


@pytest.mark.parametrize("name", TINY)
def test_a_figure_with_tiny_numbers(name: str, tmp_path: Path) -> None:
    few = ("study.requests=8", "study.seeds=[0]")
    wanted = [each for each in few if each.partition("=")[0].split(".")[1] in keys(name)]
    plan = load_plan(FOLDER / f"{name}.yaml", (*wanted, *TINY[name]), quick=True)
    with ThreadPoolExecutor(1) as executor:
        drawing = make(plan, tmp_path, Store(tmp_path / "points"), executor)
    assert len(drawing.table)
    assert CLAIMED.get(name, nothing)(drawing)
    assert (tmp_path / f"{plan.name}.png").exists()


def keys(name: str) -> dict[str, Any]:
    return load_plan(FOLDER / f"{name}.yaml").keys.study


def nothing(drawing: Drawing) -> bool:
    return not drawing.claims


CLAIMED: dict[str, Callable[[Drawing], bool]] = {
    "gllm_15": lambda drawing: (
        set(drawing.claims["gllm-ablation-no-ut"]) == {"ttft", "tpot", "e2el"}
    ),
    "gllm_16": lambda drawing: drawing.claims["gllm-minp"] >= 0,
    "gllm_capacity": lambda drawing: len(drawing.claims["gllm-capacity-vs-vllm"]) == 2,
    "decides_4": lambda drawing: drawing.claims["gllm-vllm-coupling"] == pytest.approx(0.17),
}
