"""docs/reality.md and its picture: the output of `evenflow reproduce` on all measured runs given.

`python -m tools.reality [--data DIR]` simulates them (minutes) and writes both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from evenflow.experiments.reproduce import Reproduced, chosen, data_folder, reproduce
from evenflow.experiments.reproduce.write import draw, markdown
from evenflow.report.plots import svg
from evenflow.study.trials import How

DOCS = Path(__file__).parent.parent / "docs"


def write(found: Reproduced, docs: Path = DOCS) -> None:
    """Write the document, and the picture beside the others."""
    picture = "figures/reality.svg"
    (docs / picture).write_text(svg(draw(found.table), "reality"), encoding="utf-8")
    (docs / "reality.md").write_text(markdown(found, picture), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reproduce the whole catalogue, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="holds the runs; default: EVENFLOW_SHARED")
    given = parser.parse_args(arguments)
    write(reproduce(chosen(()), data_folder(given.data), How()))


if __name__ == "__main__":
    main()
