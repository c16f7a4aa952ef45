"""How far a simulated run is from a served one: of costs, of metrics, of requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenflow.errors import PolicyError
from evenflow.replay import Asked
from experiments.report.plots import save
from experiments.validation.layers import (
    bubble_shares,
    compared,
    cost_errors,
    priced,
    repeat_errors,
    request_errors,
    summary_of,
)
from experiments.validation.validate import Validation
from experiments.validation.write import draw_validation
from sim import Link, simulate
from tests.virtual_run import WORLD, serve_noisily


def test_costs_are_compared_with_what_a_replayed_journal_held() -> None:
    served, journal = serve_noisily(WORLD)
    result = served.result
    expected_s = priced(WORLD, journal).expected_s
    tokens = result.prefill_tokens + result.decode_tokens
    assert expected_s == pytest.approx(np.repeat(0.01 + 1e-5 * tokens[:, None], 3, axis=1))
    lines = cost_errors([result], [expected_s])
    late = np.abs(expected_s / (result.end_s - result.start_s) - 1)
    for stage, line in enumerate(lines):
        assert line["median"] == pytest.approx(np.median(late[:, stage]))
        assert line["p95"] == pytest.approx(np.percentile(late[:, stage], 95))
        assert line["bias"] < 0
        assert 0 < line["median_repeat"] < line["p95_repeat"]
    asked = next(index for index, entry in enumerate(journal) if isinstance(entry, Asked))
    changed = [*journal[:asked], journal[asked]._replace(decision=None), *journal[asked + 1 :]]
    with pytest.raises(PolicyError, match="a recorded run does not replay"):
        priced(WORLD, changed)


def test_only_what_has_its_like_repeats() -> None:
    shapes = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]])
    errors = repeat_errors(shapes, np.array([1.0, 9.0, 2.0, 8.0, 3.0]))
    assert sorted(errors) == pytest.approx([0.0, 0.5, 0.5])
    assert len(repeat_errors(shapes[:2], np.array([1.0, 9.0]))) == 0


def test_one_metric_of_several_runs() -> None:
    runs = [{"duration": 9.0}, {"duration": 11.0}]
    line = compared("duration", runs, {"duration": 9.5}, [{"duration": 10.0}, {"duration": 10.2}])
    assert line == {
        "measured": 10.0,
        "least": 9.0,
        "most": 11.0,
        "spread": 0.2,
        "simulated": 9.5,
        "error": pytest.approx(-0.05),
        "calibrated": pytest.approx(10.1),
        "calibrated_error": pytest.approx(0.01),
        "calibrated_spread": pytest.approx(0.02),
    }
    nothing = compared("mean_tpot_ms", [{"mean_tpot_ms": 0.0}], {"mean_tpot_ms": 0.0})
    assert (nothing["error"], nothing["spread"]) == (None, None)
    assert "calibrated" not in nothing


def test_bubbles_add_up_to_what_is_not_busy() -> None:
    result = simulate(WORLD)
    shares = bubble_shares([result, result])
    assert sum(shares.values()) == pytest.approx(summary_of(result)["bubble_share"])


def test_errors_of_requests() -> None:
    result = simulate(WORLD)
    later = replace(
        result, completion_s=result.completion_s + 0.1 * (result.completion_s - result.arrival_s)
    )
    found = request_errors(result, later)
    assert found["e2el"] == pytest.approx({"median": 0.1, "p95": 0.1, "most": 0.1})
    assert found["ttft"] == {"median": 0, "p95": 0, "most": 0}


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    result = simulate(WORLD)
    predicted = simulate(replace(WORLD, link=Link(0, 0.001)))
    save(draw_validation(Validation({}, result, result, predicted), "t"), tmp_path / "validation")
    assert {path.name for path in tmp_path.iterdir()} == {"validation.png", "validation.svg"}
