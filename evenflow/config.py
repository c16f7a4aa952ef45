"""The schema of RUN.yaml: which keys there are, their types, limits and defaults.

It knows no model, GPU, policy or trace by name: whoever builds the run looks those up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
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
from evenflow.errors import UsageError, instead_of

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Keys(BaseModel):
    """A mapping that takes only the keys it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: object) -> object:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    hint = instead_of(key, cls.model_fields)
                    raise PydanticCustomError("unknown_key", "{hint}", {"key": key, "hint": hint})
        return data


def _expect(accepts: Callable[[Any], bool], expected: str) -> BeforeValidator:
    def check(value: object) -> object:
        if not accepts(value):
            raise PydanticCustomError("expected", "{expected}", {"expected": expected})
        return value

    return BeforeValidator(check)


def _short_form(key: str) -> BeforeValidator:
    """Let a bare word stand for a mapping that holds only `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_layers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))


class LinkConfig(Keys):
    """The link between neighbouring stages: GB/s (1e9 bytes), microseconds, one for all or each its own."""

    bandwidth_gb_s: Positive
    latency_us: NonNegative = 0.0
    shared: bool = False


class AffineCosts(Keys):
    """Every stage takes `base_s + per_token_s * tokens` seconds."""

    kind: Literal["affine"]
    base_s: NonNegative
    per_token_s: NonNegative


class RooflineCosts(Keys):
    """Operator times from peak compute and bandwidth with the GPU's efficiencies."""

    kind: Literal["roofline"]


class LaterCosts(BaseModel):
    """Cost sources that the schema announces and this version does not have."""

    kind: Literal["profile", "silicon"]

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise PydanticCustomError("later", "not available yet", {"kind": self.kind})


Costs = Annotated[
    AffineCosts | RooflineCosts | LaterCosts, _short_form("kind"), Discriminator("kind")
]


class KvConfig(Keys):
    """Paged KV memory; `pages: auto` counts what fits beside the weights on the fullest stage."""

    page_tokens: Count = 16
    pages: Annotated[
        int | Literal["auto"],
        _expect(lambda v: v == "auto" or _is_count(v), "auto or a whole number of at least 1"),
    ] = "auto"
    memory_utilization: Share = 0.9


class RuntimeConfig(Keys):
    """CPU work around a micro-batch, in seconds, `prepare_share` as a share of its execution."""

    schedule_s: NonNegative = 0.0
    prepare_s: NonNegative = 0.0
    prepare_share: NonNegative = 0.0
    overlapped: bool = True


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


class ReplayArrivals(Keys):
    """The trace's own arrival times, multiplied by `scale`: 0.5 is twice the load."""

    kind: Literal["replay"]
    scale: Positive = 1.0


class PoissonArrivals(Keys):
    """Independent arrivals at `rate` requests per second."""

    kind: Literal["poisson"]
    rate: Positive


class GammaArrivals(Keys):
    """Gamma-distributed gaps; burstiness 1 is Poisson, above 1 is steadier, below is burstier."""

    kind: Literal["gamma"]
    rate: Positive
    burstiness: Positive


class OnOffArrivals(Keys):
    """Poisson arrivals at `rate` during bursts of mean `on_s`, none during pauses of mean `off_s`."""

    kind: Literal["onoff"]
    rate: Positive
    on_s: Positive
    off_s: Positive


class ClosedArrivals(Keys):
    """`concurrency` clients; each sends its next request when the last one is finished."""

    kind: Literal["closed"]
    concurrency: Count


class OfflineArrivals(Keys):
    """All requests wait at time 0."""

    kind: Literal["offline"]


Arrivals = Annotated[
    ReplayArrivals
    | PoissonArrivals
    | GammaArrivals
    | OnOffArrivals
    | ClosedArrivals
    | OfflineArrivals,
    _short_form("kind"),
    Discriminator("kind"),
]


class WorkloadConfig(Keys):
    """Which requests come, and when."""

    trace: Annotated[str, Field(min_length=1)]
    format: str | None = None
    requests: Count | None = None
    arrivals: Arrivals = ReplayArrivals(kind="replay")
    seed: Annotated[int, Field(ge=0)] = 0
    tokenizer: str | None = None
    filter: str | None = None


def _shape(value: object) -> str:
    return "mapping" if isinstance(value, dict | BaseModel) else "name"


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
        _expect(
            lambda v: _is_count(v) or _is_layers(v),
            "a whole number of at least 1, or a list of layers per stage",
        ),
    ]
    tensor_parallel: Count = 1
    link: LinkConfig | None = None
    costs: Costs
    kv: KvConfig = KvConfig()
    runtime: Annotated[
        Annotated[Literal["gllm", "vllm", "ideal"], Tag("name")]
        | Annotated[RuntimeConfig, Tag("mapping")],
        Discriminator(_shape),
    ] = "ideal"
    dispatch: Literal["stage0", "eager"] = "stage0"
    max_in_flight: Count | None = None
    virtual_engines: Annotated[
        bool | int,
        _expect(
            lambda v: isinstance(v, bool) or _is_count(v),
            "true, false, or a number of engines of at least 1",
        ),
    ] = False
    pipelined_chunks: bool | None = None
    max_model_len: Count | None = None
    scheduler: Annotated[SchedulerConfig, _short_form("name")]
    workload: WorkloadConfig

    @model_validator(mode="after")
    def _model_and_gpu_where_needed(self) -> Self:
        needs = {
            "costs.kind: roofline": self.costs.kind == "roofline",
            "kv.pages: auto": self.kv.pages == "auto",
        }
        for key in ("model", "gpu"):
            for reason, needed in needs.items():
                if needed and getattr(self, key) is None:
                    raise PydanticCustomError(
                        "needed", "needs the key {key}", {"key": f'"{key}"', "reason": reason}
                    )
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
