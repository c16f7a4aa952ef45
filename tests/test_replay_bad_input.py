"""`evenflow replay` of what no run wrote: one line that names the file and the place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'evenflow[runtime]'")

from experiments.run_file.run import load_config
from tests.command_line import evenflow, write_inputs


def test_a_folder_that_holds_no_run_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl.gz"
    head = json.dumps({"config": {"stages": 2}, "folder": "."})
    cases = {
        "no such file": None,
        "cannot read it": b"not gzip",
        "no first line": gzip.compress(b""),
        "no first line with a configuration": gzip.compress(b"[]\n"),
        "1: not a line of JSON": gzip.compress(b"{\n"),
        "a configuration of evenflow None": gzip.compress(head.encode()),
        "Compressed file ended": gzip.compress(head.encode())[:-12],
    }
    for message, content in cases.items():
        if content is not None:
            path.write_bytes(content)
        status, _, errors = evenflow("replay", str(tmp_path))
        assert status == 2
        assert message in errors
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([["add", 0, float("nan"), 5, 3, None, None]], "2: not a line of JSON"),
        ([["add", 0, 0.0, -5, 3, None, None]], "2: no entry of a journal: a request of -5 prompt"),
        ([["add", "x", "y", "z", 3, None, None]], "2: no entry of a journal: ['add', 'x'"),
        ([["add", 0]], "2: no entry of a journal: ['add', 0]"),
        ([["next", "soon", None]], "2: no entry of a journal: ['next', 'soon', None]"),
        ([["next", 0.0, [5, 5]]], "2: no entry of a journal"),
        ([["abort", [1]]], "2: no entry of a journal: ['abort', [1]]"),
        ([["abort", 5]], "entry 0 (Aborted): cannot follow those before it: request 5 is not"),
        ([["complete", 0.0, 5, [], []]], "entry 0 (Completed): cannot follow those before it"),
        ([["add", 0, 0.0, 5, 3, None, None]] * 2, "entry 1 (Added): cannot follow those before it"),
    ],
)
def test_a_record_that_no_run_wrote_is_one_line(
    lines: list[Any], message: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    config = load_config(tmp_path / "RUN.yaml").resolved()
    head = {"config": config, "folder": str(tmp_path)}
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, [head, *lines])).encode()))
    status, _, errors = evenflow("replay", str(tmp_path))
    assert status == 2
    assert message in errors
    assert str(path) in errors
    assert len(errors.splitlines()) == 1
