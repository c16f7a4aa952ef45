"""A class name of the product means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("evenflow", "sim", "traces", "profiler", "runtime", "experiments")


def test_no_class_name_means_two_things() -> None:
    files = {path.resolve() for room in PRODUCT for path in (ROOT / room).rglob("*.py")}
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
