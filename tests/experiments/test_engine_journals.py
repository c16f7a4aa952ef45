"""Recorded decisions of real engines, replayed: every step is equal."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evenflow.errors import UsageError
from evenflow.experiments.recordings import form_of, of_engines, replay_engines, vllm
from evenflow.experiments.recordings.journal import (
    Event,
    ReplayOutcome,
    read,
    replay,
    simulated,
    world_of,
)
from tests.command_line import evenflow
from tests.places import SHARED
from tools import engines_table

VLLM = sorted((SHARED / "engines" / "vllm-0.32.0").glob("*.jsonl.gz"))
JOURNALS = [path for path in VLLM if "prompts" not in path.name]
LOOPS = [path for path in JOURNALS if path.name.startswith("loop")]

needs_shared = pytest.mark.skipif(
    not JOURNALS, reason=f"no recordings of vLLM in {SHARED} (EVENFLOW_SHARED)"
)


def stem(path: Path) -> str:
    return path.name.split(".")[0]


@needs_shared
@pytest.mark.parametrize("path", JOURNALS, ids=stem)
def test_vllm_decides_as_recorded(path: Path) -> None:
    outcome = replay(path, vllm, "0.32.0")
    assert outcome.difference is None
    assert outcome.equal == outcome.steps > 100


@pytest.fixture(scope="module")
def own() -> list[tuple[Path, ReplayOutcome | UsageError]]:
    return list(replay_engines(of_engines(engines_table.OWN), None))


def test_engines_decide_as_in_our_own_recordings(own: list[tuple[Path, Any]]) -> None:
    for path, outcome in own:
        assert isinstance(outcome, ReplayOutcome), path
        assert outcome.difference is None, path
        assert outcome.equal == outcome.steps > 20
        assert outcome.timed or path.name.startswith("gllm")


def test_the_document_has_our_own_recordings(own: list[tuple[Path, Any]]) -> None:
    """Made by python -m tools.engines_table."""
    document = engines_table.DOCUMENT.read_text(encoding="utf-8")
    assert engines_table.written(document, "own", engines_table.rows(own)) == document
    assert engines_table.written(document, "rules", engines_table.rules()) == document
    assert engines_table.written(document, "own", "") != document


@needs_shared
@pytest.mark.parametrize("path", LOOPS, ids=stem)
def test_vllm_times_are_as_recorded(path: Path) -> None:
    """A simulation with the engine's loop gives [arrival, first token, last token] to 1 ns."""
    config, *events = read(path, vllm.FACTS.fields)
    ours = simulated(world_of(vllm, path, [config | {"version": "0.32.0"}, *events]))
    times = json.loads(path.with_name(f"{stem(path)}.times.json").read_text())
    assert {str(number) for number in ours} == set(times)
    for number, (_, *expected) in times.items():
        assert ours[int(number)] == pytest.approx(expected, abs=1e-9)


CONFIG = {
    "kind": "config",
    "blocks": 5,
    "block_size": 16,
    "budget": 64,
    "max_num_seqs": 8,
    "pp": 1,
    "max_concurrent_batches": 1,
}
ASK = {
    "kind": "ask",
    "tokens": {"0": 20},
    "new": [0],
    "resumed": [],
    "preempted": [],
    "free_after": 2,
    "running": [],
    "waiting": [0],
    "held": {"0": 2},
}
ADD = {"kind": "add", "id": 0, "prompt": 20, "output": 1}
DONE = {"kind": "done", "ids": [0], "finished": [0]}
SMALL: list[Event] = [CONFIG, ADD, ASK, DONE]


def write(path: Path, events: list[Event]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    return path


def test_replay_of_a_folder_of_journals(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("one", "more/two"):
        write(tmp_path / f"{name}.jsonl.gz", SMALL)
    code, out, _ = evenflow("replay", str(tmp_path))
    assert (code, sorted(out.splitlines())) == (
        0,
        ["one.jsonl.gz: identical: 1 steps", "two.jsonl.gz: identical: 1 steps"],
    )


@pytest.mark.parametrize(
    ("index", "edit", "message"),
    [
        (2, {"free_after": 1}, "step 0: free pages: 2, recorded 1 (one block is the null block"),
        (2, {"tokens": {"0": 16}}, "step 0: request 0, tokens: 20, recorded 16 (decodes and"),
        (2, {"held": {"0": 1}}, "step 0: request 0, pages held: 2, recorded 1 (pages come"),
        (2, {"new": [], "resumed": []}, "step 0: request 0, admitted: [0], recorded [] (who"),
        (2, {"running": [[1, 0, 0, 0]]}, "step 0: request 1, running: [], recorded [1] (requests"),
        (3, {"finished": []}, "step 1: request 0, finished: [0], recorded [] (what is in flight"),
        (1, {"prompt": 99}, "step 0: 7 KV pages exceed the pool's 4"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, index: int, edit: Event, message: str
) -> None:
    events = [*SMALL[:index], SMALL[index] | edit, *SMALL[index + 1 :]]
    code, out, _ = evenflow("replay", str(write(tmp_path / "one.jsonl.gz", events)))
    assert code == 1
    assert f"one.jsonl.gz: different: {message}" in out


def test_a_later_version_is_replayed_with_a_warning_and_any_as_assumed(tmp_path: Path) -> None:
    def replay_of(engine: str, *options: str) -> tuple[int, str]:
        path = write(tmp_path / "one.jsonl.gz", [CONFIG | {"engine": engine}, *SMALL[1:]])
        code, out, err = evenflow("replay", str(path), *options)
        assert out == "one.jsonl.gz: identical: 1 steps\n"
        return code, err

    code, warning = replay_of("vllm 0.100.0")
    assert code == 0
    assert "a journal of vLLM V1 0.100.0, compared with the rules of 0.33.0" in warning
    assert len(warning.splitlines()) == 1
    for engine in ("vllm 0.31.9", "vllm 0.100.0", "vllm nightly"):
        assert replay_of(engine, "--assume-version", "0.32.0") == (0, "")


def test_the_name_of_a_folder_says_the_version_where_a_journal_does_not(tmp_path: Path) -> None:
    for folder, version in (("vllm-0.33.0", "0.33.0"), ("vllm-0.32.0", "0.32.0"), ("x", "0.32.0")):
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / "one.jsonl.gz", [CONFIG, *SMALL[1:]])
        assert form_of(path)[1] == version


def test_another_policy_may_be_asked(tmp_path: Path) -> None:
    path = str(write(tmp_path / "one.jsonl.gz", SMALL))
    assert evenflow("replay", path, "--scheduler", "sarathi")[0] == 0
    assert evenflow("replay", path, "--scheduler", "sarathy")[0] == 2


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            [CONFIG | {"async_scheduling": True, "pp": 2}, *SMALL[1:]],
            "async_scheduling with runner V1 and stages",
        ),
        ([CONFIG | {"engine": "vllm 0.31.9"}, *SMALL[1:]], "a journal of vLLM V1 0.31.9; the"),
        ([CONFIG | {"engine": "vllm nightly"}, *SMALL[1:]], "a journal of vLLM V1 nightly; the"),
        ([CONFIG | {"policy": "lottery"}, *SMALL[1:]], "scheduling_policy should be 'fcfs' or"),
        ([CONFIG | {"prefix_caching": True}, *SMALL[1:]], "prefix_caching needs the prompts"),
        ([{"kind": "config", "max_concurrent_batches": 1}], "line 1: config without 'blocks'"),
        ([CONFIG, {"kind": "sing"}], "line 2: unknown event 'sing'"),
        ([{"kind": "head"}], "neither a journal of evenflow run nor of an engine"),
        ([[1, 2]], "line 1: no event: [1, 2]"),
        ([CONFIG | {"blocks": "many"}, *SMALL[1:]], "holds values of other kinds: TypeError"),
        ([CONFIG | {"pp": 9e15}, *SMALL[1:]], "9000000000000000.0 stages; 1 to 4096 is right"),
        ([CONFIG | {"blocks": -9}, *SMALL[1:]], "holds values of other kinds: ValueError"),
        ([*SMALL[:-1], SMALL[-1] | {"t": [1]}], "holds values of other kinds: TypeError"),
        ([*SMALL[:-1], SMALL[-1] | {"finished": 3}], "holds values of other kinds: TypeError"),
    ],
)
def test_what_cannot_be_replayed_is_said(tmp_path: Path, events: list[Event], message: str) -> None:
    code, _, err = evenflow("replay", str(write(tmp_path / "one.jsonl.gz", events)))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_truncated_journal_is_unreadable(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl.gz", SMALL)
    path.write_bytes(path.read_bytes()[:-20])
    code, _, err = evenflow("replay", str(path))
    assert code == 2
    assert "cannot be read to its end" in err
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(b"{\n"))
    assert "line 1: no JSON" in evenflow("replay", str(tmp_path / "two.jsonl.gz"))[2]
    (tmp_path / "three.json").write_text("{}")
    assert "no journal, which" in evenflow("replay", str(tmp_path / "three.json"))[2]


def test_a_run_of_ours_names_its_policy_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "decisions.jsonl.gz", [{"kind": "head"}])
    code, _, err = evenflow("replay", str(path), "--scheduler", "sarathi")
    assert code == 2
    assert "says itself which policy" in err
