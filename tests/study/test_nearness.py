"""Intervals by how near measured runs are: the nearest sets count, and far ones are wider."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.results.load import student_quantile
from evenflow.study.nearness import KEPT, Likeness, deviation, likeness, measured_sets
from evenflow.study.uncertainty import MetricInterval, widened
from tools import interval_errors

LIKE = Likeness("vllm", "H200", "dense", 4)


def a_set(mean: float, **facts: object) -> dict[str, object]:
    return LIKE._asdict() | {"metric": "mean_ttft_ms", "runs": 9, "mean": mean, "sd": 0.1} | facts


def test_of_the_set_itself_a_further_run_is_as_far_off() -> None:
    found = deviation(LIKE, "mean_ttft_ms", pd.DataFrame([a_set(0.2), a_set(0.5, ranks=8)]))
    assert found is not None
    half = student_quantile(0.95, 8) * 0.1 * math.sqrt(10 / 9)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))
    assert found.words == "9 measured runs of the engine, GPU, kind of model and ranks"


def test_the_farther_what_was_measured_the_wider() -> None:
    """Means of ranks are 0.02 apart, those of GPUs and kinds more; all runs scatter alike."""
    sets = [
        *(a_set(mean, ranks=ranks) for mean, ranks in ((0.0, 1), (0.02, 2), (0.04, 8))),
        *(a_set(0.2 + mean, gpu="B200", ranks=ranks) for mean, ranks in ((0.0, 1), (0.02, 2))),
        a_set(0.6, model="mixture"),
        a_set(-0.6, engine="sglang", ranks=8),
    ]
    asked = [
        Likeness("vllm", "H200", "dense", 8),
        Likeness("vllm", "H200", "dense", 4),
        Likeness("vllm", "A100-80G", "dense", 4),
        Likeness("vllm", "A100-80G", "latent", 4),
        Likeness("gllm", "A100-80G", "latent", 4),
    ]
    table = pd.DataFrame(sets)
    found = [deviation(like, "mean_ttft_ms", table) for like in asked]
    assert [each.distance for each in found if each] == list(KEPT)
    widths = [each.high - each.low for each in found if each]
    assert widths[1:] == sorted(widths[1:])
    assert deviation(LIKE, "p99_itl_ms", table) is None


def test_runs_are_like_those_of_the_engine_that_their_cpu_time_or_policy_names() -> None:
    def of(**keys: object) -> Likeness:
        given = {"stages": 1, "model": "Llama-3.1-8B", "gpu": "H100", "workload": {"trace": "x"}}
        return likeness(configured(Document("run.yaml", given | keys, {})), "dense")

    assert of(scheduler="sarathi", runtime="trtllm-1.2").engine == "trtllm"
    assert of(scheduler="sarathi", runtime={"like": "sglang-0.5"}).engine == "sglang"
    assert of(scheduler="vllm_v1", tensor_parallel=2) == Likeness("vllm", "H100", "dense", 2)
    assert of(scheduler="sarathi").engine == ""


def test_an_interval_also_holds_what_measured_runs_are_off() -> None:
    ranges = {name: MetricInterval(9.0, 11.0, 0.5, 0.5, 0.0) for name in ("mean_ttft_ms", "x")}
    found = widened(ranges, {"mean_ttft_ms": 10.0, "x": 10.0}, LIKE)
    known = deviation(LIKE, "mean_ttft_ms")
    assert known is not None
    assert found["mean_ttft_ms"].low == pytest.approx(min(9.0, 10 * math.exp(known.low)))
    assert found["mean_ttft_ms"].high == pytest.approx(max(11.0, 10 * math.exp(known.high)))
    assert found["x"] == ranges["x"]


def test_the_table_is_of_every_second_run_and_scored_on_the_others() -> None:
    """Normal errors, alike for all ranks: nine of ten lie inside, and more by few other sets."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "entry": f"tp{ranks}",
            "metric": "mean_tpot_ms",
            "measured": math.exp(rng.normal(0.1, 0.2)),
            "simulated": 1.0,
            **{
                f"like_{name}": value
                for name, value in LIKE._replace(ranks=ranks)._asdict().items()
            },
        }
        for ranks in (1, 2, 4, 8)
        for _ in range(200)
    ]
    table = pd.DataFrame(rows)
    place = table.groupby("entry").cumcount()
    table = table.assign(even=place % 2 == 0, log=np.log(table["measured"]))
    sets = interval_errors.sets_of(table)
    assert sets.runs.to_list() == [100] * 4
    itself, others = (
        list(interval_errors.scores(table, sets, "mean_tpot_ms", each)) for each in list(KEPT)[:2]
    )
    assert len(itself) == len(others) == 400
    assert np.mean([each.inside for each in itself]) == pytest.approx(0.9, abs=0.04)
    assert np.mean([each.inside for each in others]) > 0.95, "of three sets: Student's, of two"


def test_the_shipped_table_has_both_latencies_of_three_engines() -> None:
    sets = measured_sets()
    assert set(sets.metric) == {"mean_tpot_ms", "mean_ttft_ms"}
    assert {"vllm", "sglang", "trtllm"} <= set(sets.engine)
    assert (sets.runs >= interval_errors.FEWEST).all()
    assert (sets.sd >= 0).all()
