"""The CPU time of an engine: what its host spends, what that delays, and the named sets.

Constants, which are inputs of a deployment and not findings of a simulation. Knows no clock: what
waits for what is the simulator's business (`evenflow.sim.tandem`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Self

from evenflow.costs.base import BatchShape
from evenflow.specs.tables import read_rows

Holds = Literal["engine", "stage0", "nothing"]
"""What the host's time holds up. `engine`: the micro-batch itself and all that the host has yet to
send. `stage0`: also whatever stage 0 could compute meanwhile, as where the host and the worker of
stage 0 are one process. `nothing`: it is spent while stage 0 computes the micro-batch before, and
shows only where it takes longer than that."""

EngineName = Literal[
    "ideal",
    "gllm",
    "vllm",
    "vllm-share",
    "sglang",
    "vllm-0.8",
    "vllm-0.12",
    "vllm-0.19",
    "trtllm-1.0",
    "trtllm-1.2",
    "sglang-0.5",
]
"""A set of `runtimes()`."""

RuntimeName = Literal[EngineName, "profile"]
"""A set of `runtimes()`; or `profile`, what the profile of the costs measured."""


@dataclass(frozen=True, slots=True)
class RuntimeOverheads:
    """CPU time that the runtime being modelled spends beside the kernels.

    `evenflow.config.parts.RuntimeConfig` describes the fields. Requests wait for each other in the
    front end (`evenflow.sim.arrivals.FrontEnd`), but for `front_end_latency_s`. Kernels that no
    CUDA graph replays are launched `launch_s` apart (`evenflow.costs.launches`). Those not needed
    before are compiled in `compile_s` each (`evenflow.engines.compiling`). A stage prepares inputs
    before each execution. `overlapped`: from the moment the micro-batch is scheduled, while its
    predecessors compute (gLLM). Those of stage 0 are then part of `schedule_s`.
    """

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    prepare_row_s: float = 0.0
    prepare_share: float = 0.0
    overlapped: bool = False
    per_row_s: float = 0.0
    per_new_request_s: float = 0.0
    per_prompt_token_s: float = 0.0
    per_active_s: float = 0.0
    per_prefill_s: float = 0.0
    holds: Holds = "engine"
    front_end_s: float = 0.0
    front_end_latency_s: float = 0.0
    tokenize_s: float = 0.0
    launch_s: float = 0.0
    graph_tokens: int = 0
    compile_s: float = 0.0

    @property
    def prepares(self) -> bool:
        return max(self.prepare_s, self.prepare_row_s, self.prepare_share) > 0

    @property
    def hosts(self) -> bool:
        """Whether the host spends any time on a micro-batch."""
        per_unit = (self.per_row_s, self.per_new_request_s, self.per_prompt_token_s)
        return max(self.schedule_s, self.per_prefill_s, self.per_active_s, *per_unit) > 0

    @property
    def has_front_end(self) -> bool:
        return max(self.front_end_s, self.front_end_latency_s, self.tokenize_s) > 0

    def scaled(self, factor: float) -> Self:
        """Return the same where all takes `factor` times as long."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        times: dict[str, Any] = {name: s * factor for name, s in given if isinstance(s, float)}
        return replace(self, **times)

    def inputs_s(self, batch: BatchShape) -> float:
        """Return the seconds that a stage spends on a micro-batch's inputs, but for the share."""
        return self.prepare_s + self.prepare_row_s * rows_of(batch)

    def host_s(self, batch: BatchShape) -> float:
        """Return the seconds that the host spends on a micro-batch.

        Of engines that step together, on separate hosts, those of the slowest.
        """
        if parts := getattr(batch, "parts", ()):
            return max(map(self.host_s, parts))
        return (
            self.schedule_s
            + self.per_row_s * rows_of(batch)
            + self.per_new_request_s * (batch.sampled_rows - batch.decode_tokens)
            + self.per_prompt_token_s * batch.prefill_tokens
            + self.per_active_s * getattr(batch, "num_active", 0)
            + (self.per_prefill_s if batch.prefill_tokens else 0.0)
        )


def rows_of(batch: BatchShape) -> int:
    """Return the rows of a micro-batch: chunks of prompts, and decodes."""
    return len(batch.chunks) + batch.decode_tokens


class Runtime(NamedTuple):
    """An engine's CPU time, on one stage and on several, and where its numbers come from."""

    one_stage: RuntimeOverheads
    stages: RuntimeOverheads
    source: str

    def on(self, num_stages: int) -> RuntimeOverheads:
        """Return the CPU time of the engine on `num_stages` stages."""
        return self.one_stage if num_stages == 1 else self.stages


@cache
def runtimes() -> Mapping[str, Runtime]:
    """Return the CPU time of engines by name (`specs/runtimes.csv`).

    A name with a version was fitted to measured runs of it.
    """
    found: dict[str, Runtime] = {}
    for row in read_rows("runtimes", RuntimeOverheads):
        name, stages, source = row.pop("name"), row.pop("stages"), row.pop("source", "")
        overheads = RuntimeOverheads(**row)
        if stages == "several":  # the row above is that of one
            found[name] = found[name]._replace(stages=overheads)
        else:
            found[name] = Runtime(overheads, overheads, source)
    return found
