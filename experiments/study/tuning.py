"""What `evenflow tune` is asked, checked before the first run: layouts, settings, parts, limits.

Knows what may be tried and what fits, not how well it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from evenflow.errors import UsageError
from evenflow.schedulers import POOLED, policy
from experiments.run_file.build import load_workload
from experiments.run_file.policy_folders import make_importable
from experiments.run_file.run import RunConfig, configured, with_
from experiments.run_file.yaml_file import Document, Patch, mistakes, patched
from experiments.study.layouts import Layout, layouts, pairs_of, why_fixed
from experiments.study.searches import Parameter
from experiments.study.slo import Condition, check_metrics, request_limits, service_levels
from experiments.study.trials import Case, Part, Study, dry_run, seed_matters, seeds

AS_IS = "as given"
GLLM = "gLLM's defaults"
ONLINE = ("token_throttling", "sarathi", "vllm")
"""The schedulers tried when none is named, beside the run's own."""


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
class Candidate:
    """Settings to try: a scheduler, those of its parameters that are set, a layout."""

    scheduler: str
    params: Mapping[str, Any]
    layout: Layout

    @property
    def patch(self) -> Patch:
        return {**self.layout.keys, "scheduler": {"name": self.scheduler, **self.params}}

    @property
    def labels(self) -> dict[str, Any]:
        """The settings as a row of a table."""
        told = {f"{self.scheduler}.{name}": value for name, value in self.params.items()}
        return {"scheduler": self.scheduler, "layout": self.layout.label, **told}

    @property
    def case(self) -> Case:
        return Case(self.labels, self.patch)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is asked, checked: the run, what is good, what may be changed, on which requests.

    `spaces` are the parameters to search, by scheduler; `layouts` all that were looked at, feasible
    or not. `baselines` by name, the run's own settings first. `train` are the parts to search on.
    """

    document: Document
    beside: Path
    slo: tuple[Condition, ...]
    objective: str
    spaces: Mapping[str, Mapping[str, Parameter]]
    layouts: tuple[Layout, ...]
    baselines: Mapping[str, Candidate]
    train: tuple[Part, ...]
    requests: int
    trials: int = 64
    seed: int = 0

    @property
    def default(self) -> str:
        """The name of the run's own settings among the baselines."""
        return next(iter(self.baselines))

    @property
    def feasible(self) -> list[Layout]:
        return [layout for layout in self.layouts if not layout.reason]

    @property
    def metrics(self) -> list[str]:
        """The metrics that decide, the objective first."""
        return list(dict.fromkeys([self.objective, *(each.metric for each in self.slo)]))

    def study(self, parts: Sequence[Part]) -> Study:
        """Return the study of the run on some parts: its summary and what its SLO needs."""
        run = patched(self.document, {"workload.requests": self.requests})
        limits = request_limits(self.slo, configured(run).goodput)
        more = (("metrics", tuple(self.metrics)), ("limits", limits))
        return Study(run, self.beside, lambda config: parts, service_levels, more)


def prepare(document: Document, beside: Path, wish: Wish) -> Tuning:
    """Return the checked question; UsageError naming what is wrong with the run or the wish."""
    make_importable([document.data, list(wish.schedulers or ())], Path.cwd(), beside)
    config = configured(document)
    requests = _requests(config, beside)
    workload = load_workload(with_(config, {"workload.requests": requests}), beside)
    outcome = dry_run(config, workload, beside)
    limits = request_limits(wish.slo, config.goodput)
    objective = wish.objective or ("request_goodput" if _of_requests(limits) else "mean_e2el_ms")
    metrics = [each.metric for each in wish.slo]
    values = service_levels(outcome, metrics=[*metrics, objective], limits=limits)
    check_metrics(metrics, values, "--slo")
    check_metrics([objective], values, "--objective")
    found = layouts(document, workload, beside, _pairs(config, wish))
    base = next((layout for layout in found if not layout.reason), None)
    if base is None:
        raise UsageError(
            f"--gpus {_words(wish.gpus)}: no layout fits: {found[0].label}: {found[0].reason}"
        )
    spaces = {name: space_of(name) for name in _schedulers(config, wish)}
    count = wish.replications if seed_matters(config) else 1
    return Tuning(
        document=document,
        beside=beside,
        slo=wish.slo,
        objective=objective,
        spaces=spaces,
        layouts=tuple(found),
        baselines=_baselines(config, base, spaces),
        train=tuple(seeds(count)(config)),
        requests=requests,
        trials=wish.trials,
        seed=wish.seed,
    )


def _pairs(config: RunConfig, wish: Wish) -> list[tuple[int, int]] | None:
    if wish.gpus is None:
        return None
    if fixed := why_fixed(config):
        raise UsageError(
            f"--gpus {_words(wish.gpus)}: {fixed}, so that the layout is what the run says"
        )
    return pairs_of(wish.gpus)


def _words(gpus: Sequence[int] | None) -> str:
    return ",".join(map(str, gpus or ()))


def _of_requests(limits: Sequence[tuple[str, float]]) -> bool:
    return any(name != "itl" for name, _ in limits)


def _requests(config: RunConfig, beside: Path) -> int:
    """Return how many requests a part has: what the run says, or else half of the trace."""
    if config.workload.requests is not None:
        return config.workload.requests
    total = len(config.workload.rows(beside, None))
    if total < 2:
        raise UsageError(f"workload.trace: {total} request cannot be divided into two parts")
    return total // 2


def _schedulers(config: RunConfig, wish: Wish) -> list[str]:
    own = config.scheduler.name
    names = list(wish.schedulers) if wish.schedulers is not None else [own, *ONLINE]
    if not names:
        raise UsageError("--schedulers: names no scheduler; give at least one")
    if wish.schedulers is not None and len(set(names)) < len(names):
        raise UsageError(f"--schedulers {','.join(names)}: one of them is there twice")
    return list(dict.fromkeys(names))


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
