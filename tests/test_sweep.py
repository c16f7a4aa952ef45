"""Which points a sweep has, what comes of them, and which are best."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.errors import UsageError
from experiments.study.points import Record, Store
from experiments.study.searches import Range
from experiments.study.slo import pareto_front
from experiments.study.sweep import (
    Findings,
    best_table,
    headline,
    main_effects,
    ranked,
    run_sweep,
    sensitivity,
    write_findings,
)
from experiments.study.sweep_file import (
    Sweep,
    check,
    load_sweep,
)
from experiments.study.trials import Part, Trial
from tests.command_line import write_trace
from tests.sweeps import GRID, RUN, simulator, sweep


def simulated(asked: Sweep, folder: Path, store: str = "store") -> Findings:
    with simulator(folder / store) as who:
        return run_sweep(asked, who)


def test_a_grid_is_every_combination_and_the_last_parameter_varies_fastest(tmp_path: Path) -> None:
    found = sweep(tmp_path).known
    assert [tuple(each.values()) for each in found] == [
        (64, 1), (64, 2), (64, "unlimited"), (128, 1), (128, 2), (128, "unlimited"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given_range", "expected"),
    [
        ({"low": 0, "high": 1, "steps": 3}, [0, 0.5, 1]),
        ({"low": 1, "high": 1000, "log": True, "steps": 4}, [1, 10, 100, 1000]),
        ({"low": 1, "high": 3, "integer": True, "steps": 9}, [1, 2, 3]),
        ({"low": 0.5, "high": 9, "steps": 1}, [0.5]),
    ],
)
def test_the_grid_of_a_range(given_range: dict[str, Any], expected: list[float]) -> None:
    assert Range(**given_range).grid() == expected


def test_the_default_is_what_the_run_or_its_policy_says(tmp_path: Path) -> None:
    swept = {"scheduler.token_budget": [64], "scheduler.watermark": [0.5], "max_in_flight": [1]}
    asked = sweep(tmp_path, parameters=swept)
    assert asked.default == {
        "scheduler.token_budget": 128, "scheduler.watermark": 0.01, "max_in_flight": 2,
    }  # fmt: skip
    assert asked.known[0] == asked.default
    named = sweep(tmp_path, parameters={"scheduler": ["vllm", RUN["scheduler"]]})
    assert named.default == {"scheduler": RUN["scheduler"]}
    assert len(named.known) == 2
    lacking = {key: value for key, value in RUN.items() if key != "stages"}
    assert sweep(tmp_path, run=lacking, parameters={"stages": [1]}).default is None


def test_one_at_a_time_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    asked = sweep(tmp_path, method="one_at_a_time")
    found = [tuple(each.values()) for each in asked.known]
    assert found == [(128, 2), (64, 2), (128, 1), (128, "unlimited")]


def test_random_points_follow_from_the_seed_and_each_parameter_from_its_own(tmp_path: Path) -> None:
    space = {"scheduler.token_budget": {"low": 32, "high": 512, "log": True, "integer": True}}

    def drawn(seed: int, **more: Any) -> list[Any]:
        method = {"kind": "random", "points": 20, "seed": seed}
        asked = sweep(tmp_path, method=method, parameters={**space, **more})
        return [each["scheduler.token_budget"] for each in asked.chosen]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == len(drawn(1)) > 10
    assert all(32 <= value <= 512 and isinstance(value, int) for value in drawn(1))
    both = drawn(1, max_in_flight={"low": 1, "high": 1e6, "integer": True})
    assert list(dict.fromkeys(both)) == drawn(1)


def test_all_points_of_a_replication_see_the_same_requests(tmp_path: Path) -> None:
    asked = sweep(tmp_path)
    points = asked.study.points(asked.known)
    assert [point.config.workload.seed for point in points] == [0] * 6 + [1] * 6
    assert len({point.key for point in points}) == asked.num_simulations == 12


def test_replications_may_be_windows_of_the_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},5" for i in range(9)))
    run = {**RUN, "workload": {"trace": "trace.csv", "requests": 3, "skip": 1}}
    asked = sweep(tmp_path, run=run, replicate="windows", parameters={"max_in_flight": [1, 2]})
    check(asked)
    points = simulated(asked, tmp_path).points
    assert points[["seed", "skip"]].to_numpy().tolist() == [[0, 1], [1, 4]] * 2
    assert points["total_input_tokens"].to_list() == [11 + 12 + 13, 14 + 15 + 16] * 2
    del run["workload"]["requests"]
    endless = sweep(tmp_path, run=run, replicate="windows", parameters={"max_in_flight": [1, 2]})
    with pytest.raises(UsageError, match=r"replicate: windows needs .*workload\.requests"):
        check(endless)


def test_the_run_as_it_is_does_not_weigh_in_an_effect(tmp_path: Path) -> None:
    found = simulated(sweep(tmp_path, parameters={"scheduler.token_budget": [64, 96]}), tmp_path)
    assert (found.default, found.default_is_extra) == (0, True)
    assert main_effects(found, "mean_e2el_ms")[0].values == [64, 96]
    assert sensitivity(found)[0].values == [64, 96, 128]


def test_findings_and_tables(tmp_path: Path) -> None:
    found = simulated(sweep(tmp_path), tmp_path)
    points, table = found.points, found.table
    assert len(found.trials) == 6
    assert points["replication"].to_list() == points["seed"].to_list() == [0, 1] * 6
    assert set(points["status"]) == {"completed"}
    best = table["place"].to_list().index(1)
    assert best == ranked(found)[0]
    assert table["mean_e2el_ms"][best] == table["mean_e2el_ms"].min()
    assert table["mean_e2el_ms"][0] == pytest.approx(points["mean_e2el_ms"][:2].mean())
    assert (found.default, found.default_is_extra) == (4, False)
    assert table["mean_e2el_ms_vs_default"][4] == 0
    write_findings(tmp_path, found, "title")
    with open(tmp_path / "points.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean_e2el_ms"]) for row in rows] == points["mean_e2el_ms"].to_list()
    assert (rows[2]["max_in_flight"], rows[2]["completed"]) == ("2", "6")


def test_points_that_fail_are_rows_too(tmp_path: Path) -> None:
    asked = sweep(tmp_path, parameters={"scheduler.token_budget": [0, 128]})
    found = simulated(asked, tmp_path)
    points = found.points
    assert points["status"].to_list() == ["failed", "failed", "completed", "completed"]
    assert "token_budget" in points["error"][0]
    assert math.isnan(points["mean_e2el_ms"][0])
    assert found.table["failed_replications"].to_list() == [2, 0]
    assert ranked(found) == [1]
    assert main_effects(found, "mean_e2el_ms")[0].values == [128]


def test_a_limit_decides_which_points_count(tmp_path: Path) -> None:
    free = simulated(sweep(tmp_path), tmp_path)
    slowest = max(range(6), key=lambda index: free.trials[index].mean("mean_e2el_ms"))
    limit = free.trials[slowest].mean("mean_e2el_ms")
    limits = {"mean_e2el_ms": {"at_least": limit}}
    assert ranked(simulated(sweep(tmp_path, limits=limits), tmp_path)) == [slowest]


TREND = {"kind": "optuna", "trials": 12, "batch": 4, "seed": 3}


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_search_proposes_the_same_again(tmp_path: Path, sampler: str) -> None:
    pytest.importorskip("optuna")
    asked = sweep(
        tmp_path,
        parameters={
            "scheduler.token_budget": {"low": 16, "high": 512, "log": True, "integer": True},
            "max_in_flight": [1, 2, 3],
            "dispatch": ["stage0", "eager"],
        },
        method={**TREND, "sampler": sampler},
        objectives=[
            {"metric": "mean_ttft_ms"},
            {"metric": "output_throughput", "goal": "maximize"},
        ],
        limits={"mean_tpot_ms": {"at_most": 1000}},
        replications=1,
    )
    first = simulated(asked, tmp_path)
    again = simulated(asked, tmp_path)
    afresh = simulated(asked, tmp_path, "other store")
    pd.testing.assert_frame_equal(first.points, again.points)
    pd.testing.assert_frame_equal(first.points, afresh.points)
    assert 6 < len(first.trials) <= 13


def test_tied_keys_change_together_and_points_have_gpus_and_costs(tmp_path: Path) -> None:
    layouts = [
        {"stages": 4, "replicas": {"count": 1}},
        {"stages": 2, "replicas": {"count": 3}},
        {"stages": 1, "max_in_flight": 3},
    ]
    asked = sweep(
        tmp_path,
        parameters={"layout": layouts},
        objectives=[{"metric": "gpus"}, {"metric": "mean_e2el_ms"}],
        limits={"mean_e2el_ms": {"at_most": 1.0}},
        price=2.0,
    )
    found = simulated(asked, tmp_path)
    assert [trial.mean("gpus") for trial in found.trials] == [4, 6, 1]
    assert found.trials[1].mean("dollars_per_hour") == 12
    assert found.trials[1].mean("dollars_per_million_tokens") > 0
    assert not ranked(found)
    rows = best_table(found)[1]
    assert len(rows) == 3
    assert [row[1] for row in rows] == [
        "PP=1, max_in_flight=3",
        "PP=2, replicas=3",
        "PP=4, replicas=1",
    ]
    assert "the nearest is point" in headline(found)
    assert "mean_e2el_ms is" in headline(found)
    wrong = [{"stages": 4}, {"stage": 2}]
    with pytest.raises(UsageError, match=r'SWEEP.yaml:\d+: unknown key "stage"; did you mean'):
        check(sweep(tmp_path, parameters={"layout": wrong}))


def test_a_search_goes_on_from_a_part_of_its_results(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"scheduler.token_budget": {"low": 16, "high": 512, "integer": True}}
    asked = sweep(tmp_path, parameters=space, method=TREND)
    whole = simulated(asked, tmp_path)
    kept = Store(tmp_path / "part")
    for trial in whole.trials[:5]:
        kept.put(trial.records[0])
    pd.testing.assert_frame_equal(simulated(asked, tmp_path, "part").points, whole.points)


COSTS = st.lists(st.tuples(*[st.integers(0, 5).map(float)] * 3), min_size=1, max_size=25)


@given(COSTS)
def test_the_pareto_front_is_what_its_definition_says(costs: list[tuple[float, ...]]) -> None:
    def dominated(point: Sequence[float]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, point, strict=True)) and tuple(other) != tuple(point)
            for other in costs
        )

    assert pareto_front(costs) == [not dominated(point) for point in costs]


def made_up(tmp_path: Path, **metrics: list[float]) -> Findings:
    """Findings of a sweep of token_budget 64 and 128 with these numbers, a point after another."""
    asked = sweep(tmp_path, parameters={"scheduler.token_budget": [64, 128]})
    trials = []
    for index, budget in enumerate([64, 128]):
        columns = {name: values[2 * index : 2 * index + 2] for name, values in metrics.items()}
        records = [
            Record(f"{index}{r}", {name: column[r] for name, column in columns.items()})
            for r in range(2)
        ]
        parts = (Part(0, 0), Part(1, 0))
        trials.append(Trial({"scheduler.token_budget": budget}, tuple(records), parts))
    return Findings(asked, trials, 1)


def test_sensitivity_is_relative_to_the_default_within_a_replication(tmp_path: Path) -> None:
    found = made_up(tmp_path, mean_ttft_ms=[10, 100, 20, 200], mean_e2el_ms=[3, 4, 3, 2])
    (panel,) = sensitivity(found)
    assert (panel.parameter, panel.values, panel.default) == (
        "scheduler.token_budget",
        [64, 128],
        1,
    )
    ttft = panel.means["mean_ttft_ms"]
    assert [(ratio.mean, ratio.half_width) for ratio in ttft] == [(0.5, 0.0), (1.0, 0.0)]
    assert found.trials[0].relative(found.trials[1], "mean_e2el_ms").mean == 1.5


def test_a_main_effect_averages_over_the_other_parameters(tmp_path: Path) -> None:
    found = simulated(sweep(tmp_path), tmp_path)
    budgets, in_flight = main_effects(found, "mean_e2el_ms")
    assert budgets.values == [64, 128]
    assert in_flight.values == [1, 2, "unlimited"]
    expected = math.fsum(trial.mean("mean_e2el_ms") for trial in found.trials[:3]) / 3
    assert budgets.means["mean_e2el_ms"][0].mean == pytest.approx(expected)


def test_a_run_may_lie_beside_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "RUN.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    asked = sweep(tmp_path, "run.workload.requests=5", run="RUN.yaml")
    assert asked.study.config({}).workload.requests == 5
    assert asked.study.config({"max_in_flight": 1}).max_in_flight == 1
    assert GRID["run"]["workload"]["requests"] == 6
    with pytest.raises(UsageError, match=r"run\.workload\.requests=0"):
        sweep(tmp_path, "run.workload.requests=0", run="RUN.yaml").study.config({})


def test_the_example_is_right_and_holds_the_default() -> None:
    asked = load_sweep(Path(__file__).parent.parent / "examples/sweep/azure.yaml")
    check(asked)
    assert asked.num_simulations == 48 * 3
    assert asked.default in asked.known
