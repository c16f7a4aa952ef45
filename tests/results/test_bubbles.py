"""Bubble attribution: a tiny run for each cause with its literal pieces; the edges of the rules."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenflow.results.bubbles import CAUSES, attribute
from evenflow.results.run import WAIT_REASONS, RunResult
from tools.draw_docs import FIGURES, TITLES, draw_bubbles, scenarios, tandem


def log(result: RunResult) -> list[str]:
    """Return for each stage `from-to cause` and the micro-batch that it runs next, if any."""
    table = attribute(result).table()
    stages: list[list[str]] = [[] for _ in range(result.depth)]
    for stage, start, end, cause, batch in zip(*(table[name] for name in table), strict=True):
        span = "-".join(str(float(at)).removesuffix(".0") for at in (start, end))
        stages[stage].append(f"{span} {cause} {batch}".removesuffix(" -1"))
    return [", ".join(pieces) for pieces in stages]


EXPECTED = {
    "fill_drain": ["3-5 fill_drain", "0-1 fill_drain 0, 4-5 fill_drain", "0-2 fill_drain 0"],
    "starvation": ["1-3 starvation 1, 4-5 fill_drain", "0-1 fill_drain 0, 2-4 starvation 1"],
    "kv_limited": ["1-2 kv_limited 1, 3-4 fill_drain", "0-1 fill_drain 0, 2-3 kv_limited 1"],
    "policy": ["1-2 policy 1, 3-4 fill_drain", "0-1 fill_drain 0, 2-3 policy 1"],
    "uneven_prefill": ["3-5 fill_drain", "0-1 fill_drain 0, 2-3 uneven_prefill 1"],
    "prefill_decode": ["3-5 fill_drain", "0-1 fill_drain 0, 2-3 prefill_decode 1"],
    "uneven_decode": ["3-5 fill_drain", "0-1 fill_drain 0, 2-3 uneven_decode 1"],
    "uneven_stages": [
        "6-7 fill_drain",
        "0-2 fill_drain 0, 3-4 uneven_stages 1, 5-6 uneven_stages 2",
    ],
    "link": ["2-2.5 link 2, 4.5-6 fill_drain", "0-1 fill_drain 0, 1-1.5 link 0, 3.5-4 link 2"],
    "cpu": [
        "0-0.25 cpu 0, 1.25-1.5 cpu 1, 2.5-2.75 cpu 2, 3.75-5 fill_drain",
        "0-0.25 cpu 0, 0.25-1.25 fill_drain 0, 1.25-1.5 cpu 0, 2.5-2.75 cpu 1, 3.75-4 cpu 2",
    ],
    "outage": [
        "3-7 fill_drain",
        "0-1 fill_drain 0, 6-7 fill_drain",
        "0-2 fill_drain 0, 3-5 outage 1",
    ],
    "slow_stage": [
        "3-4 slow_stage, 4-7 fill_drain",
        "0-1 fill_drain 0, 6-7 fill_drain",
        "0-2 fill_drain 0, 3-4 slow_stage 1, 5-6 slow_stage 2",
    ],
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_in_the_smallest_run_that_shows_it(cause: str) -> None:
    assert log(scenarios()[cause]) == EXPECTED[cause]


def test_totals_add_up_over_causes_and_stages() -> None:
    bubbles = attribute(scenarios()["link"])
    assert bubbles.window == (0.0, 6.0)
    assert (bubbles.busy_s, bubbles.idle_s) == (8.0, 4.0)
    totals = dict.fromkeys(CAUSES, 0.0) | {"link": 1.5, "fill_drain": 2.5}
    assert bubbles.totals() == totals
    assert bubbles.stage_totals().shape == (2, len(CAUSES))
    assert bubbles.stage_totals().sum(axis=1).tolist() == [2.0, 2.0]
    assert list(bubbles.stage_totals().sum(axis=0)) == list(totals.values())
    assert list(bubbles.table()) == ["stage", "start_s", "end_s", "cause", "batch_id"]


ASKED_AT_ITS_CAP = dataclasses.replace(
    scenarios()["link"],
    wait_s=np.array([2.0]),
    wait_reason=np.array([WAIT_REASONS.index("policy")]),
)
EDGES = {
    "the last answer holds until the next": (
        tandem([[1], [1]], ready_s=[0, 6], waits=[(1, "work"), (2, "kv"), (4, "policy")]),
        ["1-2 starvation 1, 2-4 kv_limited 1, 4-6 policy 1"],
    ),
    "an answer given before the gap holds in it": (
        tandem([[4], [1]], ready_s=[0, 6], waits=[(2, "kv")]),
        ["4-6 kv_limited 1"],
    ),
    "an answer is void once a micro-batch was sent": (
        tandem([[1], [1], [1]], ready_s=[0, 2, 5], waits=[(1, "kv")], arrival_s=[0, 4]),
        ["1-2 kv_limited 1, 3-4 starvation 2, 4-5 cpu 2"],
    ),
    "a driver that lets an arrival wait is CPU time": (
        tandem([[1], [1]], ready_s=[0, 5], arrival_s=[0, 4.5]),
        ["1-4.5 starvation 1, 4.5-5 cpu 1"],
    ),
    "before the first micro-batch nothing is filling yet": (
        tandem([[1, 1]], ready_s=[2], waits=[(0, "policy")]),
        ["0-2 policy 0, 3-4 fill_drain", "0-2 policy 0, 2-3 fill_drain 0"],
    ),
    "a heavy micro-batch holds its slot": (
        tandem([[10, 10], [1, 1]] * 2, cap=2, prefill_tokens=[512, 0] * 2),
        ["11-20 prefill_decode 2, 31-41 fill_drain", "0-10 fill_drain 0, 21-30 prefill_decode 2"],
    ),
    "a slow last stage is uneven stages on the first": (
        tandem([[1, 3]] * 4, cap=2, prefill_tokens=[512, 0] * 2),
        ["2-4 uneven_stages 2, 5-7 uneven_stages 3, 8-13 fill_drain", "0-1 fill_drain 0"],
    ),
    "links and unevenness share the wait for a slot, of which the link takes a second": (
        tandem([[4, 4], [1, 1]] * 3, cap=2, link_s=1.0, prefill_tokens=[512, 0] * 3),
        [
            "5-8 prefill_decode 2, 8-9 link 2, 14-17 prefill_decode 4, 17-18 link 4, "
            "23-28 fill_drain",
            "0-4 fill_drain 0, 4-5 link 0, 10-11 link 2, 11-14 prefill_decode 2, 19-20 link 4, "
            "20-23 prefill_decode 4",
        ],
    ),
    "preparation that stage 0 has too does not delay a slot": (
        tandem([[1, 1]] * 4, cap=2, link_s=0.5, prepare_s=0.25),
        [
            "0-0.25 cpu 0, 1.25-1.5 cpu 1, 2.5-3 link 2, 3-3.25 cpu 2, 4.25-4.5 cpu 3, "
            "5.5-7.25 fill_drain",
            "0-0.25 cpu 0, 0.25-1.25 fill_drain 0, 1.25-1.75 link 0, 1.75-2 cpu 0, 3-3.25 cpu 1, "
            "4.25-4.5 link 2, 4.5-5 cpu 2, 6-6.25 cpu 3",
        ],
    ),
    "an in-flight cap below the depth is policy": (
        tandem([[1, 1, 1]] * 2, cap=1),
        [
            "1-3 policy 1, 4-6 fill_drain",
            "0-1 fill_drain 0, 2-4 policy 1, 5-6 fill_drain",
            "0-2 fill_drain 0, 3-5 policy 1",
        ],
    ),
    "an answer given while no slot is free does not hide the cause": (
        ASKED_AT_ITS_CAP,
        EXPECTED["link"],
    ),
    "unevenness closes the hole that comes first": (
        # 2 s of starvation reach stage 1 while it still has a second of work on micro-batch 0.
        tandem([[1, 2], [1, 1]], ready_s=[0, 3], waits=[(1, "work"), (2, "kv")]),
        [
            "1-2 starvation 1, 2-3 kv_limited 1, 4-5 fill_drain",
            "0-1 fill_drain 0, 3-4 kv_limited 1",
        ],
    ),
    "a link that is equal for all makes no idle time on later stages": (
        tandem([[1, 1]] * 3, link_s=0.5),
        ["3-4.5 fill_drain", "0-1 fill_drain 0, 1-1.5 link 0"],
    ),
    "a longer transfer does": (
        tandem([[1, 1]] * 3, link_s=[[0, 0.5], [0, 0.5], [0, 0.75]]),
        ["3-4.75 fill_drain", "0-1 fill_drain 0, 1-1.5 link 0, 3.5-3.75 link 2"],
    ),
    "half from the stages and half from the micro-batches is named by content": (
        tandem([[1, 1], [2, 1.5]], prefill_tokens=[0, 512]),
        ["3-4.5 fill_drain", "0-1 fill_drain 0, 2-3 prefill_decode 1"],
    ),
    "one stage without a gap has no bubbles": (tandem([[1]] * 3), [""]),
    "one micro-batch": (tandem([[1, 2]]), ["1-3 fill_drain", "0-1 fill_drain 0"]),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_the_rules(edge: str) -> None:
    result, expected = EDGES[edge]
    assert log(result) == expected


def test_a_slow_middle_stage_hides_the_links() -> None:
    """The oldest micro-batch queued for longer than it spent on links: they made no idle time."""
    bubbles = attribute(tandem([[1, 2, 1]] * 9, cap=3, link_s=0.1))
    assert set(bubbles.batch[bubbles.cause == CAUSES.index("link")]) == {0, 3}
    totals = bubbles.totals()
    assert {cause for cause in CAUSES if totals[cause]} == {"fill_drain", "uneven_stages", "link"}


def test_a_hole_keeps_its_cause_on_its_way_through_the_stages() -> None:
    """Two equal micro-batches in flight on four stages: nothing is uneven, there is no work."""
    waits = [(2.0 + 4 * turn, "work") for turn in range(3)]
    ready = [0, 1, 4, 5, 8, 9]
    result = tandem([[1] * 4] * 6, ready_s=ready, waits=waits, cap=4)
    totals = attribute(result).stage_totals()
    assert totals[:, CAUSES.index("starvation")].tolist() == [4.0] * 4
    assert totals.sum() == totals[:, : CAUSES.index("starvation") + 1].sum()


@pytest.mark.parametrize("arrival_s", [(), (1.5,)])
def test_no_micro_batch(arrival_s: tuple[float, ...]) -> None:
    bubbles = attribute(tandem(np.zeros((0, 4)), arrival_s=arrival_s))
    start = arrival_s[0] if arrival_s else 0.0
    assert bubbles.window == (start, start)
    assert (len(bubbles.stage), bubbles.idle_s, bubbles.busy_s) == (0, 0.0, 0.0)
    assert sum(bubbles.totals().values()) == 0.0


def test_rounding_is_not_idle_time() -> None:
    exact = tandem([[1, 1]] * 4)
    bubbles = attribute(dataclasses.replace(exact, end_s=exact.end_s - [[0, 1e-12]]))
    assert {CAUSES[cause] for cause in bubbles.cause} == {"fill_drain"}


def test_a_run_that_has_not_ended_is_refused() -> None:
    result = replace(tandem([[1], [1]]), end_s=np.array([[1.0], [np.nan]]))
    with pytest.raises(ValueError, match="micro-batch 1 never returned"):
        attribute(result)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_drawing_in_the_documentation_is_of_this_run(cause: str, tmp_path: Path) -> None:
    draw_bubbles(cause, scenarios()[cause], tmp_path)
    assert TITLES[cause] in (tmp_path / f"bubbles_{cause}.svg").read_text()
    assert (FIGURES / f"bubbles_{cause}.svg").is_file()
