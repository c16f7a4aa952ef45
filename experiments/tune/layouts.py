"""Ways to lay a model out over a number of GPUs: stages x tensor parallel, and the layers of each.

Knows what fits, not how well it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError
from evenflow.specs.deployment import split_layers
from evenflow.specs.model import model
from experiments.run_file.build import Workload, build
from experiments.run_file.run import RunConfig, with_
from experiments.run_file.yaml_file import Document, find

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


AS_GIVEN = Layout("as given", "as given", {})


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
