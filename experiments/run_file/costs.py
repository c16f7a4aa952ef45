"""The schema of what work and messages cost: links, nodes, cost sources."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from experiments.run_file.fields import (
    Count,
    Keys,
    NameOr,
    NonNegative,
    Positive,
    expect,
    short_form,
)


class LinkConfig(Keys):
    """A link: GB/s (1e9 bytes) and microseconds, or a `name` with what differs from it.

    `shared`: all neighbouring stages queue for one link; else each pair has its own.
    """

    name: str | None = None
    bandwidth_gb_s: Positive | None = None
    latency_us: NonNegative | None = None
    shared: bool = False

    @model_validator(mode="after")
    def _bandwidth_is_known(self) -> Self:
        if self.name is None and self.bandwidth_gb_s is None:
            raise PydanticCustomError(
                "needed", "", {"reason": "link", "key": '"link.bandwidth_gb_s", or a name'}
            )
        return self


NameOrLink = NameOr[str, LinkConfig]


class NodesConfig(Keys):
    """Machines of `gpus` GPUs each, filled stage by stage; `link` connects neighbours.

    `all_reduce`: how a stage that spans nodes adds up: one `ring` over the link between nodes, or
    `hierarchical`, within the nodes first.
    """

    gpus: Count
    link: NameOrLink
    all_reduce: Literal["ring", "hierarchical"] = "ring"


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


Point = Annotated[list[Positive], expect(_is_pair, "a pair [bytes, microseconds]")]


class AllReduceConfig(Keys):
    """The link between the tensor-parallel GPUs of a stage, as `link`; or measured `points`.

    `points`: [bytes, microseconds] of an all-reduce on this number of GPUs, by size. The link is
    then used for the all-to-all of experts only; null: the same as `link` of the run.
    """

    name: str | None = None
    bandwidth_gb_s: Positive | None = None
    latency_us: NonNegative | None = None
    points: Annotated[list[Point], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _something_is_known(self) -> Self:
        if self.name is None and self.bandwidth_gb_s is None and self.points is None:
            key = '"all_reduce.bandwidth_gb_s", a name, or points'
            raise PydanticCustomError("needed", "", {"reason": "all_reduce", "key": key})
        return self


NameOrAllReduce = NameOr[str, AllReduceConfig]


class AffineCosts(Keys):
    """Every stage takes `base_s + per_token_s * tokens` seconds.

    `cuda_graph_sizes`: decode-only micro-batches are padded to the next of these token numbers.
    """

    kind: Literal["affine"]
    base_s: NonNegative
    per_token_s: NonNegative
    cuda_graph_sizes: list[Count] | None = None


class RooflineCosts(Keys):
    """Operator times from peak compute and bandwidth with the GPU's efficiencies.

    `all_reduce`: the link between the tensor-parallel GPUs of a stage; null: the same as `link`.
    `expert_imbalance`: load of the busiest expert-parallel GPU over the mean. `cuda_graph_sizes`:
    decode-only micro-batches are padded to the next of these token numbers, and their layers take
    `graph_layer_overhead_s` in place of the GPU's overhead (null: the same).
    """

    kind: Literal["roofline"]
    tile_tokens: Count = 128
    all_reduce: NameOrAllReduce | None = None
    expert_imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    cuda_graph_sizes: list[Count] | None = None
    graph_layer_overhead_s: NonNegative | None = None

    @model_validator(mode="after")
    def _overhead_of_what(self) -> Self:
        if self.graph_layer_overhead_s is not None and self.cuda_graph_sizes is None:
            context = {"reason": "costs.graph_layer_overhead_s", "key": '"costs.cuda_graph_sizes"'}
            raise PydanticCustomError("needed", "", context)
        return self


class ProfileCosts(Keys):
    """Operators measured on a device, from a file that `evenflow profile` wrote.

    `fill: roofline` estimates the operators that the file lacks with the GPU's efficiencies (and
    `all_reduce`, as in roofline); without it such a file is refused.
    """

    kind: Literal["profile"]
    path: Annotated[str, Field(min_length=1)]
    fill: Literal["roofline"] | None = None
    all_reduce: NameOrAllReduce | None = None
    cuda_graph_sizes: list[Count] | None = None


class SiliconCosts(Keys):
    """Operators measured on real GPUs, from the package of the extra `silicon`.

    `version` of the framework; null: the newest of each operator. `all_reduce`: the link or points
    to use in place of the measured all-reduces.
    """

    kind: Literal["silicon"]
    framework: Literal["vllm", "sglang", "trtllm"] = "vllm"
    version: str | None = None
    all_reduce: NameOrAllReduce | None = None
    cuda_graph_sizes: list[Count] | None = None


Costs = Annotated[
    AffineCosts | RooflineCosts | ProfileCosts | SiliconCosts,
    short_form("kind"),
    Discriminator("kind"),
]
