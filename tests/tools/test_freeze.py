"""What runs write is what it was, byte for byte; `make freeze` also holds the figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import done, evenflow
from tools.freeze import FROZEN, QUICK, ROOT, differences, outputs_of

SLOW = {"capacity", "sweep-random", "sweep-search"}
"""Half of the time; what they run, the tests of studies do as well."""

KNOWN = json.loads(FROZEN.read_text(encoding="utf-8")).get(np.__version__)


@pytest.mark.skipif(KNOWN is None, reason=f"nothing is frozen for numpy {np.__version__}")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in SLOW)) for case in QUICK]
)
def test_a_command_writes_the_frozen_bytes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path, command: str) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "100")
        status, output, errors = evenflow(*shlex.split(command))
        assert status == 0, errors
        return output

    assert KNOWN is not None
    assert not list(differences(KNOWN[case], outputs_of(QUICK[case], run)))


def test_no_float_is_added_by_what_each_python_rounds_differently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`sum` compensates from Python 3.12 on; `evenflow.sums.plain_sum` is the same on all."""

    def whole(values: Iterable[Any], /, start: Any = 0) -> Any:
        values = [*values]
        assert not any(isinstance(value, float) for value in values), "a sum of floats"
        return add(values, start)

    add = sum
    monkeypatch.setattr("builtins.sum", whole)
    monkeypatch.chdir(ROOT)
    few, out = ("--set", "workload.requests=30"), str(tmp_path / "out")
    for run in ("quickstart", "systems/td_pipe", "systems/sglang", "systems/distserve"):
        done("simulate", f"examples/{run}.yaml", *few, "--out", out)
    speculative = "speculative={k: 3, acceptance: 0.5, draft_cost_share: 0.1}"
    done("simulate", "examples/quickstart.yaml", *few, "--set", speculative, "--out", out)


def test_a_byte_that_moves_is_told() -> None:
    old = {"a.csv": {"sha256": "0", "means": {"x": 2.0, "y": 1.0}}, "b.csv": {"sha256": "1"}}
    new = {"a.csv": {"sha256": "2", "means": {"x": 3.0, "y": 1.0}}, "c.csv": {"sha256": "1"}}
    assert list(differences(old, new)) == [
        "a.csv: means moved by at most 0.5 (x)",
        "b.csv: not written any more",
        "c.csv: new",
    ]
