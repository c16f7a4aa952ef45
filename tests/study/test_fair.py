"""Intervals agree with SciPy's; what makes a comparison unfair is said, once, and nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evenflow.config.run import RunConfig
from evenflow.errors import UsageError
from evenflow.experiments.figures.study import unfair
from evenflow.report.shown import Table
from evenflow.report.words import refusals
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome, Served
from evenflow.sim import simulate
from evenflow.study.fair import (
    Side,
    alike,
    alone,
    doubts,
    interval,
    paired_difference,
    require_served,
    runs_told,
    unpaired_difference,
)
from evenflow.study.points import Record
from evenflow.study.slo import Condition
from evenflow.study.trials import Replication, Trial, table
from evenflow.study.trials import unfair as unfair_of
from evenflow.types import Request
from tests.command_line import evenflow, rows_of
from tests.worlds import small_world


def side(
    completed: int = 500,
    busy: float = 0.8,
    share: float = 0.0,
    commit: str = "a",
    queue_ms: float = 40.0,
    **config: Any,
) -> Side:
    provenance = {
        "config": config,
        "cost_source": {"extrapolated_share": share},
        "evenflow_version": "0.1.0",
        "git_commit": commit,
    }
    told = {"completed": completed, "busy_share": busy, "overloaded": 0}
    return Side({**told, "median_queue_ms": queue_ms, "mean_itl_ms": 20.0}, provenance)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ({}, {"completed": 499}, "not as many requests were completed: 500 with a, 499 with b"),
        ({}, {"kv": {"prefix_cache": True}}, "prefix caches are on with b, and not with a"),
        ({}, {"workload": {"after": [{}]}}, "prefix caches are warm with b, and not with a"),
        (
            {},
            {"busy": 0.97},
            "within 5 % of saturation with b (stages compute 97% of the time, half",
        ),
        ({}, {"busy": 0.97, "queue_ms": 19.0}, None),
        ({}, {"share": 0.3}, "30% of the time predicted with b rests on no measurement"),
        ({}, {"commit": "b"}, "made by other versions of evenflow: 0.1.0 (commit a) and 0.1.0 (co"),
        (
            {"runtime": "vllm-0.8"},
            {"runtime": "vllm-0.19"},
            "the CPU time of other versions of an engine: vllm-0.19 and vllm-0.8",
        ),
        ({}, {}, None),
        ({"runtime": "vllm-0.8"}, {"runtime": "gllm"}, None),
        ({"runtime": {"schedule_s": 1e-3}}, {"runtime": "gllm"}, None),
    ],
)
def test_what_is_not_fair_is_said(a: dict[str, Any], b: dict[str, Any], told: str | None) -> None:
    lines = doubts({"a": side(**a), "b": side(**b)})
    assert [line[: len(told or "")] for line in lines] == ([told] if told else [])
    assert doubts({"alone": side(3, 0.99, 0.9)}) == []


FIGURE = {
    "title": "Two budgets",
    "source": "a test",
    "run": {
        "stages": 2,
        "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 2e-5},
        "kv": {"pages": 200},
        "scheduler": "sarathi",
        "workload": {"trace": "trace.csv", "arrivals": "offline"},
    },
    "systems": {
        "small": {"scheduler": {"name": "sarathi", "token_budget": 32}},
        "cached": {"scheduler": "sarathi", "kv": {"prefix_cache": True}},
    },
    "study": {"requests": 20, "seeds": [0]},
    "vary": ["system"],
    "measure": "shares",
    "shown": ["system", "mean_ttft_ms"],
    "plot": {"panels": [{"kind": "bars", "x": "system", "y": {"mean_ttft_ms": "TTFT"}}]},
}
PLANNED = {
    "model": "Llama-3.1-8B",
    "gpu": "L20",
    "stages": 1,
    "max_model_len": 8192,
    "scheduler": "sarathi",
    "workload": {
        "trace": "azure-conv-sample",
        "requests": 20,
        "arrivals": {"kind": "poisson", "rate": 2},
    },
}
SWEEP = {"run": "RUN.yaml", "parameters": {"scheduler.token_budget": [32, 64]}}


def trial(share: float = 0.0, **keys: Any) -> Trial:
    """Return a trial as a study makes it: values, what its costs rest on, and its keys."""
    record = Record("", {"completed": 500}, cost_source={"extrapolated_share": share})
    return Trial({}, (record,), (), RunConfig.model_validate(PLANNED | keys))


def test_a_metric_of_no_requests_is_no_number_of_a_trial() -> None:
    none = Record("", {"completed": 0, "failed": 9, "mean_ttft_ms": None}, why="too long")
    some = Record("", {"completed": 9, "failed": 0, "mean_ttft_ms": 5.0})
    tried = Trial({"pages": 1}, (none, some), (Replication(0, 0), Replication(1, 0)))
    assert [math.isnan(value) for value in tried.values("mean_ttft_ms")] == [True, False]
    assert math.isnan(tried.mean("mean_ttft_ms"))
    assert tried.served == Served(18, 9, "too long")
    alone = replace(tried, records=(none,), parts=(Replication(0, 0),))
    assert table([alone])["mean_ttft_ms"].dtype == float
    assert not Condition("mean_ttft_ms", 9.0).holds(none.values)
    assert not Condition("failed", 9.0).holds(none.values), "it served nothing"


def test_trials_of_a_study_are_judged_by_the_same_rules() -> None:
    assert unfair_of({"a": trial(), "b": trial()}) == []
    cached = unfair_of({"a": trial(kv={"prefix_cache": True}), "b": trial()})
    assert cached == ["NOT FAIR: prefix caches are on with a, and not with b"]
    (guessed,) = unfair_of({"a": trial(0.4), "b": trial()})
    assert guessed == "NOT FAIR: 40% of the time predicted with a rests on no measurement"


def test_one_run_that_is_held_against_a_measurement_or_a_limit() -> None:
    assert alone("it", side()) == []
    weak = alone("it", side(49, share=0.5))
    assert weak == [
        "49 requests are few: others may tell otherwise",
        "50% of the time predicted with it rests on no measurement",
    ]


def test_requests_that_were_not_completed_are_said_first_and_unfair_from_one_in_a_hundred() -> None:
    few, many = Served(1000, 995, "too long"), Served(1000, 823, "too long")
    assert refusals({"a": Served(9, 9), "b": few}) == [
        "with b, 5 of 1,000 requests (0.5%) were refused or given up; the first: too long"
    ]
    assert refusals({"a": many, "b": many}) == [
        "NOT FAIR: 177 of 1,000 requests (17.7%) were refused or given up; the first: too long"
    ]
    require_served({"a": Served(1000, 900)}, allowed=False)
    require_served({"a": many}, allowed=True)
    with pytest.raises(
        UsageError, match=r"^with b, 177 of 1,000 .* max_model_len .* model .*trace"
    ):
        require_served({"a": few, "b": many}, allowed=False)
    lost = Side({"completed": 980, "failed": 20})
    assert alone("it", lost) == ["20 of 1,000 requests (2.0%) were refused or given up"]
    assert Served.of_all([few, many]) == Served(2000, 1818, "too long")


def test_lines_that_differ_in_numbers_are_one() -> None:
    assert alike(["12 are few", "b", "13 are few"]) == ["12 are few (2 times)", "b"]
    assert alike([]) == []


def test_a_figure_holds_systems_of_one_panel_against_each_other() -> None:
    def of(system: str, load: float, **keys: Any) -> Trial:
        return replace(trial(**keys), labels={"system": system, "load": load})

    assert unfair([of("a", 0.5), of("b", 0.5), of("a", 0.9)]) == []
    cached = of("b", 0.9, kv={"prefix_cache": True})
    (line,) = unfair([of("a", 0.5), of("b", 0.5), of("a", 0.9), cached])
    assert line == "prefix caches are on with b, and not with a"


CACHED = "NOT FAIR: prefix caches are on with {}, and not with {}"
SLO = "--slo=p99_ttft_ms=5000"


def write_questions(folder: Path) -> None:
    for name, keys in (("FIGURE", FIGURE), ("PLANNED", PLANNED), ("SWEEP", SWEEP)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(keys))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compare RUN.yaml --schedulers=sarathi,vllm", ()),
        ("sweep SWEEP.yaml", ()),
        (f"plan PLANNED.yaml --gpus=1,2 {SLO} --schedulers=sarathi", ()),
        ("capacity RUN.yaml --slo=p99_ttft_ms=500 --tolerance=0.5", ()),
        ("figures FIGURE.yaml", ("cached", "small")),
        ("diff a b", ("b", "a")),
    ],
)
def test_every_command_that_compares_says_it(
    words: str, told: tuple[str, ...], folder: Path
) -> None:
    """The tests of those that hold a run against a measurement have it, too."""
    write_questions(folder)
    if words.startswith("diff"):
        evenflow("simulate", "RUN.yaml", "--out=a")
        evenflow("simulate", "RUN.yaml", "--out=b", "--set", "kv.prefix_cache=true")
    status, output, errors = evenflow(*words.split())
    assert status == 0, errors
    said = (output + errors).replace("\n", " ")
    assert "NOT FAIR: 20 requests are few" in said
    assert not told or CACHED.format(*told) in said


WRITTEN = {
    "compare": ("comparison.csv", "report.html"),
    "plan": ("plan.csv", "plan.json"),
    "capacity": ("rates.csv", "capacity.json"),
    "figures": ("FIGURE.csv", "FIGURE.json"),
}
"""The table and the page or facts of each answer."""


@pytest.mark.parametrize(
    "words",
    [
        "compare RUN.yaml --schedulers=sarathi",
        f"plan PLANNED.yaml --gpus=1 {SLO} --schedulers=sarathi --budgets=512",
        "capacity RUN.yaml --slo=p99_ttft_ms=25 --tolerance=0.5",
        "figures FIGURE.yaml",
    ],
)
def test_an_answer_from_a_part_of_the_requests_is_none_unless_that_is_allowed(
    words: str, folder: Path
) -> None:
    """Of both, more than a tenth of 20 requests are longer than is allowed."""
    write_questions(folder)
    command = words.partition(" ")[0]
    length = "max_model_len=700" if command == "plan" else "max_model_len=60"
    short = (*words.split(), "--out=out", "--set", length)
    status, output, errors = evenflow(*short)
    assert (status, output) == (2, "")
    (line,) = errors.splitlines()
    assert re.search(r"\d+ of 20 requests .* exceed max_model_len \d+: .*--allow-refused", line)
    assert not [path for path in Path("out").glob("*") if path.name not in ("store", "points")]
    status, output, errors = evenflow(*short, "--allow-refused")
    assert status == 0, errors
    said = errors if command == "figures" else output
    assert re.search(r"NOT FAIR: \d+ of 20 requests \(\d+.0%\) were refused", said.splitlines()[0])
    table, page = WRITTEN[command]
    assert int(rows_of(f"out/{table}")[0]["failed"]) > 2
    assert re.search(r'"failed": [1-9]|"not_served": "|NOT FAIR: ', Path("out", page).read_text())


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8).filter(lambda v: max(v) > min(v) + 1))
def test_the_interval_is_that_of_scipy(values: list[float]) -> None:
    found, mean = interval(values), math.fsum(values) / len(values)
    ends = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=stats.sem(values))
    assert found.ends == pytest.approx(ends, rel=1e-9, abs=1e-6)
    assert found.n == len(values)


def test_one_replication_says_nothing_of_the_spread() -> None:
    found = interval([3.0])
    assert (found.mean, found.n, math.isnan(found.half_width)) == (3.0, 1, True)
    assert not found.is_above_zero


def test_pairs_that_share_their_noise_are_told_apart() -> None:
    noise = [100.0, 250.0, 70.0]
    slower = [value + 2 + 0.1 * index for index, value in enumerate(noise)]
    assert interval(slower).half_width > 200
    difference = paired_difference(slower, noise)
    assert difference.mean == pytest.approx(2.1)
    assert difference.is_above_zero
    assert paired_difference(noise, slower).is_below_zero


def test_independent_draws_are_compared_as_welch_does() -> None:
    values, others = [3.0, 5.5, 4.1, 7.0], [1.0, 1.2, 0.9, 1.3, 1.1, 0.8]
    found = unpaired_difference(values, others)
    right = stats.ttest_ind(values, others, equal_var=False)
    low, high = right.confidence_interval(0.95)
    assert found.mean == pytest.approx(right.statistic * right._standard_error)
    assert found.half_width >= (high - low) / 2  # of 3.02 degrees, not of 3
    assert found.half_width == pytest.approx((high - low) / 2, rel=0.01)
    assert math.isnan(unpaired_difference([1.0], others).half_width)
    assert unpaired_difference([2.0, 2.0], [1.0, 1.0]).ends == (1.0, 1.0)


def test_how_much_a_run_serves_that_is_too_short_to_tell_is_a_dash() -> None:
    """Each gets its last token 10 s after its first one; all arrive within 4 s."""
    requests = [Request(index, 0.1 * index, 16, 1000) for index in range(41)]
    world = small_world(requests, "vllm", times_s=(0.01, 0.0), total_pages=9999, max_model_len=2000)
    result = replace(simulate(world), provenance={"setup": "simulated"})
    parts = list(runs_told([Outcome(result, summarize(result), label="vllm")]))
    (table_of_runs,) = (part for part in parts if isinstance(part, Table))
    cells = dict(map(tuple, table_of_runs.rows))
    assert (cells["requests/s offered"], cells["requests/s served"]) == ("10", "-")
    assert "vllm: the run is too short to tell" in str(parts)
