"""Published outputs of the notebooks show no error; `make test` runs them anew, too (nbmake)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def errors(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield what went wrong in a cell: an exception, or a line in which a command refuses."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error":
                yield output["evalue"]
            text = [*output.get("text", ()), *output.get("data", {}).get("text/plain", ())]
            yield from (line for line in "".join(text).splitlines() if line.startswith("error:"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_published_notebook_shows_no_error(path: Path) -> None:
    assert not list(errors(json.loads(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "output",
    [
        {"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": []},
        {"output_type": "stream", "name": "stdout", "text": ["done\n", "error: out: is a file\n"]},
    ],
)
def test_an_error_in_an_output_is_found(output: dict[str, Any]) -> None:
    assert list(errors({"cells": [{"cell_type": "markdown"}, {"outputs": [output]}]}))
