"""Layouts: how a model's layers lie on so many GPUs, as stages x tensor parallel, and which fit.

A candidate is a layout with a scheduler and its parameters.

Knows what can be, not how well it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenflow.errors import MOST_RUNS, UsageError
from evenflow.specs.deployment import split_layers
from evenflow.specs.model import model
from experiments.run_file.build import Workload, build
from experiments.run_file.run import RunConfig, configured, with_
from experiments.run_file.yaml_file import Document, Patch, find
from experiments.study.trials import Case

SHIFTS = (-2, -1, 1, 2, 3)
"""Layers that the last stage gives to the others (below 0: takes from them), beside even and
balanced splits."""


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

    @property
    def short(self) -> str:
        """The name without what goes without saying: an even division."""
        return self.parallel if self.division in ("even", "as given") else self.label


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


def layouts(
    document: Document,
    workload: Workload,
    beside: Path,
    pairs: Sequence[tuple[int, int]] | None = None,
    shifts: Sequence[int] = SHIFTS,
) -> list[Layout]:
    """Return the layouts to try, those that cannot be with the reason; the one given comes first.

    `pairs` are stages and tensor-parallel ranks; None: the run's own. Layouts with the same layers
    on the same GPUs are listed once. Where the layers do not follow from a model and its memory
    there is only the one given (`why_fixed`).
    """
    config = configured(document)
    if why_fixed(config):
        return [AS_GIVEN]
    assert config.model is not None  # it would be fixed
    num_layers = model(find(config.model, beside)).num_layers
    own = (config.num_stages, config.tensor_parallel)
    pairs = [own] if pairs is None else pairs
    wanted = [AS_GIVEN] if own in pairs else []
    wanted += [each for pair in pairs for each in _divisions(num_layers, *pair, shifts)]
    tried = (_tried(each, document, workload, beside) for each in wanted)
    return list(_distinct(tried))


def parse_gpus(text: str) -> tuple[int, ...]:
    """Return the numbers of GPUs that `8`, `4,8` or `4..64` means, in order; else UsageError."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("..")
        ends = [int(end) if end.isdecimal() and len(end) < 9 else 0 for end in (low, high or low)]
        if not 1 <= ends[0] <= ends[1] <= MOST_RUNS:
            words = "should be a number of GPUs, several (4,8) or a range (4..64)"
            raise UsageError(f"--gpus {text:.80}: {words}, from 1 to {MOST_RUNS}")
        numbers.update(range(ends[0], ends[1] + 1))
    return tuple(sorted(numbers))


def on_gpus(config: RunConfig, gpus: Sequence[int]) -> RunConfig:
    """Return the run with as many replicas as have so many GPUs; UsageError where none has."""
    pipeline = config.pipeline_gpus
    if len(gpus) > 1 or gpus[0] % pipeline:
        listed = ",".join(map(str, gpus))
        words = f"one number is right, a multiple of the {pipeline} GPUs of one pipeline"
        raise UsageError(f"--gpus {listed}: {words}; evenflow plan tries several layouts")
    router = "least_outstanding" if config.replicas is None else config.replicas.router
    return with_(config, {"replicas": {"count": gpus[0] // pipeline, "router": router}})


def pairs_of(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Return all factorizations of numbers of GPUs into stages x tensor-parallel ranks."""
    return [(n // ranks, ranks) for n in gpus for ranks in range(1, n + 1) if n % ranks == 0]


def parallel_name(stages: int, ranks: int) -> str:
    """Return what people call so many stages of so many tensor-parallel GPUs: PP2 x TP4."""
    parts = [f"PP{stages}"] if stages > 1 or ranks == 1 else []
    return " x ".join([*parts, f"TP{ranks}"] if ranks > 1 else parts)


def why_fixed(config: RunConfig) -> str:
    """Say why the layout of a run is what it says; "" where others can be tried."""
    if config.model is None or config.gpu is None or config.costs.kind == "affine":
        return "the run's costs do not follow from a model on a gpu"
    if config.kv.pages != "auto":
        return "the run's kv.pages is a number, not auto"
    return ""


def _divisions(num_layers: int, stages: int, ranks: int, shifts: Sequence[int]) -> Iterator[Layout]:
    parallel = parallel_name(stages, ranks)
    if stages > num_layers or stages == 1:
        yield Layout(parallel, "even", {"stages": stages, "tensor_parallel": ranks})
        return
    for split in ("even", "balanced"):
        keys = {"stages": stages, "tensor_parallel": ranks, "split": split}
        yield Layout(parallel, split, keys)
    even = split_layers(num_layers, stages)
    for shift in shifts:
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
        built = build(config, workload.requests[:1], beside, workload.texts)
    except UsageError as error:
        return replace(layout, reason=str(error))
    pools = built.deployment.get("pools")
    layers = () if pools else tuple(built.deployment["layers_per_stage"])
    parallel = parallel_name(config.num_stages, config.tensor_parallel)
    return replace(layout, parallel=parallel, layers=layers)


def _distinct(tried: Iterator[Layout]) -> Iterator[Layout]:
    seen = set()
    for layout in tried:
        identity = (layout.parallel, layout.layers) if layout.layers else layout.label
        if identity not in seen:
            seen.add(identity)
            yield layout
