"""Which points a sweep has, what comes of them, and which are best."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coverage import covered
from evenflow.errors import UsageError
from evenflow.study.points import Record, Store
from evenflow.study.searches import NumberRange
from evenflow.study.slo import pareto_front
from evenflow.study.sweep import checked, run_sweep
from evenflow.study.sweep_file import Sweep, check, load_sweep
from evenflow.study.sweep_page import write_findings
from evenflow.study.sweep_plots import main_effects, sensitivity
from evenflow.study.swept import Swept
from evenflow.study.trials import Replication, Trial
from evenflow.study.unseen import SEEDS, WINDOWS, Check, unseen
from tests.amounts import ALL
from tests.command_line import rows_of, write_trace
from tests.places import ROOT
from tests.sweeps import GRID, RUN, simulator, sweep


def simulated(asked: Sweep, folder: Path, store: str = "store") -> Swept:
    with simulator(folder / store) as who:
        return run_sweep(asked, who)


def found_of(folder: Path, **changes: Any) -> Swept:
    """Return the findings of GRID with some keys changed."""
    return simulated(sweep(folder, **changes), folder)


GRIDDED = [(64, 1), (64, 2), (64, "unlimited"), (128, 1), (128, 2), (128, "unlimited")]


@pytest.mark.parametrize(
    ("method", "points"),
    [
        ("grid", GRIDDED),  # the last parameter varies fastest
        ("one_at_a_time", [(128, 2), (64, 2), (128, 1), (128, "unlimited")]),
    ],
)
def test_the_points_that_a_method_lists(tmp_path: Path, method: str, points: list[Any]) -> None:
    asked = sweep(tmp_path, method=method)
    assert [tuple(each.values()) for each in asked.known] == points
    seeds = [point.config.workload.seed for point in asked.study.points(asked.known)]
    assert seeds == [0] * len(points) + [1] * len(points)  # all of a replication see the same
    keys = {point.key for point in asked.study.points(asked.known)}
    assert len(keys) == asked.num_simulations == 2 * len(points)


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
    assert NumberRange(**given_range).grid() == expected


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


def test_random_points_follow_from_the_seed_and_each_parameter_from_its_own(tmp_path: Path) -> None:
    budget = "scheduler.token_budget"
    space = {budget: {"low": 32, "high": 512, "log": True, "integer": True}}

    def chosen(seed: int, **more: Any) -> list[Any]:
        method = {"kind": "random", "points": 20, "seed": seed}
        return [*sweep(tmp_path, method=method, parameters={**space, **more}).chosen]

    def drawn(seed: int) -> list[Any]:
        return [each[budget] for each in chosen(seed)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == len(drawn(1)) > 10
    assert all(32 <= value <= 512 and isinstance(value, int) for value in drawn(1))
    both = chosen(1, max_in_flight={"low": 1, "high": 1e6, "integer": True})
    assert list(dict.fromkeys(each[budget] for each in both)) == drawn(1)
    by_cap = [each[budget] for each in sorted(both, key=lambda each: each["max_in_flight"])]
    assert by_cap != sorted(by_cap)


def test_replications_may_be_windows_of_the_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},5" for i in range(9)))
    run = {**RUN, "workload": {"trace": "trace.csv", "requests": 3, "skip": 1}}
    windows = {"run": run, "replicate": "windows", "parameters": {"max_in_flight": [1, 2]}}
    check(sweep(tmp_path, **windows))
    points = found_of(tmp_path, **windows).points
    assert points[["seed", "skip"]].to_numpy().tolist() == [[0, 1], [1, 4]] * 2
    assert points["total_input_tokens"].to_list() == [11 + 12 + 13, 14 + 15 + 16] * 2
    for requests, most in ((None, 4), (5, 4)):  # 8 rows after the first
        run["workload"]["requests"] = requests
        with pytest.raises(UsageError, match=f"has 8: give workload.requests, at most {most}"):
            check(sweep(tmp_path, **windows))


def test_replications_of_a_file_have_other_rows_unless_seeds_are_asked_for(tmp_path: Path) -> None:
    """Of a sample a seed draws the requests; of a file it would draw the arrivals alone."""
    write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},5" for i in range(9)))
    poisson = {"kind": "poisson", "rate": 9.0}
    run = {**RUN, "workload": {"trace": "trace.csv", "requests": 4, "arrivals": poisson}}
    keys = {"run": run, "parameters": {"max_in_flight": [1]}, "replications": 2}

    def skipped(**more: Any) -> tuple[list[int], list[str]]:
        found = found_of(tmp_path, **keys, **more)
        same = [line for line in found.sentences() if "all replications have the same rows" in line]
        return found.points["skip"].to_list()[:2], same

    assert skipped() == ([0, 4], [])
    (line,) = skipped(replicate="seeds")[1]
    assert line.startswith("NOT FAIR: ")
    run["workload"]["trace"] = "azure-conv-sample"
    assert skipped() == skipped(replicate="seeds") == ([0, 0], [])


def test_the_interval_of_a_file_has_the_right_mean_in_it_as_often_as_it_says() -> None:
    """Of 90 %; of 30 files, 24 or more have it 97 times in 100. The same rows tell nothing."""
    assert covered(None, 0.0, 30 if ALL else 10)[0] >= 0.8
    assert covered("seeds", 0.0, 3)[0] == 0


def test_the_run_as_it_is_does_not_weigh_in_an_effect(tmp_path: Path) -> None:
    found = found_of(tmp_path, parameters={"scheduler.token_budget": [64, 96]})
    assert (found.default, found.default_is_extra) == (0, True)
    assert main_effects(found)[0].values == [64, 96]
    assert sensitivity(found)[0].values == [64, 96, 128]


def test_findings_and_tables(tmp_path: Path) -> None:
    found = found_of(tmp_path)
    points, table = found.points, found.table
    assert points["replication"].to_list() == points["seed"].to_list() == [0, 1] * 6
    assert set(points["status"]) == {"completed"}
    best = table["place"].to_list().index(1)
    assert best == found.ranked[0]
    assert table["mean_e2el_ms"][best] == table["mean_e2el_ms"].min()
    assert table["mean_e2el_ms"][0] == pytest.approx(points["mean_e2el_ms"][:2].mean())
    assert (found.default, found.default_is_extra) == (4, False)
    assert table["mean_e2el_ms_vs_default"][4] == 0
    budgets, in_flight = main_effects(found)  # over the other parameter
    assert (budgets.values, in_flight.values) == ([64, 128], [1, 2, "unlimited"])
    expected = math.fsum(trial.mean("mean_e2el_ms") for trial in found.trials[:3]) / 3
    assert budgets.means["mean_e2el_ms"]["mean"].iloc[0] == pytest.approx(expected)
    write_findings(tmp_path, found, "title")
    rows = rows_of(tmp_path / "points.csv")
    assert [float(row["mean_e2el_ms"]) for row in rows] == points["mean_e2el_ms"].to_list()
    assert (rows[2]["max_in_flight"], rows[2]["completed"]) == ("2", "6")


def test_points_that_fail_are_rows_too(tmp_path: Path) -> None:
    found = found_of(tmp_path, parameters={"scheduler.token_budget": [0, 128]})
    points = found.points
    assert points["status"].to_list() == ["failed", "failed", "completed", "completed"]
    assert "token_budget" in points["error"][0]
    assert math.isnan(points["mean_e2el_ms"][0])
    assert found.table["failed_replications"].to_list() == [2, 0]
    assert found.ranked == [1]
    assert main_effects(found)[0].values == [128]


def test_a_limit_decides_which_points_count(tmp_path: Path) -> None:
    means = [trial.mean("mean_e2el_ms") for trial in found_of(tmp_path).trials]
    limits = {"mean_e2el_ms": {"at_least": max(means)}}
    assert found_of(tmp_path, limits=limits).ranked == [means.index(max(means))]


TREND = {"kind": "optuna", "trials": 8, "batch": 4, "seed": 3}


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("nsga2", marks=pytest.mark.long)])
def test_a_search_proposes_the_same_again(tmp_path: Path, sampler: str) -> None:
    pytest.importorskip("optuna")
    budgets = {"low": 16, "high": 512, "log": True, "integer": True}
    more = {"max_in_flight": [1, 2, 3], "dispatch": ["stage0", "eager"]}
    goals = [{"metric": "mean_ttft_ms"}, {"metric": "output_throughput", "goal": "maximize"}]
    asked = sweep(
        tmp_path,
        parameters={"scheduler.token_budget": budgets, **more},
        method={**TREND, "sampler": sampler},
        objectives=goals,
        limits={"mean_tpot_ms": {"at_most": 1000}},
    )
    first = simulated(asked, tmp_path)
    kept = Store(tmp_path / "part")
    for trial in first.trials[:5]:
        kept.put(trial.records[0])
    for store in ("part", "other store"):  # a part of its results, none
        pd.testing.assert_frame_equal(first.points, simulated(asked, tmp_path, store).points)
    assert 4 < len(first.trials) <= 9


def test_tied_keys_change_together_and_points_have_gpus_and_costs(tmp_path: Path) -> None:
    layouts = [
        {"stages": 4, "replicas": {"count": 1}},
        {"stages": 2, "replicas": {"count": 3}},
        {"stages": 1, "max_in_flight": 3},
    ]
    found = found_of(
        tmp_path,
        parameters={"layout": layouts},
        objectives=[{"metric": "gpus"}, {"metric": "mean_e2el_ms"}],
        limits={"mean_e2el_ms": {"at_most": 1.0}},
        price=2.0,
    )
    assert [trial.mean("gpus") for trial in found.trials] == [4, 6, 1]
    assert found.trials[1].mean("dollars_per_hour") == 12
    assert found.trials[1].mean("dollars_per_million_tokens") > 0
    assert not found.ranked
    settings = ["PP=1, max_in_flight=3", "PP=2, replicas=3", "PP=4, replicas=1"]
    assert [row[1] for row in found.best_table()[1]] == settings
    assert re.search("the nearest is point .: mean_e2el_ms is", found.headline())
    wrong = [{"stages": 4}, {"stage": 2}]
    with pytest.raises(UsageError, match=r'SWEEP.yaml:\d+: unknown key "stage"; did you mean'):
        check(sweep(tmp_path, parameters={"layout": wrong}))


COSTS = st.lists(st.tuples(*[st.integers(0, 5).map(float)] * 3), min_size=1, max_size=25)


@given(COSTS)
def test_the_pareto_front_is_what_its_definition_says(costs: list[tuple[float, ...]]) -> None:
    def dominated(point: Sequence[float]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, point, strict=True)) and tuple(other) != tuple(point)
            for other in costs
        )

    assert pareto_front(costs) == [not dominated(point) for point in costs]


def test_sensitivity_is_relative_to_the_default_within_a_replication(tmp_path: Path) -> None:
    asked = sweep(tmp_path, parameters={"scheduler.token_budget": [64, 128]})
    points = {64: ({"ttft": 10, "e2el": 3}, {"ttft": 100, "e2el": 4})}
    points[128] = ({"ttft": 20, "e2el": 3}, {"ttft": 200, "e2el": 2})
    trials = []
    for budget, runs in points.items():
        values = [{f"mean_{name}_ms": value for name, value in run.items()} for run in runs]
        records = tuple(Record(f"{budget}{index}", each) for index, each in enumerate(values))
        trials.append(
            Trial(
                {"scheduler.token_budget": budget}, records, (Replication(0, 0), Replication(1, 0))
            )
        )
    (panel,) = sensitivity(Swept(asked, trials, 1))
    assert (panel.parameter, panel.values) == ("scheduler.token_budget", [64, 128])
    assert panel.default == 1
    ttft, e2el = (panel.means[f"mean_{name}_ms"] for name in ("ttft", "e2el"))
    assert ttft[["mean", "half_width"]].to_numpy().tolist() == [[0.5, 0.0], [1.0, 0.0]]
    assert e2el["mean"].to_list() == [1.5, 1.0]


def test_a_run_may_lie_beside_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "RUN.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    asked = sweep(tmp_path, "run.workload.requests=5", run="RUN.yaml")
    assert asked.study.config({}).workload.requests == 5
    assert asked.study.config({"max_in_flight": 1}).max_in_flight == 1
    assert GRID["run"]["workload"]["requests"] == 6
    with pytest.raises(UsageError, match=r"run\.workload\.requests=0"):
        sweep(tmp_path, "run.workload.requests=0", run="RUN.yaml").study.config({})


def test_the_example_is_right_and_holds_the_default() -> None:
    asked = load_sweep(ROOT / "examples/sweep/azure.yaml")
    check(asked)
    assert asked.num_simulations == 48 * 3
    assert asked.default in asked.known


TIGHT = {**RUN, "kv": {"pages": 400}, "workload": {**RUN["workload"], "requests": 20}}


def test_a_point_that_serves_little_is_no_answer(tmp_path: Path) -> None:
    pages = {"kv.pages": [1, 30, 80, 300, 1000]}
    found = found_of(tmp_path, run=TIGHT, parameters=pages, replications=1)
    completed = [trial.served.completed for trial in found.trials]
    assert completed == [20, 0, 4, 13, 20, 20]  # 400 pages, the default, come first
    assert sorted(found.answered) == [0, 4, 5]
    assert found.table["counts"].to_list() == ["yes", "no", "no", "no", "yes", "yes"]
    assert "3 of them no answer: more than 10 % of the requests are refused" in found.headline()
    allowed = replace(found, allow_refused=True)
    assert sorted(allowed.ranked) == [0, 2, 3, 4, 5]  # one that serves nothing never counts
    assert allowed.ranked[0] == 2
    first = next(allowed.sentences())
    assert first.startswith("NOT FAIR: with the best point, 16 of 20 requests (80.0%) were refused")
    assert allowed.best_table()[1][0][0] == "2, too short, 4 of 20 requests"


def trial(label: int, *values: dict[str, Any]) -> Trial:
    records = tuple(Record(f"{label}{index}", each) for index, each in enumerate(values))
    parts = tuple(Replication(index, 0) for index in range(len(values)))
    return Trial({"scheduler.token_budget": label}, records, parts)


BUDGETS = {"scheduler.token_budget": [64, 128]}
SERVED = {"completed": 10, "failed": 0}


@pytest.mark.parametrize("goal", ["minimize", "maximize"])
@pytest.mark.parametrize("nothing", [None, 0.0])
@pytest.mark.parametrize("limit", [{}, {"p99_ttft_ms": {"at_most": 5}}])
def test_a_metric_of_no_requests_is_missing(
    tmp_path: Path, goal: str, nothing: float | None, limit: dict[str, Any]
) -> None:
    goals = [{"metric": "mean_ttft_ms", "goal": goal}]
    asked = sweep(tmp_path, parameters=BUDGETS, objectives=goals, limits=limit)
    names = ("mean_ttft_ms", "p99_ttft_ms", "offered_requests_per_s")
    none = {"completed": 0, "failed": 10, **dict.fromkeys(names, nothing)}
    some = {**SERVED, **dict.fromkeys(names, 4.0)}
    trials = [trial(64, none, some), trial(128, some, some)]
    for allow_refused in (False, True):
        found = Swept(asked, trials, 0, allow_refused=allow_refused and nothing is None)
        assert found.ranked == [1]
        assert "nan" not in " ".join(found.sentences()).lower()
        assert math.isnan(found.points["mean_ttft_ms"][0]) == (nothing is None)
        assert math.isnan(found.table["mean_ttft_ms"][0]) == (nothing is None)
        assert math.isnan(found.table["mean_ttft_ms_vs_default"][1])


def test_an_overloaded_best_point_says_so_and_all_points_have_their_latencies(
    tmp_path: Path,
) -> None:
    asked = sweep(tmp_path, parameters=BUDGETS, replications=1)
    load = {"offered_requests_per_s": 9.0, "served_requests_per_s": 5.0, "queue_growth_per_s": 4.0}
    runs = [
        {**SERVED, **load, "overloaded": 1, "mean_e2el_ms": e2el, "mean_tpot_ms": tpot}
        for e2el, tpot in ((7.0, 3.25), (8.0, 3.5))
    ]
    found = Swept(asked, [trial(64, runs[0]), trial(128, runs[1])], 1)
    assert (
        "The best point is overloaded: 9 requests/s arrive and 5 are served"
        in list(found.sentences())[1]
    )
    write_findings(tmp_path, found, "title")
    page = (tmp_path / "report.html").read_text()
    rows = re.findall("1, default, overloaded</th>(.*?)</tr>", page)
    best, each = (re.findall("<td>(.*?)</td>", row) for row in rows)
    assert best == ["budget=128", "8", "-", "3.5", "-", "+1"]
    assert each == ["128", "8", "-", "3.5", "-"]


def parts_of(asked: Sweep) -> dict[str, list[Replication]]:
    return unseen(asked, asked.study.config({}))


def test_unseen_parts_begin_after_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.study.unseen.PARTS", 3)
    write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},3" for i in range(100)))

    def parts(keys: dict[str, Any], **workload: Any) -> dict[str, list[Replication]]:
        own = {"trace": "trace.csv", "seed": 7, **workload}
        return parts_of(sweep(tmp_path, run={**RUN, "workload": own}, **keys))

    poisson = {"kind": "poisson", "rate": 1.0}
    seeds = [Replication(9, 5), Replication(10, 5), Replication(11, 5)]  # swept on 7 and 8
    drawn = {"replicate": "seeds"}
    assert parts(drawn, requests=30, skip=5, arrivals=poisson) == {
        SEEDS: seeds,
        WINDOWS: [Replication(9, 35), Replication(10, 65)],
    }
    assert parts(drawn, requests=45, skip=5, arrivals=poisson) == {SEEDS: seeds}  # one is none
    windows: dict[str, Any] = {}
    later = {WINDOWS: [Replication(9, 20), Replication(10, 30), Replication(11, 40)]}
    assert parts(windows, requests=10) == parts(windows, requests=10, arrivals=poisson) == later
    assert parts({"replications": 1}) == {}
    sample = {"trace": "azure-conv-sample", "requests": 10, "arrivals": "offline"}
    assert parts({}, **sample)[WINDOWS] == [
        Replication(9, 10),
        Replication(10, 20),
        Replication(11, 30),
    ]


Pairs = tuple[tuple[float, float], ...]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (((9, 10), (18.9, 20), (28.8, 30)), "the gain holds: E2EL mean (ms) -1.1 ± 0.25"),
        (((8, 10), (21, 20), (27, 30)), "THE GAIN DOES NOT HOLD: E2EL mean (ms) -1.333 ± 5"),
        (((11, 10), (21.1, 20), (31.2, 30)), "THE GAIN DOES NOT HOLD: E2EL mean (ms) +1.1"),
    ],
)
def test_a_gain_holds_beyond_its_interval_only(tmp_path: Path, pairs: Pairs, said: str) -> None:
    asked = sweep(tmp_path, parameters=BUDGETS, limits={"mean_e2el_ms": {"at_most": 15}})
    sides = [[{**SERVED, "mean_e2el_ms": v} for v in side] for side in zip(*pairs, strict=True)]
    check = Check(asked, SEEDS, trial(64, *sides[0]), trial(128, *sides[1]))
    line = check.verdict(allow_refused=False)
    assert line.startswith(f"fresh seeds: {said}")
    assert re.search(r"; mean_e2el_ms is [\d.]+, not at most 15\.$", line)


def test_what_refuses_on_unseen_parts_is_not_held(tmp_path: Path) -> None:
    good, bad = ({**SERVED, "mean_e2el_ms": 1.0}, {"completed": 1, "failed": 9})
    asked = sweep(tmp_path, parameters=BUDGETS)
    check = Check(asked, WINDOWS, trial(64, good, bad), trial(128, good, good))
    line = check.verdict(allow_refused=False)
    assert line.startswith("later windows: whether the gain holds cannot be said: 9 of 20 requests")


def test_the_best_point_is_checked_on_what_the_sweep_did_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.study.unseen.PARTS", 2)
    asked = sweep(tmp_path, parameters={"max_in_flight": [1, 2]}, run={**RUN, "max_in_flight": 1})
    with simulator(tmp_path / "store") as who:
        found = checked(run_sweep(asked, who), who)
    assert found.ranked[0] != found.default
    assert [each.kind for each in found.checks] == [SEEDS, WINDOWS]
    for each in found.checks:
        assert not set(each.best.parts) & set(found.trials[0].parts)
        assert each.best.parts == each.default.parts
    write_findings(tmp_path, found, "title")
    rows = rows_of(tmp_path / "check.csv")
    assert [row["point"] for row in rows] == ["best", "best", "default", "default"] * 2
    assert list(json.loads((tmp_path / "sweep.json").read_text())["check"]) == [SEEDS, WINDOWS]
    line = next(each for each in found.sentences() if each.startswith(SEEDS))
    assert line in (tmp_path / "report.html").read_text()
