"""The CPU time of an engine: what its host spends, what that holds up, and the sets known by name.

Constants, which are inputs of a deployment and not findings of a simulation. Knows no clock: who
waits for whom is the simulator's business (`sim.tandem`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from evenflow.costs.base import BatchShape

Holds = Literal["engine", "stage0", "nothing"]
"""What the host's time holds up. `engine`: the micro-batch itself and those that the host has yet
to send. `stage0`: also whatever stage 0 could compute meanwhile, as where the host and the worker
of stage 0 are one process. `nothing`: it is spent while stage 0 computes the micro-batch before,
and shows only where it takes longer than that."""

RuntimeName = Literal[
    "ideal",
    "gllm",
    "vllm",
    "sglang",
    "vllm-0.8",
    "vllm-0.12",
    "vllm-0.19",
    "trtllm-1.0",
    "sglang-0.5",
    "profile",
]
"""A set of RUNTIMES; or `profile`, what the profile of the costs measured."""


@dataclass(frozen=True, slots=True)
class RuntimeOverheads:
    """CPU time that the runtime being modelled spends beside the kernels.

    The host spends `schedule_s` seconds on a micro-batch (policy, inputs, outputs, messages), and
    `per_row_s` for each of its rows, `per_new_request_s` for each prompt that ends in it and
    `per_prompt_token_s` for each prompt token, and `per_prefill_s` where there are any (kernels
    that no CUDA graph launches); `holds` says what waits for it. Before the engine sees a request,
    a front end spends `front_end_s` on it, for which requests wait for each other, and
    `front_end_latency_s` passes, which holds up nobody (`sim.arrivals.FrontEnd`).

    Each stage spends `prepare_s` plus `prepare_share` of the execution time to prepare a
    micro-batch's inputs: before each execution when coupled; or, `overlapped`, from the moment the
    micro-batch is scheduled, while its predecessors compute (gLLM). Stage 0's inputs are then the
    host's business, and part of `schedule_s`.
    """

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    prepare_share: float = 0.0
    overlapped: bool = False
    per_row_s: float = 0.0
    per_new_request_s: float = 0.0
    per_prompt_token_s: float = 0.0
    per_prefill_s: float = 0.0
    holds: Holds = "engine"
    front_end_s: float = 0.0
    front_end_latency_s: float = 0.0

    @property
    def prepares(self) -> bool:
        return self.prepare_s > 0 or self.prepare_share > 0

    @property
    def hosts(self) -> bool:
        """Whether the host spends any time on a micro-batch."""
        per_unit = (self.per_row_s, self.per_new_request_s, self.per_prompt_token_s)
        return max(self.schedule_s, self.per_prefill_s, *per_unit) > 0

    def scaled(self, factor: float) -> RuntimeOverheads:
        """Return the same where all takes `factor` times as long."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        times: dict[str, Any] = {name: s * factor for name, s in given if isinstance(s, float)}
        return replace(self, **times)

    def host_s(self, batch: BatchShape) -> float:
        """Return the seconds that the host spends on a micro-batch.

        Of engines that step together, each on a host of its own, those of the slowest.
        """
        if parts := getattr(batch, "parts", ()):
            return max(map(self.host_s, parts))
        rows = len(batch.chunks) + batch.decode_tokens
        return (
            self.schedule_s
            + self.per_row_s * rows
            + self.per_new_request_s * (batch.sampled_rows - batch.decode_tokens)
            + self.per_prompt_token_s * batch.prefill_tokens
            + (self.per_prefill_s if batch.prefill_tokens else 0.0)
        )


class Runtime(NamedTuple):
    """An engine's CPU time, on one stage and on several, and where its numbers come from."""

    one_stage: RuntimeOverheads
    stages: RuntimeOverheads
    source: str

    def on(self, num_stages: int) -> RuntimeOverheads:
        """Return the CPU time of the engine on so many stages."""
        return self.one_stage if num_stages == 1 else self.stages


def _any_depth(overheads: RuntimeOverheads, source: str) -> Runtime:
    return Runtime(overheads, overheads, source)


RUNTIMES: dict[RuntimeName, Runtime] = {
    "ideal": _any_depth(RuntimeOverheads(), "no CPU time at all"),
    "gllm": _any_depth(
        RuntimeOverheads(prepare_share=0.17, overlapped=True),
        "17 % of each execution, vLLM's share by gLLM (section 3.4), hidden behind the micro-batch "
        "before; published, not measured here",
    ),
    "vllm": _any_depth(
        RuntimeOverheads(prepare_share=0.17),
        "17 % of each execution, before it, by gLLM (section 3.4); published, not measured here",
    ),
    "sglang": _any_depth(
        RuntimeOverheads(prepare_share=0.17, overlapped=True),
        "17 % of each execution as vLLM's by gLLM (section 3.4), hidden as SGLang does since v0.4; "
        "an assumption, nothing of SGLang's own was published",
    ),
    "vllm-0.8": Runtime(
        RuntimeOverheads(
            schedule_s=1.42e-3,
            per_row_s=1.95e-5,
            per_prefill_s=2.62e-3,
            front_end_s=9.7e-4,
            front_end_latency_s=3.93e-3,
        ),
        RuntimeOverheads(
            schedule_s=1.92e-3,
            per_row_s=2.61e-4,
            per_prefill_s=4.60e-3,
            holds="stage0",
            front_end_s=2.10e-3,
            front_end_latency_s=1.09e-2,
        ),
        "the V0 engine, 5 constants each fitted to vLLM 0.8.3 with Llama-3.3-70B on 8 A100-40G, 1 "
        "request/s and all at once: one stage to TP8, several to TP4 x PP2 over sockets. With "
        "several stages V0 has no front end process and processes outputs in line (its "
        "is_unsupported_config), so the server, the engine and stage 0's worker share one Python "
        "process",
    ),
    "vllm-0.12": _any_depth(
        RuntimeOverheads(schedule_s=1.56e-3, per_row_s=3.22e-5),
        "2 constants fitted to closed loops of vLLM 0.12.0, Qwen3-32B on H100 at TP2 and TP4",
    ),
    "vllm-0.19": _any_depth(
        RuntimeOverheads(schedule_s=1.56e-3, per_row_s=3.22e-5, holds="nothing"),
        "the constants of vllm-0.12, hidden, as scheduling is asynchronous by default since 0.14; "
        "nothing was fitted to this version",
    ),
    "trtllm-1.0": _any_depth(
        RuntimeOverheads(
            schedule_s=5.5e-4,
            per_row_s=1.51e-5,
            per_prefill_s=1.04e-3,
            front_end_s=2.72e-3,
            front_end_latency_s=3.57e-3,
        ),
        "5 constants fitted to closed loops of TensorRT-LLM 1.0, Llama-3.1-8B on H100 at TP1 and "
        "TP4: what its overlapped scheduler does not hide",
    ),
    "sglang-0.5": _any_depth(
        RuntimeOverheads(schedule_s=7.6e-4, per_row_s=1.38e-5, holds="stage0"),
        "2 constants fitted to closed loops of SGLang 0.5, Qwen3-32B on H100 at TP4: what is left "
        "beside the policy sglang, which overlaps by itself",
    ),
}
"""The CPU time of engines by name; a name with a version was fitted to measured runs of it."""
