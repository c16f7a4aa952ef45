"""Find the best scheduler, parameters and layout of a run, and check them on unseen data.

The search sees the first part of the trace only, and its proposals depend on the seed and on
results only. What is worth nothing goes back to the default, so that what is left can be explained
and the search's luck is not taken for a finding. Then the winner and the baselines run on the same
unseen requests in pairs, so that what those do to both drops out of the difference. The winner as a
RUN.yaml, tables, words and a picture are made here too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import TypeAdapter, ValidationError

from evenflow.config.build import load_workload
from evenflow.config.files import make_importable
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.yaml_file import Document, mistakes, patched
from evenflow.errors import UsageError
from evenflow.report import plots
from evenflow.report.style import colour
from evenflow.report.tables import columns_of, write_json, write_table
from evenflow.report.words import cause_label
from evenflow.results.bubbles import CAUSES
from evenflow.results.outcome import idle_by_cause
from evenflow.schedulers import POOLED, policy
from evenflow.study.deployments import (
    Candidate,
    Layout,
    layouts,
    pairs_of,
    policies_to_try,
    run_yaml,
    why_fixed,
)
from evenflow.study.fair import signed
from evenflow.study.searches import Optuna, Parameter, Score, optuna, proposed
from evenflow.study.slo import (
    Condition,
    check_slo,
    larger_is_better,
    levels_of,
    missed,
    request_limits,
    service_levels,
    shares_beyond,
)
from evenflow.study.trials import (
    Case,
    How,
    Part,
    Simulator,
    Study,
    Trial,
    dry_run,
    run,
    seed_matters,
    seeds,
    unfair,
)

AS_IS = "as given"
GLLM = "gLLM's defaults"
ONLINE = ("token_throttling", "sarathi", "vllm")
"""The schedulers tried when none is named, beside the run's own."""

SLACK = 0.005
"""A setting stays if without it the objective is worse by more than this share."""

LAYOUT = "layout"
UNSET = object()


TUNED = "tuned"
FRESH, LATER = "fresh seeds", "later parts"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user says: all of it beside the run itself. None: chosen here."""

    slo: tuple[Condition, ...]
    objective: str | None = None
    schedulers: Sequence[str] | None = None
    gpus: Sequence[int] | None = None
    trials: int = 64
    replications: int = 2
    checks: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("replications", 1), ("checks", 2), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"--{name} {value}: should be at least {least}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is asked, checked: the run, what is good, what may be changed, on which requests.

    `spaces` are the parameters to search, by scheduler; `layouts` all that were looked at, feasible
    or not. `baselines` by name, the run's own settings first. `train` are the parts to search on.
    """

    wish: Wish
    document: Document
    beside: Path
    objective: str
    spaces: Mapping[str, Mapping[str, Parameter]]
    layouts: tuple[Layout, ...]
    baselines: Mapping[str, Candidate]
    train: tuple[Part, ...]
    requests: int

    @property
    def default(self) -> str:
        """The name of the run's own settings among the baselines."""
        return next(iter(self.baselines))

    @property
    def metrics(self) -> list[str]:
        """The metrics that decide, the objective first."""
        return list(dict.fromkeys([self.objective, *(each.metric for each in self.wish.slo)]))

    def study(self, parts: Sequence[Part]) -> Study:
        """Return the study of the run on some parts: its summary and what its SLO needs."""
        run = patched(self.document, {"workload.requests": self.requests})
        more = levels_of(self.wish.slo, configured(run), self.objective)
        return Study(run, self.beside, lambda config: parts, service_levels, more)

    def trials(
        self, candidates: Iterable[Candidate], parts: Sequence[Part], simulator: Simulator
    ) -> list[Trial]:
        """Simulate candidates, each on the same parts."""
        return simulator.trials(self.study(parts), [each.case for each in candidates])


def prepare(document: Document, beside: Path, wish: Wish) -> Tuning:
    """Return the checked question; UsageError naming what is wrong with the run or the wish."""
    make_importable([document.data, list(wish.schedulers or ())], Path.cwd(), beside)
    config = configured(document)
    requests = _requests(config, beside)
    workload = load_workload(with_(config, {"workload.requests": requests}), beside)
    outcome = dry_run(config, workload, beside)
    limits = request_limits(wish.slo, config.goodput)
    of_requests = any(name != "itl" for name, _ in limits)
    objective = wish.objective or ("request_goodput" if of_requests else "mean_e2el_ms")
    check_slo(wish.slo, outcome, config, objective)
    gpus = ",".join(map(str, wish.gpus or ()))
    if wish.gpus and (fixed := why_fixed(config)):
        raise UsageError(f"--gpus {gpus}: {fixed}, so that the layout is what the run says")
    pairs = None if wish.gpus is None else pairs_of(wish.gpus)
    found = layouts(document, workload, beside, pairs)
    base = next((layout for layout in found if not layout.reason), None)
    if base is None:
        raise UsageError(f"--gpus {gpus}: no layout fits: {found[0].label}: {found[0].reason}")
    names = policies_to_try(wish.schedulers, config, ONLINE)
    if wish.schedulers is not None and len(wish.schedulers) > len(names):
        listed = ",".join(wish.schedulers)
        raise UsageError(f"--schedulers {listed}: one of them is there twice")
    spaces = {name: space_of(name) for name in names}
    return Tuning(
        wish,
        document,
        beside,
        objective,
        spaces,
        layouts=tuple(found),
        baselines=_baselines(config, base, spaces),
        train=tuple(seeds(wish.replications if seed_matters(config) else 1)(config)),
        requests=requests,
    )


def _requests(config: RunConfig, beside: Path) -> int:
    """Return how many requests a part has: what the run says, or else half of the trace."""
    if config.workload.requests is not None:
        return config.workload.requests
    total = len(config.workload.rows(beside, None))
    if total < 2:
        raise UsageError(f"workload.trace: {total} request cannot be divided into two parts")
    return total // 2


def space_of(name: str) -> dict[str, Parameter]:
    """Return the values worth trying of a scheduler's parameters; none where it declares none.

    UsageError for an unknown scheduler, and for a user's `search_space` that cannot be read.
    """
    if name in POOLED:
        return {}
    declared: Mapping[str, Any] = getattr(policy(name), "search_space", {})
    adapter: TypeAdapter[dict[str, Parameter]] = TypeAdapter(dict[str, Parameter])
    plain = {key: list(each) if isinstance(each, tuple) else each for key, each in declared.items()}
    try:
        return adapter.validate_python(plain)
    except ValidationError as error:
        document = Document(f"scheduler {name}: search_space", plain, {})
        raise UsageError(mistakes(document, error)) from None


def _baselines(
    config: RunConfig, base: Layout, schedulers: Mapping[str, Any]
) -> dict[str, Candidate]:
    """Return the run's own settings, gLLM's, and every scheduler as it is by default, each once."""
    own = config.scheduler
    name = f"{AS_IS}, on {base.label}" if base.keys else AS_IS  # other GPUs than the run says
    found = {name: Candidate(own.name, own.params, base)}
    named = {GLLM: "token_throttling"} | {
        f"{name}'s defaults": name for name in schedulers if name != "token_throttling"
    }
    for label, name in named.items():
        candidate = Candidate(name, {}, base)
        if candidate not in found.values():
            found[label] = candidate
    return found


class Tried(NamedTuple):
    """A candidate and the trial it came to; `name` is what the tables call it."""

    name: str
    candidate: Candidate
    trial: Trial


class Worth(NamedTuple):
    """One setting that was found, what it is without it, and the objective with and without it.

    Both are means over the parts of the search, with all other settings as they were found.
    """

    setting: str
    value: str
    default: str
    objective: float
    objective_without: float
    kept: bool


Check: TypeAlias = Mapping[str, Trial]
"""The winner (TUNED, the first) and the baselines on the same parts, which the search knew not."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuning came to: all that was tried, the baselines first, and the best of them.

    One trial is better than another by the SLO first, then by the objective. It may not refuse more
    requests than the run as it is does: the others would be served the better for it. `worth` is
    what each setting is worth, `checks` are by kind of unseen data, `bubbles` GPU seconds by cause
    of the run as it is and of the winner.
    """

    tuning: Tuning
    tried: tuple[Tried, ...]
    best: Tried
    worth: tuple[Worth, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    bubbles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def default(self) -> Tried:
        """The run as it is."""
        return self.tried[0]

    @property
    def winner(self) -> Document:
        """The run with the best settings that were found."""
        return patched(self.tuning.document, self.best.candidate.patch)

    @property
    def points(self) -> pd.DataFrame:
        """A row for each of the settings that were tried, as trials.csv has them."""
        cells = pd.DataFrame(trial_columns(self))
        return cells.mask(cells == "").infer_objects()

    @property
    def table(self) -> pd.DataFrame:
        """A row for each check, part and contender, as checks.csv has them."""
        return pd.DataFrame(check_columns(self))

    def excess(self, trial: Trial) -> dict[str, float]:
        """Return by how much each limit is missed, as a share of it; 0 or less where it is kept."""
        slo = self.tuning.wish.slo
        shares = zip((each.metric for each in slo), shares_beyond(slo, trial.mean), strict=True)
        refused = trial.mean("failed") - self.default.trial.mean("failed")
        return dict(shares) | {"failed": refused}

    def rank(self, trial: Trial) -> tuple[bool, float, float]:
        """Return what is the smaller, the better a trial is."""
        objective = self.tuning.objective
        value, excess = trial.mean(objective), self.excess(trial).values()
        unknown = bool(trial.errors) or any(map(math.isnan, [value, *excess]))
        return unknown, missed(excess), -value if larger_is_better(objective) else value

    def is_as_good(self, trial: Trial) -> bool:
        """Say whether a trial is no worse than the best, or by no more than SLACK."""
        (unknown, off, cost), (_, least, best) = map(self.rank, (trial, self.best.trial))
        return not unknown and off <= least and cost <= best + SLACK * abs(best)


def trial_columns(tuned: Tuned) -> dict[str, list[Any]]:
    """Return a row for each of the settings that were tried: what they are, the means, the error.

    A cell is "" where a scheduler has no such parameter.
    """
    trials = [each.trial for each in tuned.tried]
    return {
        "name": [each.name for each in tuned.tried],
        **columns_of([each.candidate.labels for each in tuned.tried]),
        **{m: [trial.mean(m) for trial in trials] for m in (*tuned.tuning.metrics, "failed")},
        "error": [" ".join(trial.errors[:1]) for trial in trials],
    }


def check_columns(tuned: Tuned) -> dict[str, list[Any]]:
    """Return a row for each check, part and contender: the metrics that decide."""
    metrics = tuned.tuning.metrics
    rows = [
        (kind, *part, name, *(trial.values(metric)[index] for metric in metrics))
        for kind, check in tuned.checks.items()
        for index, part in enumerate(check[TUNED].parts)
        for name, trial in check.items()
    ]
    names = ("check", "seed", "skip", "settings", *metrics)
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=False))


def run_search(tuning: Tuning, simulator: Simulator) -> Tuned:
    """Try the baselines, then what Optuna proposes; return all with the best.

    UsageError without the extra `tune`.
    """
    candidates = list(tuning.baselines.values())

    def propose(asked: Any) -> Case:
        candidates.append(_propose(asked, tuning))
        return candidates[-1].case

    def score(trial: Trial) -> Score:
        return [trial.mean(tuning.objective)], known.excess(trial)

    wish = tuning.wish
    method = Optuna(kind="optuna", trials=wish.trials, seed=wish.seed)
    goal = "maximize" if larger_is_better(tuning.objective) else "minimize"
    search = optuna(method, [goal], propose, score)
    baselines = tuning.trials(candidates, tuning.train, simulator)
    for error in baselines[0].errors:
        raise UsageError(f"the run as it is fails: {error}")
    tried = list(map(Tried, tuning.baselines, candidates, baselines))
    known = Tuned(tuning, tuple(tried), tried[0])
    names = [f"trial {number}" for number in range(wish.trials)]
    trials = run(tuning.study(tuning.train), simulator, search)
    tried += map(Tried, names, candidates[len(baselines) :], trials)
    asked_for = [tried[0], *(each for each in tried if each.candidate.scheduler in tuning.spaces)]
    return Tuned(tuning, tuple(tried), min(asked_for, key=lambda each: known.rank(each.trial)))


def _propose(asked: Any, tuning: Tuning) -> Candidate:
    """Ask first for a scheduler and a number of stages, then for what belongs to those."""
    scheduler = proposed(asked, "scheduler", list(tuning.spaces))
    params = {
        name: proposed(asked, f"{scheduler}.{name}", parameter)
        for name, parameter in tuning.spaces[scheduler].items()
    }
    own = next(iter(tuning.baselines.values()))
    if scheduler == own.scheduler:
        params = {**own.params, **params}
    layouts = [layout for layout in tuning.layouts if not layout.reason]
    parallel = proposed(asked, "stages", list(dict.fromkeys(each.parallel for each in layouts)))
    of_those = [each for each in layouts if each.parallel == parallel]
    names = [each.division for each in of_those]
    division = proposed(asked, f"layers of {parallel}", names)
    return Candidate(scheduler, params, of_those[names.index(division)])


def simplified(tuned: Tuned, simulator: Simulator) -> Tuned:
    """Return the same with its winner simplified, and what each of its settings is worth.

    Each setting is taken back alone; then all those whose loss is within SLACK together, unless
    that loses more.
    """
    best, tuning = tuned.best, tuned.tuning
    without = _without_each(tuned)
    if not without or best is tuned.default:
        return tuned
    trials = tuning.trials(without.values(), tuning.train, simulator)
    pairs = list(zip(without, trials, strict=True))
    idle = {name for name, trial in pairs if tuned.is_as_good(trial)}
    plain = _plain(tuned, idle)
    [together] = tuning.trials([plain], tuning.train, simulator)
    if idle and tuned.is_as_good(together):
        simple = Tried(f"{best.name}, simplified", plain, together)
    else:
        simple, idle = best, set()
    values = _settings(best.candidate)
    with_it = best.trial.mean(tuning.objective)
    worth = [
        Worth(
            name,
            values[name],
            _settings(without[name]).get(name, "none"),
            with_it,
            trial.mean(tuning.objective),
            name not in idle,
        )
        for name, trial in pairs
    ]
    return replace(tuned, best=simple, worth=tuple(worth))


def _settings(candidate: Candidate) -> dict[str, str]:
    """Return the layout and all parameters, those that are not set too."""
    params = {**defaults(candidate.scheduler), **candidate.params}
    return {LAYOUT: candidate.layout.label} | {key: str(value) for key, value in params.items()}


def _without_each(tuned: Tuned) -> dict[str, Candidate]:
    """Return the winner with each of its settings that differs from the default taken back."""
    winner = tuned.best.candidate
    found = {name: _plain(tuned, {name}) for name in (LAYOUT, *winner.params)}
    values = _settings(winner)
    return {name: each for name, each in found.items() if _settings(each).get(name) != values[name]}


def _plain(tuned: Tuned, taken_back: set[str]) -> Candidate:
    """Return the winner without some settings: as the run has them, or as the scheduler does.

    What is set to the scheduler's own default is left out.
    """
    winner, base = tuned.best.candidate, tuned.default.candidate
    own = base.params if base.scheduler == winner.scheduler else {}
    params = {**winner.params, **{name: own[name] for name in taken_back if name in own}}
    by_default = defaults(winner.scheduler)
    kept = {
        name: value
        for name, value in params.items()
        if (name in own or name not in taken_back) and by_default.get(name, UNSET) != value
    }
    layout = base.layout if LAYOUT in taken_back else winner.layout
    return Candidate(winner.scheduler, kept, layout)


def unseen_parts(tuning: Tuning) -> dict[str, tuple[Part, ...]]:
    """Return the parts to check on, by kind: fresh seeds, and later requests of the trace.

    A later part has as many requests as one of the search and begins after it; each is another one
    as far as the trace reaches, then they come again with other seeds. Where a seed draws nothing
    (a file, with its own times) there are no fresh seeds, and each later part is there once. Where
    the trace is too short there are no later parts.
    """
    config, checks = configured(tuning.document), tuning.wish.checks
    seeds = range(tuning.train[-1].seed + 1, tuning.train[-1].seed + 1 + checks)
    skip, drawn = config.workload.skip, seed_matters(config)
    rows = wanted = tuning.requests * (1 + checks)
    if not config.workload.is_drawn:
        rows = len(config.workload.rows(tuning.beside, wanted))
    later = [skip + tuning.requests * (1 + i) for i in range(rows // tuning.requests - 1)]
    found = {FRESH: tuple(Part(seed, skip) for seed in seeds)} if drawn else {}
    if later:
        count = checks if drawn else len(later)
        found[LATER] = tuple(map(Part, seeds[:count], itertools.cycle(later)))
    return found


def checked(tuned: Tuned, simulator: Simulator) -> Tuned:
    """Return the same with the winner, the run as it is and gLLM's defaults on unseen data.

    On one part of it also with the GPU seconds by cause of the first two.
    """
    tuning = tuned.tuning
    rivals = [each for each in tuned.tried if each.name in (tuning.default, GLLM)]
    contenders = {TUNED: tuned.best.candidate} | {each.name: each.candidate for each in rivals}
    parts, checks = tuning.train, {}
    for kind, parts in unseen_parts(tuning).items():
        trials = tuning.trials(contenders.values(), parts, simulator)
        checks[kind] = dict(zip(contenders, trials, strict=True))
    held = {name: contenders[name].patch for name in (tuning.default, TUNED)}
    points = [
        replace(point, measure=idle_by_cause, more=(("ranks", point.config.tensor_parallel),))
        for patch in held.values()
        for point in tuning.study(parts[:1]).points_of(patch)
    ]
    records = simulator.records(points)
    bubbles = {name: record.values for name, record in zip(held, records, strict=True)}
    return replace(tuned, checks=checks, bubbles=bubbles)


def tune(document: Document, beside: Path, wish: Wish, how: How) -> Tuned:
    """Search, simplify what was found, and check it on unseen data.

    `beside` is the folder of the run's file. UsageError naming what is wrong with the run or the
    wish, before the first long run.
    """
    tuning = prepare(document, beside, wish)
    searched = (len(tuning.baselines) + wish.trials) * wish.replications
    most = max(map(len, tuning.spaces.values())) + 2
    total = searched + most * wish.replications + 2 * 3 * wish.checks + 2
    with how.simulator("simulations", total) as who:
        tuned = checked(simplified(run_search(tuning, who), who), who)
    how.write(lambda folder: _write(folder, tuned, how.out or folder))
    return tuned


def _write(folder: Path, tuned: Tuned, final: Path) -> None:
    """Write tune.json, trials.csv, checks.csv, tuned.yaml, and the picture as tune.png and .svg.

    tuned.yaml runs from any place: its files are named relative to `final`, the folder that
    `folder` becomes.
    """
    tuning = tuned.tuning
    write_json(folder / "tune.json", facts(tuned))
    write_table(folder / "trials.csv", trial_columns(tuned))
    write_table(folder / "checks.csv", check_columns(tuned))
    head = f"# The best settings that evenflow tune found for {tuning.document.name}.\n"
    text = head + run_yaml(tuned.winner, tuning.beside, final)
    (folder / "tuned.yaml").write_text(text, encoding="utf-8")
    plots.save(_draw(tuned), folder / "tune")


def facts(tuned: Tuned) -> dict[str, Any]:
    """Return the content of tune.json."""
    tuning = tuned.tuning
    baselines = tuned.tried[: len(tuning.baselines)]
    return {
        "objective": tuning.objective,
        "slo": [str(condition) for condition in tuning.wish.slo],
        "winner": tuned.best.candidate.labels,
        "default": tuned.default.candidate.labels,
        "settings": [each._asdict() for each in tuned.worth],
        "trials": len(tuned.tried) - len(baselines),
        "failed_trials": sum(bool(each.trial.errors) for each in tuned.tried),
        "training": {
            "parts": [part._asdict() for part in tuning.train],
            "requests": tuning.requests,
            **{each.name: _means(tuning, each.trial) for each in baselines},
            TUNED: _means(tuning, tuned.best.trial),
        },
        "checks": {kind: _check_facts(tuning, check) for kind, check in tuned.checks.items()},
        "gpu_s_by_cause": dict(tuned.bubbles),
        "layouts": [
            {"layout": each.label, "layers": list(each.layers), "reason": each.reason or None}
            for each in tuning.layouts
        ],
    }


def _means(tuning: Tuning, trial: Trial) -> dict[str, float]:
    return {metric: trial.mean(metric) for metric in tuning.metrics}


def _check_facts(tuning: Tuning, check: Check) -> dict[str, Any]:
    against = {}
    for rival, trial in _rivals(check):
        gains = {name: check[TUNED].above(trial, name) for name in tuning.metrics}
        against[rival] = {
            "survives": survives(check, tuning.objective, rival),
            "gains": {
                name: {"mean": gain.mean, "half_width_95": gain.half_width}
                for name, gain in gains.items()
            },
        }
    return {
        "parts": [part._asdict() for part in check[TUNED].parts],
        "means": {name: _means(tuning, trial) for name, trial in check.items()},
        "against": against,
    }


def _rivals(check: Check) -> list[tuple[str, Trial]]:
    return list(check.items())[1:]


def survives(check: Check, metric: str, rival: str) -> bool:
    """Say whether the winner is better than a baseline beyond the interval."""
    gain = check[TUNED].above(check[rival], metric)
    return gain.is_above_zero if larger_is_better(metric) else gain.is_below_zero


def worth_rows(tuned: Tuned) -> list[list[str]]:
    """Return a row for each setting that was found: what the objective is without it."""
    rows = []
    for each in tuned.worth:
        share = each.objective_without / each.objective - 1 if each.objective else 0.0
        loss = f"{each.objective_without:.4g} ({share:+.1%})"
        rows.append([each.setting, each.value, each.default, loss, "yes" if each.kept else "no"])
    return rows


def check_rows(tuned: Tuned) -> list[list[str]]:
    """Return a row for each check, metric and rival: both means, the gain, its interval."""
    rows = []
    for kind, check in tuned.checks.items():
        for metric in tuned.tuning.metrics:
            for rival, trial in _rivals(check):
                gain, other = check[TUNED].above(trial, metric), trial.mean(metric)
                share = f" ({gain.mean / other:+.1%})" if other else ""
                means = f"{other:.4g}", f"{check[TUNED].mean(metric):.4g}"
                unseen = f"{kind}, n = {gain.n}"
                rows.append([unseen, metric, rival, *means, signed(gain) + share])
    return rows


def bubble_rows(tuned: Tuned) -> list[list[str]]:
    """Return a row for each cause of idle time: GPU seconds and their share, in both runs."""
    return [
        [
            cause_label(cause),
            *(f"{time_s:.1f} ({share:.1%})" for time_s, share in (before, after)),
            f"{after[0] - before[0]:+.1f}",
        ]
        for cause, before, after in _times(tuned)
        if before[0] or after[0]
    ]


def _times(tuned: Tuned) -> Iterator[tuple[str, tuple[float, float], tuple[float, float]]]:
    """Yield each cause with its GPU seconds and their share in the run as it is, and the winner."""
    runs = [tuned.bubbles[name] for name in (tuned.tuning.default, TUNED)]
    for cause in ("computing", *CAUSES):
        before, after = ((run[cause], run[cause] / sum(run.values())) for run in runs)
        yield cause, before, after


def sentences(tuned: Tuned) -> list[str]:
    """Return what to say: what was found, whether it holds, why, and what did not fit."""
    best, checks = tuned.best, tuned.checks.items()
    words = ", ".join(f"{key} {value}" for key, value in best.candidate.labels.items())
    said = [f"best of {len(tuned.tried)} tried: {words}"]
    if best is tuned.default:
        return [*said, "these are the settings of the run as it is: nothing better was found"]
    if tuned.rank(best.trial)[1] > 0:
        said.append(
            "nothing that was tried keeps the SLO, even where it was searched: this is nearest"
        )
    if told := best.trial.overload:
        said.append(f"overloaded even so: {told}")
    metric, slo = tuned.tuning.objective, tuned.tuning.wish.slo
    for kind, check in checks:
        said += [f"{kind}, {_verdict(check, metric, *rival)}" for rival in _rivals(check)]
    said += [f"{kind}: {line}" for kind, check in checks for line in _missed(slo, check[TUNED])]
    if not checks:
        said.append("nothing unseen to check on: the trace ends here and its times are its own")
    said.append(_why(tuned))
    return [*said, *unfair({"the best": best.trial, "the run as it is": tuned.default.trial})]


def _verdict(check: Check, metric: str, rival: str, trial: Trial) -> str:
    gain, before = check[TUNED].above(trial, metric), trial.mean(metric)
    share = f", {gain.mean / before:+.1%}" if before else ""
    told = "the gain survives" if survives(check, metric, rival) else "THE GAIN DOES NOT SURVIVE"
    return f"against {rival}: {told}: {metric} {signed(gain)} (95 %, n = {gain.n}{share})"


def _missed(slo: Sequence[Condition], trial: Trial) -> list[str]:
    means = {each.metric: trial.mean(each.metric) for each in slo}
    return [
        f"the SLO is missed: {each.metric} is {means[each.metric]:.4g} on average; {each} was asked"
        for each in slo
        if not each.holds(means)
    ]


def _why(tuned: Tuned) -> str:
    """Name the causes of idle time whose share of the stage time changed most."""
    changes = {cause: after[1] - before[1] for cause, before, after in _times(tuned)}
    largest = sorted(changes, key=lambda cause: -abs(changes[cause]))[:3]
    words = [f"{cause_label(cause)} {100 * changes[cause]:+.1f} points" for cause in largest]
    return f"share of the GPU time, against the run as it is: {', '.join(words)}"


def _draw(tuned: Tuned) -> Figure:
    """Draw the search, the gain on unseen data, and where the GPU time goes."""
    wide = [1.3, 1.3, 1]
    figure, (trials, gains, stages) = plots.panels(3, 4, 4.2, width_ratios=wide)
    _draw_trials(trials, tuned)
    _draw_checks(gains, tuned)
    plots.stage_time(stages, tuned.bubbles)
    plots.finish(stages, "GPU time, unseen part (%)", grid="")
    plots.key(stages, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_trials(axes: Axes, tuned: Tuned) -> None:
    """One point a trial, hollow if it misses the SLO; a line for the run as it is, and the best."""
    metric, first = tuned.tuning.objective, len(tuned.tuning.baselines)
    names = list(dict.fromkeys(each.candidate.scheduler for each in tuned.tried))
    for position, each in enumerate(tuned.tried[first:]):
        unknown, off, _ = tuned.rank(each.trial)
        shade = colour(names.index(each.candidate.scheduler))
        if not unknown:
            fill = "none" if off else shade
            axes.scatter(position, each.trial.mean(metric), s=16, facecolors=fill, edgecolors=shade)
    for index, name in enumerate(names):
        axes.scatter([], [], s=16, color=colour(index), label=name)
    axes.scatter([], [], s=16, facecolors="none", edgecolors="black", label="misses the SLO")
    lines = ((tuned.default, tuned.tuning.default, ":"), (tuned.best, TUNED, "--"))
    for each, label, style in lines:
        level = each.trial.mean(metric)
        axes.axhline(level, color="black", linewidth=1, linestyle=style, label=label)
    axes.set_xlabel("trial")
    _finish(axes, f"Search: {metric}")


def _draw_checks(axes: Axes, tuned: Tuned) -> None:
    """The objective of each contender on unseen data, with its interval."""
    metric, checks = tuned.tuning.objective, tuned.checks
    for place, check in enumerate(checks.values()):
        for index, (name, trial) in enumerate(check.items()):
            mean, shade = trial.interval(metric), colour(index)
            at = place + 0.22 * (index - (len(check) - 1) / 2)
            look: dict[str, Any] = {"fmt": "o", "capsize": 4, "color": shade}
            axes.errorbar(at, mean.mean, mean.half_width, label=None if place else name, **look)
            spread = np.full(mean.n, at + 0.07)
            axes.plot(spread, trial.values(metric), ".", color=shade, alpha=0.35, markersize=4)
    heads = [f"{kind}\n(n = {len(check[TUNED].records)})" for kind, check in checks.items()]
    axes.set_xticks(range(len(checks)), heads)
    axes.set_xlim(-0.6, max(len(checks), 1) - 0.4)
    _finish(axes, f"Unseen data: {metric}")


def _finish(axes: Axes, title: str) -> None:
    plots.finish(axes, title)
    plots.key(axes, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
