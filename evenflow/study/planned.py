"""A plan as an answer: its points, its sentences, rows of its tables, launch lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evenflow.config.run import RunConfig, configured
from evenflow.config.yaml_file import Document, patched
from evenflow.report.shown import Aside, Shown, Table
from evenflow.report.tables import number, percent
from evenflow.report.words import metric_words, refusals, rows_left_out
from evenflow.study import decision
from evenflow.study.decision import (
    ALTERNATIVES,
    CHANGES,
    NEAREST,
    DecisionRecord,
    Margin,
    basis,
    breaks,
    margins,
)
from evenflow.study.plan_question import CHANGE, PlanQuestion, name_of
from evenflow.study.rates import Probe, RateFound, TriedRate, bracket, rate_found
from evenflow.study.slo import Condition, completed_per_s, costs
from evenflow.study.trials import Trial, table, unfair
from evenflow.study.uncertainty import Prediction

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 8
"""Points in the table."""

WAYS = 3
"""Changes in the sentence."""


@dataclass(frozen=True, repr=False)
class Planned(Shown):
    """A plan: all simulated points; `kept` are the points that keep the SLO, the best first.

    `misses` are the nearest points where none does, and `changed` these with changes, the
    best first. `seconds`: how long it took. `calm`: the plan without the processes that were asked
    for. `prediction`: how far the numbers of the best may be off, where that was asked.
    """

    question: PlanQuestion
    trials: Sequence[Trial]
    kept: Sequence[Trial] = ()
    misses: Sequence[Trial] = ()
    changed: Sequence[Trial] = ()
    seconds: float = 0.0
    calm: Planned | None = None
    prediction: Prediction | None = None

    @property
    def best(self) -> Trial:
        """The best point that keeps the SLO, or else the nearest."""
        return (*self.kept, *self.misses)[0]

    @property
    def spare(self) -> int | None:
        """GPUs beyond the cheapest plan without the processes; None where one keeps no SLO."""
        if self.calm is None or not (self.kept and self.calm.kept):
            return None
        gpus: int = self.best.labels["gpus"] - self.calm.best.labels["gpus"]
        return gpus

    @property
    def winner(self) -> Document:
        """The run of the best point, as RUN.yaml's keys."""
        setting, count = self.question.point(self.best)
        return patched(self.question.document, setting.patch(count))

    @property
    def points(self) -> DataFrame:
        """A row for each point, stretch of the trace and seed that was simulated."""
        return table(self.trials)

    @property
    def table(self) -> DataFrame:
        """A row for each point that keeps the SLO, the best first; else for the nearest ones."""
        from pandas import DataFrame

        return DataFrame([facts_of(self, each) for each in (*self.kept, *self.misses)])

    @property
    def setup(self) -> str:
        """Set-up of the best point in words, with what was not chosen marked."""
        return self.config.setup()

    @property
    def config(self) -> RunConfig:
        """The run of the best point, checked."""
        return configured(self.winner).with_defaults(self.question.unchosen)

    @cached_property
    def probes(self) -> dict[str, list[Probe]]:
        """The rates at which points were simulated, by the point's name."""
        found: dict[str, list[Probe]] = defaultdict(list)
        for trial in self.trials if self.question.rate is not None else ():
            if (probe := self.question.probe(trial)) is not None:
                found[name_of(trial)].append(probe)
        return found

    @cached_property
    def rates(self) -> dict[str, float]:
        """The rate in requests/s up to which each point keeps the SLO, by name."""
        lows = {name: bracket(probes)[0] for name, probes in self.probes.items()}
        return {name: low.rate for name, low in lows.items() if low is not None}

    @property
    def tried(self) -> list[TriedRate]:
        """The best point at all rates at which it was simulated to the end, on all requests."""
        probes = self.probes.get(name_of(self.best), ())
        return [each for each in probes if isinstance(each, TriedRate)]

    @property
    def breaking(self) -> RateFound | None:
        """Up to which rate the best point keeps the SLO, and what breaks first above it."""
        return rate_found(self.probes[name_of(self.best)]) if self.tried else None

    @property
    def decision(self) -> DecisionRecord:
        """The best point as a record for JSON and the page."""
        question, best = self.question, self.best
        searches = list(filter(None, [self.probes.get(name_of(best))]))
        of_each = margins(question.slo, best.mean, self.prediction, searches)
        tables = {ALTERNATIVES if self.kept else NEAREST: Table(*rows(self))}
        if self.changed:
            tables[CHANGES] = Table(*change_rows(self))
        config = self.config
        return DecisionRecord(
            sentences=sentences(self, timed=False),
            config=config,
            rate=question.rate,
            margins=of_each,
            breaks=list(breaks(of_each, self.breaking)),
            price={k: v for k, v in facts_of(self, best).items() if k.startswith("dollars_")},
            alternatives=tables,
            basis=list(basis(config, best, self.prediction)),
            launch=launch(self),
            tried=self.tried,
        )

    def told(self) -> Iterator[str | Table]:
        yield from first_lines(self)
        yield Table(*rows(self))
        if len(self.kept) > SHOWN:
            yield f"{len(self.kept) - SHOWN} more keep the SLO; plan.csv has them."
        if self.changed:
            yield Table(*change_rows(self))
        yield from launch(self)
        if lost := [trial for trial in self.trials if trial.errors]:
            first = f"{lost[0].labels['setting']}: {lost[0].errors[0]}"
            yield Aside(f"{len(lost)} simulations failed, the first of them {first}")
        if self.prediction is not None:
            yield from self.prediction.told()


def facts_of(planned: Planned, trial: Trial) -> dict[str, Any]:
    """Return a point's setting, its cost, and its margin to each limit."""
    question = planned.question
    gpus, price = trial.labels["gpus"], question.ask.price
    facts: dict[str, Any] = {
        "gpus": gpus,
        "replicas": trial.labels["replicas"],
        "setting": trial.labels["setting"],
    }
    runs = [record.values for record in trial.records]
    if question.rate is not None and question.excess(trial) <= 0:
        per_s = trial.served.share * question.rate_of(trial)
    else:
        per_s = fmean(map(completed_per_s, runs))
    facts |= costs(price and gpus * price, per_s, runs)
    for each in question.slo:
        facts[each.metric] = trial.mean(each.metric)
        facts[f"{each.metric}_margin"] = -each.excess_share(trial.mean(each.metric))
    facts |= {"completed": trial.served.completed, "failed": trial.served.failed}
    facts["busy_share"] = trial.mean("busy_share")
    facts["binds"] = binding(question, trial).metric
    if name_of(trial) in planned.rates:
        facts["up_to_requests_per_s"] = planned.rates[name_of(trial)]
    return facts


def binding(question: PlanQuestion, trial: Trial) -> Condition:
    """Return the limit that is nearest, or missed by most."""
    return max(question.slo, key=lambda each: each.excess_share(trial.mean(each.metric)))


def launch(planned: Planned) -> list[str]:
    """Return how to start the winner with vLLM, SGLang and gLLM; nothing where there is none."""
    if not planned.kept:
        return []
    question = planned.question
    setting, count = question.point(planned.best)
    config, layers = planned.config, setting.candidate.layout.layers
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for trial in filter(question.is_planned, planned.trials):
        other, replicas = question.point(trial)
        if (other.candidate.layout, replicas) == (setting.candidate.layout, count):
            verdicts[other.candidate.scheduler].append(question.keeps(trial))
    missed = [name for name, keeps in verdicts.items() if not any(keeps)]
    return decision.launch(config, question.beside, layers, missed)


def effort(planned: Planned) -> dict[str, int]:
    """Return how many points there are, how many were simulated, and how many on all requests."""
    question = planned.question
    plain = [each for each in planned.trials if question.is_planned(each)]
    whole = [each for each in plain if question.is_whole(each)]

    def count(trials: Sequence[Trial]) -> int:
        return len({name_of(each) for each in trials})

    return {
        "points": question.num_points,
        "refuted_by_bounds": len(question.bounds),
        "simulated": count(plain),
        "on_all_requests": count(whole),
        "simulations": len({r.key for each in planned.trials for r in each.records}),
    }


def first_lines(planned: Planned) -> list[str]:
    """Return what was refused, what the best point is simulated on, and the other sentences."""
    told = sentences(planned)
    refused = len(refusals({"": planned.best.served}))
    return [*told[:refused], planned.setup, *told[refused:]]


def sentences(planned: Planned, *, timed: bool = True) -> list[str]:
    """Return the answer: what was refused; what to launch and its cost; limits; what was tried.

    `timed`: in how many seconds, too.
    """
    told = [*refusals({"": planned.best.served}), _what(planned), *_beaten(planned)]
    told.append(_how_near(planned))
    first = {name_of(trial): trial for trial in planned.kept[:2]}
    told += [] if planned.calm is None else [_spare(planned, planned.calm)]
    told += [] if planned.kept else [_what_would(planned)]
    told += [f"{line}." for line in rows_left_out(planned.question.trace)]
    seconds = f", in {planned.seconds:.0f} s" if timed else ""
    return [*told, f"{_tried(planned)}{seconds}.", *unfair(first)]


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _what(planned: Planned) -> str:
    trial, question = planned.best, planned.question
    (setting, count), gpus = question.point(trial), trial.labels["gpus"]
    each = f" of {_gpus(setting.gpus)} each" if count > 1 else ""
    name = f"{name_of(trial)}{each}: {_gpus(gpus)}"
    if not planned.kept:
        most = question.ask.gpus[-1]
        by = "the rate that it holds" if name_of(trial) in planned.rates else "its misses"
        return f"Nothing with up to {_gpus(most)} keeps the SLO. Nearest, by {by}, is {name}."
    if question.ask.price is None:
        return f"Launch {name}."
    told = facts_of(planned, trial)
    dollars, tokens = told["dollars_per_hour"], told["dollars_per_million_tokens"]
    return f"Launch {name}, ${dollars:,.2f} an hour, ${number(tokens, 3)} for a million tokens."


def _beaten(planned: Planned) -> Iterator[str]:
    """Say that another scheduler than the run's own is better, and how near that one is.

    Points with more GPUs than the answer are not decided.
    """
    question, name = planned.question, planned.question.config.scheduler.name
    of = {key: setting.candidate.scheduler for key, setting in question.settings.items()}
    winner, gpus = of[planned.best.labels["setting"]], planned.best.labels["gpus"]
    if not planned.kept or winner == name or name not in of.values():
        return
    own = [each for each in planned.kept if of[each.labels["setting"]] == name]
    near = next((name_of(each) for each in own if each.labels["gpus"] == gpus), None)
    misses = f"misses the SLO on up to {_gpus(gpus)}; --schedulers {name} plans with it alone"
    told = f"whose best on as many GPUs is {near}" if near else f"which {misses}"
    yield f"{winner} beats the run's own {name}, {told}."


def _how_near(planned: Planned) -> str:
    question, trial = planned.question, planned.best
    told = [Margin(each, trial.mean(each.metric)).sentence for each in question.slo]
    rate, end, served = planned.rates.get(name_of(trial)), planned.breaking, trial.served
    of = f", {served.share * rate:.3g} of them served" if rate and served.failed else ""
    verb = "holds up to" if end and end.status == "found" and end.fails_at else "still holds at"
    holds = "" if rate is None else f"; it {verb} {rate:.4g} requests/s{of}"
    at = "" if question.rate is None else f"At {question.rate:.3g} requests/s: "
    busy = percent(trial.mean("busy_share"), 0, sign=False)
    words = metric_words(binding(question, trial).metric)
    return f"{at}{', '.join(told)}; {words} binds, GPUs are {busy} busy{holds}."


def _spare(planned: Planned, calm: Planned) -> str:
    """Say how many GPUs are spare for the processes, and how often these acted."""
    names = ", ".join(each["name"] for each in planned.question.ask.joining)
    gpus, acts = calm.best.labels["gpus"], planned.best.mean("marks")
    enough = f"{_gpus(gpus)} do{'' if gpus > 1 else 'es'}: {name_of(calm.best)}"
    if planned.spare is None:
        return f"Without {names} {enough if calm.kept else 'nothing keeps it either'}."
    return f"Spare for {names} ({acts:g} marks here): {planned.spare}; without, {enough}."


def _what_would(planned: Planned) -> str:
    """Say which changes would keep the SLO, or which comes nearest."""
    question = planned.question
    would = [_words_of_change(each) for each in planned.changed if question.excess(each) <= 0]
    names = [name_of(each) for each in planned.misses]
    rates = {name: planned.rates[name] for name in names if name in planned.rates}
    less = [f"{rate:.3g} requests/s with {name}" for name, rate in rates.items()][:1]
    if told := [*dict.fromkeys(would), *less]:
        return f"What would keep it (simulated, one at a time): {'; '.join(told[:WAYS])}."
    if not planned.changed:
        return "No change was found to simulate."
    nearest = planned.changed[0]
    metric = binding(question, nearest)
    value = number(nearest.mean(metric.metric), 3)
    return (
        f"None of {len(planned.changed)} changes keeps it, nor does less traffic; nearest is "
        f"{_words_of_change(nearest)}: {metric_words(metric.metric)} {value} of {metric.limit:g}."
    )


def _words_of_change(trial: Trial) -> str:
    words = trial.labels[CHANGE]
    where = f"{trial.labels['gpus']} GPUs, {name_of(trial)}"
    return f"{where}, {words}" if words else where


def change_rows(planned: Planned) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the changes that come nearest to the SLO, or keep it."""
    question = planned.question
    heads = ["change", *_heads(question)]
    return heads, [
        [_words_of_change(each), *_cells(planned, each)] for each in planned.changed[:SHOWN]
    ]


def _tried(planned: Planned) -> str:
    done, question = effort(planned), planned.question
    which = "the first" if question.is_cut else "all"
    more = " of the trace (workload.requests says how many)" if question.is_cut else ""
    return (
        f"Simulated {done['simulated']} of {done['points']} points, {done['on_all_requests']} of "
        f"them on {which} {question.requests} requests{more} or until they missed the SLO"
    )


def rows(planned: Planned) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the best points, or of the nearest: values and their margins."""
    question = planned.question
    priced = question.ask.price is not None
    heads = [
        "replicas x layout, scheduler, budget",
        "GPUs",
        *(["$/h", "$/M tok.\n(in+out)"] if priced else []),
    ]
    shown = (*planned.kept, *planned.misses)[:SHOWN]
    lost = any(trial.served.failed for trial in shown)
    heads += ["requests\ncompleted"] if lost else []
    found = []
    for trial in shown:
        told = facts_of(planned, trial)
        row = [name_of(trial), str(told["gpus"])]
        if priced:
            row += [number(told["dollars_per_hour"]), number(told["dollars_per_million_tokens"], 3)]
        row += [f"{trial.served.completed:,} of {trial.served.asked:,}"] if lost else []
        found.append([*row, *_cells(planned, trial)])
    return [*heads, *_heads(question)], found


def _heads(question: PlanQuestion) -> list[str]:
    return [metric_words(each.metric).replace(" (", "\n(") for each in question.slo] + ["busy"]


def _cells(planned: Planned, trial: Trial) -> list[str]:
    """Return the limited numbers with their margins, and the busy share of the GPUs."""
    cells = [Margin(each, trial.mean(each.metric)).words for each in planned.question.slo]
    return [*cells, percent(trial.mean("busy_share"), 0, sign=False)]
