"""What a notebook shows of a result, however much it has to tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.report.shown import MOST_COLUMNS, MOST_LINES, MOST_ROWS, Aside, Shown, Table
from tests.amounts import many

TEXTS = st.text(max_size=20) | st.just("<&" * 300)


@dataclass(repr=False)
class Told(Shown):
    parts: list[str | Table]

    def told(self) -> Iterator[str | Table]:
        yield from self.parts


TABLES = st.builds(
    lambda cell, across, down: Table([cell] * across, [[cell] * across] * down),
    TEXTS,
    st.integers(1, 20),
    st.integers(0, 50),
)


@settings(max_examples=many(100))
@given(st.lists(TEXTS | st.builds(Aside, TEXTS) | TABLES, max_size=16))
def test_any_result_is_short_and_its_words_are_no_html(parts: list[str | Table]) -> None:
    result = Told(parts)
    html = result._repr_html_()
    assert html.count("<p>") <= MOST_LINES + 2
    assert html.count('<th scope="row">') <= MOST_ROWS
    assert html.count("<td>") <= MOST_ROWS * MOST_COLUMNS
    assert "<<" not in html
    assert len(repr(result)) <= 170
    assert "\n" not in repr(result)


def test_what_is_not_shown_is_counted() -> None:
    html = Told([f"line {i}" for i in range(14)] + [Table(["x"] * 14, [["1"] * 14] * 33)])
    assert "... and 2 more<" in html._repr_html_()
    assert "... and 3 more rows and 2 more columns" in html._repr_html_()
