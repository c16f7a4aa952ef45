"""SGLang's rules: recorded journals, the times of its loops, and what holds whatever it serves."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.replay import replay
from evenflow.results.bubbles import attribute
from experiments.engines import sglang
from experiments.engines.journal import first_line, lines
from experiments.engines.journal import replay as replay_journal
from sim import World
from sim.driver import Driver
from sim.tandem import Tandem
from tests.test_engine_journals import stem
from tests.worlds import AuditedBatcher, assert_same, require_idle, sglang_worlds

SHARED = Path(os.environ.get("EVENFLOW_SHARED", "../shared")) / "engines" / "sglang-0.5.23"
OWN = Path(__file__).with_name("journals")
FILES = [*sorted(SHARED.glob("*.jsonl.gz")), *sorted(OWN.glob("sglang-*.jsonl.gz"))]
JOURNALS = [path for path in FILES if sglang.MARK in first_line(path)]


@pytest.mark.parametrize("path", JOURNALS, ids=stem)
def test_sglang_decides_as_recorded(path: Path) -> None:
    """Step for step and, from arrivals alone, each end in a simulation to 1 ns."""
    outcome = replay_journal(path, sglang)
    assert outcome.difference is None
    assert outcome.equal == outcome.steps > 40
    assert outcome.timed == sum(len(event.get("finished", ())) for event in lines(path))


@settings(max_examples=150, deadline=None)
@given(sglang_worlds(st.just(1), overlap=True))
def test_nothing_is_lost_but_what_is_chosen_too_early(world: World) -> None:
    """Who ends by itself decodes once more; what is in flight of who is retracted is dropped."""
    driver = Driver(world, Tandem, batcher=AuditedBatcher)
    result = driver.run()
    wanted = {request.request_id: request.output_tokens for request in world.requests}
    got = zip(result.request_id.tolist(), result.output_tokens.tolist(), result.status, strict=True)
    assert all(tokens == wanted[number] for number, tokens, status in got if status == "completed")
    served = np.array([status != "rejected" for status in result.status], dtype=bool)
    assert result.sampled_rows.sum() >= result.output_tokens[served].sum()
    assert result.gap_count.sum() == (result.output_tokens[served] - 1).clip(0).sum()
    (engine,) = driver.engines
    require_idle(engine)
    assert replay(engine.journal, world.batcher()) is None
    assert_same(result, Driver(world, Tandem).run())
    bubbles = attribute(result)
    assert sum(bubbles.totals().values()) == pytest.approx(bubbles.idle_s, abs=1e-9)
