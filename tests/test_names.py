"""A class name of the product means one thing; what is public stays, or is said to be gone."""

from __future__ import annotations

import ast
import re
from collections import Counter

from tests.places import ROOT
from tools.public_names import public_names

PRODUCT = ("evenflow", "sim", "traces", "profiler", "runtime", "experiments")


def test_no_class_name_means_two_things() -> None:
    files = {path.resolve() for room in PRODUCT for path in (ROOT / room).rglob("*.py")}
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


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
