"""Tables as Parquet: what the CSV holds, wherever a run is written and read."""

from __future__ import annotations

import errno
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet

import evenflow as ef
from evenflow import errors
from evenflow.report.tables import read_table, write_table
from tests.command_line import (
    complaint,
    done,
    evenflow,
    mistake,
    refusal,
    refused,
    rows_of,
    write_trace,
)
from tests.report.test_full_disk import files_of_at_most

pytestmark = pytest.mark.usefixtures("folder")

PARQUET = ("--format", "parquet")
CASES = {
    "one pipeline": (),
    "rejected": ("--set", "max_model_len=60"),
    "prefix cache": ("--set", "kv.prefix_cache=true"),
    "replicas": ("--set", "replicas={count: 2}"),
    "pools": ("--set", "scheduler=distserve"),
    "no transfers": ("--set", "scheduler=distserve", "--set", "workload.requests=1"),
}

WORDS = ("status", "reason", "cause", "source", "destination")
KINDS: dict[type, str] = {str: "string", float: "double", int: "int64"}


def kind_of(column: str) -> type:
    return str if column in WORDS else float if column.endswith("_s") else int


def tables_in(folder: str, suffix: str) -> dict[str, Path]:
    paths = sorted(Path(folder).rglob(f"*.{suffix}"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


@pytest.mark.parametrize("keys", CASES.values(), ids=list(CASES))
def test_parquet_holds_what_the_csv_does(keys: tuple[str, ...]) -> None:
    for form in ("csv", "parquet"):
        command = ("simulate", "RUN.yaml", *keys, "--format", form, "--out", form)
        assert evenflow(*command)[0] == 0
    texts, binary = tables_in("csv", "csv"), tables_in("parquet", "parquet")
    assert texts.keys() == binary.keys() >= {"requests"}
    assert not tables_in("csv", "parquet") | tables_in("parquet", "csv")
    for name, path in texts.items():
        rows, table = rows_of(path), parquet.read_table(binary[name])
        assert path.read_text().split("\n")[0].split(",") == table.column_names
        for column in table.column_names:
            kind = kind_of(column)
            assert str(table.schema.field(column).type) == KINDS[kind], (name, column)
            cells = [row[column] for row in rows]
            values = [kind(cell) if cell or kind is str else None for cell in cells]
            assert table[column].to_pylist() == values, (name, column)


def test_nothing_else_in_the_folder_depends_on_the_format() -> None:
    done("simulate", "RUN.yaml", "--out", "text")
    for name in ("one", "two"):
        done("simulate", "RUN.yaml", *PARQUET, "--out", name)
    for path in Path("one").iterdir():
        if path.name not in ("wall_clock.json", "manifest.json"):
            other = Path("two" if path.suffix == ".parquet" else "text", path.name)
            assert path.read_bytes() == other.read_bytes(), path


def test_what_no_request_has_is_a_null_and_an_empty_word_stays_one(tmp_path: Path) -> None:
    columns = {"x": np.array([0.1 + 0.2, np.nan]), "s": ["", "é"], "n": [3, None]}
    write_table(tmp_path / "t.parquet", columns)
    rows = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert rows == [{"x": 0.1 + 0.2, "s": "", "n": 3}, {"x": None, "s": "é", "n": None}]
    with pytest.raises(ValueError, match="length"):
        write_table(tmp_path / "t.parquet", {"a": np.arange(3), "b": np.arange(2)})


@pytest.mark.long
def test_python_and_compare_take_the_format_too() -> None:
    ef.simulate("RUN.yaml", out="a", save="requests", format="parquet")
    assert {path.name for path in Path("a").glob("*requests*")} == {"requests.parquet"}
    ef.compare("RUN.yaml", ["sarathi"], out="b", format="parquet")
    done("compare", "RUN.yaml", "--schedulers", "sarathi", *PARQUET, "--out", "c")
    for folder in ("b", "c"):
        kept = {"sarathi/batches", "sarathi/bubbles", "sarathi/requests", "sarathi/stages"}
        assert tables_in(folder, "parquet").keys() == kept
        assert tables_in(folder, "csv").keys() == {"comparison"}


def test_runs_in_either_format_are_compared_alike() -> None:
    ef.simulate("RUN.yaml", out="a", save="requests")
    other: dict[str, Any] = {"set": {"costs.base_s": 0.006}, "save": "requests"}
    ef.simulate("RUN.yaml", out="b", **other)
    ef.simulate("RUN.yaml", out="c", format="parquet", **other)
    csv, mixed = ef.diff("a", "b"), ef.diff("a", "c")
    assert mixed.paired
    pd.testing.assert_frame_equal(csv.metrics, mixed.metrics)
    assert ef.diff("b", "c").metrics.empty


def test_a_folder_holds_one_format_and_the_users_file_stays() -> None:
    done("simulate", "RUN.yaml", "--out", "out")
    done("simulate", "RUN.yaml", *PARQUET, "--out", "out")
    assert not tables_in("out", "csv")
    Path("out/requests.csv").write_text("mine")
    assert "(requests.csv)" in refusal("simulate", "RUN.yaml", *PARQUET, "--out", "out")
    done("simulate", "RUN.yaml", *PARQUET, "--out", "out", "--force")
    assert Path("out/requests.csv").read_text() == "mine"
    both = "out: holds requests.csv and requests.parquet; take away the one that is not the run's"
    assert complaint("diff", "out", "out") == both
    Path("out/requests.csv").unlink()
    with open("out/stages.parquet", "ab") as file:
        file.write(b"changed")
    assert "(stages.parquet)" in refusal("simulate", "RUN.yaml", "--out", "out")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"request_id\n1\n"])
def test_what_is_no_parquet_is_a_mistake(content: bytes) -> None:
    ef.simulate("RUN.yaml", out="a", save="requests", format="parquet")
    Path("a/requests.parquet").write_bytes(content)
    assert complaint("diff", "a", "a").startswith("a/requests.parquet: is no table of requests: ")


def test_a_parquet_without_the_columns_is_a_mistake() -> None:
    write_table(Path("requests.parquet"), {"request_id": np.arange(2)})
    with refused("requests.parquet: is no table of requests: "):
        read_table(Path(), "requests", ["request_id", "arrival_s"])
    assert read_table(Path(), "stages", ["stage"]) is None


def test_without_pyarrow_a_line_says_what_to_install_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ef.simulate("RUN.yaml", out="a", save="requests", format="parquet")

    def lacking(name: str) -> Any:
        return None if name == "pyarrow" else find_spec(name)

    monkeypatch.setattr(errors, "find_spec", lacking)
    needs = "needs pyarrow: pip install pyarrow"
    write_trace(Path("trace.csv"), "no,row,at all")  # so that whatever begins a run fails otherwise
    line = f"the format parquet {needs}"
    assert refusal("simulate", "RUN.yaml", *PARQUET, "--out", "b") == line
    assert refusal("compare", "RUN.yaml", "--schedulers", "sarathi", *PARQUET) == line
    assert mistake(lambda: ef.simulate("RUN.yaml", out="b", format="parquet")) == line
    assert mistake(lambda: ef.compare("RUN.yaml", ["sarathi"], out="b", format="parquet")) == line
    assert complaint("diff", "a", "a") == f"a/requests.parquet {needs}"


def test_another_format_is_unknown() -> None:
    form: Any = "xlsx"
    with refused("format should be 'csv' or 'parquet', not 'xlsx'"):
        ef.simulate("RUN.yaml", format=form)


def test_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    table = {"x": np.random.default_rng(0).random(10_000)}
    with files_of_at_most(5_000), pytest.raises(OSError, match="File too large") as caught:
        write_table(tmp_path / "t.parquet", table)
    assert caught.value.errno == errno.EFBIG
