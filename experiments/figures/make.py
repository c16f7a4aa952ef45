"""Make figures: run their modules, write PNG, SVG, data and facts, and the table of claims."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from evenflow.errors import LostProcessError, UsageError, instead_of
from evenflow.experiments.figures import FOLDER, names
from evenflow.experiments.figures.cases import exploded, function, table_of
from evenflow.experiments.figures.claims import (
    UNJUDGED,
    Answer,
    answer,
    answers,
    by_claim,
    claim_of,
    ends,
    load_claims,
    load_misses,
    number,
    score,
    with_interval,
    with_papers,
    worst,
)
from evenflow.experiments.figures.formulas import filled
from evenflow.experiments.figures.looks import MARKS, annotate, fit, marks_paper, styled
from evenflow.experiments.figures.panels import checked_plot, draw
from evenflow.experiments.figures.schema import PLAIN, FigureKeys, FigurePlan, Look, load_plan
from evenflow.experiments.figures.study import Drawing, FigureStudy, footnote
from evenflow.report.echo import Watch
from evenflow.report.folder import staged
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import markdown_table, write_json, write_table
from evenflow.study.fair import alike, marked
from evenflow.study.points import Store
from evenflow.study.uncertainty import COSTS


def chosen(
    asked: Sequence[str] | Mapping[str, Mapping[str, Any]],
    overrides: tuple[str, ...],
    *,
    quick: bool,
    allow_refused: bool = False,
    look: Look = PLAIN,
) -> list[FigurePlan]:
    """Return the figures asked for, all where none is; UsageError for an unknown name.

    A name without its number stands for all of that paper: `gllm`. One that ends in .yaml is a
    figure of the user's own. So is one given by name with its keys.
    """
    known, wanted = names(), {}
    given = asked if isinstance(asked, Mapping) else {}
    for name in asked or known:
        if name in given or name.endswith(".yaml"):
            wanted[name] = Path(f"{name.removesuffix('.yaml')}.yaml")
            continue
        group = [each for each in known if name in (each, each.rpartition("-")[0])]
        if not group:
            raise UsageError(f"figures {name}: no such figure; {instead_of(name, known)}")
        wanted |= {each: FOLDER / f"{each.replace('-', '_')}.yaml" for each in group}
    return [
        replace(
            load_plan(path, overrides, quick=quick, keys=given.get(name)),
            allow_refused=allow_refused,
            look=look,
        )
        for name, path in wanted.items()
    ]


class Figures(Shown, dict[str, Drawing]):
    """Figures by name, and the papers' claims that have an answer, by figures as published."""

    answers: Sequence[Answer] = ()
    set_by_hand: Sequence[str] = ()

    def told(self) -> Iterator[str | Table]:
        groups = [group for group in by_claim(self.answers) if worst(group) != "not run"]
        rows = [
            (
                group[0].claim.id,
                "\n".join(f"{each.part} {each.paper}".strip() for each in group),
                "\n".join(map(with_interval, group)),
                worst(group),
            )
            for group in groups
        ]
        if rows:
            yield Table(("claim", "paper", "ours", "verdict"), rows, of_words=True)
            counts = Counter(map(worst, groups))
            yield "; ".join(f"{count} {verdict}" for verdict, count in counts.items())
        if self.answers and self.set_by_hand:
            yield f"not compared, as set by hand: {', '.join(self.set_by_hand)}"


def make_all(
    plans: Sequence[FigurePlan],
    folder: Path,
    executor: Executor,
    watch: Watch | None = None,
    say: Callable[[list[str | Table]], None] | None = None,
    *,
    intervals: bool = False,
    tables: bool = False,
) -> Figures:
    """Make figures, with `intervals` of their claims; UsageError, at the end, for impossible ones.

    `say` gets the path of each, what is unfair in it and, with `tables`, its numbers.
    """
    found, failures, store = Figures(), dict[str, list[str]](), Store(folder / "points")
    say = say or (lambda parts: None)
    for plan in plans:
        started = time.perf_counter()
        try:
            with _shown(plan, watch) as on_progress:
                drawing = found[plan.name] = make(plan, folder, store, executor, on_progress)
        except LostProcessError:  # no other can be made
            raise
        except UsageError as error:
            failures.setdefault(str(error), []).append(plan.name)
            say([f"{plan.name}: not made"] if len(plans) > 1 else [])
            continue
        seconds = time.perf_counter() - started
        say([f"{folder / plan.name}.{plan.look.formats[0]}  {seconds:.1f} s"])
        say([Aside(f"{plan.name}: {line}") for line in marked(drawing.doubts)])
        if intervals:
            try:
                with _shown(plan, watch) as on_progress:
                    add_intervals(plan, folder, store, executor, on_progress)
            except LostProcessError:
                raise
            except UsageError as error:
                say([f"{plan.name}: no intervals: {error}"])
        say([drawing.text] if tables else [])
    if any(plan.name in found and (plan.of_a_paper or plan.keys.claims) for plan in plans):
        found.answers = write_claims(folder)
        found.set_by_hand = [plan.name for plan in plans if not plan.published]
    if failures:
        if found.answers:
            say([*found.told(), str(folder / "claims.md")])
        told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in failures.items())
        failed = sum(map(len, failures.values()))
        one = len(plans) == 1
        raise UsageError(
            next(iter(failures)) if one else f"{failed} of {len(plans)} figures failed: {told}"
        )
    return found


@contextmanager
def _shown(plan: FigurePlan, watch: Watch | None) -> Iterator[Callable[..., None] | None]:
    with nullcontext() if watch is None else watch([plan.name], None) as bar:
        yield None if bar is None else bar.done


def make(
    plan: FigurePlan,
    folder: Path,
    store: Store,
    executor: Executor,
    on_progress: Callable[[int, int], None] | None = None,
) -> Drawing:
    """Make one figure and write its files into `folder`, all or none: png, svg, csv, json."""
    study = FigureStudy(plan, store, executor, on_progress)
    with _told(plan), styled(plan.look.style):
        return _written(study, maker(plan)(study), folder)


def _written(study: FigureStudy, drawing: Drawing, folder: Path) -> Drawing:
    from evenflow.report.plots import save

    plan = study.plan
    facts, keys = study.facts(), plan.keys
    title = filled(keys.title, {"gpus": study.gpus, **study.numbers}, "title")
    source = keys.source.replace(" ", "\u00a0")  # which no line break parts
    if not plan.published:
        source = f"after {source}; set by hand: {', '.join(plan.overrides)}"
    # A verdict on a claim holds for the set-up of its paper only.
    claims = dict(drawing.claims) if plan.published else {}
    about = {
        "title": title,
        "source": keys.source,
        "run": plan.run.data,
        "differs": keys.differs,
        "says": keys.says,
        "facts": facts,
        "claims": claims,
        "beside": dict(drawing.beside),
    }
    with staged(folder, force=True, adds=True) as scratch:
        if plan.look.width is not None:
            fit(drawing.figure, plan.look.width)
        told = [footnote(facts, keys.differs), MARKS if marks_paper(drawing.figure) else ""]
        told += [] if facts["quick"] else [missed(claims)]
        annotate(drawing.figure, f"{title}  [{source}]", " ".join(filter(None, told)))
        save(drawing.figure, scratch / plan.name, plan.look.formats)
        write_table(scratch / f"{plan.name}.csv", drawing.table)
        write_json(scratch / f"{plan.name}.json", about)
    return replace(drawing, doubts=alike(study.doubts))


def missed(claims: Mapping[str, Any]) -> str:
    """Say which of a figure's claims are wrong; nothing where none is."""
    judged = ((each, worst(answers(each, claims[each.id]))) for each in map(claim_of, claims))
    wrong = [claim.quantity for claim, verdict in judged if verdict == "wrong"]
    return f"Not as published: {'; '.join(wrong)}." if wrong else ""


def add_intervals(
    plan: FigurePlan,
    folder: Path,
    store: Store,
    executor: Executor,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make a figure of `folder` nine times more; add its claims' 90 % intervals to its json.

    UsageError where no factor can be on the costs: a figure that takes iterations apart.
    """
    path = folder / f"{plan.name}.json"
    about = _made(path)
    if not about["claims"]:
        return
    studies = [
        FigureStudy(plan, store, executor, on_progress, index) for index in range(len(COSTS))
    ]
    with _told(plan):
        about["intervals"] = ends(about["claims"], [maker(plan)(each).claims for each in studies])
    with staged(folder, force=True, adds=True) as scratch:
        write_json(scratch / path.name, about)


def maker(plan: FigurePlan) -> Callable[[FigureStudy], Drawing]:
    known = load_claims()
    for name in plan.keys.claims:
        if name not in known:
            raise UsageError(f"{plan.run.name}: claims: {name}; {instead_of(name, known)}")
    if plan.keys.module is not None:
        return function(plan.keys.module, "study")
    if not plan.keys.vary and plan.keys.table is None:
        raise UsageError(f"{plan.run.name}: the figure has no cases; give vary, like [system]")
    checked_plot(plan.keys.plot)  # before what takes long
    return from_keys


def from_keys(study: FigureStudy) -> Drawing:
    """Make a figure that is data: its table, its picture, and our values of its claims."""
    keys = study.plan.keys
    table = table_of(study)
    words = {"gpus": study.gpus, "first": next(iter(keys.systems), ""), **study.numbers}
    drawn = table
    if study.plan.published:
        drawn = with_papers(table, keys.claims, judged=not study.facts()["quick"])
    if keys.draw:
        figure = function(keys.draw, "study", "table")(study, table)
    else:
        figure = draw({**keys.plot, **study.plan.look.keys}, drawn, words)
    claims, *others = (
        {name: answer(table, query) for name, query in queries.items()}
        for queries in (keys.claims, *keys.beside.values())
    )
    if keys.explode:
        from pandas import concat

        told = [exploded(table, columns) for columns in keys.explode]
        table = concat(told, ignore_index=True)
    shown = keys.shown or (None if study.plan.of_a_paper else _drawn_columns(keys))
    if not study.plan.published:
        return Drawing(figure, table, shown)
    beside = dict(zip(keys.beside, others, strict=True))
    return Drawing(figure, table, shown, claims, beside)


def _drawn_columns(keys: FigureKeys) -> list[str] | None:
    """Return the columns of the cases and of the panels; None where the panels name none."""
    drawn = [column for panel in keys.plot.get("panels", ()) for column in panel.get("y", ())]
    return [*dict.fromkeys([*keys.vary, "seed", *drawn, "error"])] if drawn else None


MISUSED = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What a figure's functions and matplotlib raise where keys do not go together."""


@contextmanager
def _told(plan: FigurePlan) -> Iterator[None]:
    """Turn errors due to keys set by hand, or the user's own file, into UsageErrors."""
    try:
        yield
    except MISUSED as error:
        given = ", ".join(f"--set {each}" for each in plan.overrides)
        if not given and plan.of_a_paper:
            raise
        raise UsageError(
            f"{given or plan.run.name}: no figure comes of it ({type(error).__name__}: {error})"
            + (f"; compare with {plan.run.name}" if given else "")
        ) from error


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


OF_VALUE = ("part", "paper", "ours", "ratio", "effect", "verdict", "low", "high")
CLAIM_COLUMNS = (
    *("claim", "paper", "where", "kind", "part", "paper_value"),
    *("ours", "ratio", "effect", "verdict", "low_90", "high_90"),
)
"""The columns of claims.csv: of the claim, and OF_VALUE."""


def write_claims(folder: Path) -> list[Answer]:
    """Write claims.csv, a row a value, and claims.md, a row a claim; return the values.

    Any figure made in the folder answers; where two answer one claim, the paper's figure does. A
    coarse pass answers without a verdict. Claims of other figures are counted only.
    """
    import pandas as pd

    papers = [name for name in names() if (folder / f"{name}.json").exists()]
    others = sorted({path.stem for path in folder.glob("*.json")} - {*papers})
    made = {}
    for name in [*others, *papers]:
        try:
            made[name] = _made(folder / f"{name}.json")
        except UsageError:
            if name in papers:
                raise
    of = {key: about for about in made.values() for key in about["claims"]}
    found = []
    for claim in load_claims().values():
        about = of.get(claim.id, {"claims": {}, "facts": {}})
        intervals = about.get("intervals", {}).get(claim.id)
        for each in answers(claim, about["claims"].get(claim.id), intervals):
            coarse = about["facts"].get("quick") and each.verdict != "not run"
            found.append(replace(each, verdict="too short to tell") if coarse else each)
    run = [each for each in found if each.verdict != "not run"]
    with staged(folder, force=True, adds=True) as scratch:
        of_claim, of_value = attrgetter("id", "paper", "where", "kind"), attrgetter(*OF_VALUE)
        rows = [of_claim(each.claim) + of_value(each) for each in run]
        table = pd.DataFrame(rows, columns=CLAIM_COLUMNS)
        write_table(scratch / "claims.csv", table)
        text = markdown(found, _beside(made)) + "".join(
            f"\n{each}\n" for each in _reservations(made)
        )
        (scratch / "claims.md").write_text(text, encoding="utf-8")
    return found


def _beside(made: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return by claim what other readings give, as a table shows it."""
    told: dict[str, list[str]] = {}
    for about in made.values():
        for words, ours in about.get("beside", {}).items():
            for claim_id, value in ours.items():
                values = answers(claim_of(claim_id), value)
                numbers = (
                    f"{a.part} {number(a.ours)}".strip() for a in values if a.ours is not None
                )
                told.setdefault(claim_id, []).append(f"{words}: {', '.join(numbers)}")
    return {claim_id: "<br>".join(lines) for claim_id, lines in told.items()}


def _made(path: Path) -> dict[str, Any]:
    """Return the facts kept of a figure beside its picture; UsageError for another file."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        facts, claims, ends = about["facts"], about["claims"], about.get("intervals", {})
        if {type(part) for part in (facts, claims, ends)} == {dict}:
            return dict(about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path}: is no figure that evenflow made; move it elsewhere")


def markdown(found: Sequence[Answer], beside: Mapping[str, str] | None = None) -> str:
    """Return the table of claims that were run, a row a claim, with notes, such as why one misses.

    `beside`: by claim, what other readings give.
    """
    misses, beside = load_misses(), beside or {}
    heads = ("claim", "quantity", "paper", "ours", "ours / paper", "effect", "verdict",
             "other readings", "why")  # fmt: skip
    rows, left_out = [], 0
    for group in by_claim(found):
        claim, verdict = group[0].claim, worst(group)
        if all(each.verdict == "not run" for each in group):
            left_out += 1
            continue
        why = "" if verdict in UNJUDGED else misses.get(claim.id, "")
        row = (
            f"{claim.id} ({claim.paper} {claim.where})",
            claim.quantity,
            "<br>".join(f"{a.part} {number(a.paper)}".strip() for a in group),
            "<br>".join(with_interval(a) for a in group),
            "<br>".join(number(a.ratio) for a in group),
            "<br>".join("" if a.effect is None else f"{a.effect:.2f}" for a in group),
            verdict,
            beside.get(claim.id, ""),
            why,
        )
        rows.append(row)
    told = [markdown_table(heads, rows)] if rows else []
    near = score([answer for answer in found if answer.verdict not in UNJUDGED])
    told += [f"{near}\n"] if near else []
    told += [f"{left_out} claims are of other figures.\n"] if left_out else []
    return "\n".join(told)
