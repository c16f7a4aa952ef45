"""Which points a sweep has, what comes of them, and which are best."""

from __future__ import annotations

import json
import math
import re
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
from evenflow.study.sweep_pictures import main_effects, sensitivity
from evenflow.study.swept import Swept
from evenflow.study.trials import Replication, Trial
from evenflow.study.unseen import SEEDS, WINDOWS, Check, unseen
from tests.amounts import ALL
from tests.command_line import rows_of, write_trace
from tests.places import ROOT
from tests.sweeps import GRID, RUN, simulator, sweep

BUDGET, BUDGETS = "scheduler.token_budget", {"scheduler.token_budget": [64, 128]}
SERVED = {"completed": 10, "failed": 0}
POISSON = {"kind": "poisson", "rate": 9.0}


def simulated(asked: Sweep, folder: Path, store: str = "store") -> Swept:
    with simulator(folder / store) as who:
        return run_sweep(asked, who)


def found_of(folder: Path, **changes: Any) -> Swept:
    """Return the findings of GRID with some keys changed."""
    return simulated(sweep(folder, **changes), folder)


def trial(label: int, *values: dict[str, Any]) -> Trial:
    records = tuple(Record(f"{label}{index}", each) for index, each in enumerate(values))
    parts = tuple(Replication(index, 0) for index in range(len(values)))
    return Trial({BUDGET: label}, records, parts)


def test_a_search_may_vary_what_the_policy_calls_worth_trying(tmp_path: Path) -> None:
    """A parameter given beside the search space has the values given."""
    both = {"search_space": True, "parameters": {"scheduler.watermark": [0.0, 0.5]}}
    space = sweep(tmp_path, **both, method={"kind": "random", "points": 2}).config.parameters
    budget, seqs, watermark = space.values()
    assert [*space] == ["scheduler.token_budget", "scheduler.max_num_seqs", "scheduler.watermark"]
    assert budget == NumberRange(low=128, high=8192, log=True, integer=True)
    assert seqs == NumberRange(low=16, high=1024, log=True, integer=True)
    assert watermark == [0.0, 0.5]
    for changes, why in (
        (both, r'method: grid needs the key "parameters.scheduler.token_budget.steps", or a list'),
        ({"parameters": {}}, 'a sweep needs the key "parameters", or search_space: true'),
        ({**both, "run": {**RUN, "scheduler": "distserve"}}, "search_space: distserve has none"),
    ):
        with pytest.raises(UsageError, match=why):
            sweep(tmp_path, **changes)


@pytest.mark.parametrize(
    "parameters",
    [
        {"kv.pages": [900], "kv": [{"pages": 800}]},
        {"kv": [{"pages": 800}], "kv.pages": [900]},
        {"kv.pages": [900], "kv": [{"memory_utilization": 0.5}]},
        {"layout": [{"stages": 4}, {"stages": 3}], "stages": [1]},
        {"one": [{"stages": 4}], "other": [{"max_in_flight": 1}, {"stages": 3}]},
    ],
)
def test_two_parameters_that_set_one_key_are_refused(parameters: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"yaml:\d+: \w+(\.pages)?: sets \S+, as a parameter ab"):
        check(sweep(tmp_path, parameters=parameters))


def test_values_of_a_key_below_another_may_be_mappings(tmp_path: Path) -> None:
    arrivals = [{"kind": "poisson", "rate": 2.0}, {"kind": "poisson", "rate": 3.0}]
    asked = sweep(tmp_path, parameters={"workload.arrivals": arrivals, "scheduler": ["sarathi"]})
    check(asked)
    assert [each["workload.arrivals"] for each in asked.chosen] == arrivals


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
    listed = asked.study.points(asked.known)
    assert [each.config.workload.seed for each in listed] == [0] * len(points) + [1] * len(points)
    assert len({each.key for each in listed}) == asked.num_simulations == 2 * len(points)


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
    swept = {BUDGET: [64], "scheduler.watermark": [0.5], "max_in_flight": [1]}
    asked = sweep(tmp_path, parameters=swept)
    assert asked.default == {BUDGET: 128, "scheduler.watermark": 0.01, "max_in_flight": 2}
    assert asked.known[0] == asked.default
    named = sweep(tmp_path, parameters={"scheduler": ["vllm", RUN["scheduler"]]})
    assert named.default == {"scheduler": RUN["scheduler"]}
    assert len(named.known) == 2
    lacking = {key: value for key, value in RUN.items() if key != "stages"}
    assert sweep(tmp_path, run=lacking, parameters={"stages": [1]}).default is None
    example = load_sweep(ROOT / "examples/sweep/azure.yaml")
    check(example)
    assert example.num_simulations == 48 * 3
    assert example.default in example.known


def test_random_points_follow_from_the_seed_and_each_parameter_from_its_own(tmp_path: Path) -> None:
    space = {BUDGET: {"low": 32, "high": 512, "log": True, "integer": True}}

    def drawn(seed: int, **more: Any) -> list[tuple[Any, ...]]:
        method = {"kind": "random", "points": 20, "seed": seed}
        asked = sweep(tmp_path, method=method, parameters={**space, **more})
        return [tuple(each.values()) for each in asked.chosen]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == len(drawn(1)) > 10
    assert all(32 <= value <= 512 and isinstance(value, int) for (value,) in drawn(1))
    both = drawn(1, max_in_flight={"low": 1, "high": 1e6, "integer": True})
    assert list(dict.fromkeys(budget for budget, _ in both)) == [budget for (budget,) in drawn(1)]
    by_cap = [budget for budget, _ in sorted(both, key=lambda each: each[1])]
    assert by_cap != sorted(by_cap)


def test_replications_of_a_file_have_other_rows_unless_seeds_are_asked_for(tmp_path: Path) -> None:
    """Of a sample a seed draws the requests; of a file it would draw the arrivals alone."""
    write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},5" for i in range(9)))
    workload = {"trace": "trace.csv", "requests": 3, "skip": 1, "arrivals": POISSON}
    keys = {"run": {**RUN, "workload": workload}, "parameters": {"max_in_flight": [1, 2]}}

    def drawn(**more: Any) -> tuple[list[list[int]], list[str]]:
        found = found_of(tmp_path, **keys, **more)
        same = [line for line in found.sentences() if "all replications have the same rows" in line]
        return found.points[["seed", "skip", "total_input_tokens"]].to_numpy().tolist(), same

    assert drawn() == ([[0, 1, 36], [1, 4, 45]] * 2, [])  # 11 + 12 + 13, then 14 + 15 + 16
    rows, (line,) = drawn(replicate="seeds")
    assert rows == [[0, 1, 36], [1, 1, 36]] * 2
    assert line.startswith("NOT FAIR: ")
    workload |= {"trace": "azure-conv-sample", "skip": 0}
    assert drawn() == drawn(replicate="seeds")
    workload |= {"trace": "trace.csv", "skip": 1, "arrivals": "replay"}
    for requests in (None, 5):  # of 8 rows after the first
        workload["requests"] = requests
        with pytest.raises(UsageError, match=r"has 8: give workload\.requests, at most 4"):
            check(sweep(tmp_path, **keys))


def test_the_interval_of_a_file_has_the_right_mean_in_it_as_often_as_it_says() -> None:
    """Of 90 %; of 30 files, 24 or more have it 97 times in 100. The same rows tell nothing."""
    assert covered(None, 0.0, 30 if ALL else 10)[0] >= 0.8
    assert covered("seeds", 0.0, 3)[0] == 0


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
    worst = max(table["mean_e2el_ms"])
    limited = found_of(tmp_path, limits={"mean_e2el_ms": {"at_least": worst}})
    assert limited.ranked == [table["mean_e2el_ms"].to_list().index(worst)]
    extra = found_of(tmp_path, parameters={BUDGET: [64, 96]})
    assert (extra.default, extra.default_is_extra) == (0, True)
    assert main_effects(extra)[0].values == [64, 96]
    assert sensitivity(extra)[0].values == [64, 96, 128]


def test_points_that_fail_are_rows_too(tmp_path: Path) -> None:
    found = found_of(tmp_path, parameters={BUDGET: [0, 128]})
    assert found.points["status"].to_list() == ["failed", "failed", "completed", "completed"]
    assert "token_budget" in found.points["error"][0]
    assert math.isnan(found.points["mean_e2el_ms"][0])
    assert found.table["failed_replications"].to_list() == [2, 0]
    assert found.ranked == [1]
    assert main_effects(found)[0].values == [128]
    alone = found_of(tmp_path, parameters={BUDGET: [0]})  # all but the run as it is
    assert (alone.default_is_extra, alone.answered) == (True, [0])
    assert main_effects(alone)[0].values == []
    write_findings(tmp_path, alone, "title")


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("nsga2", marks=pytest.mark.long)])
def test_a_search_proposes_the_same_again(tmp_path: Path, sampler: str) -> None:
    pytest.importorskip("optuna")
    budgets = {"low": 16, "high": 512, "log": True, "integer": True}
    asked = sweep(
        tmp_path,
        parameters={BUDGET: budgets, "max_in_flight": [1, 2, 3], "dispatch": ["stage0", "eager"]},
        method={"kind": "optuna", "trials": 8, "batch": 4, "seed": 3, "sampler": sampler},
        objectives=[{"metric": "mean_ttft_ms"}, {"metric": "completed", "goal": "maximize"}],
        limits={"mean_tpot_ms": {"at_most": 1000}},
        replications=1,
    )
    first = simulated(asked, tmp_path)
    kept = Store(tmp_path / "part")
    for each in first.trials[:5]:
        kept.put(each.records[0])
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
    assert [each.mean("gpus") for each in found.trials] == [4, 6, 1]
    assert found.trials[1].mean("dollars_per_hour") == 12
    assert found.trials[1].mean("dollars_per_million_tokens") > 0
    for one in found.trials:
        values = one.records[0].values
        given, got = (values["output_throughput_per_gpu"], values["output_speed_per_user"])
        assert given == values["output_throughput"] / values["gpus"]
        assert got == 1e3 / values["mean_tpot_ms"]
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
    def dominated(point: tuple[float, ...]) -> bool:
        no_worse = (each for each in costs if all(a <= b for a, b in zip(each, point, strict=True)))
        return any(each != point for each in no_worse)

    assert pareto_front(costs) == [not dominated(point) for point in costs]


def test_sensitivity_is_relative_to_the_default_within_a_replication(tmp_path: Path) -> None:
    def of(budget: int, *runs: tuple[float, float]) -> Trial:
        return trial(budget, *({"mean_ttft_ms": a, "mean_e2el_ms": b} for a, b in runs))

    asked = sweep(tmp_path, parameters=BUDGETS)
    found = Swept(asked, [of(64, (10, 3), (100, 4)), of(128, (20, 3), (200, 2))], 1)
    (panel,) = sensitivity(found)
    assert (panel.parameter, panel.values, panel.default) == (BUDGET, [64, 128], 1)
    assert panel.means["mean_ttft_ms"].to_numpy().tolist() == [[0.5, 0.0], [1.0, 0.0]]
    assert panel.means["mean_e2el_ms"]["mean"].to_list() == [1.5, 1.0]


def test_a_run_may_lie_beside_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "RUN.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    asked = sweep(tmp_path, "run.workload.requests=5", run="RUN.yaml")
    assert asked.study.config({"max_in_flight": 1}).workload.requests == 5
    assert GRID["run"]["workload"]["requests"] == 6
    with pytest.raises(UsageError, match=r"run\.workload\.requests=0"):
        sweep(tmp_path, "run.workload.requests=0", run="RUN.yaml").study.config({})


def test_a_point_that_serves_little_is_no_answer(tmp_path: Path) -> None:
    tight = {**RUN, "kv": {"pages": 400}, "workload": {**RUN["workload"], "requests": 20}}
    pages = {"kv.pages": [1, 30, 80, 300, 1000]}
    found = found_of(tmp_path, run=tight, parameters=pages, replications=1)
    completed = [each.served.completed for each in found.trials]
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
    overloaded = "The best point is overloaded: 9 requests/s arrive and 5 are served"
    assert overloaded in list(found.sentences())[1]
    write_findings(tmp_path, found, "title")
    page = (tmp_path / "report.html").read_text()
    rows = re.findall("1, default, overloaded</th>(.*?)</tr>", page)
    best, each = (re.findall("<td>(.*?)</td>", row) for row in rows)
    assert best == ["budget=128", "8", "-", "3.5", "-", "+1"]
    assert each == ["128", "8", "-", "3.5", "-"]


def test_a_best_point_on_the_edge_is_told(tmp_path: Path) -> None:
    def edge(*e2el_ms: float) -> list[str]:
        trials = [trial(64 + i, SERVED | {"mean_e2el_ms": ms}) for i, ms in enumerate(e2el_ms)]
        lines = Swept(sweep(tmp_path, parameters=BUDGETS), trials, None).sentences()
        return [line for line in lines if "edge" in line]

    assert edge(3.0, 2.0, 1.0) == [
        "The best is on the edge of what was tried: budget=66 is the most."
    ]
    assert edge(2.0, 1.0, 3.0) == edge(2.0, 1.0) == []


def test_unseen_parts_begin_after_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.study.unseen.PARTS", 3)
    write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},3" for i in range(100)))

    def parts(keys: dict[str, Any], **workload: Any) -> dict[str, list[tuple[int, int]]]:
        own = {"trace": "trace.csv", "seed": 7, **workload}
        asked = sweep(tmp_path, run={**RUN, "workload": own}, **keys)
        found = unseen(asked, asked.study.config({}))
        return {kind: list(map(tuple, each)) for kind, each in found.items()}

    seeds = {SEEDS: [(9, 5), (10, 5), (11, 5)]}  # swept on 7 and 8
    drawn = {"replicate": "seeds"}
    windows = {WINDOWS: [(9, 35), (10, 65)]}
    assert parts(drawn, requests=30, skip=5, arrivals=POISSON) == seeds | windows
    assert parts(drawn, requests=45, skip=5, arrivals=POISSON) == seeds  # one is none
    later = {WINDOWS: [(9, 20), (10, 30), (11, 40)]}
    assert parts({}, requests=10) == parts({}, requests=10, arrivals=POISSON) == later
    assert parts({"replications": 1}) == {}
    sample = {"trace": "azure-conv-sample", "requests": 10, "arrivals": "offline"}
    assert parts({}, **sample)[WINDOWS] == [(9, 10), (10, 20), (11, 30)]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (((9, 10), (18.9, 20), (28.8, 30)), "the gain holds: E2EL mean (ms) -1.1 ± 0.25"),
        (((8, 10), (21, 20), (27, 30)), "THE GAIN IS NOT CERTAIN: E2EL mean (ms) -1.333 ± 5"),
        (((11, 10), (21.1, 20), (31.2, 30)), "THE GAIN DOES NOT HOLD: E2EL mean (ms) +1.1"),
        (((1, 1), (None, 1)), "whether the gain holds cannot be said: 9 of 20 requests"),
    ],
)
def test_a_gain_holds_beyond_its_interval_only(
    tmp_path: Path, pairs: tuple[tuple[float | None, float], ...], said: str
) -> None:
    asked = sweep(tmp_path, parameters=BUDGETS, limits={"mean_e2el_ms": {"at_most": 15}})
    refused = {"completed": 1, "failed": 9}
    sides = [
        [{**SERVED, "mean_e2el_ms": value} if value else refused for value in side]
        for side in zip(*pairs, strict=True)
    ]
    check = Check(asked, SEEDS, trial(64, *sides[0]), trial(128, *sides[1]))
    line = check.verdict(allow_refused=False)
    assert line.startswith(f"fresh seeds: {said}")
    missed = re.search(r"; mean_e2el_ms is [\d.]+, not at most 15\.$", line)
    assert (missed is None) == ("cannot" in said)


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
