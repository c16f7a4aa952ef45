"""The schema of RUN.yaml: which keys there are, their types, limits and defaults.

It knows no model, GPU, policy or trace by name: whoever builds the run looks those up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from evenflow.errors import UsageError
from evenflow.results.metrics import Limit
from experiments.run_file import yaml_file
from experiments.run_file.costs import Costs, NameOrLink, NodesConfig, RooflineCosts
from experiments.run_file.engine import ReplicasConfig, SpeculativeConfig
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
from experiments.run_file.kv import KvConfig
from experiments.run_file.mistakes import mistakes
from experiments.run_file.workers import EmulatedWorkers, Workers
from experiments.run_file.workload import WorkloadConfig


def _is_layers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_count, value))


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
    """One run: a deployment, a scheduler, a workload.

    `goodput`: limits in ms that a request must meet to count in `request_goodput`.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    gpu: NameOr[str, dict[str, Any]] | None = None
    stages: Annotated[
        int | list[int],
        expect(
            lambda v: is_count(v) or _is_layers(v),
            "a whole number of at least 1, or a list of layers per stage",
        ),
    ]
    split: Literal["even", "balanced"] = "even"
    tensor_parallel: Count = 1
    expert_parallel: bool = False
    link: NameOrLink | None = None
    nodes: NodesConfig | None = None
    costs: Costs = RooflineCosts(kind="roofline")
    kv: KvConfig = KvConfig()
    runtime: NameOr[Literal["gllm", "vllm", "sglang", "ideal"], RuntimeConfig] = "ideal"
    workers: Workers = EmulatedWorkers(kind="emulated")
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
    goodput: dict[Limit, Positive] | None = None
    speculative: SpeculativeConfig | None = None
    replicas: ReplicasConfig | None = None
    scheduler: Annotated[SchedulerConfig, short_form("name")]
    workload: WorkloadConfig

    @model_validator(mode="after")
    def _model_and_gpu_where_needed(self) -> Self:
        needs = (
            ("costs.kind: roofline", self.costs.kind == "roofline", ("model", "gpu")),
            ("costs.kind: silicon", self.costs.kind == "silicon", ("model", "gpu")),
            ("costs.kind: profile", self.costs.kind == "profile", ("model",)),
            ("costs.fill", getattr(self.costs, "fill", None) is not None, ("gpu",)),
            ("kv.pages: auto", self.kv.pages == "auto", ("model", "gpu")),
            ("link", self.link is not None, ("model",)),
            ("nodes", self.nodes is not None, ("model", "link")),
            ("split: balanced", self.split == "balanced", ("model", "gpu")),
            ("expert_parallel", self.expert_parallel, ("model", "gpu")),
            ("speculative.draft_model", self._has_draft, ("model", "gpu")),
            ("kv.swap", self.kv.swap, ("model",)),
            ("workers.kind: torch", self.workers.kind == "torch", ("model",)),
        )
        for reason, needed, keys in needs:
            for key in keys:
                if needed and getattr(self, key) is None:
                    raise PydanticCustomError("needed", "", {"reason": reason, "key": f'"{key}"'})
        return self

    @property
    def _has_draft(self) -> bool:
        return self.speculative is not None and self.speculative.draft_model is not None

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, defaults included, as plain data."""
        return self.model_dump(mode="json")

    def document(self) -> yaml_file.Document:
        """Return the keys as a RUN.yaml would hold them, defaults included."""
        scheduler = {"name": self.scheduler.name, **self.scheduler.params}
        return yaml_file.Document("the run", {**self.model_dump(), "scheduler": scheduler}, {})

    def digest(self) -> str:
        """Return the SHA-256 of the resolved configuration, as hexadecimal digits."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check RUN.yaml, with `dotted.key=value` overrides applied first.

    Raises UsageError naming the file, the line, the key, and what would be right.
    """
    return configured(yaml_file.read(Path(path)), overrides)


def configured(document: yaml_file.Document, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a document of RUN.yaml's keys, with `dotted.key=value` overrides applied first.

    Raises UsageError naming the file, the line, the key, and what would be right.
    """
    for assignment in overrides:
        document = yaml_file.override(document, assignment)
    try:
        return RunConfig.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(mistakes(document, error)) from None


def with_(
    run: RunConfig | yaml_file.Document,
    patch: yaml_file.Patch,
    places: Mapping[str, str] | None = None,
) -> RunConfig:
    """Return the run with some keys changed: `with_(run, {"workload.seed": 1})`, checked.

    Seeds, rates, a policy's parameters, another layout: each is a patch, and patches merge with
    `|`. Values replace what was below their key, outer keys first (`yaml_file.patched`);
    `yaml_file.as_patch` makes a patch of nested keys that only adds. `places` say where a key's
    value was written, for the UsageError of a key or value that cannot be.
    """
    document = run.document() if isinstance(run, RunConfig) else run
    return configured(yaml_file.patched(document, patch, places))
