"""A file of a run, a sweep or a figure is data: its texts run nothing, and steer no terminal."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.cli.terminal import Progress
from evenflow.errors import MOST_LETTERS, UsageError
from evenflow.experiments.figures import FOLDER
from evenflow.experiments.figures.cases import function
from evenflow.experiments.figures.formulas import MOST_LETTERS as LONGEST_FORMULA
from evenflow.experiments.figures.formulas import chosen, evaluated, filled
from evenflow.experiments.figures.panels import checked_plot
from evenflow.report.echo import STEERS
from evenflow.report.tables import print_numbers, print_table, read_table, write_table
from tests.command_line import complaint
from tests.experiments.test_figures import MINE
from tests.places import ROOT

TABLE = pd.DataFrame({"speed": [1, 2, 4], "label": ["a", None, "b"], "odd name": [0.5, 1.5, 2.5]})
NUMBERS = {"kept": [1, 4], "reference": {"batch": 2}, "gpus": 8, "words": "'touch ran'"}


# -- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "values"),
    [
        ("1000 * speed", [1000, 2000, 4000]),
        ("speed / 2 - (speed + 1)", [-1.5, -2.0, -3.0]),
        ("-speed", [-1, -2, -4]),
        ("7", [7, 7, 7]),
        ("speed / 0", [math.inf] * 3),
        ("speed * {gpus}", [8, 16, 32]),
        ("label == 'b'", [False, False, True]),
        ("label == label", [True, False, True]),
        ("1 < speed <= 4", [False, True, True]),
        ("speed in [1, 2] and not label == 'a'", [False, True, False]),
        ("speed in {kept} or speed == {reference[batch]}", [True, True, True]),
        ("speed not in {kept}", [False, True, False]),
    ],
)
def test_a_formula_is_arithmetic_and_comparison_of_columns(formula: str, values: list[Any]) -> None:
    assert evaluated(formula, TABLE, NUMBERS, "let").tolist() == values


RUNS = "@pd.io.common.os.system('touch ran')"
NO_FORMULAS = (
    *(
        RUNS,
        "__import__('os').system('touch ran')",
        "speed.map(print)",
        "speed.__class__",
        "@speed",
    ),
    *(
        "9**9**9",
        "1 << 99",
        "speed // 1",
        "speed % 2",
        "~speed",
        "f'{speed}'",
        "lambda: 1",
        "`speed`",
    ),
    *(
        "[x for x in speed]",
        "(x := 1)",
        "speed if speed else 1",
        "speed[0]",
        "{speed: 1}",
        "{*kept}",
    ),
    *("", "1 +", "speed speed", "1; 2", "\0", "speed == None", "speed is speed", "not speed"),
    "not " * 70 + "speed",
)


@pytest.mark.parametrize("formula", NO_FORMULAS)
def test_anything_else_is_no_formula_and_runs_nothing(formula: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=r'^let: ".* is no formula; columns, numbers'):
        evaluated(formula, TABLE, NUMBERS, "let")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("sped * 2", 'no column "sped"; did you mean "speed"?'),
        ("label * 999999999", "cannot be computed"),
        ("'a' * 999999999", "cannot be computed"),
        ("label + label", "cannot be computed"),
        ("1 / 0", "cannot be computed"),
        ("speed in {gpus}", "cannot be computed"),
        ("{__class__}", 'no number "__class__"'),
        ("{kept[__import__('os')]}", "no number"),
        ("speed + 1" * LONGEST_FORMULA, "a formula has at most 300"),
        ("speed", "is neither true nor false"),
    ],
)
def test_a_formula_that_does_not_fit_the_columns_is_told_why(formula: str, told: str) -> None:
    with pytest.raises(UsageError, match=r"^where: ") as error:
        chosen(formula, TABLE, NUMBERS, "where")
    assert told in str(error.value)
    assert len(str(error.value)) < 200


def test_words_have_numbers_in_braces_and_nothing_else() -> None:
    numbers = {"speed": 1234.5, "reference": {"batch": 2}, "": 0.25, "label": "{gpus}"}
    words = "{{{speed:,.0f}}} at {reference[batch]}: {:.1%} of {label}"
    assert filled(words, numbers, "title") == "{1,234} at 2: 25.0% of {gpus}"


@pytest.mark.parametrize(
    "words",
    [
        *("{speed.__class__}", "{speed!r}", "{speed:9999999d}", "{speed:{speed}}", "{speed[0]}"),
        *("{", "}", "{speed", "{0}", "{spede}", "{speed:>99999999}", "{label:d}", "{__class__}"),
    ],
)
def test_other_words_in_braces_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match=r"^title: "):
        filled(words, {"speed": 1, "label": "a"}, "title")


@pytest.mark.parametrize(
    "name",
    [
        *("measures.np", "cases.importlib", "os.system", "..cli.app.app", "own._decodes", "none"),
        *("measures.__loader__", "panels.draw", "own.Study", "own.played", "measures.shares.a", ""),
    ],
)
def test_a_figure_names_only_functions_that_are_for_figures(name: str) -> None:
    with pytest.raises(UsageError):
        function(name, "study")


# -- every key of every file ----------------------------------------------------------------------


def with_hostile(document: Any, texts: Iterator[str]) -> Iterator[Any]:
    """Yield a document with a text in place of one value after the other."""
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(inside):
        below = with_hostile(value, texts) if isinstance(value, dict | list) else ()
        for changed in (*below, next(texts)):
            copy = document.copy()
            copy[key] = changed
            yield copy


FIGURES = [*FOLDER.glob("*.yaml"), *(ROOT / "examples").glob("[fs][it]*s/*.yaml")]


def test_no_key_of_a_figure_runs_what_it_holds(folder: Path) -> None:
    """What its keys are read with, for all files; what is drawn is in `tools.fuzz`."""
    texts = itertools.cycle([RUNS, "{gpus.__class__}", "\x1b[2J", "os.system"])
    read = 0
    for path in FIGURES:
        document = yaml.safe_load(path.read_text())
        plot = document.get("plot", {}) if isinstance(document, dict) else {}
        for changed in with_hostile(plot, texts):
            read += 1
            with suppress(UsageError):
                keys, panels = checked_plot(changed)
                for formula in [*keys.let.values(), *filter(None, (p.where for p in panels))]:
                    evaluated(formula, TABLE, NUMBERS, "plot")
    assert read > 1000
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("plot:\n", f'plot:\n  let: {{z: "{RUNS}"}}\n', "plot.let.z"),
        ("x: budget,", f'x: budget, where: "{RUNS}",', "plot.panels.where"),
        ("{gain: ours}", '{gain: "{gain.__class__}"}', "plot.panels.y.gain: no number"),
        ("legend: {}", "legend: {prop: {fname: /etc/passwd}}", 'unknown key "legend.prop"'),
        ("legend: {}", "legend: {}, axes: {picker: 1}", 'unknown key "axes.picker"'),
        ("legend: {}", 'legend: {}, write: "%.99999999f"', "write: should be null, or a text with"),
        ("{key: scheduler.token", '{words: "{0.real}", key: scheduler.token', "no number"),
        ("vary:", "claims: {nothing: {take: gain}}\nvary:", "claims: nothing; known:"),
        ('"Speed', '"{study.__init__}', "title: no number"),
    ],
)
def test_a_hostile_figure_is_refused_in_a_line(old: str, new: str, told: str, folder: Path) -> None:
    Path("mine.yaml").write_text(MINE.replace(old, new))
    assert old in MINE
    assert told in complaint("figures", "mine.yaml", "--quick", "--out", "out")
    assert not (folder / "ran").exists()


# -- terminals ------------------------------------------------------------------------------------

OWNED = "\x1b]0;owned\a\x1b[2J\u202e\x9b\x7f"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\u202e\x9b\x7f"


def test_a_key_that_steers_the_terminal_is_shown(folder: Path) -> None:
    Path("RUN.yaml").write_text(Path("RUN.yaml").read_text() + f"{json.dumps(OWNED)}: 1\n")
    assert f'unknown key "{SHOWN}"' in complaint("simulate", "RUN.yaml")
    assert SHOWN in complaint("simulate", f"{OWNED}.yaml")
    assert SHOWN in complaint(OWNED)


def test_tables_and_progress_show_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_numbers([OWNED, "[/b]"], [[OWNED, "[red]1"]], title=OWNED)
    print_table([OWNED, "b"], [["[/]", ":smile:"]])
    shown = "".join(capsys.readouterr().out.split())
    assert not STEERS.search(shown)
    assert all(word in shown for word in ("owned", "[/b]", "[red]1", "[/]", ":smile:"))
    assert Progress([OWNED], 3).lines() == [f"{SHOWN}: 0 of 3"]


PRINTS = re.compile(r"(?<![\w.])(print|Console)\(|(typer|click)\.s?echo|\bstd(out|err)\.write")


def test_all_printing_goes_through_one_place() -> None:
    """`print` in two modules is of a text of ours, before or without the command line."""
    folders = ("evenflow", "sim", "profiler", "runtime", "traces", "experiments")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if PRINTS.search(path.read_text(encoding="utf-8"))
    }
    assert found == {
        "evenflow/report/echo.py",
        "evenflow/report/tables.py",
        "evenflow/cli/terminal.py",
        "evenflow/user_code.py",
    }


@pytest.mark.parametrize(
    ("assignment", "begins", "ends"),
    [
        (f"scheduler.{'word ' * 200}=1", "scheduler sarathi has no parameter", "watermark"),
        (f"model={'x' * 5000}", "xxx", "xxx: File name too long"),
        ("workload.requests=many" + " of them" * 200, "--set workload.requests", "of them of ..."),
        (f"scheduler={{name: {'s' * 200}}}", "unknown scheduler", "your own as module:Class"),
    ],
)
def test_a_long_line_keeps_its_advice(
    assignment: str, begins: str, ends: str, folder: Path
) -> None:
    line = complaint("simulate", "RUN.yaml", "--set", assignment)
    assert len(line) <= MOST_LETTERS
    assert line.startswith(begins)
    assert line.endswith(ends), line


# -- names that are lists, and cells --------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("scheduler={name: td_pipe, predictor: {kind: [1]}}", 'predictor "[1]" is unknown'),
        ("scheduler={name: td_pipe, predictor: {kind: {a: 1}}}", "is unknown; known: classifier"),
        ("scheduler={name: td_pipe, predictor: {1: 2}}", "predictor should be a text"),
        ("gpu={name: [1]}", "gpu: name: should be a text, not [1]"),
        ("gpu.name={a: 1}", "gpu: name: should be a text, not {'a': 1}"),
        ("link={name: [1]}", "link"),
    ],
)
def test_a_name_that_is_none_is_told_of(assignment: str, told: str, folder: Path) -> None:
    assert told in complaint("simulate", "RUN.yaml", "--set", assignment)


@settings(max_examples=50)
@given(st.lists(st.text("=+-@'\t\r\n 1a\"", max_size=5), min_size=1, max_size=5))
def test_no_cell_of_a_csv_is_a_formula_and_all_read_back(
    tmp_path_factory: pytest.TempPathFactory, labels: list[str]
) -> None:
    words = [f"{label}." for label in labels]  # what is a number reads back as one
    folder = tmp_path_factory.mktemp("csv")
    write_table(folder / "points.csv", {"=label": words, "speed": [-1.5] * len(words)})
    with open(folder / "points.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["'=label", "speed"]
    for cell, speed in rows:
        assert cell[0] not in "=+@\t\r\n-" or isinstance(float(cell), float)
        assert speed == "-1.5"
    read = read_table(folder, "points", ["=label", "speed"])
    assert read is not None
    assert list(map(str, read["=label"])) == words or all(map(_is_number, words))


def _is_number(text: str) -> bool:
    try:
        return bool(float(text)) or True
    except ValueError:
        return False
