"""Bubble attribution: a tiny run for each cause with its literal pieces; the edges of the rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from evenflow.results.bubbles import CAUSES, Bubbles, attribute
from evenflow.results.run import WAIT_REASONS, RunResult
from tools.draw_docs import FIGURES, TITLES, draw_bubbles, scenarios, tandem

Piece = tuple[int, float, float, str, int]


def pieces(bubbles: Bubbles) -> list[Piece]:
    table = bubbles.table()
    return list(zip(*(table[name].tolist() for name in table), strict=True))


def of_cause(result: RunResult, cause: str) -> list[Piece]:
    return [piece for piece in pieces(attribute(result)) if piece[3] == cause]


# (stage, from, to, cause, the micro-batch that the stage runs next)
EXPECTED: dict[str, list[Piece]] = {
    "fill_drain": [
        (0, 3.0, 5.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 4.0, 5.0, "fill_drain", -1),
        (2, 0.0, 2.0, "fill_drain", 0),
    ],
    "starvation": [
        (0, 1.0, 3.0, "starvation", 1),
        (0, 4.0, 5.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 2.0, 4.0, "starvation", 1),
    ],
    "kv_limited": [
        (0, 1.0, 2.0, "kv_limited", 1),
        (0, 3.0, 4.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 2.0, 3.0, "kv_limited", 1),
    ],
    "policy": [
        (0, 1.0, 2.0, "policy", 1),
        (0, 3.0, 4.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 2.0, 3.0, "policy", 1),
    ],
    "uneven_prefill": [
        (0, 3.0, 5.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 2.0, 3.0, "uneven_prefill", 1),
    ],
    "prefill_decode": [
        (0, 3.0, 5.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 2.0, 3.0, "prefill_decode", 1),
    ],
    "uneven_decode": [
        (0, 3.0, 5.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 2.0, 3.0, "uneven_decode", 1),
    ],
    "uneven_stages": [
        (0, 6.0, 7.0, "fill_drain", -1),
        (1, 0.0, 2.0, "fill_drain", 0),
        (1, 3.0, 4.0, "uneven_stages", 1),
        (1, 5.0, 6.0, "uneven_stages", 2),
    ],
    "link": [
        (0, 2.0, 2.5, "link", 2),
        (0, 4.5, 6.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
        (1, 1.0, 1.5, "link", 0),
        (1, 3.5, 4.0, "link", 2),
    ],
    "cpu": [
        (0, 0.0, 0.25, "cpu", 0),
        (0, 1.25, 1.5, "cpu", 1),
        (0, 2.5, 2.75, "cpu", 2),
        (0, 3.75, 5.0, "fill_drain", -1),
        (1, 0.0, 0.25, "cpu", 0),
        (1, 0.25, 1.25, "fill_drain", 0),
        (1, 1.25, 1.5, "cpu", 0),
        (1, 2.5, 2.75, "cpu", 1),
        (1, 3.75, 4.0, "cpu", 2),
    ],
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_in_the_smallest_run_that_shows_it(cause: str) -> None:
    assert pieces(attribute(scenarios()[cause])) == EXPECTED[cause]


def test_totals_add_up_over_causes_and_stages() -> None:
    bubbles = attribute(scenarios()["link"])
    assert bubbles.window == (0.0, 6.0)
    assert (bubbles.busy_s, bubbles.idle_s) == (8.0, 4.0)
    totals = dict.fromkeys(CAUSES, 0.0) | {"link": 1.5, "fill_drain": 2.5}
    assert bubbles.totals() == totals
    assert bubbles.stage_totals().shape == (2, len(CAUSES))
    assert bubbles.stage_totals().sum(axis=1).tolist() == [2.0, 2.0]
    assert list(bubbles.stage_totals().sum(axis=0)) == list(totals.values())


def test_table_spells_out_the_cause() -> None:
    table = attribute(scenarios()["kv_limited"]).table()
    assert list(table) == ["stage", "start_s", "end_s", "cause", "batch_id"]
    assert table["cause"].tolist() == ["kv_limited", "fill_drain", "fill_drain", "kv_limited"]


def test_the_last_answer_holds_until_the_next() -> None:
    result = tandem(
        [[1], [1]], ready_s=[0, 6], waits=[(1, "work"), (2, "kv"), (4, "policy")], arrival_s=[0]
    )
    assert pieces(attribute(result)) == [
        (0, 1.0, 2.0, "starvation", 1),
        (0, 2.0, 4.0, "kv_limited", 1),
        (0, 4.0, 6.0, "policy", 1),
    ]


def test_an_answer_given_before_the_gap_holds_in_it() -> None:
    result = tandem([[4], [1]], ready_s=[0, 6], waits=[(2, "kv")])
    assert pieces(attribute(result)) == [(0, 4.0, 6.0, "kv_limited", 1)]


def test_an_answer_is_void_once_a_micro_batch_was_sent() -> None:
    result = tandem([[1], [1], [1]], ready_s=[0, 2, 5], waits=[(1, "kv")], arrival_s=[0, 4])
    assert pieces(attribute(result)) == [
        (0, 1.0, 2.0, "kv_limited", 1),
        (0, 3.0, 4.0, "starvation", 2),
        (0, 4.0, 5.0, "cpu", 2),
    ]


def test_a_driver_that_lets_an_arrival_wait_is_cpu_time() -> None:
    result = tandem([[1], [1]], ready_s=[0, 5], arrival_s=[0, 4.5])
    assert pieces(attribute(result)) == [
        (0, 1.0, 4.5, "starvation", 1),
        (0, 4.5, 5.0, "cpu", 1),
    ]


def test_before_the_first_micro_batch_nothing_is_filling_yet() -> None:
    result = tandem([[1, 1]], ready_s=[2], waits=[(0, "policy")])
    assert pieces(attribute(result)) == [
        (0, 0.0, 2.0, "policy", 0),
        (0, 3.0, 4.0, "fill_drain", -1),
        (1, 0.0, 2.0, "policy", 0),
        (1, 2.0, 3.0, "fill_drain", 0),
    ]


def test_a_heavy_micro_batch_holds_its_slot() -> None:
    """Heavy prefills and light decodes alternate, two in flight on two stages."""
    result = tandem([[10, 10], [1, 1]] * 2, cap=2, prefill_tokens=[512, 0] * 2)
    assert pieces(attribute(result)) == [
        (0, 11.0, 20.0, "prefill_decode", 2),
        (0, 31.0, 41.0, "fill_drain", -1),
        (1, 0.0, 10.0, "fill_drain", 0),
        (1, 21.0, 30.0, "prefill_decode", 2),
    ]


def test_a_slow_last_stage_is_uneven_stages_on_the_first() -> None:
    result = tandem([[1, 3]] * 4, cap=2, prefill_tokens=[512, 0] * 2)
    assert of_cause(result, "uneven_stages") == [
        (0, 2.0, 4.0, "uneven_stages", 2),
        (0, 5.0, 7.0, "uneven_stages", 3),
    ]


def test_a_slow_middle_stage_hides_the_links() -> None:
    """The oldest micro-batch queued for longer than it spent on links: they made no idle time."""
    result = tandem([[1, 2, 1]] * 9, cap=3, link_s=0.1)
    assert {batch for *_, batch in of_cause(result, "link")} == {0, 3}
    totals = attribute(result).totals()
    assert {cause for cause in CAUSES if totals[cause]} == {"fill_drain", "uneven_stages", "link"}


def test_links_and_unevenness_share_the_wait_for_a_slot() -> None:
    """Of the 4 s that stage 0 idles on each round trip, the link takes one."""
    result = tandem([[4, 4], [1, 1]] * 3, cap=2, link_s=1.0, prefill_tokens=[512, 0] * 3)
    assert [piece for piece in pieces(attribute(result)) if piece[0] == 0][:-1] == [
        (0, 5.0, 8.0, "prefill_decode", 2),
        (0, 8.0, 9.0, "link", 2),
        (0, 14.0, 17.0, "prefill_decode", 4),
        (0, 17.0, 18.0, "link", 4),
    ]


def test_preparation_that_stage_0_has_too_does_not_delay_a_slot() -> None:
    result = tandem([[1, 1]] * 4, cap=2, link_s=0.5, prepare_s=0.25)
    assert [piece[:4] for piece in pieces(attribute(result)) if piece[4] == 2][:2] == [
        (0, 2.5, 3.0, "link"),
        (0, 3.0, 3.25, "cpu"),
    ]


def test_an_in_flight_cap_below_the_depth_is_policy() -> None:
    result = tandem([[1, 1, 1]] * 2, cap=1)
    assert of_cause(result, "policy") == [
        (0, 1.0, 3.0, "policy", 1),
        (1, 2.0, 4.0, "policy", 1),
        (2, 3.0, 5.0, "policy", 1),
    ]


def test_an_answer_given_while_no_slot_is_free_does_not_hide_the_cause() -> None:
    """A driver that is asked at its cap answers "policy"; what it waits for is the link."""
    asked = dataclasses.replace(
        scenarios()["link"],
        wait_s=np.array([2.0]),
        wait_reason=np.array([WAIT_REASONS.index("policy")]),
    )
    assert pieces(attribute(asked)) == EXPECTED["link"]


def test_a_hole_keeps_its_cause_on_its_way_through_the_stages() -> None:
    """Two equal micro-batches in flight on four stages: nothing is uneven, there is no work."""
    waits = [(2.0 + 4 * turn, "work") for turn in range(3)]
    ready = [0, 1, 4, 5, 8, 9]
    result = tandem([[1] * 4] * 6, ready_s=ready, waits=waits, cap=4)
    totals = attribute(result).stage_totals()
    assert totals[:, CAUSES.index("starvation")].tolist() == [4.0] * 4
    assert totals.sum() == totals[:, : CAUSES.index("starvation") + 1].sum()


def test_unevenness_closes_the_hole_that_comes_first() -> None:
    """2 s of starvation reach stage 1 while it still has a second of work on micro-batch 0."""
    result = tandem([[1, 2], [1, 1]], ready_s=[0, 3], waits=[(1, "work"), (2, "kv")])
    assert pieces(attribute(result))[-1] == (1, 3.0, 4.0, "kv_limited", 1)


def test_a_link_that_is_equal_for_all_makes_no_idle_time_on_later_stages() -> None:
    result = tandem([[1, 1]] * 3, link_s=0.5)
    assert of_cause(result, "link") == [(1, 1.0, 1.5, "link", 0)]


def test_a_longer_transfer_does() -> None:
    result = tandem([[1, 1]] * 3, link_s=[[0, 0.5], [0, 0.5], [0, 0.75]])
    assert of_cause(result, "link")[1:] == [(1, 3.5, 3.75, "link", 2)]


def test_half_from_the_stages_and_half_from_the_micro_batches_is_named_by_content() -> None:
    result = tandem([[1, 1], [2, 1.5]], prefill_tokens=[0, 512])
    assert pieces(attribute(result))[-1] == (1, 2.0, 3.0, "prefill_decode", 1)


def test_one_stage_without_a_gap_has_no_bubbles() -> None:
    bubbles = attribute(tandem([[1]] * 3))
    assert (pieces(bubbles), bubbles.idle_s, bubbles.busy_s) == ([], 0.0, 3.0)


def test_one_micro_batch() -> None:
    assert pieces(attribute(tandem([[1, 2]]))) == [
        (0, 1.0, 3.0, "fill_drain", -1),
        (1, 0.0, 1.0, "fill_drain", 0),
    ]


@pytest.mark.parametrize("arrival_s", [(), (1.5,)])
def test_no_micro_batch(arrival_s: tuple[float, ...]) -> None:
    bubbles = attribute(tandem(np.zeros((0, 4)), arrival_s=arrival_s))
    start = arrival_s[0] if arrival_s else 0.0
    assert bubbles.window == (start, start)
    assert (pieces(bubbles), bubbles.idle_s, bubbles.busy_s) == ([], 0.0, 0.0)
    assert sum(bubbles.totals().values()) == 0.0


def test_rounding_is_not_idle_time() -> None:
    exact = tandem([[1, 1]] * 4)
    result = dataclasses.replace(exact, end_s=exact.end_s - [[0, 1e-12]])
    assert {cause for *_, cause, _ in pieces(attribute(result))} == {"fill_drain"}


def test_a_run_that_has_not_ended_is_refused() -> None:
    result = tandem([[1], [np.nan]])
    with pytest.raises(ValueError, match="micro-batch 1 never returned"):
        attribute(result)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_drawing_in_the_documentation_is_of_this_run(cause: str, tmp_path: Path) -> None:
    draw_bubbles(cause, scenarios()[cause], tmp_path)
    assert TITLES[cause] in (tmp_path / f"bubbles_{cause}.svg").read_text()
    assert (FIGURES / f"bubbles_{cause}.svg").is_file()
