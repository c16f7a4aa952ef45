"""Turn what takes time and memory in a configuration into things: deployment, costs, links.

Knows specifications and cost models; no trace, no scheduler, no simulator's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from evenflow.costs import (
    AffineCost,
    DraftedCost,
    Fabric,
    GraphCost,
    Measured,
    Ring,
    RooflineCost,
    StageCost,
    SwapCost,
    TwoLevel,
    balanced_layers,
    prefill_work,
)
from evenflow.costs.drafts import share_of, step_of
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import LinkSpec, gpu, link
from evenflow.specs.model import ModelSpec, model
from evenflow.speculation import Speculation
from evenflow.world import Link
from experiments.run_file.build_measured import MeasuredCosts
from experiments.run_file.costs import AffineCosts, AllReduceConfig, LinkConfig, RooflineCosts
from experiments.run_file.pools import TransferLinkConfig
from experiments.run_file.run import RunConfig


def deployment_of(
    config: RunConfig, spec: ModelSpec | None, find: Callable[[str], str]
) -> Deployment | None:
    """Return the model on its GPUs; None without a model or a GPU. `find` resolves a path."""
    if spec is None:
        return None
    if config.gpu is None:
        split_layers(spec.num_layers, config.stages)
        return None
    draft = None if config.speculative is None else config.speculative.draft_model
    return Deployment(
        spec,
        gpu(config.gpu),
        _layers(config, spec),
        config.tensor_parallel,
        memory_utilization=config.kv.memory_utilization,
        page_tokens=config.kv.page_tokens,
        expert_parallel=config.expert_parallel,
        draft=None if draft is None else model(find(draft)),
    )


def _layers(config: RunConfig, spec: ModelSpec) -> tuple[int, ...]:
    if config.split == "even":
        return split_layers(spec.num_layers, config.stages)
    if not isinstance(config.stages, int):
        raise UsageError(
            f"split: balanced: stages lists the layers already, {config.stages}; give their number"
        )
    assert config.gpu is not None  # the schema asks for it
    tensor_parallel, fabric = config.tensor_parallel, fabric_of(config)
    return balanced_layers(
        spec, gpu(config.gpu), config.stages, tensor_parallel=tensor_parallel, fabric=fabric
    )


def costs_of(
    config: RunConfig,
    spec: ModelSpec | None,
    deployment: Deployment | None,
    tables: MeasuredCosts | None = None,
) -> StageCost:
    """Return the seconds of a micro-batch on each stage, without those of proposing tokens.

    `tables` are the measured operators where the costs come from such.
    """
    given = config.costs
    if isinstance(given, AffineCosts):
        crossing = 0 if spec is None else spec.hidden_size * spec.dtype_bytes
        affine = AffineCost(given.base_s, given.per_token_s, config.num_stages, crossing)
        sizes = given.cuda_graph_sizes
        return affine if sizes is None else GraphCost(affine, sizes)
    if tables is not None:
        sizes = given.cuda_graph_sizes
        return tables.cost if sizes is None else GraphCost(tables.cost, sizes)
    assert isinstance(given, RooflineCosts)  # the others have tables
    assert deployment is not None  # the schema asks for model and GPU
    eager = _roofline(config, given, deployment)
    if given.cuda_graph_sizes is None:
        return eager
    overhead_s = given.graph_layer_overhead_s
    if overhead_s is None:
        return GraphCost(eager, given.cuda_graph_sizes)
    launched = replace(deployment.gpu, per_layer_overhead_s=overhead_s)
    captured = _roofline(config, given, replace(deployment, gpu=launched))
    return GraphCost(eager, given.cuda_graph_sizes, captured)


def _roofline(config: RunConfig, given: RooflineCosts, deployment: Deployment) -> RooflineCost:
    return RooflineCost(
        deployment,
        fabric_of(config),
        tile_tokens=given.tile_tokens,
        expert_imbalance=given.expert_imbalance,
    )


def speculation_of(config: RunConfig) -> Speculation | None:
    """Return how many tokens a decode step proposes and yields; None: one token a step."""
    given = config.speculative
    return None if given is None else Speculation(given.k, given.acceptance)


def with_drafts(config: RunConfig, costs: StageCost, deployment: Deployment | None) -> StageCost:
    """Return the costs with those of proposing tokens, if any are proposed."""
    given, speculation = config.speculative, speculation_of(config)
    if given is None or speculation is None:
        return costs
    if given.draft_model is None:
        share = given.draft_cost_share or 0.0
        return DraftedCost(costs, speculation, share_of(costs, share)) if share else costs
    if not isinstance(config.costs, RooflineCosts):
        raise UsageError(
            "speculative.draft_model: its costs need costs.kind: roofline; or give a "
            "draft_cost_share"
        )
    assert deployment is not None  # the schema asks for model and GPU
    assert deployment.draft is not None
    draft = Deployment(
        deployment.draft, deployment.gpu, (deployment.draft.num_layers,), config.tensor_parallel
    )
    step = step_of(RooflineCost(draft, fabric_of(config), tile_tokens=config.costs.tile_tokens))
    return DraftedCost(costs, speculation, step)


def fabric_of(config: RunConfig) -> Fabric | None:
    """Return what connects the GPUs of a stage; None if no link is known."""
    given = None if isinstance(config.costs, AffineCosts) else config.costs.all_reduce
    points = given.points if isinstance(given, AllReduceConfig) else None
    if isinstance(given, AllReduceConfig) and given.name is None and given.bandwidth_gb_s is None:
        given = None
    within = given or config.link
    fabric = None if within is None else _across_nodes(config, link_spec(within))
    if points is None:
        return fabric
    return Measured([(size, microseconds * 1e-6) for size, microseconds in points], fabric)


def _across_nodes(config: RunConfig, within: LinkSpec) -> Fabric:
    nodes, ranks = config.nodes, config.tensor_parallel
    if nodes is None or ranks <= nodes.gpus:
        return Ring(within)
    if ranks % nodes.gpus:
        raise UsageError(
            f"nodes: {ranks} tensor-parallel GPUs do not fill nodes of {nodes.gpus} evenly"
        )
    across = link_spec(nodes.link)
    if nodes.all_reduce == "ring":
        return Ring(across)
    return TwoLevel(within, across, nodes.gpus)


def link_spec(given: str | LinkConfig | AllReduceConfig | TransferLinkConfig) -> LinkSpec:
    """Return the link that a name or a mapping of the configuration means."""
    if isinstance(given, str):
        return link(given)
    keys = {"latency_us": 0.0} if given.name is None else {}
    known = {"name", "bandwidth_gb_s", "latency_us"}
    return link(keys | given.model_dump(include=known, exclude_none=True))


def links_of(config: RunConfig, costs: StageCost) -> tuple[Link | None, tuple[Link, ...] | None]:
    """Return the link of all hops between stages, or else one for each hop."""
    if config.link is None:
        return None, None
    shared = isinstance(config.link, LinkConfig) and config.link.shared
    within = _timed(link_spec(config.link), costs, shared)
    nodes, ranks = config.nodes, config.tensor_parallel
    if nodes is None:
        return within, None
    if shared:
        raise UsageError("link.shared: there is no one link for all stages where there are nodes")
    if ranks <= nodes.gpus and nodes.gpus % ranks:
        raise UsageError(
            f"nodes: {nodes.gpus} GPUs hold no whole number of stages of {ranks} GPUs each"
        )
    across = _timed(link_spec(nodes.link), costs, False)
    home = [stage * ranks // nodes.gpus for stage in range(config.num_stages)]
    return None, tuple(within if here == there else across for here, there in pairwise(home))


def _timed(spec: LinkSpec, costs: StageCost, shared: bool) -> Link:
    per_token_s = costs.transfer_bytes(prefill_work(1)) / (spec.bandwidth_gb_s * 1e9)
    return Link(per_token_s, spec.latency_s, shared)


def with_swap(
    config: RunConfig, costs: StageCost, spec: ModelSpec | None, deployment: Deployment | None
) -> StageCost:
    """Return the costs with those of copying KV pages to the host and back, if they are swapped."""
    host = config.kv.host_link
    if host is None:
        return costs
    assert spec is not None  # the schema asks for a model
    if deployment is not None:
        token_bytes = [deployment.kv_bytes_per_token(stage) for stage in range(costs.depth)]
    else:
        layers = split_layers(spec.num_layers, config.stages)
        token_bytes = [spec.kv_bytes_per_token(count, config.tensor_parallel) for count in layers]
    page_bytes = [config.kv.page_tokens * count for count in token_bytes]
    return SwapCost(costs, page_bytes, host.bandwidth_gb_s * 1e9, host.latency_us * 1e-6)
