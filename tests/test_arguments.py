"""What Python passes: data of numpy and pandas is as that of a file, anything else is a line."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest

import evenflow as ef
from evenflow.errors import UsageError

RUN: dict[str, Any] = {
    "stages": 2,
    "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 2e-5},
    "kv": {"pages": 200},
    "scheduler": "sarathi",
    "workload": {"trace": "azure-conv-sample", "requests": 3, "arrivals": "offline"},
}


FEW = {"trace": "azure-conv-sample", "requests": 3, "arrivals": {"kind": "poisson", "rate": 1}}


@pytest.mark.parametrize(
    "change",
    [
        {"stages": np.int64(2)},
        {"stages": (1, 1)},
        {"stages": np.array([1, 1])},
        {"stages": pd.Series([1, 1])},
        {"kv": MappingProxyType({"pages": np.int32(200)})},
        {"scheduler": {"name": "sarathi", "token_budget": np.int64(512)}},
    ],
)
def test_data_of_other_packages_is_that_of_a_file(change: Mapping[str, Any]) -> None:
    plain = ef.simulate(RUN).summary
    for run, changes in (({**RUN, **change}, None), (RUN, change)):
        changed = ef.simulate(run, set=changes).summary
        assert {**changed, "provenance": None} == {**plain, "provenance": None}


def test_one_value_stands_for_a_list_of_one() -> None:
    fewer = ef.simulate(RUN, set="workload.requests=2", processes={"name": "straggler", "stage": 1})
    assert fewer.summary["completed"] == 2
    with pytest.raises(UsageError, match=r"^nowhere\.yaml: no such file"):
        ef.check("nowhere.yaml")


class HoldsALock:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def schedule(self, view: ef.View) -> ef.Plan:
        return ef.Plan()


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["kv"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ef.simulate(3), "simulate: run should be a text or a path or a mapping of names"),
        (lambda: ef.simulate(pd.DataFrame({"a": [1]})), "or a RunConfig, not a 0 1"),
        (lambda: ef.simulate("a\0b"), r"or a RunConfig, not 'a\x00b'"),
        (lambda: ef.simulate(HOLDS_ITSELF), "run is nested too deep, or holds itself"),
        (lambda: ef.simulate({**RUN, (1, 2): 3}), "simulate: run should be"),
        (lambda: ef.simulate(RUN, set={3: 4}), "set should be a mapping of names to any value or"),
        (lambda: ef.simulate(RUN, set=[3]), "set should be"),
        (lambda: ef.simulate(RUN, out=b"x"), "out should be a text or a path or None, not b'x'"),
        (lambda: ef.simulate(RUN, out="x" * 300), "cannot write: File name too long"),
        (lambda: ef.simulate(RUN, save="some"), "save should be 'summary' or 'requests' or 'all'"),
        (lambda: ef.simulate(RUN, on_done=3), "on_done should be a function or None, not 3"),
        (lambda: ef.simulate(RUN, watch=3), "watch should be a function or None, not 3"),
        (lambda: ef.simulate(RUN, processes=[None]), "processes should be a list, each a text or"),
        (
            lambda: ef.compare(RUN, 3),
            "scheduler: should be a name, a mapping, or a class or object",
        ),
        (
            lambda: ef.compare(RUN, [HoldsALock()]),
            "HoldsALock: cannot be copied for each engine (",
        ),
        (lambda: ef.compare(RUN, systems=None), "systems should be a text or a list, each a text"),
        (lambda: ef.capacity(RUN, {"p99_itl_ms": "x"}), "slo should be a mapping of names to a nu"),
        (lambda: ef.capacity(RUN, {"p99_itl_ms": 9}, replications=1.5), "should be a whole number"),
        (lambda: ef.capacity(RUN, {"p99_itl_ms": 9}, workers=0), "it must be a whole number, 1 or"),
        (lambda: ef.plan(RUN, {"p99_itl_ms": 9}, 1, price="x"), "price should be a number or None"),
        (lambda: ef.plan(RUN, gpus=1, slo=5), "a text or a list, each a text, not 5"),
        (lambda: ef.figures({"mine": 3}), "names should be a list, each a text, or a mapping"),
        (lambda: ef.calibrate(RUN, []), "results: none are given; a file of a benchmark"),
        (
            lambda: ef.diff(None, Path()),
            "diff: a should be a text or a path or a Outcome, not None",
        ),
    ],
)
def test_another_type_is_one_line(call: Callable[[], object], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_working_folder_that_is_gone_leaves_what_is_named_from_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, out = tmp_path / "gone", tmp_path / "out"
    (tmp_path / "mine.py").write_text("from evenflow.schedulers.sarathi import Sarathi as Mine\n")
    (tmp_path / "RUN.yaml").write_text(json.dumps(RUN))
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run = ef.simulate(tmp_path / "RUN.yaml", scheduler="mine.py:Mine", out=out)
    assert run.summary["completed"] == 3
    assert (out / "report.html").is_file()
    with pytest.raises(UsageError, match=r"^out: cannot write"):
        ef.simulate(tmp_path / "RUN.yaml", out="out")


def test_names_that_are_not_utf_8_are_shown_with_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"b\xff.yaml")
    Path(name).write_text(json.dumps(RUN | {"workload": FEW}))
    ef.simulate(name, out="simulated")
    ef.plan(
        name, {"p99_ttft_ms": 9000}, 2, schedulers="sarathi", budgets=64, workers=1, out="planned"
    )
    assert "b\\udcff.yaml" in Path("simulated/report.html").read_text()
    first, *_ = Path("planned/plan.yaml").read_text().splitlines()
    assert first.endswith("for b\\udcff.yaml.")
    assert "b\\udcff.yaml" in str(ef.check(name).table)
