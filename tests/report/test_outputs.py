"""Files: whole or not at all, and numbers that read back as they were."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.report.tables import (
    html_table,
    is_number,
    markdown_table,
    number,
    percent,
    print_numbers,
    print_table,
    write_json,
    write_rows,
    write_table,
)
from evenflow.results.run import RunResult, columns_of
from tests.synthetic_run import synthetic_run


def test_columns_of_different_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        write_table(tmp_path / "t.csv", {"a": np.arange(3), "b": np.arange(2)})


def test_what_json_cannot_say_becomes_null(tmp_path: Path) -> None:
    write_json(tmp_path / "t.json", {"a": np.float64("nan"), "b": [float("inf"), np.int64(3)]})
    assert json.loads((tmp_path / "t.json").read_text()) == {"a": None, "b": [None, 3]}


def test_each_array_of_a_run_is_a_column_of_one_table() -> None:
    result = synthetic_run(requests=5)
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    arrays = [name for name, value in values.items() if isinstance(value, np.ndarray | list)]
    tables = ("requests", "batches", "stages", "waits", "gaps")
    listed = [name for table in tables for name in columns_of(RunResult, table)]
    assert sorted([*arrays, "cached_tokens"]) == sorted(listed)  # None without a prefix cache
    assert {len(values[name]) for name in columns_of(RunResult, "requests") if name in arrays} == {
        5
    }


@settings(max_examples=50)
@given(
    st.lists(st.floats(width=64), min_size=1),
    st.sampled_from([["a"], ["fill drain", "x"], ["a,b", "c"], ['"', "é"], [""], ["", "a"]]),
)
def test_numbers_are_written_as_python_writes_them(values: list[float], words: list[str]) -> None:
    words = [words[index % len(words)] for index in range(len(values))]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        write_table(
            path,
            {"i": np.arange(len(values)), "x": np.array(values), "w": np.array(words), "l": words},
        )
        written = path.read_text(encoding="utf-8")
    expected = io.StringIO()
    cells = ["" if math.isnan(value) else value for value in values]
    rows = [("i", "x", "w", "l"), *zip(range(len(values)), cells, words, words, strict=True)]
    csv.writer(expected, lineterminator="\n").writerows(rows)
    assert written == expected.getvalue()


def test_an_empty_word_alone_in_its_row_is_in_quotes(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", {"word": ["", "a"]})
    assert (tmp_path / "t.csv").read_text() == 'word\n""\na\n'  # else the row would be no row


def test_stages_are_written_one_after_the_other(tmp_path: Path) -> None:
    result = synthetic_run(requests=5, depth=3)
    write_table(tmp_path / "stages.csv", result.tables()["stages"])
    with open(tmp_path / "stages.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    batches = len(result.scheduled_s)
    assert [int(row["stage"]) for row in rows] == sorted([0, 1, 2] * batches)
    last = rows[batches + 1]  # stage 1, micro-batch 1
    assert (last["batch_id"], float(last["end_s"])) == ("1", result.end_s[1, 1])


def test_a_data_frame_is_written_as_pandas_would(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {
            "n": [1, 2],
            "x": [0.1 + 0.2, np.nan],
            "s": ["a,b", None],
            "o": [1, 2.5],
            "b": [True, False],
        }
    )
    table["mixed"] = pd.Series([1, 2.5], dtype=object)
    write_table(tmp_path / "t.csv", table)
    assert (tmp_path / "t.csv").read_text() == table.to_csv(index=False)


def test_rows_may_lack_a_column(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.csv", [{"a": 1, "b": 2.5}, {"a": 2, "c": "x"}])
    assert (tmp_path / "t.csv").read_text() == "a,b,c\n1,2.5,\n2,,x\n"


def test_a_table_as_text() -> None:
    rows = [["TTFT", "1.2"], ["a < b", "3"]]
    assert markdown_table(["", "ms"], rows, right=True).splitlines() == [
        "|  | ms |",
        "|---|---:|",
        "| TTFT | 1.2 |",
        "| a < b | 3 |",
    ]
    assert markdown_table(["a", "b"], []) == "| a | b |\n|---|---|\n"
    assert "a &lt; b</th><td>3</td>" in html_table(["", "ms"], rows)


def test_a_table_of_numbers_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_numbers(["", "sarathi"], [["TTFT", "1.2"]], "Latency")
    title, _, heads, _, row, _ = capsys.readouterr().out.splitlines()
    assert (title.split(), heads.split(), row.split()) == (
        ["Latency"],
        ["sarathi"],
        ["TTFT", "1.2"],
    )
    assert len(heads.rstrip()) == len(row.rstrip())


@pytest.mark.parametrize("columns", ["80", "20"])
def test_no_word_of_a_table_is_cut(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cells = ["3, default, too short", "token_budget=12345", *["10,488 ± 11,178"] * 4]
    print_table(["point", "setting", *["E2EL mean (ms)"] * 4], [cells])
    words = re.findall(r"[^\s│┃]+", capsys.readouterr().out)
    assert {"short", "token_budget=12345", "11,178"}.issubset(words)


@pytest.mark.parametrize("columns", ["80", "20"])
def test_no_number_of_a_table_is_lost(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cells = ["TTFT mean (ms)", *[f"1022{column}.4" for column in range(6)]]
    print_numbers(["", *["token_throttling(iterations=4)"] * 6], [cells])
    numbers = re.findall(r"1022\d\.4", capsys.readouterr().out)
    assert numbers == cells[1:]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345.6, "12,346"),
        (999.96, "1000"),
        (12.3456, "12.35"),
        (12.0, "12"),
        (0.00123456, "0.001235"),
        (-1.25e300, "-1.25e+300"),
        (None, "-"),
    ],
)
def test_a_number_has_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text
    assert number(12.3456, 3) == "12.3"
    assert number(math.nan) == "-"


def test_a_share_is_in_percent() -> None:
    assert [percent(share) for share in (0.1234, -0.00001, None)] == ["+12.34%", "0.00%", "-"]
    assert percent(0.1234, 1, sign=False) == "12.3%"


def test_true_is_no_number() -> None:
    assert [is_number(value) for value in (1, 1.5, True, "1")] == [True, True, False, False]
