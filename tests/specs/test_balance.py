"""Layers per stage that balance embedding and LM head."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest

from evenflow.costs import RooflineCost, balanced_layers
from evenflow.costs.estimates import TYPICAL
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GpuSpec, LinkSpec, gpu
from evenflow.specs.model import model, models
from evenflow.specs.modelspec import ModelSpec
from tests.command_line import refused
from tests.profiles import PLAIN


def slowest_s(spec: ModelSpec, on: GpuSpec, layers: tuple[int, ...]) -> float:
    return max(RooflineCost(Deployment(spec, on, layers)).times(TYPICAL))


ROOFLINE = [name for name, spec in models().items() if not any(k.mixer for k in spec.kinds())]


@pytest.mark.parametrize("name", ROOFLINE[::3])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_balanced_split_is_never_slower_than_an_even_one(name: str, stages: int) -> None:
    spec = model(name)
    for on in (gpu("L20"), gpu("H100")):
        layers = balanced_layers(spec, on, stages)
        assert sum(layers) == spec.num_layers
        even = split_layers(spec.num_layers, stages)
        assert slowest_s(spec, on, layers) <= slowest_s(spec, on, even) * (1 + 1e-12)


def test_a_balanced_split_is_the_best_of_all() -> None:
    spec = ModelSpec("small", 12, 64, 4, 2, 16, 128, 50000, 2048, 1e4)
    cuts = combinations(range(1, 12), 2)
    best = min(slowest_s(spec, PLAIN, (one, two - one, 12 - two)) for one, two in cuts)
    balanced = balanced_layers(spec, PLAIN, 3)
    assert slowest_s(spec, PLAIN, balanced) == pytest.approx(best, rel=1e-12)
    assert balanced[-1] < 4


def test_a_head_of_several_layers_takes_several_layers_off_the_last_stage() -> None:
    assert balanced_layers(model("Qwen2.5-7B"), gpu("H100"), 8) == (3, 4, 4, 4, 4, 4, 3, 2)


def test_ranks_are_taken_into_account() -> None:
    """Slow all-reduces make layers longer, and the head takes fewer layers off the last stage."""
    balanced = partial(balanced_layers, model("Qwen2.5-7B"), gpu("H100"), 4)
    assert balanced()[-1] < balanced(tensor_parallel=4, fabric=LinkSpec(10, 30))[-1]


def test_more_stages_than_layers_are_refused() -> None:
    with refused("stages: 33 stages for 32 layers; use fewer stages"):
        balanced_layers(model("Mistral-7B"), gpu("L20"), 33)
