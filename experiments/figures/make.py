"""Make figures: run their modules, write PNG, SVG, data and facts, and the table of claims."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from evenflow.errors import UsageError, instead_of
from experiments.figures.claims import (
    Answer,
    answers,
    by_claim,
    load_claims,
    load_misses,
    number,
    worst,
)
from experiments.figures.facts import annotate, footnote
from experiments.figures.schema import Plan, load_plan
from experiments.figures.study import Drawing, Study
from experiments.report.folder import staged
from experiments.report.tables import write_json
from experiments.study.points import Store

FOLDER = Path(__file__).parent
DOTS_PER_INCH = 150
NOT_FIGURES = ("claims", "misses")


def names() -> list[str]:
    """Return the names of all figures, in the order of their papers and numbers."""
    found = [p.stem for p in FOLDER.glob("*.yaml") if p.stem not in NOT_FIGURES]
    return sorted((stem.replace("_", "-") for stem in found), key=_by_number)


def chosen(asked: Sequence[str], overrides: tuple[str, ...], *, quick: bool) -> list[Plan]:
    """Return the figures asked for, all where none is; UsageError for a name that is none.

    A name without its number stands for all of that paper: `gllm`.
    """
    known = names()
    wanted: list[str] = []
    for name in asked or known:
        group = [each for each in known if each == name or each.rpartition("-")[0] == name]
        if not group:
            raise UsageError(f"figures {name}: no such figure; {instead_of(name, known)}")
        wanted += group
    return [
        load_plan(FOLDER / f"{name.replace('-', '_')}.yaml", overrides, quick=quick)
        for name in dict.fromkeys(wanted)
    ]


def make(
    plan: Plan,
    folder: Path,
    store: Store,
    executor: Executor,
    on_progress: Callable[[int, int], None] | None = None,
) -> Drawing:
    """Make one figure and write its files into `folder`, all or none: png, svg, csv, json."""
    study = Study(plan, store, executor, on_progress)
    drawing = _drawn(maker(plan), study)
    facts = study.facts()
    title, source = _heading(plan, study)
    with (
        staged(folder, force=True, adds=True) as scratch,
        mpl.rc_context({"svg.hashsalt": plan.name}),
    ):
        annotate(drawing.figure, f"{title}  [{source}]", footnote(facts, plan.keys.differs))
        drawing.figure.savefig(
            scratch / f"{plan.name}.png", dpi=DOTS_PER_INCH, metadata={"Software": None}
        )
        drawing.figure.savefig(scratch / f"{plan.name}.svg", metadata={"Date": None})
        drawing.table.to_csv(scratch / f"{plan.name}.csv", index=False)
        about = {"title": title, "source": plan.keys.source, "run": plan.run.data}
        # A verdict on a claim holds for the set-up of its paper only.
        claims = dict(drawing.claims) if plan.published else {}
        more = {"differs": plan.keys.differs, "facts": facts, "claims": claims}
        write_json(scratch / f"{plan.name}.json", about | more)
    return drawing


def maker(plan: Plan) -> Callable[[Study], Drawing]:
    """Return the function that makes a figure of its study."""
    module, function = plan.maker
    found: Callable[[Study], Drawing] = getattr(importlib.import_module(module), function)
    return found


def _drawn(module_make: Callable[[Study], Drawing], study: Study) -> Drawing:
    """Make a figure; what goes wrong inside after something was set by hand is told of that."""
    try:
        return module_make(study)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        given = [f"--set {each}" for each in study.plan.overrides]
        if not given:
            raise
        raise UsageError(
            f"{', '.join(given)}: no figure comes of it ({type(error).__name__}: {error}); compare "
            f"with {study.plan.run.name}"
        ) from error


def _heading(plan: Plan, study: Study) -> tuple[str, str]:
    """Return title and source; of another set-up than the published one, with what was set."""
    title = plan.keys.title.format_map({"gpus": study.gpus, **study.numbers})
    if plan.published:
        return title, plan.keys.source
    return title, f"after {plan.keys.source}; set by hand: {', '.join(plan.overrides)}"


def _made(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what is told of each figure in `folder`, by name."""
    paths = {name: folder / f"{name}.json" for name in names()}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def _reservations(made: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each figure that is not of its full, published set-up."""
    found = []
    for name, about in made.items():
        facts = about["facts"]
        told = ["a coarse pass"] if facts["quick"] else []
        told += [f"--set {assignment}" for assignment in facts["set"]]
        if not facts["published_set_up"]:
            told.append("another set-up, so that no claim is compared")
        if told and (about["claims"] or not facts["published_set_up"]):
            found.append(f"{name}: {', '.join(told)}")
    return found


def write_claims(folder: Path) -> list[Answer]:
    """Write claims.csv, a row a value, and claims.md, a row a claim; return the values."""
    made = _made(folder)
    ours = {key: value for about in made.values() for key, value in about["claims"].items()}
    found = [answer for claim in load_claims() for answer in answers(claim, ours.get(claim.id))]
    with staged(folder, force=True, adds=True) as scratch:
        table = pd.DataFrame(
            {
                "claim": answer.claim.id,
                "paper": answer.claim.paper,
                "where": answer.claim.where,
                "kind": answer.claim.kind,
                "part": answer.part,
                "paper_value": answer.paper,
                "ours": answer.ours,
                "ratio": answer.ratio,
                "verdict": answer.verdict,
            }
            for answer in found
        )
        table.to_csv(scratch / "claims.csv", index=False)
        text = markdown(found) + "".join(f"\n{each}\n" for each in _reservations(made))
        (scratch / "claims.md").write_text(text, encoding="utf-8")
    return found


def markdown(found: Sequence[Answer]) -> str:
    """Return the table of claims, a row a claim, with what has to be known: why it misses, say."""
    misses = load_misses()
    head = "| claim | quantity | paper | ours | ours / paper | verdict | why |\n"
    lines = [head, "|---|---|---|---|---|---|---|\n"]
    for group in by_claim(found):
        claim, verdict = group[0].claim, worst(group)
        why = misses.get(claim.id, "") if verdict != "not run" else ""
        cells = (
            f"{claim.id} ({claim.paper} {claim.where})",
            claim.quantity,
            "<br>".join(f"{a.part} {number(a.paper)}".strip() for a in group),
            "<br>".join(number(a.ours) for a in group),
            "<br>".join(number(a.ratio) for a in group),
            verdict,
            why,
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _by_number(name: str) -> tuple[str, int, str]:
    paper, _, number = name.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper, int(digits) if digits else 0, number
