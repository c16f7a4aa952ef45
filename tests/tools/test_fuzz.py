"""A few cases of each class of attack; `make test-fuzz` has as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evenflow.report.tables import write_rows
from tests.amounts import many
from tests.command_line import done, rows_of
from tests.places import ROOT
from tools.fuzz import CLASSES
from tools.fuzz_worlds import wrong_tables


def test_what_nobody_sane_gives_it_is_told_in_a_line() -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--cases", str(many(20))]
    fuzz = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [f"{name}: 0 of {many(20)} cases are wrong" for name in CLASSES]
    assert fuzz.stdout.splitlines() == lines, fuzz.stdout + fuzz.stderr


@pytest.mark.parametrize(
    ("place", "cell", "told"),
    [
        (("requests", 3, "output_tokens"), "2", "request 3: 2 of 4 tokens"),
        (("requests", 0, "first_token_s"), "0.0", "request 0: times in disorder"),
        (("batches", 2, "free_pages"), "201", "pages that are not there"),
        (("batches", 0, "prefill_tokens"), "1", "tokens computed"),
        (("stages", 1, "start_s"), "0.001", "overlap"),
        (("stages", -1, "end_s"), "9.0", "stage 1, micro-batch"),
    ],
)
def test_the_judge_of_tables_sees_a_planted_fault(
    folder: Path, place: tuple[str, int, str], cell: str, told: str
) -> None:
    done("simulate", "RUN.yaml", "--out", "out")
    costs = {"kind": "affine", "base_s": 0.005, "per_token_s": 2e-5}
    world = {"stages": 2, "costs": costs, "kv": {"pages": 200}}
    asked = [(0.1 * i, 20 + 7 * i % 50, 1 + i % 5) for i in range(20)]
    assert wrong_tables(Path("out"), world, asked) is None
    name, row, column = place
    path = Path("out") / f"{name}.csv"
    rows = rows_of(path)
    rows[row][column] = cell
    write_rows(path, rows)
    assert told in str(wrong_tables(Path("out"), world, asked))
