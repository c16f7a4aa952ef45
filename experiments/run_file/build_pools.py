"""Turn `distserve` or `splitwise` into what a simulation needs: a world for each of its pools.

Each pool is built as a run of its own would be, on its part of the GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from evenflow.errors import UsageError
from evenflow.specs.model import model
from evenflow.types import Request
from experiments.run_file.build_costs import link_spec
from experiments.run_file.build_world import (
    Built,
    build_world,
    concurrency_of,
    cost_source_of,
    find,
)
from experiments.run_file.costs import AffineCosts
from experiments.run_file.mistakes import mistakes
from experiments.run_file.pools import DistServeConfig, MixedPoolConfig, PoolConfig, system
from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import Document
from sim import PooledWorld, TransferLink, World


class Share(NamedTuple):
    """The GPUs of one pool: `stages` (or their layers) of `tensor_parallel` each."""

    stages: int | list[int]
    tensor_parallel: int

    @property
    def gpus(self) -> int:
        stages = self.stages if isinstance(self.stages, int) else len(self.stages)
        return stages * self.tensor_parallel


def build_pools(
    config: RunConfig, requests: list[Request], beside: Path, texts: Sequence[str] | None = None
) -> Built:
    """Return the world of a system of pools; UsageError for what cannot be.

    Where policies of several pools predict lengths, the last pool's predictions hold.
    """
    given = system(config.scheduler)
    for key in ("virtual_engines", "replicas"):
        if getattr(config, key):
            raise UsageError(
                f"{key}: not with {config.scheduler.name}, whose pools are one engine each; leave "
                "it out"
            )
    total = config.num_stages * config.tensor_parallel
    built = {}
    for name, share in divide(config, given).items():
        own = _own_config(config, given.pools()[name], share, total)
        try:
            built[name] = build_world(_checked(own), requests, beside, texts)
        except UsageError as error:
            raise UsageError(f"scheduler {config.scheduler.name}: {name} pool: {error}") from None
        requests = list(built[name].world.requests)
    link = _link(config, given, beside)
    mixed = given.pools().get("mixed")
    world = PooledWorld(
        requests=requests,
        **{name: _without_requests(one) for name, one in built.items()},
        link=link,
        watermark=given.watermark,
        borrow_tokens=mixed.borrow_tokens if isinstance(mixed, MixedPoolConfig) else 0,
        concurrency=concurrency_of(config),
    )
    facts = {name: one.deployment for name, one in built.items()}
    deployment = {"pools": facts, "kv_bytes_per_token": link.bytes_per_token}
    return Built(world, cost_source_of(config), deployment, pools=built)


def divide(config: RunConfig, given: DistServeConfig) -> dict[str, Share]:
    """Return each pool's share of the run's GPUs: as given; what is left over, evenly.

    UsageError unless the pools use exactly the GPUs that any other scheduler would.
    """
    total = config.num_stages * config.tensor_parallel
    pools = given.pools()
    fixed = {
        name: Share(pool.stages, pool.tensor_parallel or config.tensor_parallel)
        for name, pool in pools.items()
        if pool.stages is not None
    }
    left = total - sum(share.gpus for share in fixed.values())
    open_pools = [name for name in pools if name not in fixed]
    shares = dict(fixed)
    for position, name in enumerate(open_pools):
        gpus = left // (len(open_pools) - position)
        left -= gpus
        shares[name] = _share(config, name, pools[name], gpus)
    used = sum(share.gpus for share in shares.values())
    if used != total:
        raise UsageError(
            f"scheduler {config.scheduler.name}: the pools take {used} GPUs ({_words(shares)}); "
            f"the run has {total}: stages {config.num_stages} x tensor_parallel "
            f"{config.tensor_parallel}"
        )
    return {name: shares[name] for name in pools}


def _share(config: RunConfig, name: str, pool: PoolConfig, gpus: int) -> Share:
    """Return a pool's stages on so many GPUs; few GPUs shrink a tensor-parallel group not given."""
    if gpus < 1:
        raise UsageError(
            f"scheduler {config.scheduler.name}: no GPU is left for the {name} pool of the "
            f"{config.num_stages * config.tensor_parallel}; give the run more stages"
        )
    ranks = pool.tensor_parallel or min(config.tensor_parallel, gpus)
    if gpus % ranks:
        raise UsageError(
            f"scheduler {config.scheduler.name}: the {name} pool's {gpus} GPUs are no whole number "
            f"of stages of {ranks}; give its stages and tensor_parallel"
        )
    return Share(gpus // ranks, ranks)


def _words(shares: Mapping[str, Share]) -> str:
    return ", ".join(f"{name} {share.gpus}" for name, share in shares.items())


def _own_config(config: RunConfig, pool: PoolConfig, share: Share, total_gpus: int) -> RunConfig:
    """Return the configuration of a run that is one pool.

    On 1/n of the GPUs a stage has n times the layers: affine costs are n times as long, and a
    number of pages is divided by n. What follows from the model follows from the layers anyway.
    """
    part = share.gpus / total_gpus
    costs: Any = config.costs
    if pool.costs is not None:
        costs = pool.costs
    elif isinstance(costs, AffineCosts):
        scaled = {key: getattr(costs, key) / part for key in ("base_s", "per_token_s")}
        costs = costs.model_copy(update=scaled)
    pages = config.kv.pages
    if pool.pages is not None:
        pages = pool.pages
    elif isinstance(pages, int):
        pages = max(int(pages * part), 1)
    changes = {
        "stages": share.stages,
        "tensor_parallel": share.tensor_parallel,
        "gpu": config.gpu if pool.gpu is None else pool.gpu,
        "costs": costs,
        "kv": config.kv.model_copy(update={"pages": pages}),
        "scheduler": pool.scheduler,
    }
    return config.model_copy(update=changes)


def _checked(config: RunConfig) -> RunConfig:
    """Return the configuration if what it asks for goes together; a copy is not checked."""
    data = config.model_dump()
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(mistakes(Document("its part of the run", data, {}), error)) from None


def _without_requests(built: Built) -> World:
    assert isinstance(built.world, World)
    return replace(built.world, requests=(), concurrency=None)


def _link(config: RunConfig, given: DistServeConfig, beside: Path) -> TransferLink:
    """Return the link between the pools; without any the KV is there at once."""
    bytes_per_token = given.kv_bytes_per_token
    if bytes_per_token is None and config.model is not None:
        bytes_per_token = float(model(find(config.model, beside)).kv_bytes_per_token())
    chosen = config.link if given.transfer_link is None else given.transfer_link
    if chosen is None:
        return TransferLink(bytes_per_token=bytes_per_token)
    if bytes_per_token is None:
        raise UsageError(
            f"scheduler {config.scheduler.name}: a transfer_link needs the KV's size: give "
            'kv_bytes_per_token, or the run a "model"'
        )
    spec = link_spec(chosen)
    return TransferLink(
        bytes_per_token / (spec.bandwidth_gb_s * 1e9), spec.latency_s, bytes_per_token
    )
