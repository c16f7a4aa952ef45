"""The parameters of `distserve` and `splitwise`: schedulers that are systems of several pools.

Knows keys, types, limits and defaults; not which GPUs a pool gets when it does not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from evenflow import schedulers
from evenflow.errors import UsageError
from experiments.run_file.costs import Costs
from experiments.run_file.fields import (
    Count,
    Keys,
    NameOr,
    NonNegative,
    Positive,
    expect,
    is_count,
    short_form,
)
from experiments.run_file.mistakes import mistakes
from experiments.run_file.run import SchedulerConfig
from experiments.run_file.yaml_file import Document


def _is_stages(value: object) -> bool:
    listed = value if isinstance(value, list) else [value]
    return value is None or (bool(listed) and all(map(is_count, listed)))


Policy = Annotated[SchedulerConfig, short_form("name")]

BY_DEFAULT_PREFILL = {"mode": "hybrid_only", "token_budget": 2048}


class TransferLinkConfig(Keys):
    """The link that KV crosses: GB/s (1e9 bytes) and microseconds, or a `name` and what differs."""

    name: str | None = None
    bandwidth_gb_s: Positive | None = None
    latency_us: NonNegative | None = None

    @model_validator(mode="after")
    def _bandwidth_is_known(self) -> Self:
        if self.name is None and self.bandwidth_gb_s is None:
            key = '"transfer_link.bandwidth_gb_s", or a name'
            raise PydanticCustomError("needed", "", {"reason": "transfer_link", "key": key})
        return self


class PoolConfig(Keys):
    """One pool. What is null is as in the rest of the run, or the pool's share of it."""

    stages: Annotated[
        int | list[int] | None,
        expect(
            _is_stages,
            "null, a whole number of at least 1, or a list of layers per stage",
        ),
    ] = None
    tensor_parallel: Count | None = None
    gpu: NameOr[str, dict[str, Any]] | None = None
    costs: Costs | None = None
    pages: Annotated[
        int | Literal["auto"] | None,
        expect(
            lambda v: v in (None, "auto") or is_count(v),
            "null, auto or a whole number of at least 1",
        ),
    ] = None
    scheduler: Policy

    @property
    def num_stages(self) -> int | None:
        return len(self.stages) if isinstance(self.stages, list) else self.stages


class PrefillPoolConfig(PoolConfig):
    """By default whole prompts, first come first served, up to 2048 tokens a micro-batch."""

    scheduler: Policy = SchedulerConfig(name="sarathi", params=BY_DEFAULT_PREFILL)


class DecodePoolConfig(PoolConfig):
    """By default continuous batching, spread evenly over the pool's stages."""

    scheduler: Policy = SchedulerConfig(name="token_throttling")


class MixedPoolConfig(PoolConfig):
    """By default prompt chunks beside decodes.

    `borrow_tokens`: prompts go here while more tokens than that wait in the prefill pool.
    """

    scheduler: Policy = SchedulerConfig(name="sarathi", params={"token_budget": 2048})
    borrow_tokens: Annotated[int, Field(ge=0)] = 2048


class DistServeConfig(Keys):
    """Prompts and decodes on pools of their own; the KV crosses a link in between.

    Source: DistServe (OSDI'24), sections 3 and 4. Each pool has its own parallelism, memory and
    policy, and by default half of the GPUs. The decode pool takes KV when it has room; until then
    it stays on the prefill side. `transfer_link` null: as `link`.
    """

    prefill: PrefillPoolConfig = PrefillPoolConfig()
    decode: DecodePoolConfig = DecodePoolConfig()
    transfer_link: NameOr[str, TransferLinkConfig] | None = None
    kv_bytes_per_token: Positive | None = None
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01

    def pools(self) -> dict[str, PoolConfig]:
        """Return the pools there are, in the order in which they are listed everywhere."""
        return {"prefill": self.prefill, "decode": self.decode}


class SplitwiseConfig(DistServeConfig):
    """As `distserve`, and a mixed pool that either side may borrow.

    Source: Splitwise (ISCA'24), section 4. The mixed pool computes prompts when too many wait for
    the prefill pool, and decodes those, and others, when the decode pool has no room.
    """

    mixed: MixedPoolConfig | None = None

    def pools(self) -> dict[str, PoolConfig]:
        mixed = {} if self.mixed is None else {"mixed": self.mixed}
        return {"prefill": self.prefill, **mixed, "decode": self.decode}


POOLED: Mapping[str, type[DistServeConfig]] = {
    "distserve": DistServeConfig,
    "splitwise": SplitwiseConfig,
}


def system(scheduler: SchedulerConfig) -> DistServeConfig:
    """Return the checked parameters of one of POOLED; UsageError naming the key otherwise."""
    document = Document(f"scheduler {scheduler.name}", dict(scheduler.params), {})
    try:
        found = POOLED[scheduler.name].model_validate(scheduler.params)
    except ValidationError as error:
        raise UsageError(mistakes(document, error)) from None
    for name, pool in found.pools().items():
        if pool.scheduler.name in POOLED:
            raise UsageError(
                f"scheduler {scheduler.name}: {name}.scheduler: {pool.scheduler.name} is itself "
                "made of pools; a pool needs a policy such as sarathi"
            )
    return found


def catalogue() -> list[schedulers.Entry]:
    """Return the policies and systems with their parameters, defaults and sources."""
    pooled = [schedulers.entry(name, cls, parameters(name)) for name, cls in POOLED.items()]
    return schedulers.catalogue() + pooled


def parameters(name: str) -> tuple[tuple[str, Any], ...]:
    """Return (name, default) pairs of a system's parameters, those of pools as `pool.name`."""
    return tuple(_flat(POOLED[name], ""))


def _flat(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, field in model.model_fields.items():
        if key == "mixed":
            yield prefix + key, field.default
            yield from _flat(MixedPoolConfig, f"{key}.")
        elif isinstance(field.default, PoolConfig):
            yield from _flat(type(field.default), f"{key}.")
        elif isinstance(field.default, SchedulerConfig):
            yield prefix + key, {"name": field.default.name, **field.default.params}
        else:
            yield prefix + key, field.default
