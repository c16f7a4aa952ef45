"""Pictures: one look, and equal bytes of equal figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from evenflow.report.page import page, parallel, picture
from evenflow.report.plots import (
    finish,
    front,
    key,
    panels,
    plain_decades,
    save,
    stage_time,
    svg,
    whiskers,
)
from evenflow.report.style import PARTS

pytestmark = pytest.mark.pictures


def drawn() -> Figure:
    figure, (left, middle, right) = panels(3, 3, 2, columns=2)
    whiskers(left, range(3), [1, 2, 3], [0.1, math.nan, 0.3], 0, label="sarathi")
    left.set_yscale("log")
    plain_decades(left.yaxis)
    front(middle, [(1, 2), (2, 1), (3, 3)], [0, 1], [2])
    stage_time(right, {"a": dict.fromkeys(PARTS, 1.0)})
    for axes in (left, middle, right):
        finish(axes, "Title", grid="y")
        key(axes, loc="upper left")
    return figure


def test_equal_figures_give_equal_bytes(tmp_path: Path) -> None:
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        save(drawn(), folder / "figure 1.5")
    for kind in ("png", "svg"):
        first, second = (tmp_path / name / f"figure 1.5.{kind}" for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_a_picture_is_part_of_a_page_that_fetches_nothing() -> None:
    text = page("Title", [picture(svg(drawn(), "one")), picture(svg(drawn(), "two"))], {})
    assert text.count("<svg") == 2
    assert "<?xml" not in text
    assert ">sarathi<" in text


def test_spare_axes_are_hidden_and_empty_ones_have_no_key() -> None:
    figure, axes = panels(3, 3, 2, columns=2)
    assert [one.get_visible() for one in figure.axes] == [True, True, True, False]
    key(axes[0])
    assert axes[0].get_legend() is None


def test_a_key_without_a_place_is_below_the_words_of_its_axes() -> None:
    figure, (axes,) = panels(1, 3, 2)
    axes.plot([1, 2], label="served")
    axes.set_xlabel("requests/s arriving")
    key(axes)
    figure.draw_without_rendering()
    assert axes.get_legend().get_window_extent().y1 < axes.xaxis.get_tightbbox().y0


def test_a_figure_is_laid_out_once_for_all_its_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure, done = drawn(), []
    engine, dpi, draw = figure.get_layout_engine(), figure.dpi, Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda *given: done.append(draw(*given)))
    save(figure, tmp_path / "a", ("png", "svg", "pdf"))
    assert len(done) == 3
    assert (figure.get_layout_engine(), figure.dpi) == (engine, dpi)


def test_the_bars_of_stage_time_are_whole() -> None:
    _, (axes,) = panels(1, 3, 2)
    even, one = dict.fromkeys(PARTS, 2.0), {**dict.fromkeys(PARTS, 0.0), "cpu": 3.0}
    stage_time(axes, {"a": even, "b": one})
    last = axes.patches[-2:]
    corners = [bar.get_corners().max(axis=0) for bar in last]
    assert [corner[0] for corner in corners] == pytest.approx([100.0, 100.0])


def test_dollars_in_labels_are_no_mathematics(tmp_path: Path) -> None:
    figure, (axes,) = panels(1, 3, 2)
    axes.bar(["$x^$", "b"], [1, 200], label="$\\frac{")
    axes.set(yscale="log", title="$" + "{" * 99 + "$")
    key(axes)
    drawn = save(figure, tmp_path / "a")
    assert "$x^$" in drawn
    assert "<tspan" in drawn, "the numbers of the axis are"


def test_values_at_the_ends_of_an_upright_axis_stand_clear_of_its_lines() -> None:
    drawing = parallel({"iterations": [1, 4, 16], "policy": ["a", "b", "c"]}, ["0", "1", "2"], [])
    words = [each for each in drawing["data"] if each["mode"] == "text"]
    assert [(each["text"], each["textposition"]) for each in words] == [
        (["1", "16"], ["bottom center", "top center"]),
        (["a", "b", "c"], ["bottom center", "middle right", "top center"]),
    ]
