"""A csv in order is read at once; the same numbers come of whatever has to be read row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.errors import UsageError
from evenflow.traces import Trace, load_trace
from evenflow.traces.formats import TraceTable

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = f"{HEADER}2023-11-16 18:15:46.6805900,374,44\n"


def trace_of(text: str, folder: Path, limit: int | None = None) -> Trace:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return load_trace(path, limit=limit)


def rows_of(trace: Trace) -> list[tuple[float, int, int]]:
    assert trace.arrival_s is not None
    columns = trace.arrival_s, trace.prompt_tokens, trace.output_tokens
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TraceTable, "rows")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (f"{FIRST}2023-11-16T18:15:50,396,109\n", [(0.0, 374, 44), (3.31941, 396, 109)]),
        (f"{FIRST}\n2023-11-16 18:15:45,1e3, 9\n", [(0.0, 1000, 9), (1.68059, 374, 44)]),
        ("x,arrived_at,num_prefill_tokens,num_decode_tokens\n,1.5,3,4\n,4.25,1,2", [
            (0.0, 3, 4),
            (2.75, 1, 2),
        ]),
        ("arrival_time_ns;input_toks;output_toks\n2e9;3;4\n3500000000;1;2", [
            (0.0, 3, 4),
            (1.5, 1, 2),
        ]),
    ],
)  # fmt: skip
def test_a_csv_in_order_is_read_without_its_rows(
    text: str, rows: list[tuple[float, int, int]], tmp_path: Path
) -> None:
    assert rows_of(trace_of(text, tmp_path)) == rows


@pytest.mark.usefixtures("at_once")
def test_of_a_limit_the_rest_is_not_read(tmp_path: Path) -> None:
    trace = trace_of(f"{FIRST}never,read\n", tmp_path, limit=1)
    assert (rows_of(trace), trace.rows_read) == ([(0.0, 374, 44)], 1)


@pytest.mark.parametrize(
    ("row", "rows", "dropped"),
    [
        ("2023-11-16 18:15:47,396,0", [], {"no output tokens": 1}),
        ("2023-11-16 18:15:47,0,109", [], {"no prompt tokens": 1}),
        ("2023-11-16 18:15:47.68059 ,396.0,109", [(1.0, 396, 109)], {}),
        ("2023-11-16 18:15:47.68059,1_000,109", [(1.0, 1000, 109)], {}),
        ('2023-11-16 18:15:47.68059,396,"109"', [(1.0, 396, 109)], {}),
        ("2199-01-01 00:00:00,396,109", [(5526423853.319409, 396, 109)], {}),
        ("2050-06-01 00:00:00.000000001,396,109", [(837495853.3194101, 396, 109)], {}),
    ],
)
def test_other_rows_are_read_one_by_one(
    row: str, rows: list[tuple[float, int, int]], dropped: dict[str, int], tmp_path: Path
) -> None:
    trace = trace_of(f"{FIRST}{row}\n", tmp_path)
    assert (rows_of(trace), trace.dropped) == ([(0.0, 374, 44), *rows], dropped)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("2023-02-30 18:15:47,396,109", "TIMESTAMP is '2023-02-30 18:15:47'"),
        ("now,396,109", "TIMESTAMP is 'now'"),
        ("2023-11-17,396,109", "TIMESTAMP is '2023-11-17'"),
        ("2023-11-16 18:15:47Z,396,109", "TIMESTAMP is '2023-11-16 18:15:47Z', a calendar time wi"),
        ("2023-11-16 18:15:47,-1,109", "ContextTokens is '-1'"),
        ("2023-11-16 18:15:47,1,99999999999999999999", "GeneratedTokens is '999999999999"),
        ("2023-11-16 18:15:47,1", "2 fields; expected 3"),
        ("2023-11-16 18:15:47,1,2,3", "4 fields; expected 3"),
        ("2023-11-16 18:15:47,1.5,2", "ContextTokens is '1.5'"),
    ],
)
def test_a_row_that_is_wrong_is_named(row: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"line 3: {wrong}"):
        trace_of(f"{FIRST}{row}\n", tmp_path)
