"""The simulated world as a SimPy model: what runs, and that both pipelines give the same bytes."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import simpy

import evenflow as ef
from evenflow.errors import UsageError
from evenflow.sim import Link, simulate
from evenflow.types import Request
from tests.amounts import ALL
from tests.worlds import assert_same, small_world

ROOT = Path(__file__).parent.parent
SYSTEMS = sorted((ROOT / "examples" / "systems").glob("*.yaml"))
FEW = {} if ALL else {"workload.requests": 10}


@pytest.mark.parametrize("file", SYSTEMS if ALL else SYSTEMS[::6], ids=lambda file: file.stem)
def test_a_system_is_the_same_bytes_as_a_recurrence_and_as_processes(file: Path) -> None:
    formula, processes = (
        ef.simulate(file, set=FEW, pipeline=pipeline).result
        for pipeline in ("recurrence", "processes")
    )
    assert formula.provenance["pipeline"] == "recurrence"
    assert processes.provenance["pipeline"] == "processes"
    assert_same(replace(formula, provenance={}), replace(processes, provenance={}))


def test_a_run_is_events_of_a_simpy_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = []
    step = simpy.Environment.step

    def counted(env: simpy.Environment) -> None:
        step(env)
        stepped.append(env.now)

    monkeypatch.setattr(simpy.Environment, "step", counted)
    result = simulate(small_world([Request(0, 1.5, 8, 3), Request(1, 1.5, 8, 3)]))
    assert result.returned_s.tolist() == [2.5, 3.5, 4.5]
    started, arrived, all_are_in = 0.0, 1.5, 1.5
    assert stepped == [started, arrived, all_are_in, 2.5, 3.5, 4.5]


def test_only_an_instant_writes_into_simpys_queue() -> None:
    for file in (ROOT / "sim").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = used & {"_queue", "_eid", "_now", "_ok", "_value", "_defused", "_active_proc"}
        assert not private or file.name == "clock.py", private
    clock = ast.parse((ROOT / "sim" / "clock.py").read_text(encoding="utf-8"))
    instant = next(n for n in clock.body if isinstance(n, ast.ClassDef) and n.name == "Instant")
    assert instant.end_lineno is not None
    assert instant.end_lineno - instant.lineno < 30


def test_a_shared_link_needs_processes() -> None:
    shared = small_world([Request(0, 0.0, 8, 2)], depth=3, link=Link(0.1, 0.0, shared=True))
    assert simulate(shared).completion_s.tolist() == [pytest.approx(7.8)]
    with pytest.raises(UsageError, match=r"pipeline: recurrence: hops share a link"):
        simulate(shared, pipeline="recurrence")
