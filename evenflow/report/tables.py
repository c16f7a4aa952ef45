"""The one place that writes tables and facts: to files, to a terminal, as Markdown and as HTML.

Cells are text where people read them, and values in a file. Loads nothing but what is called for.
Knows no run and no study.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

import numpy as np

from evenflow.errors import UsageError, require_package
from evenflow.report.echo import visible

if TYPE_CHECKING:
    from pandas import DataFrame

Cells = Sequence[str]
Format = Literal["csv", "parquet"]
"""How a table is written; its file's suffix says so."""
FORMATS: tuple[Format, ...] = get_args(Format)
LARGEST = 1e15
"""From here on the digits of a float are no longer those of a number."""
BLOCK = 10_000
"""Rows that are written at a time."""
PLAIN_WORD = re.compile("([A-Za-z0-9_ ][A-Za-z0-9_ -]*)?")
FORMULA = re.compile("'*[=+@\\t\\r\\n-]")
"""Begins a cell of CSV that a spreadsheet would compute; an apostrophe before it makes it text."""


def write_table(path: Path, table: Mapping[str, Any] | DataFrame) -> None:
    """Write equally long columns as the path's suffix says; floats read back bit for bit.

    NaN is an empty cell, in an array or a Series. A list is written as it is, None as nothing. In
    Parquet an empty cell is a null. In CSV a word that a spreadsheet would compute begins with an
    apostrophe, which `read_table` takes away.
    """
    columns = {str(name): c if isinstance(c, list) else np.asarray(c) for name, c in table.items()}
    with open(path, "wb") as file:
        (_write_parquet if path.suffix == ".parquet" else _write_csv)(file, columns)


def read_table(folder: Path, name: str, columns: Sequence[str]) -> DataFrame | None:
    """Return columns of the table of that name in a folder; None where it is in no format.

    UsageError for a file that cannot be read, and for two of which one is not the run's.
    """
    import pandas as pd

    there = [path for form in FORMATS if (path := folder / f"{name}.{form}").exists()]
    if len(there) > 1:
        names = " and ".join(path.name for path in there)
        raise UsageError(f"{folder}: holds {names}; take away the one that is not the run's")
    for path in there:
        check_format(path.suffix[1:], str(path))
        try:
            if path.suffix == ".csv":
                table = pd.read_csv(path).rename(columns=as_given)
                words = table.select_dtypes(exclude="number")
                table[words.columns] = words.map(as_given)
            else:
                table = pd.read_parquet(path, engine="pyarrow")
            return table[list(columns)]
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: is no table of {name}: {reason}") from None
    return None


def check_format(name: str, who: str = "the format parquet") -> None:
    """Raise a UsageError where `who` needs what is not installed."""
    if name == "parquet":
        require_package("pyarrow", who)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line for each row as CSV; a cell is empty where a row lacks the column."""
    write_table(path, columns_of(rows))


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns in the order in which their names first occur; "" where one lacks."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, "") for row in rows] for name in names}


def _write_parquet(file: BinaryIO, columns: Mapping[str, Any]) -> None:
    """Write columns as Parquet; an empty list is one of words.

    Compressed, which makes words short too: dictionaries would only make times longer.
    """
    import pyarrow
    from pyarrow import parquet

    def array(column: Any) -> Any:
        kind = pyarrow.string() if isinstance(column, list) and not column else None
        return pyarrow.array(column, kind, from_pandas=True)

    table = pyarrow.table({name: array(column) for name, column in columns.items()})
    parquet.write_table(table, file, compression="zstd", use_dictionary=False)


def _write_csv(file: BinaryIO, columns: Mapping[str, Any]) -> None:
    file.write(_csv([list(map(_inert, columns))]))
    for start in range(0, max(map(len, columns.values()), default=0), BLOCK):
        block = [column[start : start + BLOCK] for column in columns.values()]
        plain = len(block) > 1 and all(map(_is_plain, block))  # csv quotes an empty word alone
        file.write(_lines(block) if plain else _csv(zip(*map(_cells, block), strict=True)))


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    lines = _CsvLines()
    csv.writer(lines, lineterminator="\r\n").writerows(rows)
    return "".join(lines).encode()


class _CsvLines(list[str]):
    """Lines of CSV that end in a newline; a cell with any end of a line is in quotes."""

    def write(self, line: str) -> None:
        self.append(f"{line[:-2]}\n")


def _inert(cell: Any) -> Any:
    """Return a cell as it is; what begins a formula, and is no number, behind an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell


def as_given(cell: Any) -> Any:
    """Return the cell that `_inert` was given."""
    is_inert = isinstance(cell, str) and cell[:1] == "'" and FORMULA.match(cell)
    return cell[1:] if is_inert else cell


def _is_formula(text: str) -> bool:
    if not FORMULA.match(text):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def _cells(column: Any) -> list[Any]:
    if isinstance(column, list):
        return list(map(_inert, column))
    cells = ["" if isinstance(c, float) and math.isnan(c) else c for c in column.tolist()]
    return list(map(_inert, cells)) if column.dtype.kind in "OU" else cells


def _is_plain(column: Any) -> bool:
    """Say whether JSON has a column's cells as CSV does, but for quotes around words."""
    if isinstance(column, list):
        return {*map(type, column)} == {str} and all(map(PLAIN_WORD.fullmatch, {*column}))
    if column.dtype.kind == "f":
        sizes = np.abs(column)
        return bool(np.all((sizes == 0) | ((sizes >= 1e-4) & (sizes < 1e16))))
    return column.dtype.kind in "iu" or (column.dtype.kind == "U" and _is_plain(column.tolist()))


def _lines(block: list[Any]) -> bytes:
    """Return plain columns as CSV; pydantic's JSON writes numbers much faster than Python."""
    from pydantic_core import to_json

    columns = (column if isinstance(column, list) else column.tolist() for column in block)
    rows = to_json(zip(*columns, strict=True))[2:-2]
    return rows.replace(b"],[", b"\n").replace(b'"', b"") + b"\n"


def write_summaries(path: Path, label: str, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a row of numbers for each summary; the first column names it."""
    rows = [
        {label: name, **{key: value for key, value in summary.items() if is_metric(value)}}
        for name, summary in summaries.items()
    ]
    write_rows(path, rows)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as JSON; a number that is not finite becomes null, which JSON can say."""
    text = json.dumps(_plain(data), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # of NumPy
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(heads: Cells, rows: Iterable[Cells]) -> None:
    """Print rows of words under column heads, in boxes, as cells may have several lines.

    No word is cut: where the terminal is too narrow for that, lines are longer than it.
    """
    from rich.table import Table

    rows = list(rows)
    _print(Table(*map(visible, heads), show_lines=True), heads, rows, [heads, *rows])


def print_numbers(heads: Cells, rows: Iterable[Cells], title: str = "") -> None:
    """Print rows of numbers: the first column says what they are, the others align at the right.

    Only a head is cut, into lines; where the numbers need it, lines are longer than the terminal.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows, above = list(rows), visible(title) or None
    table = Table(title=above, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(visible(head), justify="right" if index else "left", overflow="fold")
    _print(table, heads, rows, rows)


def _print(table: Any, heads: Cells, rows: Sequence[Cells], whole: Sequence[Cells]) -> None:
    """Print a table of rich's with these rows; no word of the `whole` ones is cut.

    Brackets in a cell are no markup.
    """
    from rich.console import Console

    console = Console(markup=False, emoji=False)
    frame = 3 * len(heads) + (1 if table.pad_edge else -1)
    widths = _widths([heads, *rows], whole, console.width - frame)
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    console.width = max(console.width, sum(widths) + frame)
    for row in rows:
        table.add_row(*map(visible, row))
    console.print(table)


def _widths(lines: Sequence[Cells], whole: Sequence[Cells], room: int) -> list[int]:
    """Return widths of columns: the longest `whole` words, and even shares of what is left."""
    from rich.cells import cell_len

    def longest(cells: Cells, parts: Callable[[str], list[str]]) -> int:
        return max((cell_len(part) for cell in cells for part in parts(visible(cell))), default=1)

    wanted = [longest(column, str.splitlines) for column in zip(*lines, strict=True)]
    widths = [longest(column, str.split) for column in zip(*whole, strict=True)] or wanted
    spare = max(room - sum(widths), 0)
    by_wish = sorted(range(len(widths)), key=lambda index: wanted[index] - widths[index])
    for left, index in zip(range(len(widths), 0, -1), by_wish, strict=True):
        more = min(wanted[index] - widths[index], spare // left)
        widths[index] += more
        spare -= more
    return widths


def markdown_table(heads: Cells, rows: Iterable[Cells], *, right: bool = False) -> str:
    """Return a table as Markdown, each line ended; `right`: all columns but the first align so."""
    rules = ["---", *["---:" if right else "---"] * (len(heads) - 1)]
    lines = [" | ".join(heads), *map(" | ".join, rows)]
    head, *body = [f"| {line} |\n" for line in lines]
    return "".join([head, f"|{'|'.join(rules)}|\n", *body])


class Html(str):
    """A cell that is HTML already; one of words is escaped."""

    __slots__ = ()


def html_table(
    heads: Cells, rows: Iterable[Cells], *, sorts: bool = False, narrow: bool = True
) -> str:
    """Return a table as HTML; `sorts`: by a click on a head, `narrow`: no wider than it needs."""
    click = ' onclick="sortBy(this)" title="sort"' if sorts else ""
    head = "".join(f"<th{click}>{_html(word)}</th>" for word in heads)
    lines = []
    for name, *values in rows:
        cells = "".join(f"<td>{_html(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{_html(name)}</th>{cells}</tr>')
    look = ' class="narrow"' if narrow else ""
    return f"<table{look}><thead><tr>{head}</tr></thead>\n<tbody>{''.join(lines)}</tbody></table>"


def _html(cell: str) -> str:
    return cell if isinstance(cell, Html) else escape(cell)


def number(value: float | None, digits: int = 4) -> str:
    """Return a number to `digits` significant digits, or all before its point; a dash for none.

    Thousands are set apart; beyond LARGEST it has a power of ten.
    """
    if value is None or math.isnan(value):
        return "-"
    is_long = 10 ** (digits - 1) <= abs(value) < LARGEST
    return f"{value:,.0f}" if is_long else f"{value:.{digits}g}"


def percent(share: float | None, digits: int = 2, *, sign: bool = True) -> str:
    """Return a share in percent, with its sign unless that is not wanted; a dash for none."""
    if share is None or not math.isfinite(share):
        return "-"
    value = round(100 * share, digits) + 0.0  # no minus before a zero
    return f"{value:{'+' if sign and value else ''}.{digits}f}%"


def is_number(value: object) -> bool:
    """Say whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_metric(value: object) -> bool:
    """Say whether a value is a metric's: a number, or None of no requests."""
    return value is None or is_number(value)
