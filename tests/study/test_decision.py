"""Decisions of `plan` and `capacity`: one record of margins, price and basis, and its page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.report.shown import Table
from evenflow.study.capacity import CapacityQuestion, capacity
from evenflow.study.decision import Margin, basis, breaks
from evenflow.study.decision_page import draw, measured, write_page
from evenflow.study.plan import plan
from evenflow.study.plan_prepare import prepare
from evenflow.study.plan_question import Ask
from evenflow.study.planned import Planned, sentences
from evenflow.study.points import Record
from evenflow.study.rates import RateFound, TriedRate
from evenflow.study.slo import Condition, costs, parse_slo
from evenflow.study.trials import How, Trial
from tests.command_line import write_trace
from tests.study.test_capacity import QUEUE
from tests.study.test_plan import RUN

NAME = "<img src=x>.csv"
SERVED = "served_requests_per_s"


def written(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the page, and what the JSON beside it says of the decision."""
    (path,) = [*folder.glob("capacity.json"), *folder.glob("plan.json")]
    page = (folder / "report.html").read_text(encoding="utf-8")
    return page, json.loads(path.read_text())["decision"]


def cells(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading of a page."""
    below = page.split(f"<h2>{heading}</h2>")[1].split("</table>", maxsplit=1)[0]
    rows = re.findall("<tr>(<th scope.*?)</tr>", below)
    return [[unescape(each) for each in re.findall(r">([^<>]*)</t[hd]>", row)] for row in rows]


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def test_the_page_of_a_capacity_has_the_numbers_of_its_json(tmp_path: Path) -> None:
    """One server of 0.1 s a request; the name of the trace is a user's, and no HTML."""
    write_trace(tmp_path / NAME, *["0,1,1"] * 100)
    workload = {**QUEUE["workload"], "trace": NAME}
    config = configured(Document("a.yaml", {**QUEUE, "workload": workload}, {}))
    slo = tuple(parse_slo(["mean_queue_ms=100", "p99_ttft_ms=9000"]))
    asked = CapacityQuestion(config, slo, tmp_path, 0.1, per_hour=6.0)
    found = capacity(asked, How(tmp_path / "out"))
    page, told = written(tmp_path / "out")
    assert "<img" not in page
    assert "&lt;img src=x&gt;.csv" in page
    assert told["requests_per_s"] == found.rate.mean
    queue, ttft = told["margins"]
    assert queue["low_90"] < queue["limit"] == 100 < queue["high_90"]
    assert queue["verdict"] == "may be missed"
    assert queue["kept_up_to_requests_per_s"] == found.rate.mean
    assert queue["missed_from_requests_per_s"] == found.searches[0].fails_at
    assert queue["missed_value"] > 100
    assert (ttft["verdict"], ttft["missed_from_requests_per_s"]) == ("kept", None)
    row = [shown(queue[key]) for key in ("value", "low_90", "high_90")]
    assert cells(page, "Margins")[0][2:4] == [row[0], f"{row[1]} to {row[2]}"]
    traffic, off, safe = told["what_would_break_it"]
    assert found.safe < found.rate.mean
    assert safe == f"With the costs' stated error all limits hold at {found.safe:.4g} requests/s."
    assert safe in list(found.told())
    assert traffic.startswith(f"More traffic: from {queue['missed_from_requests_per_s']:.4g} req")
    assert f"all limits hold up to {found.rate.mean:.4g} requests/s" in traffic
    assert "the 90 % interval of scheduling delay mean reaches beyond" in off
    assert all(sentence in unescape(page) for sentence in [*told["sentences"], traffic, off])
    assert [value for _, value in cells(page, "Price")] == [
        f"{value:.3g}" for key, value in told["price"].items() if key.startswith("dollars_")
    ]
    rates = [float(row[0]) for row in cells(page, "At other rates")]
    assert rates == sorted(found.curve)
    assert told["rests_on"][0] == {
        "part": "time of kernels",
        "what": "costs affine",
        "how": "guessed; stated error, one standard deviation: costs affine are given, and taken "
        "as exact",
    }


def test_the_page_of_a_plan_has_its_launch_lines_and_alternatives(tmp_path: Path) -> None:
    slo = tuple(parse_slo(["p90_ttft_ms=1000", "p90_tpot_ms=60"]))
    ask = Ask(slo, (1, 2), price=0.8, schedulers=("sarathi",), budgets=(512,), intervals=True)
    run = {**RUN, "link": None, "workload": {**RUN["workload"], "requests": 20}}
    found = plan(Document("a.yaml", run, {}), tmp_path, ask, How(tmp_path / "out"))
    page, told = written(tmp_path / "out")
    assert found.kept
    assert told["sentences"][0].startswith("Launch ")
    assert unescape(page).count("vllm serve meta-llama/Llama-3.1-8B --tensor") == 1
    assert told["launch"][0] in unescape(page)
    assert len(cells(page, "The nearest alternatives")) == min(len(found.table), 8)
    prices = found.table["dollars_per_million_tokens"] / found.table["gpus"]
    assert prices.to_list() == pytest.approx([prices[0]] * len(prices)), "equal traffic"
    assert told["price"]["dollars_per_hour"] == found.table["dollars_per_hour"][0]
    assert [each["metric"] for each in told["margins"]] == ["p90_ttft_ms", "p90_tpot_ms"]
    assert all(each["low_90"] < each["high_90"] for each in told["margins"])
    assert any(each.startswith("machine pcie-l20 (default)") for each in told["nobody_chose"]) == (
        found.best.labels["gpus"] > 1
    )
    assert "(default)" not in unescape(page).partition("Nobody chose: ")[2].partition("</p>")[0]
    assert "<svg" in page
    heads = [part.heads[0] for part in found.told() if part.__class__ is Table]
    assert heads[-1] == "90 % interval"
    again = replace(found, prediction=None, seconds=99.0).decision.facts
    assert again["sentences"] == told["sentences"], "no wall clock"
    write_page(tmp_path, replace(found, prediction=None).decision, {})
    bare = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Without 90 % intervals (--intervals)." in bare
    assert [len(row) for row in cells(page, "Margins") + cells(bare, "Margins")] == [6, 6, 5, 5]


def test_how_much_is_served_is_drawn_only_of_runs_that_can_tell() -> None:
    runs = [
        TriedRate(rate, (), 1.0, 9, Trial({}, (Record("", {SERVED: served, "overloaded": sure}),)))
        for rate, served, sure in ((4.0, 4.0, 0), (17.0, 8.5, None))
    ]
    assert measured(runs)[SERVED].isna().to_dict() == {4.0: False, 17.0: True}


@pytest.mark.pictures
def test_rates_that_are_near_each_other_fill_the_picture() -> None:
    """A plan often tries two: 20 and 21 requests/s."""
    runs = [
        TriedRate(rate, (), 1.0, 9, Trial({}, (Record("", {"p99_ttft_ms": ms, "overloaded": 0}),)))
        for rate, ms in ((20.0, 760.0), (21.0, 970.0))
    ]
    _, arriving, limits = draw(runs, parse_slo(["p99_ttft_ms=1000"]), None, "").axes
    assert min(arriving.get_xlim()[0], limits.get_xlim()[0]) > 19
    assert [at for at in limits.get_yticks() if 0.5 <= at <= 1] == [0.5, 1.0]


def test_a_price_is_everything_charged_to_some_tokens() -> None:
    """Two requests a second of 100 and 10 tokens, for 7.92 dollars an hour."""
    run = {"completed": 5, "total_input_tokens": 500, "total_output_tokens": 50}
    assert costs(7.92, 2.0, [run]) == {
        "dollars_per_hour": 7.92,
        "dollars_per_million_tokens": pytest.approx(10.0),
        "dollars_per_million_input_tokens": pytest.approx(11.0),
        "dollars_per_million_output_tokens": pytest.approx(110.0),
    }
    assert costs(None, 2.0, [run]) == {}
    assert costs(7.92, 0.0, [{"completed": 0}])["dollars_per_million_tokens"] is None


@pytest.mark.parametrize(
    ("condition", "value", "ends", "verdict", "left"),
    [
        (Condition("p99_ttft_ms", 100), 80.0, (70.0, 90.0), "kept", "+20%"),
        (Condition("p99_ttft_ms", 100), 80.0, (70.0, 101.0), "may be missed", "+20%"),
        (Condition("p99_ttft_ms", 100), 80.0, None, "kept", "+20%"),
        (Condition("p99_ttft_ms", 100), 250.0, (90.0, 300.0), "missed", "x2.5"),
        (Condition("p99_ttft_ms", 100), float("nan"), None, "missed", "-"),
        (Condition("attainment", 0.8), 0.9, (0.7, 1.0), "may be missed", "+12%"),
    ],
)
def test_a_margin_says_whether_a_limit_is_kept(
    condition: Condition, value: float, ends: Any, verdict: str, left: str
) -> None:
    margin = Margin(condition, value, ends)
    assert (margin.verdict, margin.left_words) == (verdict, left)


@pytest.mark.parametrize(
    ("value", "words"), [(80.0, "20% left"), (112.0, "12% over"), (250.0, "x2.5"), (math.nan, "-")]
)
def test_a_sentence_says_what_the_share_beside_a_number_is(value: float, words: str) -> None:
    assert Margin(Condition("p99_ttft_ms", 100), value).sentence.endswith(f" of 100 ({words})")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (
            RateFound("found", 4.0, 4.1, ("p99_ttft_ms", "overloaded"), 9),
            "More traffic: from 4.1 requests/s on, TTFT P99 (120 of 100) and the queue grows break "
            "first; all limits hold up to 4 requests/s.",
        ),
        (
            RateFound("too_short", None, None, (), 9),
            "More traffic: the run is too short to tell which limit breaks first.",
        ),
        (
            RateFound("found", 4.0, None, (), 9),
            "More traffic: all limits hold at 4 requests/s, the highest tried.",
        ),
        (
            RateFound("never", None, 1.0, ("p99_ttft_ms",), 0),
            "Less traffic does not help: no rate was found at which all limits hold.",
        ),
    ],
)
def test_what_breaks_first_is_said_with_its_rate(end: RateFound, words: str) -> None:
    limit = Condition("p99_ttft_ms", 100)
    sure = Margin(limit, 80.0, (70.0, 90.0), 4.0, 4.1, 120.0)
    assert list(breaks([sure], end)) == [
        words,
        "Costs that are off by their stated error break no limit (90 % intervals).",
    ]
    assert list(breaks([replace(sure, ends=None)], None)) == []


def test_a_rate_kept_above_one_that_is_missed_is_nothing_to_rely_on() -> None:
    """Kept at 20 and 22.05 requests/s; at 21 the run ended as it could not keep TPOT."""
    run = {**RUN, "workload": {**RUN["workload"], "arrivals": {"kind": "poisson", "rate": 20}}}
    slo = tuple(parse_slo(["p90_ttft_ms=1000", "p90_tpot_ms=60"]))
    ask = Ask(slo, (1,), price=7.2, budgets=(512,))
    question = prepare(Document("a.yaml", run, {}), Path(), ask)
    labels = {"setting": "PP1, sarathi 512", "replicas": 1, "gpus": 1, "requests": 60}
    values = {"completed": 60, "mean_e2el_ms": 100.0, "p90_ttft_ms": 500.0, "p90_tpot_ms": 55.0}
    values |= {"total_input_tokens": 60, "total_output_tokens": 60, "busy_share": 0.9}
    values |= {"request_throughput": 10.0}

    def at(values: dict[str, Any], **rate: float) -> Trial:
        return Trial({**labels, **rate}, (Record("", values),))

    missed = at({"missed": "p90_tpot_ms", "done": 9}, requests_per_s=21.0)
    trials = [at(values), missed, at(values, requests_per_s=22.05)]
    found = Planned(question, trials, kept=trials[:1])
    assert found.table["up_to_requests_per_s"][0] == 20.0
    assert found.table["dollars_per_million_tokens"][0] == pytest.approx(50.0), "2 tokens each"
    assert sentences(found)[1].endswith("GPUs are 90% busy; it holds up to 20 requests/s.")
    decision = found.decision
    assert decision.breaks == [
        "More traffic: from 21 requests/s on, TPOT P90 breaks first; all limits hold up to 20 "
        "requests/s."
    ]
    ends = [(each.kept_up_to, each.missed_from, each.missed_value) for each in decision.margins]
    assert ends == [(22.05, None, None), (20.0, 21.0, None)]
    alone = replace(found, trials=[trials[0], trials[2]])
    assert sentences(alone)[1].endswith("; it still holds at 22.05 requests/s.")


@pytest.mark.parametrize(
    ("keys", "how"),
    [
        ({"gpu": "H100"}, {"time of kernels": "fitted", "CPU time": "guessed"}),
        ({"gpu": "H100", "runtime": "vllm-0.12"}, {"CPU time": "fitted", "traffic": "drawn from"}),
        ({"gpu": "L20", "runtime": "gllm"}, {"CPU time": "published", "KV cache": "estimated"}),
        ({"gpu": "H100", "scheduler": "vllm_v1"}, {"GPUs and links": "given"}),
        ({"gpu": "V100-16G"}, {"time of kernels": "guessed"}),
        ({"gpu": "H100", "costs": "silicon"}, {"time of kernels": "measured; 25% of the time"}),
        ({"gpu": "H100", "kv": {"pages": 99}}, {"KV cache": "given"}),
    ],
)
def test_what_an_answer_rests_on(keys: dict[str, Any], how: dict[str, str]) -> None:
    config = configured(Document("a.yaml", {**RUN, "link": None, **keys}, {}))
    source = {"extrapolated_share": 0.25} if "costs" in keys else {}
    trial = Trial({}, (Record("", {}, cost_source=source),))
    parts = list(basis(config, trial, None))
    assert parts[2].what == f"Llama-3.1-8B on 1 x {keys['gpu']}, PP1"
    found = {each.part: each.how for each in parts}
    assert {part: found[part][: len(words)] for part, words in how.items()} == how
