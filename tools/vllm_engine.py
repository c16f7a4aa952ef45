"""vLLM's own engine core over an executor without a model, recorded as it decides.

The executor answers made-up tokens after made-up seconds on a virtual clock; queues, blocks and
decisions are vLLM's own. The recorder is a mix-in for its option `scheduler_cls`. Only for the
versions that `tools.vllm_record` knows, in an environment of its own (`make test-vllm`); what the
events hold is in docs/engines.md.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm import SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

VOCABULARY = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


class Setting(NamedTuple):
    """A deployment: its stages, settings by vLLM's names, and what a micro-batch takes a stage."""

    pp: int
    blocks: int
    block_size: int
    budget: int
    max_num_seqs: int
    watermark: float
    prefix_caching: bool
    asynchronous: str
    """`off`, or the version of the model runner: `v1`, `v2`."""
    base_s: float
    per_token_s: float
    max_model_len: int = 1024
    policy: str = "fcfs"
    prefill_schedule_interval: int = 1
    full_isl: bool = True
    chunked: bool = True
    longest_chunk: int = 0


class Arrival(NamedTuple):
    """A request: when it comes, the ids of its prompt's tokens, how many it generates.

    `max_new`: how many the client allows; None: as many as it generates.
    """

    arrival_s: float
    prompt: Sequence[int]
    output: int
    priority: int = 0
    max_new: int | None = None


class Clock:
    """The virtual time and the journal; one recording at a time uses them."""

    now_s = 0.0
    journal: list[dict[str, Any]] = []  # noqa: RUF012

    def note(self, kind: str, **facts: object) -> None:
        """Append an event at this time."""
        self.journal.append({"kind": kind, **facts, "now_s": self.now_s})


CLOCK = Clock()


class Answer(Future):  # type: ignore[type-arg]
    """A micro-batch's output; to wait for it moves the clock to when it is there."""

    def __init__(self, at_s: float, output: ModelRunnerOutput) -> None:
        super().__init__()
        self.at_s = at_s
        self.set_result(output)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        CLOCK.now_s = max(CLOCK.now_s, self.at_s)
        return super().result(timeout)


class EmulatedExecutor(Executor):  # type: ignore[misc]
    """Stages in a row, each of which takes `base_s + per_token_s` x tokens a micro-batch.

    Stage 0 waits for the tokens that were sampled as many steps ago as there are stages, as in
    `vllm.v1.worker.gpu.pp_utils.PPHandler`.
    """

    supports_pp = True
    setting: Setting
    scheduler: Scheduler

    def _init_executor(self) -> None:
        self.free_s = [0.0] * self.parallel_config.pipeline_parallel_size
        self.last: deque[Answer] = deque(maxlen=1)
        self.tokens_s: deque[float] = deque(maxlen=len(self.free_s))  # of the last steps

    def get_kv_cache_specs(self) -> list[dict[str, FullAttentionSpec]]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=64,
            dtype=torch.float32,
        )
        return [{"layer": spec}] * len(self.free_s)

    def determine_available_memory(self) -> list[int]:
        return [1 << 32] * len(self.free_s)

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD"]] * len(self.free_s)

    def collective_rpc(self, method: object, *_: object, **__: object) -> list[Any]:
        return [None] * len(self.free_s)

    def initialize_from_config(self, kv_cache_configs: object) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def check_health(self) -> None: ...

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Answer:
        """Return the tokens of a micro-batch, and when they are there."""
        tokens = scheduler_output.num_scheduled_tokens
        at_s = CLOCK.now_s
        if tokens:
            takes_s = self.setting.base_s + self.setting.per_token_s * sum(tokens.values())
            if len(self.tokens_s) == len(self.free_s):
                at_s = max(at_s, self.tokens_s[0])
            for stage, free_s in enumerate(self.free_s):
                self.free_s[stage] = at_s = max(at_s, free_s) + takes_s
        requests = [self.scheduler.requests[request_id] for request_id in tokens]
        output = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={request_id: index for index, request_id in enumerate(tokens)},
            sampled_token_ids=[
                [] if request.is_prefill_chunk else [token_after(request.num_computed_tokens)]
                for request in requests
            ],
        )
        self.tokens_s.append(at_s if any(output.sampled_token_ids) else 0.0)
        self.last.append(Answer(at_s, output))
        return self.last[0]

    def sample_tokens(self, grammar_output: object, non_block: bool = False) -> Answer:
        return self.last[0]


class Recording:
    """A mix-in for vLLM's schedulers that notes what they are asked and what they answer."""

    def add_request(self: Any, request: Request) -> None:
        CLOCK.note(
            "add",
            id=int(request.request_id),
            prompt=request.num_prompt_tokens,
            output=request.sampling_params.extra_args["output"],
            **({"max_new": request.max_tokens} if request.sampling_params.stop_token_ids else {}),
            arrival_s=request.arrival_time,
            priority=request.priority,
        )
        super().add_request(request)  # type: ignore[misc]

    def schedule(self: Any, *args: object, **options: object) -> Any:
        running = [[int(r.request_id), r.num_computed_tokens, r.num_tokens] for r in self.running]
        waiting = [int(request.request_id) for request in self.waiting]
        pool = self.kv_cache_manager.block_pool
        before = pool.get_num_free_blocks()
        output = super().schedule(*args, **options)  # type: ignore[misc]
        after = {int(request.request_id): request.request_id for request in self.running}
        new = output.scheduled_new_reqs
        CLOCK.note(
            "ask",
            tokens={str(int(key)): count for key, count in output.num_scheduled_tokens.items()},
            new=[int(each.req_id) for each in new],
            cached={
                str(int(each.req_id)): each.num_computed_tokens
                for each in new
                if each.num_computed_tokens
            },
            resumed=sorted(map(int, output.scheduled_cached_reqs.resumed_req_ids)),
            preempted=[row[0] for row in reversed(running) if row[0] not in after],
            free_before=before,
            free_after=pool.get_num_free_blocks(),
            running=running,
            waiting=waiting,
            held={
                str(number): len(self.kv_cache_manager.get_blocks(name).blocks[0])
                for number, name in after.items()
            },
        )
        return output

    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        ids = list(scheduler_output.num_scheduled_tokens)
        before = set(self.requests)
        answer = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        finished = sorted(map(int, before - set(self.requests)))
        CLOCK.note("done", ids=[int(each) for each in ids], finished=finished)
        return answer


class RecordingScheduler(Recording, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, recorded."""


class RecordingAsyncScheduler(Recording, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, recorded."""


def record(setting: Setting, arrivals: Sequence[Arrival], model: Path) -> list[dict[str, Any]]:
    """Serve requests, in order of arrival, with vLLM's engine core; return the journal.

    `model` is an empty folder for the model's configuration.
    """
    CLOCK.now_s, CLOCK.journal = 0.0, []
    runs_ahead = setting.asynchronous != "off"
    engine = engine_of(
        setting, model, RecordingAsyncScheduler if runs_ahead else RecordingScheduler
    )
    CLOCK.note("config", **_facts(setting, engine))
    serve(engine, arrivals)
    return CLOCK.journal


def serve(engine: EngineCore, arrivals: Sequence[Arrival]) -> None:
    """Serve requests, in order of arrival, on the virtual clock."""
    scheduler, coming = engine.scheduler, deque(enumerate(arrivals))
    while coming or scheduler.has_requests() or engine.batch_queue:
        if not (scheduler.has_requests() or engine.batch_queue):
            CLOCK.now_s = max(CLOCK.now_s, coming[0][1].arrival_s)
        while coming and coming[0][1].arrival_s <= CLOCK.now_s:
            engine.add_request(_request(engine, *coming.popleft()))
        engine.step_fn()


def engine_of(
    setting: Setting, model: Path, scheduler: type[Scheduler], *, emulated: bool = True
) -> EngineCore:
    """Return vLLM's engine core with this class of scheduler; the model's configuration is written.

    Not `emulated`: it has vLLM's own executor, and the model random weights.
    """
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    envs.disable_envs_cache()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=setting.max_model_len,
        block_size=setting.block_size,
        num_gpu_blocks_override=setting.blocks,
        max_num_batched_tokens=setting.budget,
        max_num_seqs=setting.max_num_seqs,
        watermark=setting.watermark,
        scheduling_policy=setting.policy,
        prefill_schedule_interval=setting.prefill_schedule_interval,
        scheduler_reserve_full_isl=setting.full_isl,
        enable_chunked_prefill=setting.chunked,
        long_prefill_token_threshold=setting.longest_chunk,
        enable_prefix_caching=setting.prefix_caching,
        pipeline_parallel_size=setting.pp,
        distributed_executor_backend=EmulatedExecutor if emulated else None,
        scheduler_cls=scheduler,
    ).create_engine_config()
    # Set here, as its checks refuse them on a CPU and without Triton, of which nothing is used.
    config.scheduler_config.async_scheduling = setting.asynchronous != "off"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(setting.asynchronous == "v2"))
    engine = EngineCore(config, Executor.get_class(config), log_stats=False)
    if emulated:
        engine.model_executor.setting = setting
        engine.model_executor.scheduler = engine.scheduler
    return engine


def _facts(setting: Setting, engine: EngineCore) -> dict[str, Any]:
    config = engine.vllm_config
    scheduling = config.scheduler_config
    return {
        "engine": f"vllm {vllm.__version__}",
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "budget": scheduling.max_num_batched_tokens,
        "max_num_seqs": scheduling.max_num_seqs,
        "watermark": scheduling.watermark,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "full_isl": scheduling.scheduler_reserve_full_isl,
        "chunked_prefill": scheduling.enable_chunked_prefill,
        "policy": scheduling.policy,
        "prefill_schedule_interval": scheduling.prefill_schedule_interval,
        "long_prefill_token_threshold": scheduling.long_prefill_token_threshold,
        "async_scheduling": scheduling.async_scheduling,
        "v2_runner": config.use_v2_model_runner,
        "pp": config.parallel_config.pipeline_parallel_size,
        "max_concurrent_batches": config.max_concurrent_batches,
        "max_model_len": config.model_config.max_model_len,
        "base_s": setting.base_s,
        "per_token_s": setting.per_token_s,
    }


def token_after(known: int) -> int:
    """Return the token at position `known` of a sequence."""
    return 3 + known % 500


def _request(engine: EngineCore, number: int, arrival: Arrival) -> Request:
    stops = arrival.max_new is not None and arrival.max_new > arrival.output
    last = token_after(len(arrival.prompt) + arrival.output - 1)  # which none before it is
    params = SamplingParams(
        max_tokens=arrival.max_new if stops else arrival.output,
        stop_token_ids=[last] if stops else None,
        ignore_eos=True,
        temperature=0.0,
        extra_args={"output": arrival.output},
    )
    return Request(
        f"{number:06}",  # of equal arrivals vLLM orders the ids, as text
        list(arrival.prompt),
        params,
        None,
        arrival_time=arrival.arrival_s,
        priority=arrival.priority,
        block_hasher=engine.request_block_hasher,
    )
