"""Show a result in at most a screen: in a terminal, in a notebook, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from evenflow.errors import shortened
from evenflow.report.echo import visible
from evenflow.report.tables import html_table

MOST_LINES, MOST_ROWS, MOST_COLUMNS = 12, 30, 12
"""How many sentences a notebook shows of a result, and how much of its tables."""
MOST_LETTERS, MOST_OF_A_CELL = 160, 80
"""How long a result is as a text, and a cell of its tables in a notebook."""


class Aside(str):
    """A sentence beside the answer, such as what was left out; commands print it on stderr."""

    __slots__ = ()


class Table(NamedTuple):
    """Rows of text under heads, and a title.

    `of_words`: cells may have several lines; `markdown`: as a command prints them.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    of_words: bool = False
    markdown: bool = False
    title: str = ""


class Shown:
    """A result that describes itself in words; its tables and numbers are attributes."""

    @property
    def is_failure(self) -> bool:
        """Whether a command ends with 1: every run failed, or a limit of a check is passed."""
        return False

    def told(self) -> Iterator[str | Table]:
        """Yield sentences and tables, the answer first."""
        raise NotImplementedError

    def __repr__(self) -> str:
        words = [part for part in self.told() if isinstance(part, str)]
        answer = " ".join(visible(": ".join([type(self).__name__, *words[:1]])).split())
        return f"<{shortened(answer, MOST_LETTERS)}>"

    def _repr_html_(self) -> str:
        parts = list(self.told())
        lines = [shortened(visible(part)) for part in parts if isinstance(part, str)]
        tables = [part for part in parts if isinstance(part, Table)]
        html = [f"<p>{escape(line)}</p>" for line in lines[:MOST_LINES]]
        more = len(lines) - MOST_LINES
        html += [f"<p>... and {more} more</p>"] if more > 0 else []
        left = MOST_ROWS
        for table in tables:
            rows = [_short(row) for row in table.rows[:left]]
            left -= len(rows)
            html.append(html_table(_short(table.heads), rows))
        return "\n".join([*html, *_hidden(tables)])


def _short(cells: Sequence[str]) -> list[str]:
    return [shortened(visible(cell), MOST_OF_A_CELL) for cell in cells[:MOST_COLUMNS]]


def _hidden(tables: Sequence[Table]) -> list[str]:
    """Return a line on the rows and columns that are not shown, if there are any."""
    more = sum(len(table.rows) for table in tables) - MOST_ROWS
    wider = max((len(table.heads) for table in tables), default=0) - MOST_COLUMNS
    said = [f"{more} more rows"] if more > 0 else []
    said += [f"{wider} more columns"] if wider > 0 else []
    return [f"<p>... and {' and '.join(said)}</p>"] if said else []
