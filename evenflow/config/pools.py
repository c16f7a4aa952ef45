"""`distserve` and `splitwise`, schedulers that are systems of several pools: keys, GPUs, link.

Each pool is a separate run on its part of the GPUs; nothing is built here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from evenflow import schedulers
from evenflow.config.costs import AffineCosts, Costs
from evenflow.config.links import LinkKeys, link_spec
from evenflow.config.parts import Policy, SchedulerConfig
from evenflow.config.run import Gpu, RunConfig, with_
from evenflow.config.yaml_file import Document, checked
from evenflow.engines.pools import TransferLink
from evenflow.errors import UsageError, is_count
from evenflow.keys import Count, Keys, NameOr, Positive, expect
from evenflow.specs.modelspec import ModelSpec


def _is_stages(value: object) -> bool:
    listed = value if isinstance(value, list) else [value]
    return value is None or (bool(listed) and all(map(is_count, listed)))


BY_DEFAULT_PREFILL = {"mode": "hybrid_only", "token_budget": 2048}


class TransferLinkConfig(LinkKeys):
    """The link that KV crosses from pool to pool."""

    KEY = "transfer_link"


class PoolConfig(Keys):
    """One pool; null keys are the run's, or the pool's share of them."""

    stages: Annotated[
        int | list[int] | None,
        expect(_is_stages, "null, a whole number of at least 1, or a list of layers per stage"),
    ] = None
    """Pipeline stages of the pool, or the layers of each; null: an even share of the run's GPUs."""
    tensor_parallel: Count | None = None
    """GPUs of each stage; null: as the run."""
    gpu: Gpu | None = None
    """The pool's GPU; null: as the run."""
    costs: Costs | None = None
    """The pool's costs; null: as the run."""
    pages: Annotated[
        int | Literal["auto"] | None,
        expect(
            lambda v: v in (None, "auto") or is_count(v),
            "null, auto or a whole number of at least 1",
        ),
    ] = None
    """Pages of the pool; null: as the run, a number by its share of the GPUs."""
    scheduler: Policy
    """The pool's policy."""


class PrefillPoolConfig(PoolConfig):
    """By default whole prompts, first come first served, up to 2048 tokens a micro-batch."""

    scheduler: Policy = SchedulerConfig(name="sarathi", params=BY_DEFAULT_PREFILL)


class DecodePoolConfig(PoolConfig):
    """By default continuous batching, spread evenly over the pool's stages."""

    scheduler: Policy = SchedulerConfig(name="token_throttling")


class MixedPoolConfig(PoolConfig):
    """By default prompt chunks beside decodes."""

    scheduler: Policy = SchedulerConfig(name="sarathi", params={"token_budget": 2048})
    borrow_tokens: Annotated[int, Field(ge=0)] = 2048
    """Prompts go here while more tokens than that wait in the prefill pool."""


class DistServeConfig(Keys):
    """Prompts and decodes on separate pools; the KV crosses a link in between.

    Source: DistServe (OSDI'24), sections 3 and 4. Each pool has its own parallelism, memory and
    policy, and by default half of the GPUs. The decode pool takes KV when it has room; until then
    it stays on the prefill side.
    """

    prefill: PrefillPoolConfig = PrefillPoolConfig()
    """The pool that computes prompts."""
    decode: DecodePoolConfig = DecodePoolConfig()
    """The pool that decodes."""
    transfer_link: NameOr[str, TransferLinkConfig] | None = None
    """The link that KV crosses from pool to pool; null: as `link`."""
    kv_bytes_per_token: Positive | None = None
    """Bytes of a token's KV; null: the model's."""
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """The share of the decode pool's pages that stays free when a request's KV comes."""

    def pools(self) -> dict[str, PoolConfig]:
        """Return the pools there are, in the order in which they are listed everywhere."""
        pools = {name: getattr(self, name, None) for name in ("prefill", "mixed", "decode")}
        return {name: pool for name, pool in pools.items() if pool is not None}


class SplitwiseConfig(DistServeConfig):
    """Pools as in `distserve`, and a mixed pool that either side may borrow.

    Source: Splitwise (ISCA'24), section 4. The mixed pool computes prompts when too many wait for
    the prefill pool. It decodes them, and others when the decode pool has no room.
    """

    mixed: MixedPoolConfig | None = None
    """The pool that either side may borrow; null: none."""


POOLED: Mapping[str, type[DistServeConfig]] = {
    "distserve": DistServeConfig,
    "splitwise": SplitwiseConfig,
}


def system(scheduler: SchedulerConfig) -> DistServeConfig:
    """Return the checked parameters of one of POOLED; UsageError naming the key otherwise."""
    document = Document(f"scheduler {scheduler.name}", dict(scheduler.params), {})
    given = checked(POOLED[scheduler.name], document)
    for name, pool in given.pools().items():
        if pool.scheduler.name in POOLED:
            raise UsageError(
                f"scheduler {scheduler.name}: {name}.scheduler: {pool.scheduler.name} is itself "
                "made of pools; a pool needs a policy such as sarathi"
            )
    return given


def catalogue() -> list[schedulers.PolicyEntry]:
    """Return the policies and systems with their parameters, defaults and sources."""
    pooled = [schedulers.entry(name, cls, tuple(_flat(cls))) for name, cls in POOLED.items()]
    return schedulers.catalogue() + pooled


def defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a policy's or a system's parameters, where they have one."""
    if name in POOLED:
        return dict(_flat(POOLED[name]))
    declared = schedulers.parameters(schedulers.policy(name)).items()
    return {key: each.default for key, each in declared if each.default is not each.empty}


def _flat(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a system with their defaults, parameters of pools as `pool.name`."""
    for key, field in model.model_fields.items():
        if key == "mixed":
            yield prefix + key, field.default
            yield from _flat(MixedPoolConfig, f"{key}.")
        elif isinstance(field.default, PoolConfig):
            yield from _flat(type(field.default), f"{key}.")
        elif isinstance(field.default, SchedulerConfig):
            yield prefix + key, field.default.written
        else:
            yield prefix + key, field.default


class _Share(NamedTuple):
    """The GPUs of one pool: `stages` (or their layers) of `tensor_parallel` each."""

    stages: int | list[int]
    tensor_parallel: int

    @property
    def gpus(self) -> int:
        stages = self.stages if isinstance(self.stages, int) else len(self.stages)
        return stages * self.tensor_parallel


def runs_of_pools(config: RunConfig, given: DistServeConfig) -> dict[str, RunConfig]:
    """Return each pool's run on its GPUs; pools without a size share the other GPUs evenly.

    UsageError unless the pools use exactly the GPUs that any other scheduler would.
    """
    total, pools = config.pipeline_gpus, given.pools()
    shares = {
        name: _Share(pool.stages, pool.tensor_parallel or config.tensor_parallel)
        for name, pool in pools.items()
        if pool.stages is not None
    }
    left = total - sum(share.gpus for share in shares.values())
    open_pools = [name for name in pools if name not in shares]
    for position, name in enumerate(open_pools):
        gpus = left // (len(open_pools) - position)
        left -= gpus
        shares[name] = _share(config, name, pools[name], gpus)
    used = sum(share.gpus for share in shares.values())
    if used != total:
        words = ", ".join(f"{name} {share.gpus}" for name, share in shares.items())
        raise UsageError(
            f"scheduler {config.scheduler.name}: the pools take {used} GPUs ({words}); "
            f"the run has {total}: stages {config.num_stages} x tensor_parallel "
            f"{config.tensor_parallel}"
        )
    return {name: _run_of_pool(config, name, pool, shares[name]) for name, pool in pools.items()}


def _share(config: RunConfig, name: str, pool: PoolConfig, gpus: int) -> _Share:
    """Return a pool's stages on `gpus` GPUs; few GPUs shrink a tensor-parallel group not given."""
    if gpus < 1:
        raise UsageError(
            f"scheduler {config.scheduler.name}: no GPU is left for the {name} pool of the "
            f"{config.pipeline_gpus}; give the run more stages"
        )
    ranks = pool.tensor_parallel or min(config.tensor_parallel, gpus)
    if gpus % ranks:
        raise UsageError(
            f"scheduler {config.scheduler.name}: the {name} pool's {gpus} GPUs are no whole number "
            f"of stages of {ranks}; give its stages and tensor_parallel"
        )
    return _Share(gpus // ranks, ranks)


def _run_of_pool(config: RunConfig, name: str, pool: PoolConfig, share: _Share) -> RunConfig:
    """Return the configuration of one pool's run; UsageError for keys that cannot be.

    On 1/n of the GPUs a stage has n times the layers: affine costs are n times as long, and a
    number of pages is divided by n. What follows from the model follows from the layers anyway.
    """
    part = share.gpus / config.pipeline_gpus
    patch: dict[str, Any] = {
        "stages": share.stages,
        "tensor_parallel": share.tensor_parallel,
        "scheduler": pool.scheduler.written,
    }
    if pool.gpu is not None:
        patch["gpu"] = pool.gpu
    if pool.costs is not None:
        patch["costs"] = pool.costs.model_dump()
    elif isinstance(config.costs, AffineCosts):
        patch["costs.base_s"] = config.costs.base_s / part
        patch["costs.per_token_s"] = config.costs.per_token_s / part
    if pool.pages is not None:
        patch["kv.pages"] = pool.pages
    elif isinstance(config.kv.pages, int):
        patch["kv.pages"] = max(int(config.kv.pages * part), 1)
    part_of = f"scheduler {config.scheduler.name}: {name} pool: its part of the run"
    return with_(config.document(part_of), patch)


def transfer_link(
    config: RunConfig, given: DistServeConfig, spec: ModelSpec | None
) -> TransferLink:
    """Return the link between the pools of a model; without any the KV is there at once."""
    bytes_per_token = given.kv_bytes_per_token
    if bytes_per_token is None and spec is not None:
        bytes_per_token = float(spec.kv_bytes_per_token())
    chosen = config.wires.link if given.transfer_link is None else given.transfer_link
    if chosen is None:
        return TransferLink(bytes_per_token=bytes_per_token)
    if bytes_per_token is None:
        raise UsageError(
            f"scheduler {config.scheduler.name}: a transfer_link needs the KV's size: give "
            'kv_bytes_per_token, or the run a "model"'
        )
    link = link_spec(chosen)
    return TransferLink(
        bytes_per_token / (link.bandwidth_gb_s * 1e9), link.latency_s, bytes_per_token
    )
