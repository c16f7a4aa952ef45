"""A class name of the product means one thing; its docstrings are in the field's words; what is
public stays, or is said to be gone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.places import ROOT
from tools.public_names import public_names

PRODUCT = ("evenflow", "sim", "traces", "profiler", "runtime", "experiments")

PRIVATE = re.compile(
    r"\b(who|whom|whoever|such an?|told|tells|(so|thus) (many|much|wide)"
    r"|those (that|who|which|it|they)|(of|on) (its|their|one's) own(?! \w)|hear(s|d)?"
    r"|(it|that|what|which) is none|is none (of|that)"
    r"|an? \w+ each(?=[.,;:]|$))\b",
    re.IGNORECASE,
)
"""Words that a stranger has to translate, where a thing has a name."""

QUESTION = re.compile(r"(who|what|how|when|where|which|why|as|of|nothing)\b", re.IGNORECASE)
"""Beginnings of a docstring that say neither what a thing is nor what it does."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def trees() -> dict[Path, ast.Module]:
    files = {path.resolve() for room in PRODUCT for path in (ROOT / room).rglob("*.py")}
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def test_no_class_name_means_two_things() -> None:
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def private_words(text: str) -> list[str]:
    return [found[0] for found in PRIVATE.finditer(re.sub("`.*?`", "", text))]


def test_docstrings_are_in_the_words_of_the_field() -> None:
    found = {
        f"{path.relative_to(ROOT.resolve())}:{node.lineno}": words
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (words := private_words(" ".join(str(node.value.value).split())))
    }
    assert not found


def test_private_words_are_seen() -> None:
    text = "Who waits, and those that end; so many, a row each, on a stage of their own. Not `who`."
    assert len(private_words(text)) == 5


def flaws(docstring: str) -> list[str]:
    """Return what is wrong with how a docstring begins."""
    first = re.split(r"(?<=\.)\s|\n\n", docstring)[0]
    long = ["more than 20 words"] if len(first.split()) > 20 else []
    return long + [begun[0] for begun in [QUESTION.match(first)] if begun]


def test_a_docstring_begins_with_what_the_thing_is_or_does_in_20_words() -> None:
    found = {
        f"{path.relative_to(ROOT.resolve())}:{getattr(node, 'lineno', 1)}": wrong
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and (wrong := flaws(ast.get_docstring(node) or ""))
    }
    assert not found
    assert flaws("How many pages are free" + " or held" * 8) == ["more than 20 words", "How"]


def unsaid(before: set[str], now: set[str], page: str) -> set[str]:
    """Return the names that are gone, and neither they nor their owners are in the page's table."""
    cells = re.findall(r"^\| v\S+ \| (.*?) \|", page.partition("## Removed")[2], re.MULTILINE)
    said = [
        re.compile(rf"{re.escape(each)}(?!\w)") for each in re.findall("`(.+?)`", "".join(cells))
    ]
    return {name for name in before - now if not any(each.match(name) for each in said)}


def test_what_a_release_had_is_there_or_is_said_to_be_removed() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    releases = list((ROOT / "tests" / "public").glob("v*.txt"))
    assert releases
    now = public_names()
    for release in releases:
        assert unsaid(set(release.read_text(encoding="utf-8").splitlines()), now, page) == set()


def test_a_name_that_is_gone_is_found() -> None:
    page = "`ef.plan`\n## Removed\n| v1 | `ef.tune` | `ef.sweep` |\n"
    before = {"ef.tune", "ef.tune(run=)", "ef.tuner", "ef.plan", "ef.sweep(a=)", "ef.diff"}
    assert unsaid(before, {"ef.diff", "ef.new"}, page) == {"ef.tuner", "ef.plan", "ef.sweep(a=)"}
