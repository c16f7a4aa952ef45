"""The schema of RUN.yaml: which keys there are, their types, limits and defaults.

It knows no model, GPU, policy or trace by name: whoever builds the run looks those up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from evenflow import yaml_file
from evenflow.config_errors import first_error
from evenflow.config_fields import (
    Count,
    Keys,
    NonNegative,
    Positive,
    Share,
    expect,
    is_count,
    short_form,
)
from evenflow.config_workload import WorkloadConfig
from evenflow.errors import UsageError


def _is_layers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_count, value))


def _shape(value: object) -> str:
    return "mapping" if isinstance(value, dict | BaseModel) else "name"


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


NameOrLink = Annotated[
    Annotated[str, Tag("name")] | Annotated[LinkConfig, Tag("mapping")], Discriminator(_shape)
]


class AffineCosts(Keys):
    """Every stage takes `base_s + per_token_s * tokens` seconds."""

    kind: Literal["affine"]
    base_s: NonNegative
    per_token_s: NonNegative


class RooflineCosts(Keys):
    """Operator times from peak compute and bandwidth with the GPU's efficiencies.

    `all_reduce`: the link between the tensor-parallel GPUs of a stage; null: the same as `link`.
    """

    kind: Literal["roofline"]
    tile_tokens: Count = 128
    all_reduce: NameOrLink | None = None


class LaterCosts(BaseModel):
    """Cost sources that the schema announces and this version does not have."""

    kind: Literal["profile", "silicon"]

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise PydanticCustomError("later", "not available yet", {"kind": self.kind})


Costs = Annotated[
    AffineCosts | RooflineCosts | LaterCosts, short_form("kind"), Discriminator("kind")
]


class KvConfig(Keys):
    """Paged KV memory; `pages: auto` counts what fits beside the weights on the fullest stage."""

    page_tokens: Count = 16
    pages: Annotated[
        int | Literal["auto"],
        expect(lambda v: v == "auto" or is_count(v), "auto or a whole number of at least 1"),
    ] = "auto"
    memory_utilization: Share = 0.9


class RuntimeConfig(Keys):
    """CPU work around a micro-batch, in seconds, `prepare_share` as a share of its execution."""

    schedule_s: NonNegative = 0.0
    prepare_s: NonNegative = 0.0
    prepare_share: NonNegative = 0.0
    overlapped: bool = False


class SchedulerConfig(BaseModel):
    """A policy's name, or `module:Class`, and its parameters, which the policy itself checks."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    params: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _gather_params(cls, data: object) -> object:
        if not isinstance(data, dict) or set(data) <= {"name", "params"}:
            return data
        return {
            "params": {str(key): value for key, value in data.items() if key != "name"},
            **({"name": data["name"]} if "name" in data else {}),
        }


class RunConfig(Keys):
    """One run: a deployment, a scheduler, a workload."""

    model: Annotated[str, Field(min_length=1)] | None = None
    gpu: (
        Annotated[
            Annotated[str, Tag("name")] | Annotated[dict[str, Any], Tag("mapping")],
            Discriminator(_shape),
        ]
        | None
    ) = None
    stages: Annotated[
        int | list[int],
        expect(
            lambda v: is_count(v) or _is_layers(v),
            "a whole number of at least 1, or a list of layers per stage",
        ),
    ]
    tensor_parallel: Count = 1
    link: NameOrLink | None = None
    costs: Costs = RooflineCosts(kind="roofline")
    kv: KvConfig = KvConfig()
    runtime: Annotated[
        Annotated[Literal["gllm", "vllm", "ideal"], Tag("name")]
        | Annotated[RuntimeConfig, Tag("mapping")],
        Discriminator(_shape),
    ] = "ideal"
    dispatch: Literal["stage0", "eager"] = "stage0"
    max_in_flight: Annotated[
        int | Literal["unlimited"] | None,
        expect(
            lambda v: v in (None, "unlimited") or is_count(v),
            "null (the number of stages), unlimited, or a whole number of at least 1",
        ),
    ] = None
    virtual_engines: Annotated[
        bool | int,
        expect(
            lambda v: isinstance(v, bool) or is_count(v),
            "true, false, or a number of engines of at least 1",
        ),
    ] = False
    pipelined_chunks: bool | None = None
    max_model_len: Count | None = None
    scheduler: Annotated[SchedulerConfig, short_form("name")]
    workload: WorkloadConfig

    @model_validator(mode="after")
    def _model_and_gpu_where_needed(self) -> Self:
        needs = (
            ("costs.kind: roofline", self.costs.kind == "roofline", ("model", "gpu")),
            ("kv.pages: auto", self.kv.pages == "auto", ("model", "gpu")),
            ("link", self.link is not None, ("model",)),
        )
        for reason, needed, keys in needs:
            for key in keys:
                if needed and getattr(self, key) is None:
                    raise PydanticCustomError("needed", "", {"reason": reason, "key": f'"{key}"'})
        return self

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, defaults included, as plain data."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Return the SHA-256 of the resolved configuration, as hexadecimal digits."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check RUN.yaml, with `dotted.key=value` overrides applied first.

    Raises UsageError naming the file, the line, the key, and what would be right.
    """
    document = yaml_file.read(Path(path))
    for assignment in overrides:
        document = yaml_file.override(document, assignment)
    try:
        return RunConfig.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(first_error(document, error)) from None
