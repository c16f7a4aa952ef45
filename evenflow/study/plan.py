"""A plan from its question to its folder: what is simulated, and the files of the answer."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from evenflow.config.provenance import code_version
from evenflow.config.yaml_file import Document, patched
from evenflow.errors import UsageError
from evenflow.report.tables import write_json, write_table
from evenflow.report.words import rows_left_out
from evenflow.study.deployments import run_yaml
from evenflow.study.fair import interval, require_served
from evenflow.study.plan_prepare import prepare
from evenflow.study.plan_question import CHANGE, Ask, PlanQuestion, name_of
from evenflow.study.plan_search import (
    climb,
    less_traffic,
    nearest,
    ranked,
    remedies,
    search,
)
from evenflow.study.planned import Planned, effort, facts_of, first_lines, launch
from evenflow.study.slo import levels_of, service_levels
from evenflow.study.trials import How, Simulator, Study, run
from evenflow.study.uncertainty import METRICS, Prediction, predicted


def plan(document: Document, beside: Path, ask: Ask, how: How) -> Planned:
    """Find the cheapest deployment that keeps the SLO; where there is none, what is nearest to it.

    Nearest is what holds the highest rate, or where none is held, what misses least.
    `beside` is the folder of the run's file. UsageError naming what is wrong with the run or
    `ask`, before the first long run.
    """
    started = time.perf_counter()
    question = prepare(document, beside, ask)
    with how.simulator("simulations", None, "evenflow.study.decision_page") as who:
        planned = answered(question, who)
        if ask.joining:
            planned = replace(planned, calm=answered(_calm(question, document), who))
        require_served({"": planned.best.served}, allowed=ask.allow_refused)
        if ask.intervals:
            planned = replace(planned, prediction=_predicted(planned, who))
        planned = replace(planned, seconds=time.perf_counter() - started)
        how.write(lambda folder: _write(folder, planned, how.out or folder))
    return planned


def _calm(question: PlanQuestion, document: Document) -> PlanQuestion:
    """Return the question without the processes that were asked for."""
    own = {"processes": document.data.get("processes")}
    return replace(question, document=patched(question.document, own))


def _predicted(planned: Planned, who: Simulator) -> Prediction:
    question, config = planned.question, planned.config
    more = levels_of(question.slo, config)
    study = Study(config, question.beside, measure=service_levels, more=more)
    return predicted(study, who, [*METRICS, *(each.metric for each in question.slo)])


def answered(question: PlanQuestion, who: Simulator) -> Planned:
    """Answer a checked question by simulations; return the plan."""
    study = question.study
    trials = run(study, who, search(question))
    kept = ranked(question, trials)
    if not kept:
        missed = run(study, who, nearest(question, trials))
        misses = sorted((each for each in missed if not each.errors), key=question.excess)
        if not misses:
            raise UsageError(f"no point can be simulated: {missed[0].errors[0]}")
        less = run(study, who, less_traffic(question, misses))
        rates = Planned(question, (*missed, *less)).rates
        misses.sort(key=lambda each: -rates.get(name_of(each), 0.0))
        tried = run(study, who, remedies(question, misses))
        every = (*trials, *missed, *less, *tried)
        changed = [each for each in tried if CHANGE in each.labels and not each.errors]
        changed.sort(key=lambda each: (question.excess(each), each.labels["gpus"]))
        return Planned(question, every, (), misses, changed)
    more = run(study, who, climb(question, trials))
    climbed = list({str(each.labels): each for each in [*trials, *more]}.values())
    found = Planned(question, climbed, ranked(question, climbed))
    highest = sorted(found.kept, key=lambda each: -found.rates.get(name_of(each), 0.0))
    return replace(found, kept=sorted(highest, key=lambda each: each.labels["gpus"]))


def _write(folder: Path, planned: Planned, final: Path) -> None:
    """Write plan.json, plan.csv, points.csv, launch.txt and plan.yaml, the winner's RUN.yaml."""
    question = planned.question
    write_json(folder / "plan.json", facts(planned))
    write_table(folder / "plan.csv", planned.table)
    write_table(folder / "points.csv", planned.points.astype(object))
    lines = [*first_lines(planned), *launch(planned)]
    write = partial(Path.write_text, encoding="utf-8", errors="backslashreplace")
    write(folder / "plan.txt", "\n".join(lines) + "\n")
    how = "found" if planned.kept else "found nearest"
    head = f"# The deployment that evenflow plan {how} for {question.document.name}.\n"
    text = head + run_yaml(planned.winner, question.beside, final)
    write(folder / "plan.yaml", text)
    from evenflow.report import plots
    from evenflow.study.decision_page import draw, write_page

    decision, svg = planned.decision, ""
    if len(decision.tried) > 1:  # one rate is no curve
        title = f"{name_of(planned.best)}, {question.requests:,} requests"
        up_to = planned.rates.get(name_of(planned.best))
        rate = None if up_to is None else interval([up_to])
        svg = plots.svg(draw(decision.tried, question.slo, rate, title), "plan")
    write_page(folder, decision, _source(planned), svg)


def _source(planned: Planned) -> dict[str, Any]:
    """Return where a plan comes from."""
    question = planned.question
    asked = {"slo": list(map(str, question.slo)), "gpus": list(question.ask.gpus)}
    return {
        **code_version(),
        "asked": {**asked, "rate": question.ask.rate, "price": question.ask.price},
        "config": planned.config.resolved(),
        "trace": dict(question.trace),
    }


def facts(planned: Planned) -> dict[str, Any]:
    """Return the content of plan.json."""
    question = planned.question
    return {
        "keeps_slo": bool(planned.kept),
        "setup": planned.setup,
        "slo": [str(each) for each in question.slo],
        "gpus": [question.ask.gpus[0], question.ask.gpus[-1]],
        "requests_per_s": question.rate,
        "requests": question.requests,
        **(planned.best.served.facts if planned.best.served.failed else {}),
        "rows_left_out": rows_left_out(question.trace),
        "best": facts_of(planned, planned.best),
        **({} if planned.calm is None else _spare_facts(planned, planned.calm)),
        "decision": planned.decision.facts,
        "effort": effort(planned),
        "pruned": pruned(question),
        "left_out": [{"layout": each.label, "reason": each.reason} for each in question.left_out],
    }


def _spare_facts(planned: Planned, calm: Planned) -> dict[str, Any]:
    joining = list(planned.question.ask.joining)
    without = facts_of(calm, calm.best)
    return {"with": joining, "spare_gpus": planned.spare, "without": without}


def pruned(question: PlanQuestion) -> list[dict[str, Any]]:
    """Return which points bounds refuted: of each setting, with up to how many replicas and why."""
    most: dict[str, int] = {}
    for name, count in question.bounds:
        most[name] = max(count, most.get(name, 0))
    return [
        {"setting": name, "up_to_replicas": count, **asdict(question.bounds[name, count])}
        for name, count in most.items()
    ]
