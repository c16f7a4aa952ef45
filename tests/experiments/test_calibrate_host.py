"""`evenflow calibrate`: the CPU time of an engine, from results of a benchmark."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import evenflow as ef
from evenflow.experiments.reproduce.calibrate import CalibrationTarget, one_load
from evenflow.experiments.reproduce.fit import CONSTANTS, Fit, FittedConstants
from evenflow.experiments.reproduce.forms import read_results
from tests.command_line import evenflow
from tests.experiments.test_reproduce import as_guidellm, as_vllm, seen_of

RUN: dict[str, Any] = {
    "stages": 1,
    "costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 5e-5},
    "kv": {"pages": 4000},
    "max_model_len": 4096,
    "runtime": {"holds": "engine"},
    "scheduler": {"name": "sarathi", "token_budget": 512},
    "workload": {"trace": "sharegpt-sample", "requests": 80, "arrivals": "offline"},
}
TRUE = {"schedule_s": 0.003, "per_row_s": 2e-4, "front_end_s": 0.004}


def results(arrivals: dict[str, Any]) -> Any:
    """Return what a benchmark of the run would have seen, were the engine's CPU time TRUE."""
    run = ef.simulate(RUN, set={"runtime": TRUE, "workload.arrivals": arrivals})
    return seen_of(run.requests)


@pytest.fixture(autouse=True)
def measured(folder: Path) -> list[Path]:
    (folder / "MINE.yaml").write_text(yaml.safe_dump(RUN))
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    return [
        as_vllm(folder / "one", results({"kind": "poisson", "rate": 4.0})),
        as_guidellm(folder / "two", results({"kind": "offline"})),
    ]


@pytest.mark.long
@pytest.mark.slow
def test_constants_are_found_again_within_their_intervals(measured: list[Path]) -> None:
    found = ef.calibrate("MINE.yaml", measured, workers=2)
    known = {constant.name: constant.ends for constant in found.constants if constant.ends}
    assert {"schedule_s", "per_row_s", "front_end_s"} <= known.keys()
    for name, (least, most) in known.items():
        assert least <= TRUE.get(name, 0.0) <= most, name
    assert len(known) < len(found.constants)  # what makes no difference here is not told
    assert found.off["TPOT"][1] < 0.05 < found.off["TPOT"][0]
    assert any("TTFT is the queue's" in doubt for _, doubt in found.doubts)
    assert not any("one load" in doubt for _, doubt in found.doubts)


@pytest.mark.long
def test_a_mean_tells_nothing_and_it_says_so(folder: Path) -> None:
    means = {"duration": 1.0, "mean_ttft_ms": 30.0, "mean_tpot_ms": 20.0}
    (folder / "means.json").write_text(json.dumps(means))
    status, output, errors = evenflow(
        "calibrate", "MINE.yaml", "means.json", "--set", "workload.requests=4"
    )
    assert status == 0
    assert output.count("cannot") == 7
    assert "give --save-detailed" in errors
    assert "NOT FAIR: one load:" in errors


def test_loads_that_are_alike_say_little_of_two_constants(measured: list[Path]) -> None:
    paced, offline = (CalibrationTarget(read_results(path)[0], {}) for path in measured)
    assert "one load of at most" in "".join(one_load([offline, offline]))
    assert not list(one_load([paced, offline]))


def test_what_results_cannot_tell_is_no_key_to_paste() -> None:
    fit = Fit([], {"holds": "engine"}, left_out=[*range(2, len(CONSTANTS))])
    fit.best = FittedConstants(np.ones(len(CONSTANTS)), [])
    assert fit.known() == {"holds": "engine", "schedule_s": 1e-3, "per_row_s": 5e-5}
    fit.left_out = [*range(len(CONSTANTS))]
    assert fit.known() == {}


@dataclass(frozen=True)
class Straight:
    """A target of loads so near that a row's time looks like a constant, and an error."""

    patch: dict[str, Any] = field(default_factory=dict)

    def deviations(self, values: Any) -> Any:
        rows = 8 + np.linspace(-0.8, 0.8, 12)
        error = 0.04 * np.where(np.arange(12) % 2, 1, -1)
        off = [values[name] / unit - (2.0, 0.3)[i] for i, (name, unit) in enumerate(BOTH)]
        return 0.05 * (off[0] + rows * off[1]) + error


BOTH = list(CONSTANTS.items())[:2]


def test_the_interval_of_a_constant_holds_what_it_took_over_from_one_left_out() -> None:
    fit = Fit([Straight()], {}, left_out=[*range(2, len(CONSTANTS))])
    search, answers = fit.search(), None
    with suppress(StopIteration):
        while True:
            asked = search.send(answers)
            found = [SimpleNamespace(values=variant.patch["runtime"]) for variant in asked]
            answers = [SimpleNamespace(errors=(), records=[values]) for values in found]
    schedule, row = fit.constants()[:2]
    assert row.ends is None  # and schedule_s holds its 8 x 0.3 units: 4.4 ms for 2
    assert schedule.value == pytest.approx(4.4e-3, rel=0.02)
    assert schedule.ends is not None
    assert schedule.ends[0] < 2e-3 < schedule.ends[1]
