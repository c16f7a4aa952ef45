"""Bubble attribution of random pipelines: pieces cover the idle time once, for a sensible cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.results.bubbles import CAUSES, Bubbles, attribute
from evenflow.results.run import WAIT_REASONS
from tools.draw_docs import tandem

UNEVEN = {"uneven_prefill", "prefill_decode", "uneven_decode", "uneven_stages"}


def causes(bubbles: Bubbles) -> set[str]:
    return {CAUSES[cause] for cause in bubbles.cause}


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `tandem`: loads from overload to idleness, every kind of overhead."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, depth = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    ready_s = np.cumsum(rng.exponential(draw(st.sampled_from([0.0, 0.5, 3.0])), count))
    wait_s = np.sort(rng.uniform(0, ready_s[-1] + count, draw(st.integers(0, 40))))
    return {
        "service_s": rng.exponential(1.0, (count, 1)) * rng.uniform(0.5, 1.5, (count, depth)),
        "ready_s": ready_s,
        "cap": draw(st.none() | st.integers(1, depth + 2)),
        "link_s": rng.exponential(draw(st.sampled_from([0.0, 0.3])), (count, depth)),
        "prepare_s": rng.exponential(draw(st.sampled_from([0.0, 0.3])), (count, depth)),
        "prefill_tokens": rng.integers(0, 2, count).tolist(),
        "waits": [
            (float(at), WAIT_REASONS[why])
            for at, why in zip(wait_s, rng.integers(0, 3, 40), strict=False)
        ],
        "arrival_s": np.append(0.0, ready_s[rng.integers(0, 2, count) > 0]).tolist(),
    }


@given(settings())
def test_pieces_cover_the_idle_time_once_and_add_up(arguments: dict[str, Any]) -> None:
    result = tandem(**arguments)
    bubbles = attribute(result)
    assert bubbles.window == (result.arrival_s.min(), result.end_s[-1, -1])
    for stage in range(result.depth):
        mine = bubbles.stage == stage
        start, end = bubbles.start_s[mine], bubbles.end_s[mine]
        assert (start < end).all()
        assert (end[:-1] <= start[1:]).all()
        middle = (start + end) / 2
        running = np.searchsorted(result.start_s[:, stage], middle) - 1
        assert (result.end_s[np.maximum(running, 0), stage] <= start)[running >= 0].all()
        batch = bubbles.batch[mine]
        assert (running + 1 == np.where(batch < 0, len(result.start_s), batch)).all()
        idle_s = bubbles.window[1] - bubbles.window[0]
        idle_s -= float((result.end_s - result.start_s)[:, stage].sum())
        assert (end - start).sum() == pytest.approx(idle_s, rel=1e-9, abs=1e-9)
        assert bubbles.stage_totals()[stage].sum() == pytest.approx(idle_s, rel=1e-9, abs=1e-9)
    assert set(bubbles.cause.tolist()) <= set(range(len(CAUSES)))
    assert sum(bubbles.totals().values()) == pytest.approx(bubbles.idle_s, rel=1e-9, abs=1e-9)
    assert bubbles.stage_totals().sum() == pytest.approx(bubbles.idle_s, rel=1e-12)
    assert bubbles.busy_s == pytest.approx((result.end_s - result.start_s).sum(), rel=1e-9)


@given(settings(), st.integers(1, 7))
def test_gaps_divided_some_at_a_time_are_divided_alike(
    arguments: dict[str, Any], some: int
) -> None:
    result = tandem(**arguments)
    whole = attribute(result)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenflow.results.bubbles.BLOCK", some)
        found = attribute(result)
    for name in ("stage", "cause", "batch"):
        assert getattr(found, name).tolist() == getattr(whole, name).tolist()
    for name in ("start_s", "end_s"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), abs=1e-9)


@given(settings(), st.sampled_from(["link", "cpu"]))
def test_what_is_not_there_is_no_cause(arguments: dict[str, Any], cause: str) -> None:
    if cause == "link":
        arguments |= {"link_s": 0.0}
    else:
        # Sent as soon as something arrives or returns, and never prepared.
        arguments |= {"prepare_s": 0.0, "arrival_s": [0.0, *arguments["ready_s"]]}
    assert cause not in causes(attribute(tandem(**arguments)))


@given(settings())
def test_without_unevenness_it_is_no_cause(arguments: dict[str, Any]) -> None:
    """Equal micro-batches, equal stages, equal links, equal preparation: whatever the arrivals."""
    depth = arguments["service_s"].shape[1]
    arguments |= {"service_s": np.ones_like(arguments["service_s"])}
    arguments |= {"link_s": 0.3, "prepare_s": 0.2, "cap": arguments["cap"] and depth}
    assert not causes(attribute(tandem(**arguments))) & UNEVEN


@given(settings())
def test_a_stage_that_never_waits_has_no_bubbles(arguments: dict[str, Any]) -> None:
    one_stage = arguments["service_s"][:, :1]
    assert causes(attribute(tandem(one_stage))) == set()


@given(settings(), st.floats(0.0, 1e5))
def test_when_the_run_takes_place_does_not_matter(
    arguments: dict[str, Any], later_s: float
) -> None:
    first = attribute(tandem(**arguments))
    arguments |= {
        "ready_s": arguments["ready_s"] + later_s,
        "waits": [(at + later_s, why) for at, why in arguments["waits"]],
        "arrival_s": [at + later_s for at in arguments["arrival_s"]],
    }
    second = attribute(tandem(**arguments))
    assert second.stage_totals() == pytest.approx(first.stage_totals(), abs=1e-6)
