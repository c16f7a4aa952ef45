"""Costs from measured operators, as a configuration asks for: a profile file, or silicon tables.

Knows where the measurements come from and says so in the provenance; no scheduler, no simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenflow.costs import Fabric, RooflineCost
from evenflow.costs.tables import TableCost
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GPUS
from evenflow.specs.model import ModelSpec
from experiments.run_file.costs import ProfileCosts, SiliconCosts
from experiments.run_file.run import RunConfig


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs from tables, and what to say about their source."""

    cost: TableCost
    source: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """Return the source, with the share of predicted seconds that rests on no measurement."""
        return self.source | {"extrapolated_share": round(self.cost.extrapolated_share, 6)}


def measured_costs(
    config: RunConfig,
    spec: ModelSpec | None,
    deployment: Deployment | None,
    fabric: Callable[[], Fabric | None],
    find: Callable[[str], str],
) -> MeasuredCosts | None:
    """Return the costs of `kind: profile` or `silicon`; None for other kinds.

    `fabric()` is what connects the GPUs of a stage; `find` resolves a path.
    """
    given = config.costs
    if isinstance(given, ProfileCosts):
        assert spec is not None  # the schema asks for it
        return _profile(config, Path(find(given.path)), spec, deployment, fabric)
    if isinstance(given, SiliconCosts):
        assert deployment is not None  # the schema asks for model and GPU
        return _silicon(config, given, deployment, fabric)
    return None


def _profile(
    config: RunConfig,
    path: Path,
    spec: ModelSpec,
    deployment: Deployment | None,
    fabric: Callable[[], Fabric | None],
) -> MeasuredCosts:
    from evenflow.costs.profile.cost import check_device, missing_operators, profile_cost
    from evenflow.costs.profile.file import read_profile

    given = config.costs
    assert isinstance(given, ProfileCosts)
    profile = read_profile(path)
    if deployment is not None and deployment.gpu.name in {known.name for known in GPUS}:
        check_device(profile, deployment.gpu.name, str(path))
    fill = None
    if given.fill is not None:
        assert deployment is not None  # the schema asks for the GPU
        fill = RooflineCost(deployment, fabric(), tile_tokens=profile.header.tile_tokens)
    layers = split_layers(spec.num_layers, config.stages)
    if deployment is not None:
        layers = deployment.layers_per_stage
    ranks = config.tensor_parallel
    cost = profile_cost(profile, spec, layers, ranks, fill, name=str(path))
    header = asdict(profile.header)
    missing = missing_operators(profile, ranks)
    source = {
        "path": given.path,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "filled_in": missing if fill is not None else [],
    }
    wanted = (
        "device",
        "driver",
        "libraries",
        "dtype",
        "date",
        "threads",
        "grid",
        "source",
        "checked",
    )
    return MeasuredCosts(cost, source | {key: header[key] for key in wanted})


def _silicon(
    config: RunConfig,
    given: SiliconCosts,
    deployment: Deployment,
    fabric: Callable[[], Fabric | None],
) -> MeasuredCosts:
    from evenflow.costs.silicon.cost import silicon_cost, silicon_source

    source = silicon_source(deployment, given.framework, given.version)
    spans = config.nodes is not None and config.tensor_parallel > config.nodes.gpus
    other = fabric() if given.all_reduce is not None or spans else None
    return MeasuredCosts(silicon_cost(deployment, source, other), source.facts())
