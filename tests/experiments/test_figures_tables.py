"""A figure's cases, the columns made of its runs, our values of its claims, and its panels."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evenflow.errors import UsageError
from evenflow.experiments.figures import claims, own
from evenflow.experiments.figures.cases import capacities, cases_of, over, rates, tbt_slo
from evenflow.experiments.figures.claims import (
    answer,
    answers,
    ends,
    load_claims,
    load_misses,
    worst,
)
from evenflow.experiments.figures.looks import COLORS, PAPER_WORDS, colors_of
from evenflow.experiments.figures.make import markdown, missed
from evenflow.experiments.figures.panels import draw
from evenflow.experiments.figures.schema import FigureKeys, Query
from evenflow.study.uncertainty import COSTS
from tests.figure_studies import study_of


@pytest.mark.parametrize(
    ("name", "vary", "overrides", "expected"),
    [
        ("gllm_13", ("pair", "trace"), (), (6, {"pair": "A100-40G + Qwen2.5-14B"})),
        ("gllm_13", ("pair", "trace"), ("gpu=L20", "model=Mistral-7B", "workload.trace=x"),
         (1, {"pair": "L20 + Mistral-7B", "trace": "x"})),
        ("tdpipe_11", ("pair", "gpus", "system"), (), (72, {"gpus": 1, "system": "TP+SB"})),
        ("tdpipe_13", ("pair", "rule"), (), (16, {"rule": "20%"})),
        ("sarathi_10", ("deployment", "dataset", "slo"), (), (8, {"slo": "strict"})),
        ("sarathi_12", ("deployment", "slo_s"), ("study.limits=3",), (6, {"slo_s": 0.1})),
        ("gllm_16", ("parameter",), ("study.vary={min_prefill: [8, 16]}",), (2, {"value": 8})),
        ("blog_disaggregation", ("rate", "system"), (), (21, {"rate": 1})),
    ],
)  # fmt: skip
def test_the_axes_of_the_figures(
    name: str,
    vary: tuple[str, ...],
    overrides: tuple[str, ...],
    expected: tuple[int, dict[str, Any]],
    tmp_path: Path,
) -> None:
    cases = cases_of(study_of(name, tmp_path, *overrides), vary)
    count, first = expected
    assert cases[0].values.items() >= first.items()
    assert len(cases) == count


def test_the_keys_of_an_axis_of_ones_own_lie_over_the_system(tmp_path: Path) -> None:
    rule = cases_of(study_of("tdpipe_13", tmp_path), ("pair", "rule"))[0]
    config = rule.config(study_of("tdpipe_13", tmp_path))
    assert config.scheduler.params["kv_occupancy_ratio"] == 0.2
    assert config.scheduler.params["predictor"] == {"kind": "noisy"}


def test_only_sarathi_gets_the_budget_of_an_slo(tmp_path: Path) -> None:
    def params(*overrides: str) -> dict[str, Any]:
        study = study_of("sarathi_10", tmp_path, *overrides)
        cases = cases_of(study, ("dataset", "deployment", "slo", "system"))[3:6]
        return {case.values["system"]: case.config(study).scheduler.params for case in cases}

    assert params()["Sarathi-Serve"]["token_budget"] == 2048
    assert params()["vLLM"] == {"max_num_seqs": 128}
    assert params("scheduler.max_num_seqs=7")["Orca"] == {"max_num_seqs": 7}


def test_rates_are_shares_of_saturation_with_two_digits_or_those_given(tmp_path: Path) -> None:
    study = study_of("gllm_10", tmp_path, "study.loads=[0.1, 0.5, 1.0]")
    assert rates(study, 12.345) == [1.2, 6.2, 12.0]
    assert rates(study_of("gllm_10", tmp_path, "study.rates=[1, 3]"), 12.345) == [1.0, 3.0]


SLOW = {"base_s": 0.01, "per_token_s": 1e-4}


def test_capacities_that_are_none_and_deployments_that_do_not_fit(tmp_path: Path) -> None:
    study = study_of("sarathi_10", tmp_path, "study.seeds=[3]", "study.tolerance=0.1")
    trace = {"trace": "sharegpt-sample", "requests": 20}
    sized = {"scheduler": "sarathi", "workload": trace, "max_model_len": 2048}
    easy = {**sized, "model": "Mistral-7B", "costs": {"kind": "affine", **SLOW}}
    large = {**sized, "model": "Falcon-180B"}
    cases = {
        ("met",): (study.config(easy), tbt_slo(10.0, 1000.0)),
        ("never",): (study.config(easy), tbt_slo(1e-6, 2.0)),
        ("too large",): (study.config(large), tbt_slo(1.0, 2.0)),
    }
    table = capacities(study, cases, ("case",)).set_index("case")
    assert table.capacity["never"] == 0
    assert table.status["met"] in ("found", "too_short")
    assert "does not fit" in table.error["too large"]
    assert list(table.seed) == [3, 3, 3]
    assert study.facts()["runs"] > 0
    with pytest.raises(UsageError, match="does not fit"):
        capacities(study, {("too large",): cases["too large",]}, ("case",))


def rows(columns: str, *values: tuple[Any, ...]) -> pd.DataFrame:
    return pd.DataFrame(values, columns=columns.split())


def test_a_metric_is_over_that_of_the_reference_run_all_else_equal() -> None:
    table = rows(
        "system rate seed speed",
        *(("A", 1, 0, 20.0), ("A", 1, 1, 30.0), ("B", 1, 0, 10.0), ("B", 1, 1, 10.0)),
        ("B", 2, 0, 5.0),
    )
    found = over(table, {"ratio": "speed"}, {"system": "A"})["ratio"]
    assert found.tolist()[:4] == [1.0, 1.0, 0.5, pytest.approx(1 / 3)]
    assert np.isnan(found[4])


def test_a_reference_may_be_another_in_every_row() -> None:
    table = rows("value seed time default", (16, 0, 9.0, 32), (32, 0, 10.0, 32), (64, 0, 12.0, 32))
    assert over(table, {"x": "time"}, {"value": "default"})["x"].tolist() == [0.9, 1.0, 1.2]


def test_ttft_turns_at_five_times_its_lowest_and_stays_turned(tmp_path: Path) -> None:
    points = [("P", "T", "S", rate, ms) for rate, ms in ((1, 10), (2, 40), (3, 60), (4, 45))]
    table = rows("pair trace system rate mean_ttft_ms", *points)
    assert own.turning_points(study_of("gllm_10", tmp_path), table).tolist() == [2] * 4


def test_throughput_is_over_the_fewest_gpus_that_hold_the_model(tmp_path: Path) -> None:
    points = [("P", "S", gpus, rate) for gpus, rate in ((1, np.nan), (2, 50.0), (4, 110.0))]
    table = rows("pair system gpus total_token_throughput", *points)
    assert own.over_smallest(study_of("gllm_12", tmp_path), table).tolist()[1:] == [1.0, 2.2]


RUNS = rows(
    "place load system seed rate",
    *(("a", 0.5, "S", 0, 2.0), ("a", 0.5, "S", 1, 4.0), ("a", 0.5, "T", 0, 1.0)),
    *(("a", 0.5, "T", 1, 1.0), ("b", 0.9, "S", 0, 8.0), ("b", 0.9, "T", 0, 2.0)),
    ("c", 0.9, "S", 0, 8.0),
    ("c", 0.9, "T", 0, 0.0),
)


@pytest.mark.parametrize(
    ("query", "ours"),
    [
        ({"where": {"place": "a", "system": "S"}}, 3.0),
        ({"where": {"load": 0.6, "system": "S", "place": "a"}}, 3.0),  # the nearest load
        ({"where": {"place": "a", "system": "S"}, "how": "geomean"}, pytest.approx(8**0.5)),
        ({"where": {"place": "a", "system": "S"}, "take": "1/rate"}, 0.375),
        ({"where": {"system": "S"}, "over": {"system": "T"}, "best": "max"}, 4.0),
        ({"where": {"system": "S"}, "over": {"system": "T"}, "best": ["min", "max"]}, [3.0, 4.0]),
        ({"where": {"system": "S"}, "best": "range"}, 5.0),
        ({"where": {"system": {"s": "S", "t": "T"}, "place": "b"}}, {"s": 8.0, "t": 2.0}),
        ({"where": {"place": ["a", "b"], "system": "S"}}, [3.0, 8.0]),
        ({"where": {"place": ["a", "b"], "system": "S"}, "then": "max"}, 8.0),
        ({"where": {"place": "nowhere"}}, None),
        ({"then": "min", "where": {"place": ["b", "a"], "system": "S"}}, 3.0),
        ({"where": {"system": "T", "place": "c"}, "over": {"system": ["S", "T"]}}, [0.0, None]),
    ],
)
def test_our_value_of_a_claim(query: dict[str, Any], ours: Any) -> None:
    assert answer(RUNS, Query.model_validate({"take": "rate", **query})) == ours


def test_a_number_that_an_axis_has_in_words_is_found() -> None:
    table = rows("order rate", ("0", 1.0), ("0.44", 3.0))
    assert answer(table, Query.model_validate({"take": "rate", "where": {"order": 0.44}})) == 3.0


@pytest.mark.parametrize(
    ("paper", "query", "marks", "missed"),
    [
        ({"s": 9.0, "t": 1.03}, {"where": {"place": "a", "system": {"s": "S", "t": "T"}}},
         [9, 9, 1.03, 1.03, 0, 0, 0, 0], True),
        (2.1, {"where": {"place": "b", "load": 0.9, "system": "T"},
               "over": {"place": "a", "load": 0.5}},
         [0, 0, 0, 0, 0, 2.1, 0, 0], False),
        (4.0, {"where": {"system": "S"}, "over": {"system": "T"}, "best": "max"},
         [0, 0, 0, 0, 0, 2, 0, 0], False),
        ("<= 5", {"where": {"system": "S", "place": ["a", "b"]}, "then": "max"}, [], False),
        ("<= 5", {"where": {"system": "T"}, "best": "max"}, [0, 0, 0, 0, 0, 5, 0, 0], False),
        ("> 5", {"where": {"system": "T", "place": "b"}}, [], False),
    ],
)  # fmt: skip
def test_the_papers_value_stands_where_ours_would_have_to_be(
    paper: Any, query: dict[str, Any], marks: list[float], missed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(claims, "load_claims", lambda: {"one": claim(paper)})
    asked = {"one": Query.model_validate({"take": "rate", **query})}
    told = claims.with_papers(RUNS, asked)
    if not marks:
        assert list(told) == list(RUNS)
        return
    assert told["rate, paper"].fillna(0).tolist() == marks
    assert bool(told["rate, missed"].any()) == missed
    assert not claims.with_papers(RUNS, asked, judged=False)["rate, missed"].any()
    panel = {"kind": "bars", "x": "place", "y": {"rate": "{system}"}, "hue": ["system"]}
    figure = draw({"panels": [panel]}, told, {})
    drawn = {look: {float(y) for line in figure.axes[0].lines if line.get_marker() == look
                    for y in line.get_ydata() if y > 0} for look in "Dx"}  # fmt: skip
    assert drawn["D"] == {mark for mark in marks if mark}
    assert drawn["x"] == ({9.0} if missed else set())
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [PAPER_WORDS, *(["missed"] if missed else [])]
    twice = {"let": {"twice": "2 * rate"}, "panels": [panel | {"y": {"twice": "x"}}]}
    assert not draw(twice, told, {}).legends, "no value of the paper's is drawn"


def test_a_claim_may_have_a_query_for_each_part() -> None:
    parts = {
        "all": {"where": {"system": "S"}},
        "two": {"where": {"place": ["a", "b"]}, "best": "max"},
    }
    keys = {"title": "x", "source": "y", "run": {}, "study": {}}
    asked = {name: {"take": "rate", **query} for name, query in parts.items()}
    plan = FigureKeys.model_validate({**keys, "claims": {"one": asked}})
    assert answer(RUNS, plan.claims["one"]) == {"all": pytest.approx(19 / 3), "two": [3.0, 8.0]}


def test_a_claim_of_a_table_without_seeds() -> None:
    table = pd.DataFrame(
        {"prompt": [1, 1, 2, 2], "chunk": [5, 6, 5, 6], "ms": [1.0, 3.0, 2.0, 4.0]}
    )
    query = {"take": "ms", "where": {"chunk": 6}, "over": {"chunk": 5}, "best": "max"}
    assert answer(table, Query.model_validate(query)) == 3


def test_labels_side_by_side_have_colours_of_their_own() -> None:
    assert COLORS["TD-Pipe"] == COLORS["gLLM"]
    found = colors_of(["TD-Pipe", "PP+HB", "gLLM", "unheard of"])
    assert len(set(found.values())) == 4
    assert found["PP+HB"] == COLORS["PP+HB"]


DRAWN = rows(
    "pair system gpus seed speed steady error",
    *(("P", "gLLM", 1, 0, np.nan, np.nan, "it does not fit"), ("P", "gLLM", 2, 0, 4.0, 5.0, None)),
    *(("P", "gLLM", 2, 1, 6.0, 7.0, None), ("P", "vLLM", 1, 0, 2.0, 2.5, None)),
    *(("P", "vLLM", 2, 0, np.nan, np.nan, "no such key"), ("Q", "gLLM", 1, 0, 1.0, 1.0, None)),
)


def axes_of(**panel: Any) -> list[Any]:
    common = {"x": "gpus", "y": {"speed": "{system}"}, "hue": ["system"], **panel}
    return list(draw({"panels": [common]}, DRAWN, {"limit": 3}).axes)


def texts(axes: Any) -> list[str]:
    return [text.get_text().strip() for text in axes.texts if text.get_text()]


def test_bars_have_whiskers_words_and_why_they_are_none() -> None:
    left, right = axes_of(
        kind="bars", each="pair", also={"speed": "steady"}, write="{:.1f}", legend={}
    )
    assert (left.get_title(), right.get_title()) == ("P", "Q")
    assert [patch.get_height() for patch in left.patches] == [0, 5, 2, 0]
    assert texts(left) == ["OOM", "5.0", "2.0", "not possible"]
    assert left.get_legend() is not None
    assert right.get_legend() is None


@pytest.mark.parametrize(("paper", "at"), [(6.2, 6.355), (4.0, 6.0)])
def test_words_over_a_bar_stand_clear_of_the_papers_diamond(paper: float, at: float) -> None:
    marks = {"speed, paper": [np.nan, paper, paper, *[np.nan] * 3], "speed, missed": 0.0}
    told = DRAWN.assign(**marks)
    panel = {"kind": "bars", "x": "gpus", "y": {"speed": "{system}"}, "hue": ["system"]}
    (axes,) = draw({"panels": [panel | {"write": "{:.1f}"}]}, told, {}).axes
    (over,) = (text.xy[1] for text in axes.texts if text.get_text() == "5.0")
    assert over == pytest.approx(at)


def test_lines_skip_what_failed_and_the_legend_may_have_their_numbers() -> None:
    (axes,) = axes_of(
        kind="lines", where="pair == 'P'", write="{speed:.1f}", line=1, also={"speed": "steady"},
        bands={"said": [1, 2]}, legend={"title": "at most {limit}"},
    )  # fmt: skip
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["gLLM", "vLLM"]
    assert axes.get_legend().get_title().get_text() == "at most 3"
    assert texts(axes) == ["said"]


def test_within_runs_words_are_of_all_seeds_and_a_run_that_failed_has_no_panel() -> None:
    run = {"pair": "P", "system": "S", "time_s": [0.0, 1.0], "busy": [1.0, 0.0], "error": None}
    runs = [{**run, "seed": 0, "busy_share": 0.5}, {**run, "seed": 1, "busy_share": 0.7}]
    failed = {"pair": "Q", "system": "S", "seed": 0, "error": "it does not fit"}
    plot = {
        "rows": ["pair"],
        "title": "{pair}: {busy_share[min]:.0%} to {busy_share[max]:.0%} of {seeds}",
        "panels": [{"kind": "busy"}],
    }
    (axes,) = draw(plot, pd.DataFrame([*runs, failed]), {"seeds": [0, 1]}).axes
    assert axes.get_title("left") == "P: 50% to 70% of 2"
    (line,) = axes.lines
    assert line.get_ydata()[0] == 50, "the first seed is drawn"


@pytest.mark.parametrize(
    ("plot", "test"),
    [
        ({"rows": ["pair"], "title": "{pair}!"}, lambda axes: axes[0].get_title("left") == "P!"),
        ({"down": True}, lambda axes: len(axes) == 1),
        ({"legend": {}}, lambda axes: len(axes[0].figure.legends) == 1),
        ({"let": {"speed": "10 * speed"}}, lambda axes: axes[0].get_ylim()[1] > 50),
    ],
)
def test_panels_in_rows(plot: dict[str, Any], test: Callable[[list[Any]], bool]) -> None:
    panel = {"kind": "bars", "x": ["pair", "gpus"], "y": {"speed": "all"}, "strong": "P\n2"}
    numbers = {"metrics": ["speed", "steady"]}
    assert test(list(draw({"panels": [panel], **plot}, DRAWN, numbers).axes))


def test_a_footnote_names_the_claims_that_are_wrong() -> None:
    assert missed({"tdpipe-stealing-l20": 0.99, "blog-transfer": 2.24}) == (
        "Not as published: with over without work stealing, L20 + 32B."
    )
    assert missed({"blog-transfer": 2.24}) == ""


def test_the_bar_that_others_are_over_has_no_words() -> None:
    (axes,) = axes_of(kind="bars", x="pair", y={"speed": "a"}, hue=[], write="{:.0f}", strong="P")
    assert texts(axes) == ["1"]


def test_stacks_lie_and_defaults_are_marked() -> None:
    (axes,) = axes_of(
        kind="lying", x="pair", y={"speed": "a", "steady": "b"}, hue=[], write="{speed:.0f}"
    )
    assert len(axes.patches) == 4
    (axes,) = axes_of(kind="stack", x="pair", y={"speed": "a"}, hue=[], levels={"steady": "limit"})
    assert axes.get_legend_handles_labels()[1] == ["limit", "a"]
    (axes,) = axes_of(kind="lines", where="pair == 'Q'", mark="gpus", decades=True)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1"]
    (axes,) = axes_of(kind="lines", where="error == error", log_2=True)
    assert texts(axes) == ["does not fit"]


def claim(value: Any, kind: Any = "ratio", **more: Any) -> claims.Claim:
    return claims.Claim("one", "a paper", "1", kind, "what", value, **more)


@pytest.mark.parametrize(
    ("kind", "paper", "ours", "verdict"),
    [
        ("exact", 2.24, 2.24, "exact"),
        ("exact", 2.24, 2.25, "wrong"),
        ("exact", {"a": [1, 2]}, {"a": [1, 2]}, "exact"),
        ("ratio", 2.0, 2.14, "within 10 %"),
        ("ratio", 2.0, 1.75, "within 25 %"),
        ("ratio", 2.0, 1.1, "right order"),
        ("ratio", 2.0, 1.01, "wrong"),
        ("ratio", 2.0, 0.9, "wrong"),
        ("ratio", [1.0, 2.0, 4.0], [1.0, 1.9, 2.0], "right order"),
        ("ratio", [1.0, 2.0, 4.0], [1.0, 1.9], "not run"),
        ("ratio", "<= 0.02", 0.01, "holds"),
        ("ratio", "<= 0.02", 0.024, "within 25 %"),
        ("ratio", "<= 0.02", 0.2, "wrong"),
        ("ratio", {"a": ">= 2", "b": ">= 2"}, {"a": 2.0, "b": 9.0}, "holds"),
        ("ratio", ">= 2", 1.9, "within 10 %"),
        ("ratio", ">= 2", 1.0, "wrong"),
        ("ratio", "> 1", 1.01, "holds"),
        ("ratio", "> 1", 1.0, "wrong"),
        ("ratio", {"a": "< 1", "b": "> 1"}, {"a": 0.9, "b": 0.99}, "wrong"),
        ("absolute", 10.0, 14.0, "wrong"),
        ("absolute", {"a": 10.0, "b": 1.0}, {"a": 10.0}, "not run"),
        ("absolute", 10.0, float("nan"), "not run"),
    ],
)
def test_verdicts(kind: str, paper: Any, ours: Any, verdict: str) -> None:
    assert worst(answers(claim(paper, kind), ours)) == verdict


def test_misses_are_whole_sentences_of_claims_that_there_are() -> None:
    assert load_misses().keys() <= load_claims().keys()
    assert [why for why in load_misses().values() if not why.endswith(".")] == []


def test_a_ratio_has_the_interval_of_nine_ratios() -> None:
    ours = {"throughput": 1.0, "e2el": 0.9}
    wrong = [{"throughput": math.exp(0.1 * z), "e2el": 0.9} for z in COSTS]
    known = ends({"gllm-ck-vs-vllm": ours}, [{"gllm-ck-vs-vllm": each} for each in wrong])
    assert set(known) == {"gllm-ck-vs-vllm"}
    (low, high), same = (known["gllm-ck-vs-vllm"][part] for part in ("throughput", "e2el"))
    assert (math.log(low), math.log(high)) == pytest.approx((-0.1645, 0.1645), rel=1e-3)
    assert same == pytest.approx((0.9, 0.9))
    found = answers(claims.claim_of("gllm-ck-vs-vllm"), ours, known["gllm-ck-vs-vllm"])
    assert "Of 2 values with an interval, 1 have the paper's inside." in markdown(found)


@pytest.mark.parametrize(
    ("paper", "ours", "effect", "verdict"),
    [
        (2.0, 2.0, 1.0, "within 10 %"),
        (1.14, 1.0, 0.0, "wrong"),  # within 25 % of the value, and no effect at all
        (4.0, 2.0, 0.5, "right order"),
        (0.5, 2.0, -1.0, "wrong"),
        (1.0, 1.2, None, "within 25 %"),  # the paper says that nothing differs
    ],
)
def test_a_comparison_is_judged_by_its_effect(
    paper: float, ours: float, effect: float | None, verdict: str
) -> None:
    (found,) = claims.answers(claim(paper), ours)
    assert found.verdict == verdict
    assert found.effect == (None if effect is None else pytest.approx(effect, abs=1e-12))


def test_a_share_has_no_effect() -> None:
    (found,) = claims.answers(claim(0.5, neutral=False), 0.52)
    assert (found.effect, found.verdict) == (None, "within 10 %")


def test_the_score_stands_beside_that_of_always_saying_1() -> None:
    paper, ours = {"a": [1.0, 2.0], "b": [1.0, 4.0]}, {"a": [1.0, 2.0], "b": [1.0, 1.0]}
    assert claims.score(claims.answers(claim(paper), ours)) == (
        "Of 4 published ratios 3 are within 25 % of the value; a model that always says 1 has 2. "
        "Ours are off by a factor of 1.41 in the geometric mean, those of that model by 1.68. "
        "Of 3 pairs of values that a claim puts in an order, 1 have that order."
    )  # a and b on two, and the growth of each
