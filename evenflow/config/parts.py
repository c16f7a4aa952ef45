"""The mappings of RUN.yaml but for costs, links, workers and workload: their keys and defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from evenflow.config.costs import Hardware
from evenflow.core.routing import Router
from evenflow.costs import StageCost, SwapCost
from evenflow.engines import sglang_server
from evenflow.errors import MOST, is_count
from evenflow.keys import (
    Count,
    Instances,
    Keys,
    NonNegative,
    Positive,
    Share,
    expect,
    needed,
    remedy,
    short_form,
)
from evenflow.runtimes import EngineName, Holds, RuntimeOverheads, runtimes
from evenflow.specs.gpu import GIB, GpuSpec
from evenflow.specs.memory import MemoryName

if TYPE_CHECKING:
    from evenflow.engines.lock_step import PromptWait


class AttentionDpConfig(Keys):
    """Waiting of prompts for prompts of other groups, by TensorRT-LLM's options."""

    enable_balance: bool = False
    """Whether prompts wait until all groups have one, so that fewer steps take as long as a prompt.
    """
    timeout_iters: Count = 50
    """Most steps that prompts wait."""
    batching_wait_iters: Annotated[int, Field(ge=0)] = 10
    """Steps that prompts wait for further ones once all groups have one."""

    def make(self) -> "PromptWait | None":
        """Return the wait, if there is one."""
        from evenflow.engines.lock_step import PromptWait

        wait = PromptWait(self.timeout_iters, self.batching_wait_iters)
        return wait if self.enable_balance else None


class RuntimeConfig(Keys):
    """CPU work around a micro-batch, of host, stages and front end."""

    schedule_s: NonNegative = 0.0
    """Seconds that the policy takes for a micro-batch."""
    prepare_s: NonNegative = 0.0
    """Seconds that a stage takes to prepare the inputs of a micro-batch."""
    prepare_row_s: NonNegative = 0.0
    """Seconds of that for each row of the micro-batch, on top."""
    prepare_share: NonNegative = 0.0
    """The same as a share of the micro-batch's execution time, on top."""
    overlapped: bool = False
    """Whether a stage prepares its inputs while it computes the micro-batch before."""
    per_row_s: NonNegative = 0.0
    """Seconds for each row of a micro-batch: a decode, or a chunk of a prompt."""
    per_active_s: NonNegative = 0.0
    """Seconds of a micro-batch for each request that is admitted, in flight or not."""
    per_new_request_s: NonNegative = 0.0
    """Seconds for each prompt that ends in a micro-batch."""
    per_prompt_token_s: NonNegative = 0.0
    """Seconds for each prompt token of a micro-batch."""
    per_prefill_s: NonNegative = 0.0
    """Seconds for a micro-batch that has prompt tokens."""
    holds: Holds = "engine"
    """What the host's time holds up: `engine` the micro-batch itself, `stage0` also whatever stage
    0 could compute meanwhile, `nothing` shows only where it outlasts the micro-batch before.
    """
    front_end_s: NonNegative = 0.0
    """Seconds of the front end for a request; requests queue for it."""
    front_end_latency_s: NonNegative = 0.0
    """Seconds of the front end for a request that delay no other request."""
    tokenize_s: NonNegative = 0.0
    """Seconds in which the front end makes a token of a prompt's text; requests queue for it."""
    launch_s: NonNegative = 0.0
    """Seconds from one kernel's launch to the next, where no CUDA graph replays them: of
    micro-batches with prompts, and of all with `enforce_eager`.
    """
    graph_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens up to which micro-batches with prompts are replayed from CUDA graphs, but for the
    attention; 0: none (vLLM's max_cudagraph_capture_size, and 0 with FULL_DECODE_ONLY).
    """
    compile_s: NonNegative = 0.0
    """Seconds in which a kernel is compiled that no micro-batch needed before, on servers that no
    requests have warmed up but the first, served alone: TensorRT-LLM's products of `fp8_block` on
    H100 and H200 (DeepGEMM, 0.43); 0: all are there.
    """
    like: EngineName | None = None
    """The engine that has the keys which are left out; null: they are as this table says."""

    def make(self, num_stages: int) -> RuntimeOverheads:
        if self.like is None:
            return RuntimeOverheads(**self.model_dump(exclude={"like"}))
        given = self.model_dump(exclude_unset=True, exclude={"like"})
        return replace(runtimes()[self.like].on(num_stages), **given)


class ScaleConfig(Keys):
    """Factors on predicted seconds, to see what their errors would change."""

    costs: Positive = 1.0
    """Factor on the seconds of a micro-batch on a stage."""
    host: Positive = 1.0
    """Factor, a ratio, on the CPU time of `runtime`."""


class HostLinkConfig(Keys):
    """The link of each GPU to its host."""

    bandwidth_gb_s: Positive = Field(examples=[25.0])
    """1e9 bytes a second, each way."""
    latency_us: NonNegative = 0.0
    """Microseconds for each request copied."""


MEMORY_OF: Mapping[str, MemoryName] = {"vllm_v1": "vllm", "trtllm": "trtllm", "sglang": "sglang"}
"""The engine that pages are counted as with its policy."""


class KvConfig(Keys):
    """Paged memory for keys and values."""

    page_tokens: Count = 16
    """Tokens of a page (block_size); SGLang has 1, TensorRT-LLM 32."""
    pages: Annotated[
        int | Literal["auto"],
        expect(
            lambda v: v == "auto" or is_count(v),
            f"auto or a whole number of at least 1 and at most {MOST}",
        ),
    ] = "auto"
    """Pages of a pipeline's pool; auto: as many as fit beside the weights on the fullest stage."""
    memory_utilization: Share | None = None
    """The share of each GPU's memory that weights, activations and pages may take
    (gpu_memory_utilization); of `like: trtllm`, the share of what the others leave that pages take
    (free_gpu_memory_fraction); of `sglang`, the share of what is free at the start that weights and
    pages take (mem_fraction_static); null: 0.92 of `like: vllm`, of `sglang` what it keeps for a
    step and graphs on that GPU leaves, else 0.9.
    """
    like: MemoryName | None = None
    """The engine that `pages: auto` is counted as: what it takes of each GPU besides weights and
    pages, of the memory that the card shows. A version stands for all before it, to the next
    (docs/kv.md). `plain`: none, of the nominal memory; null: `vllm` for its policy `vllm_v1`,
    `sglang` and `trtllm` for those, else plain; commands that compare policies take one for all.
    """
    prefix_cache: bool = False
    """Whether requests share the pages of common prefixes (enable_prefix_caching), as they do by
    default in vLLM, SGLang and TensorRT-LLM.
    """
    swap: bool = False
    """Whether preempted requests are copied to the host and back, instead of recomputed."""
    host_link: HostLinkConfig | None = Field(default=None, examples=[{"bandwidth_gb_s": 25.0}])
    """The link that `swap` copies over."""

    @model_validator(mode="after")
    def _swap_over_a_link(self) -> Self:
        if self.swap and self.host_link is None:
            raise needed("kv.swap", '"kv.host_link"', remedy(type(self), "host_link"))
        if self.host_link is not None and not self.swap:
            raise needed("kv.host_link", '"kv.swap: true"')
        return self

    def swapped(self, costs: StageCost, hardware: Hardware) -> StageCost:
        """Return the costs plus copies of pages to the host and back, where pages are swapped."""
        host = self.host_link
        if host is None:
            return costs
        page_bytes = [self.page_tokens * size for size in hardware.kv_bytes_per_token()]
        return SwapCost(costs, page_bytes, host.bandwidth_gb_s * 1e9, host.latency_us * 1e-6)


class ReplicasConfig(Keys):
    """Pipelines of one kind side by side, and a router in front of them."""

    count: Instances = Field(examples=[2])
    """How many pipelines."""
    router: Router = "round_robin"
    """Which pipeline gets a request: each in turn, the one with the fewest requests that are not
    done, or the one that was sent the longest part of its prefix.
    """


class SchedulerConfig(BaseModel):
    """A policy's name, or `module:Class`, and its parameters, which the policy itself checks."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    NAMES: ClassVar = "a name of `evenflow schedulers`, or module:Class"

    name: Annotated[str, Field(min_length=1)]
    params: dict[str, Any] = {}

    @property
    def written(self) -> dict[str, Any]:
        """The name and the parameters, as a RUN.yaml has them."""
        return {"name": self.name, **self.params}

    @model_validator(mode="before")
    @classmethod
    def _gather_params(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if "name" not in data:
            raise PydanticCustomError("missing_name", "", {"remedy": cls.NAMES})
        if set(data) <= {"name", "params"}:
            return data
        return {
            "params": {str(key): value for key, value in data.items() if key != "name"},
            **({"name": data["name"]} if "name" in data else {}),
        }


Policy = Annotated[SchedulerConfig, short_form("name")]


def runtime_of(policy: SchedulerConfig, *, in_step: bool) -> EngineName:
    """Return the CPU time of the engine, and release, whose policy it is; `ideal` for no engine's.

    `in_step`: decodes wait for their last token, so vLLM hides nothing, as before 0.14.
    """
    params = policy.params
    if policy.name == "vllm_v1":
        waits = in_step or params.get("async_scheduling") is False
        return "vllm-0.12" if waits else "vllm-0.19"
    if policy.name == "trtllm":
        return "trtllm-1.0" if params.get("version") == "1.0" else "trtllm-1.2"
    return "sglang-0.5" if policy.name == "sglang" else "ideal"


def limits_of(policy: SchedulerConfig, gpus: Sequence[GpuSpec]) -> dict[str, int]:
    """Return the parameters left out that the policy's engine sets by the card, that of stage 0.

    Source: vLLM 0.33, engine/arg_utils.py: get_batch_defaults (OPENAI_API_SERVER), and no more
    requests than tokens; SGLang 0.5.23, arg_groups/memory_hook.py: handle_gpu_memory_settings.
    """
    found, given = {}, policy.params
    gib = gpus[0].visible_bytes / GIB if gpus else 0
    if gpus and policy.name == "sglang":
        found["chunked_prefill_size"] = sglang_server.chunked_prefill_size(gib)
    if gpus and policy.name == "vllm_v1":
        is_small = gib < 70 or (gib < 160 and gpus[0].name.startswith(("A100", "GB10")))
        found["max_num_batched_tokens"] = 16384 if gib >= 160 else 2048 if is_small else 8192
        found["max_num_seqs"] = 256 if is_small else 1024
        budget = given.get("max_num_batched_tokens")
        if isinstance(budget, int) and 0 < budget < found["max_num_seqs"]:
            found["max_num_seqs"] = budget
    return {key: value for key, value in found.items() if key not in given}


class ProcessConfig(SchedulerConfig):
    """A process of your own, module:function, and its parameters."""

    NAMES: ClassVar = "straggler, outage, contended_link, autoscaler, or module:function"


NamedProcess = Annotated[ProcessConfig, short_form("name")]
