"""The report: its words follow from the numbers, its data stay light, its bytes stay equal."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest

from evenflow.report.data import (
    binned,
    chunks_of,
    cumulative,
    present,
    shares,
    shares_over_time,
    steady,
    timeline_data,
    used_share,
)
from evenflow.report.page import parallel, plotly_library
from evenflow.report.plots import draw_comparison
from evenflow.report.run_page import DRAWN, render, write_report
from evenflow.report.style import CAUSE_COLOURS
from evenflow.report.words import CAUSE_WORDS, table, verdict
from evenflow.results.bubbles import CAUSES
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome
from evenflow.results.run import merged
from tests.synthetic_run import REASON, nothing_ran, synthetic_run

SUMMARY = {
    "output_throughput": 400.0,
    "total_token_throughput": 2000.0,
    "mean_ttft_ms": 500.0,
    "mean_tpot_ms": 40.0,
    "p99_itl_ms": 90.0,
    "mean_e2el_ms": 9000.0,
}


def make(budget: int = 512, requests: int = 40, depth: int = 4) -> Outcome:
    result = synthetic_run(requests=requests, budget=budget, depth=depth)
    return Outcome(result, summarize(result))


@pytest.fixture(scope="module")
def runs() -> dict[str, Outcome]:
    return {"even": make(256), "greedy": make(2048)}


def figures(page: str) -> list[dict]:
    return [json.loads(found) for found in re.findall(r'draw\("[\w-]+",(\{.*\})\)</script>', page)]


def plain(sentences: list[str]) -> list[str]:
    return [re.sub("<.*?>", "", sentence) for sentence in sentences]


def test_a_comparison_has_every_figure_and_fetches_nothing(runs: dict[str, Outcome]) -> None:
    page = render(runs, "Two schedulers", {"seed": 0}, plotly_js="")
    drawn = re.findall(r'<div id="([\w-]+)"', page)
    assert drawn == [
        "causes",
        "causes-by-stage",
        *("tokens-0", "tokens-0-steady", "tokens-1", "tokens-1-steady"),
        *("timeline-0", "timeline-1"),
        *("latency-ttft", "latency-tpot", "latency-itl", "latency-e2el"),
        *("queue-0", "queue-1"),
        "kv",
    ]
    assert len(figures(page)) == len(drawn) - 2
    types = {trace["type"] for each in figures(page) for trace in each["data"]}
    assert types == {"bar", "scatter"}, "the smaller build of the library has these"
    assert "plotly.js (basic - minified)" in plotly_library()[:100]
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)


def test_the_page_says_at_its_top_what_ran_on_what(runs: dict[str, Outcome]) -> None:
    run = runs["even"]
    told = replace(run, result=replace(run.result, provenance={"setup": "simulated: 4 x <L20>"}))
    page = render({"a": told, "b": told}, "Twice", {}, plotly_js="")
    assert page.count("simulated: 4 x &lt;L20&gt;") == 1
    assert page.index("simulated: 4 x") < page.index('class="verdict"')


def test_a_narrow_page_breaks_long_names_at_their_underscores(runs: dict[str, Outcome]) -> None:
    heads = table({"token_throttling": runs["even"], "<b>": runs["even"]}).partition("</thead>")[0]
    assert "<th>token_<wbr>throttling</th><th>&lt;b&gt;</th>" in heads


def test_replicas_are_one_deployment_and_each_by_itself_an_appendix() -> None:
    """Two equal replicas: no verdict on which is better, and the shares of either."""
    alone = make(depth=2).result
    both = merged([alone, alone])
    run = Outcome(both, summarize(both), 0.0, (alone, alone), "A")
    other = Outcome(alone, summarize(alone), label="B")
    assert shares(run) == pytest.approx(shares(other))
    page = render({"A": run, "B": other}, "", {}, plotly_js="")
    main, appendix = page.split("Appendix: the replicas</h2>")
    assert "replica 0" not in main
    assert main.count("80 requests") == 1
    assert appendix.count("<b>A, replica 1</b>") == appendix.count("<b>B</b>") == 2
    assert '<th scope="row">A, replica 1</th><td>39</td>' in appendix
    drawn = Outcome(both, summarize(both), 0.0, (alone,) * (DRAWN + 1), "C")
    page = render({"C": drawn}, "", {}, plotly_js="")
    assert f"<b>C, replica {DRAWN}</b>" not in page
    assert f'<th scope="row">C, replica {DRAWN}</th>' in page
    whole = synthetic_run()
    drawn = Outcome(whole, summarize(whole), 0.0, (nothing_ran(),) * DRAWN + (whole,), "C")
    assert f"<b>C, replica {DRAWN}</b>" in render({"C": drawn}, "", {}, plotly_js="")


@pytest.mark.parametrize("depth", [1, 4])
def test_a_single_run_makes_a_page_too(depth: int) -> None:
    page = render({"alone": make(depth=depth)}, "One", {}, plotly_js="")
    assert "<b>alone</b>: the run is too short to tell whether it keeps up with the" in page
    assert "<td><b>" not in page
    assert len(figures(page)) == 11


def test_a_page_has_the_library_inside_and_stays_light(
    runs: dict[str, Outcome], tmp_path: Path
) -> None:
    write_report(tmp_path / "page", runs, "Twice", {"seed": 0})
    page = (tmp_path / "page").read_bytes()
    assert b"Plotly" in page
    assert len(page) < 1_500_000


def test_what_is_compared_has_the_same_axes(runs: dict[str, Outcome]) -> None:
    page = render(runs, "", {}, "")
    drawn = dict(re.findall(r'draw\("([\w-]+)",(\{.*\})\)</script>', page))
    for kind in ("tokens-{}", "tokens-{}-steady"):
        axes = [json.loads(drawn[kind.format(run)])["layout"] for run in (0, 1)]
        assert axes[0]["yaxis"]["range"] == axes[1]["yaxis"]["range"]
        if "steady" not in kind:
            assert axes[0]["xaxis"]["range"] == axes[1]["xaxis"]["range"]


def test_limits_are_drawn_where_requests_have_them(runs: dict[str, Outcome]) -> None:
    given = {"config": {"goodput": {"tpot": 50.0}}}
    run = replace(runs["even"], result=replace(runs["even"].result, provenance=given))
    page = render({"even": run}, "", {}, "")
    drawn = [each["layout"] for each in figures(page)]
    assert [each["shapes"][0]["x0"] for each in drawn if "shapes" in each] == [50.0]
    assert "SLO: TPOT 50 ms" in page


def test_shares_of_short_parts_of_a_run_add_up_to_those_of_the_whole(
    runs: dict[str, Outcome],
) -> None:
    run = runs["greedy"]
    edges = np.linspace(0.0, run.result.returned_s.max(), 8)
    parts = shares_over_time(run, edges)
    assert parts.shape == (4, 7, 1 + len(CAUSES))
    computing_s = (parts[:, :, 0] * np.diff(edges)).sum(axis=1)
    assert computing_s == pytest.approx((run.result.end_s - run.result.start_s).sum(axis=0))
    assert parts.sum(axis=2).max() <= 1 + 1e-9


def test_names_from_the_user_cannot_break_the_page(runs: dict[str, Outcome]) -> None:
    evil = "</script><img>"
    page = render({evil: runs["even"]}, evil, {"note": evil}, plotly_js="")
    assert "<img>" not in page
    assert len(figures(page)) == 11


def test_the_data_do_not_grow_with_the_run() -> None:
    small, large = (
        len(render({"run": make(requests=n)}, "", {}, plotly_js="")) for n in (300, 1200)
    )
    assert large < 1.2 * small < 400_000


def test_a_run_in_which_nothing_ran_says_so() -> None:
    empty = nothing_ran()
    page = render({"none": Outcome(empty, summarize(empty))}, "", {}, plotly_js="")
    assert "computed no micro-batch" in page
    assert "<b>none</b> completed no request" in page


def test_the_page_has_what_else_is_told(runs: dict[str, Outcome]) -> None:
    page = render(runs, "", {}, "", ["<h2>What would help</h2>"])
    assert (
        page.index("Summary</h2>") < page.index("What would help") < page.index("stage time goes")
    )


def test_parallel_axes_take_numbers_words_and_gaps() -> None:
    columns = {"budget": [2, 8, 5], "scheduler": ["a", "<b>", "a"], "ms": [1.0, np.nan, 3.0]}
    drawn = parallel(columns, ["point 0", "point 1", "point 2"], [2])
    lines = [each for each in drawn["data"] if each["mode"] == "lines+markers"]
    assert [each["y"] for each in lines] == [[0, 0, 0], [1, 1, None], [0.5, 0, 1]]
    assert [each["name"] for each in lines] == ["point 0", "point 1", "point 2"]
    assert lines[2]["line"] != lines[0]["line"] == lines[1]["line"]
    assert "<b>" not in json.dumps(drawn)
    json.dumps(drawn, allow_nan=False)


def test_the_verdict_names_who_is_best_at_what_and_by_how_much(runs: dict[str, Outcome]) -> None:
    fast = replace(runs["even"], summary=SUMMARY)
    slow = replace(
        runs["greedy"],
        summary=SUMMARY
        | {"total_token_throughput": 1600.0, "mean_ttft_ms": 250.0, "p99_itl_ms": 1200.0},
    )
    sentences = plain(verdict({"A": fast, "B": slow}))
    assert sentences[:5] == [
        f"NOT FAIR: 1 of 40 requests (2.5%) were refused or given up; the first: {escape(REASON)}.",
        "A serves the most tokens: 2,000 per second, 25 % more than B.",
        "First token soonest: B, mean TTFT 250 ms, against 500 ms with A.",
        "Shortest stalls between tokens: A, P99 ITL 90 ms, against 1.2 s with B.",
        "Whole request soonest: A (level with B), mean E2EL 9 s, against 9 s with B.",
    ]
    busy = shares(fast)["computing"]
    assert sentences[5].startswith(f"Stages compute {100 * busy:.0f} % of the time with A")


def test_the_verdict_on_requests_that_arrive_by_themselves_is_whether_they_are_served(
    runs: dict[str, Outcome],
) -> None:
    """Throughput over the drain is no result of them; of a closed loop it is."""
    offered = {"offered_requests_per_s": 7.2, "overloaded": 0, "completed": 1000}
    able = replace(runs["even"], summary=SUMMARY | offered | {"served_requests_per_s": 7.2})
    beyond = {"served_requests_per_s": 2.8, "queue_growth_per_s": 4.4, "overloaded": 1}
    late = replace(runs["greedy"], summary=SUMMARY | offered | beyond)
    assert plain(verdict({"A": able, "B": late}))[1:3] == [
        "B is overloaded: 7.2 requests/s arrive and 2.8 are served: the queue grows by 4.4 a "
        "second, and so does every latency with the length of the run.",
        "A keeps up with the 7.2 requests/s that arrive.",
    ]
    short = replace(able, summary=able.summary | {"overloaded": None})
    assert plain(verdict({"A": short}))[1] == (
        "A: the run is too short to tell whether it keeps up with the 7.2 requests/s that arrive; "
        "give more requests."
    )
    unsure = replace(late, summary=late.summary | {"overloaded": None})
    assert [">2.8<" in table({"B": each}) for each in (late, unsure)] == [True, False]
    both = plain(verdict({"A": able, "C": able}))[1]
    assert both == "A and C keep up with the 7.2 requests/s that arrive: latency decides."
    closed = {"config": {"workload": {"arrivals": {"kind": "closed"}}}}
    looped = replace(able, result=replace(able.result, provenance=closed))
    assert plain(verdict({"A": looped}))[1] == "A serves tokens: 2,000 per second."


def test_equal_throughputs_are_called_equal(runs: dict[str, Outcome]) -> None:
    first = replace(runs["even"], summary=SUMMARY)
    second = replace(runs["greedy"], summary=SUMMARY | {"total_token_throughput": 1990.0})
    assert "same pace, 2,000 tokens per second" in verdict({"A": first, "B": second})[1]
    third = replace(first, summary=SUMMARY | {"total_token_throughput": 1000.0})
    leading = plain(verdict({"A": first, "B": second, "C": third}))[1]
    assert leading == "A and B serve the most tokens: 2,000 per second, 100 % more than C."


def test_the_best_value_of_a_row_is_marked_and_missing_rows_are_left_out(
    runs: dict[str, Outcome],
) -> None:
    slow = replace(runs["greedy"], summary=SUMMARY | {"mean_ttft_ms": 700.0})
    html = table({"A": replace(runs["even"], summary=SUMMARY), "B": slow})
    assert "<td><b>500</b></td><td>700</td>" in html
    assert "<td>400</td><td>400</td>" in html
    assert "steady" not in html


def test_every_cause_has_words_and_a_colour_of_its_own() -> None:
    assert set(CAUSES) == set(CAUSE_WORDS) == set(CAUSE_COLOURS)
    assert len(set(CAUSE_COLOURS.values())) == len(CAUSES)


def test_cumulative_goes_from_the_least_to_the_greatest_known_value() -> None:
    values, share = cumulative(np.array([3.0, np.nan, 1.0, 2.0]))
    assert values.tolist() == [1.0, 2.0, 3.0]
    assert share.tolist() == [0.0, 0.5, 1.0]
    assert len(cumulative(np.arange(10_000.0))[0]) == 150
    assert len(cumulative(np.array([np.nan]))[0]) == 0


def test_a_bin_without_a_value_holds_the_last_one() -> None:
    ours = binned(np.array([0.5, 0.6, 3.5]), np.array([1.0, 3.0, 7.0]), stop_s=4.0, bins=4)
    assert ours.middle_s.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert ours.low.tolist() == [1.0, 3.0, 3.0, 7.0]
    assert ours.mean.tolist() == [2.0, 3.0, 3.0, 7.0]
    assert ours.high.tolist() == [3.0, 3.0, 3.0, 7.0]


def test_present_counts_who_entered_and_has_not_left() -> None:
    counts = present(np.array([0.0, 1.0, 2.0]), np.array([2.0, np.nan, 3.0]), np.arange(4.0))
    assert counts.tolist() == [1, 2, 2, 1]


def test_parts_cover_the_whole() -> None:
    assert chunks_of(7, 3).tolist() == [0, 2, 4, 7]
    assert chunks_of(2, 250).tolist() == [0, 1, 2]


def test_the_window_lies_around_the_middle_of_the_steady_state(runs: dict[str, Outcome]) -> None:
    run = runs["even"]
    scheduled = run.result.scheduled_s
    window = {"steady_start_s": scheduled[40], "steady_stop_s": scheduled[40]}
    assert steady(replace(run, summary=window), 10) == slice(35, 45)
    assert steady(replace(run, summary={}), 10**6) == slice(0, len(scheduled))
    late = {"steady_start_s": 1e9, "steady_stop_s": 1e9}
    assert steady(replace(run, summary=late), 10) == slice(len(scheduled) - 10, len(scheduled))


def test_the_comparison_draws_each_run_in_a_row_on_equal_axes(runs: dict[str, Outcome]) -> None:
    figure = draw_comparison(runs)
    tokens, times = figure.axes[::2], figure.axes[1::2]
    assert [axes.texts[0].get_text() for axes in tokens] == list(runs)
    busy = [f"{100 * shares(run)['computing']:.0f} %" for run in runs.values()]
    assert [axes.texts[0].get_text() for axes in times] == busy
    assert tokens[0].get_ylim() == tokens[1].get_ylim()
    assert times[0].get_xlim() == (0, 100)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[:3] == ["prefill tokens", "decode tokens", "computing"]


def test_kv_use_is_a_share_of_the_pages_of_the_engine_that_sent_it() -> None:
    """Two engines of 50 pages: with 40 free a fifth is used, not three fifths."""
    result = replace(synthetic_run(), total_pages=100, engines=2)
    result = replace(result, free_pages=np.full_like(result.free_pages, 40))
    assert used_share(result).tolist() == pytest.approx([0.2] * len(result.free_pages))


def numbers(text: str, kind: str) -> list[int]:
    return np.frombuffer(b64decode(text), f"<{kind}").tolist()


@pytest.mark.parametrize("most", [10, 10**6])
def test_a_timeline_holds_every_block_and_idle_time_of_its_micro_batches(most: int) -> None:
    run = make()
    data = timeline_data(run, most)
    result, count = run.result, min(most, len(run.result.scheduled_s))
    rows = slice(data["first"], data["first"] + count)
    assert numbers(data["prefill"], "u4") == result.prefill_tokens[rows].tolist()
    assert ("shares" in data) == (most == 10)
    for stage, row in enumerate(data["stages"]):
        kinds, lengths = numbers(row["kinds"], "u1"), numbers(row["lengths"], "u4")
        edges = row["from_s"] + 1e-6 * np.cumsum([0, *lengths])
        busy = [at for at, kind in enumerate(kinds) if kind == 0]
        assert edges[busy] == pytest.approx(result.start_s[rows, stage], abs=1e-6)
        ends = [edges[at + 1] for at in busy]
        assert ends == pytest.approx(result.end_s[rows, stage], abs=1e-6)
        if most > 10:
            idle_us = np.bincount(kinds, weights=lengths, minlength=1 + len(CAUSES))[1:]
            assert 1e-6 * idle_us == pytest.approx(
                run.idle.stage_totals()[stage].tolist(), abs=1e-4
            )
