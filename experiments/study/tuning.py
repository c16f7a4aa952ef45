"""What `evenflow tune` is asked, checked before the first run: layouts, settings, parts, limits.

Knows what may be tried and what fits, not how well it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from evenflow.errors import UsageError
from evenflow.schedulers import POOLED, policy
from evenflow.specs.deployment import split_layers
from evenflow.specs.model import model
from experiments.run_file.build import Workload, build, load_workload
from experiments.run_file.policy_folders import make_importable
from experiments.run_file.run import RunConfig, configured, with_
from experiments.run_file.yaml_file import Document, Patch, find, mistakes, patched
from experiments.study.searches import Parameter
from experiments.study.slo import Condition, check_metrics, request_limits, service_levels
from experiments.study.trials import Case, Part, Study, dry_run, seed_matters

AS_IS = "as given"
GLLM = "gLLM's defaults"
ONLINE = ("token_throttling", "sarathi", "vllm")
"""The schedulers tried when none is named, beside the run's own."""


SHIFTS = (-2, -1, 1, 2, 3)
"""Layers that the last stage gives to the others (below 0: takes from them), beside even and
balanced splits."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user says: all of it beside the run itself. None: chosen here."""

    slo: tuple[Condition, ...]
    objective: str | None = None
    schedulers: Sequence[str] | None = None
    gpus: int | None = None
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
class Layout:
    """One way: its name in two parts, the keys of RUN.yaml that make it, and the layers per stage.

    `reason`: why it cannot be; "" where it can.
    """

    parallel: str
    division: str
    keys: Mapping[str, Any]
    layers: tuple[int, ...] = field(default=(), compare=False)
    reason: str = ""

    @property
    def label(self) -> str:
        return f"{self.parallel}, {self.division}"


AS_GIVEN = Layout("as given", "as given", {})


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
    found = layouts(document, config, workload, beside, wish.gpus)
    base = next((layout for layout in found if not layout.reason), None)
    if base is None:
        raise UsageError(f"--gpus {wish.gpus}: no layout fits: {found[0].label}: {found[0].reason}")
    spaces = {name: space_of(name) for name in _schedulers(config, wish)}
    count = wish.replications if seed_matters(config) else 1
    seeds = range(config.workload.seed, config.workload.seed + count)
    return Tuning(
        document=document,
        beside=beside,
        slo=wish.slo,
        objective=objective,
        spaces=spaces,
        layouts=tuple(found),
        baselines=_baselines(config, base, spaces),
        train=tuple(Part(seed, config.workload.skip) for seed in seeds),
        requests=requests,
        trials=wish.trials,
        seed=wish.seed,
    )


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


def layouts(
    document: Document, config: RunConfig, workload: Workload, beside: Path, gpus: int | None
) -> list[Layout]:
    """Return the layouts to try, those that cannot be with the reason; the one given comes first.

    All factorizations of `gpus` into stages x tensor parallel; None: the run's own. Layouts with
    the same layers on the same GPUs are listed once. Where the layers do not follow from a model
    and its memory there is only the one given, and `gpus` is a UsageError.
    """
    fixed = _why_fixed(config)
    if fixed:
        if gpus is not None:
            raise UsageError(f"--gpus {gpus}: {fixed}, so that the layout is what the run says")
        return [AS_GIVEN]
    if gpus is not None and gpus < 1:
        raise UsageError(f"--gpus {gpus}: should be at least 1")
    assert config.model is not None  # it would be fixed
    num_layers = model(find(config.model, beside)).num_layers
    own = (config.num_stages, config.tensor_parallel)
    pairs = [own] if gpus is None else _factors(gpus)
    wanted = [AS_GIVEN] if gpus in (None, own[0] * own[1]) else []
    wanted += [each for pair in pairs for each in _divisions(num_layers, *pair)]
    tried = (_tried(each, document, workload, beside) for each in wanted)
    return list(_distinct(tried))


def _why_fixed(config: RunConfig) -> str:
    if config.model is None or config.gpu is None or config.costs.kind == "affine":
        return "the run's costs do not follow from a model on a gpu"
    if config.kv.pages != "auto":
        return "the run's kv.pages is a number, not auto"
    return ""


def _factors(gpus: int) -> list[tuple[int, int]]:
    return [(gpus // ranks, ranks) for ranks in range(1, gpus + 1) if gpus % ranks == 0]


def _divisions(num_layers: int, stages: int, ranks: int) -> Iterator[Layout]:
    parallel = f"{stages} x {ranks}"
    if stages > num_layers or stages == 1:
        yield Layout(parallel, "even", {"stages": stages, "tensor_parallel": ranks})
        return
    for split in ("even", "balanced"):
        keys = {"stages": stages, "tensor_parallel": ranks, "split": split}
        yield Layout(parallel, split, keys)
    even = split_layers(num_layers, stages)
    for shift in SHIFTS:
        layers = shifted(even, shift)
        if min(layers) >= 1:
            listed = {"stages": list(layers), "tensor_parallel": ranks, "split": "even"}
            yield Layout(parallel, f"last {-shift:+d}", listed)


def shifted(layers: Sequence[int], shift: int) -> tuple[int, ...]:
    """Return the layers with `shift` of the last stage's on the others, one each from the front on.

    Below 0 the others give to the last stage.
    """
    moved = list(layers)
    step = 1 if shift > 0 else -1
    for count in range(abs(shift)):
        moved[count % (len(moved) - 1)] += step
        moved[-1] -= step
    return tuple(moved)


def _tried(layout: Layout, document: Document, workload: Workload, beside: Path) -> Layout:
    try:
        places = dict.fromkeys(layout.keys, f"layout {layout.label}")
        config = with_(document, layout.keys, places)
        built = build(config, workload.requests, beside, workload.texts)
    except UsageError as error:
        return replace(layout, reason=str(error))
    pools = built.deployment.get("pools")
    layers = () if pools else tuple(built.deployment["layers_per_stage"])
    parallel = f"{config.num_stages} x {config.tensor_parallel}"
    return replace(layout, parallel=parallel, layers=layers)


def _distinct(tried: Iterator[Layout]) -> Iterator[Layout]:
    seen = set()
    for layout in tried:
        identity = (layout.parallel, layout.layers) if layout.layers else layout.label
        if identity not in seen:
            seen.add(identity)
            yield layout
