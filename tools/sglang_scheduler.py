"""SGLang's own scheduler on a clock of ours, with a journal of what it decides.

Its event loops, admission, retraction, pools and prefix tree are the package's (0.5.23). Replaced
are the run of a batch (the clock moves on by what it costs), the ways in and out, what only
reports, the stages behind the first (the first decides), and the profile of dynamic chunks.
`tools.sglang_loads.stand_in` is to be called before this is imported.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.dynamic_chunk_sizer import DynamicChunkSizer
from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.runtime_context import (
    get_context,
    get_disagg,
    get_parallel,
    get_schedule,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tools.sglang_settings import END_TOKEN, server_args
from tools.sglang_transfers import BootstrapQueue, KvOnHost, PreallocQueue, TransferQueue

Event = dict[str, Any]
TOKEN = 7
MOST_BATCHES = 50_000


class Drained(Exception):  # noqa: N818
    """Everything was served."""


class Silent:
    """Stands in for what only reports: it accepts all calls."""

    num_generated_tokens = forward_ct_decode = 0

    def __getattr__(self, name: str) -> Silent:
        return self

    def __call__(self, *args: object, **options: object) -> Silent:
        return self

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""


def _assign_slots(rows: Any, table: Any, starts: Any, stops: Any, slots: Any, *_: object) -> None:
    """Write the slots of new tokens into the table of requests, as the package's kernel does."""
    done = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = slots[done : done + stop - start]
        done += stop - start


allocation.assign_req_to_token_pool_func = _assign_slots


class RecordedScheduler(Scheduler):  # type: ignore[misc]
    """Serves the requests of a journal's `add` lines; `journal` has a line an event.

    `model`: a folder for its config.json. `requests` have `id`, `at` (s), `prompt` (tokens),
    `output`, `max_new`, `ignore_eos`; `prompts` the tokens of those that may share some.
    """

    # What a server has only where it is asked to.
    abort_on_priority_when_disabled = enable_priority_scheduling = max_queued_requests = None
    schedule_low_priority_values_first = priority_scheduling_preemption_threshold = None
    enable_hierarchical_cache = enable_hicache_storage = enable_lmcache = enable_hisparse = None
    enable_unified_cache_external_linker = enable_unified_memory = hisparse_coordinator = None
    decode_offload_manager = external_corpus_manager = draft_worker = dllm_config = None
    enable_lora = enable_lora_overlap_loading = enable_overlap_mlx = enable_pdmux = None
    is_hybrid_swa = is_hybrid_ssm = sliding_window_size = truncation_align_size = None
    full_tokens_per_layer = swa_tokens_per_layer = dynamic_chunk_sizer = rust_server = None
    min_free_slots_delayer = max_new_tokens_limit = require_mlp_sync = enable_fpm = None
    attn_cp_cpu_group = attn_tp_cpu_group = enable_staging = return_health_check_ipcs = None
    load_snapshot_writer = idle_sleeper = _war_barrier_enabled = None
    # What only reports.
    scheduler_stage_metrics = metrics_reporter = metrics_collector = Silent()
    kv_events_publisher = load_inquirer = load_publisher = output_streamer = Silent()

    def __init__(
        self,
        config: Event,
        model: Path,
        requests: Sequence[Event],
        prompts: Mapping[int, Sequence[int]],
    ) -> None:
        args = server_args(config, model)
        self.coming = deque(sorted(requests, key=lambda request: request["at"]))
        self.prompts = prompts
        self.outputs = {str(request["id"]): request["output"] for request in requests}
        self.costs = config["base_s"], config["per_token_s"]
        self.speculative: Event = config.get("speculative") or {}
        self.drafted: set[str] = set()  # requests for which the last stage has proposed tokens
        self.accepted: dict[str, list[int]] = {}
        self.now, self.turn, self.spins, self.idles = 0.0, -1, 0, True
        self.stage_free = [0.0] * config["pp"]
        self.ends: deque[float] = deque()
        self.transfer_s = float(config.get("transfer_s") or 0)
        self.mode = DisaggregationMode(config.get("disaggregation_mode") or "null")
        self.prefills = self.mode == DisaggregationMode.PREFILL
        self.decodes = self.mode == DisaggregationMode.DECODE
        self.rounds: deque[list[Any]] = deque(maxlen=config["pp"])
        self.heard: deque[Any] = deque()
        self.round: dict[str, Any] = {}
        self.joined: list[Req] = []
        self.num_reserved_decode_tokens = config.get("num_reserved_decode_tokens")
        self.begun: tuple[list[int], tuple[int, int]] | None = None
        self.retracted: list[int] = []
        self.aborted: list[int] = []
        self.journal: list[Event] = []
        self._set_what_is_absent(args)
        self._limit_requests(config)
        self._make_pools(config)
        self.disagg_prefill_inflight_queue: list[Req] = []
        if self.decodes:
            self.disagg_decode_transfer_queue = TransferQueue(self)
            self.disagg_decode_prealloc_queue = PreallocQueue(self)
        else:
            self.disagg_prefill_bootstrap_queue = BootstrapQueue(self)
        self.init_running_status()
        self.init_chunked_prefill()
        self.init_schedule_policy()
        self.init_overlap()
        self.init_lora_drainer()
        self.init_pool_stats_observer()
        self.init_invariant_checker()
        self.init_batch_result_processor()
        if config["dynamic_chunking"] is not None:
            self._make_sizer(*config["dynamic_chunking"])

    def _set_what_is_absent(self, args: ServerArgs) -> None:
        self.server_args = args
        self.model_config = ModelConfig.from_server_args(args)
        schedule = get_schedule()
        self.schedule_policy = schedule.schedule_policy
        self.enable_overlap = not schedule.disable_overlap_schedule
        self.page_size = schedule.page_size
        self.max_prefill_tokens = schedule.max_prefill_tokens
        self.recv_skipper = SchedulerRecvSkipper.maybe_create()
        self.device = "cpu"
        self.is_generation = True
        self.disaggregation_mode = self.mode
        self.enable_decode_hicache = False
        self.spec_algorithm = SpeculativeAlgorithm.from_string(
            "EAGLE" if self.speculative else None
        )
        self.processed_tokens_counter = 0
        runner = SimpleNamespace(
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=True),
            prefill_aware_swa=False,
            sampling_observer=None,
        )
        self.tp_worker = self.model_worker = SimpleNamespace(
            model_runner=runner, on_verify_complete_cpu=lambda *args, **options: None
        )
        self.forward_stream = self.schedule_stream = torch.cpu.Stream()
        self.dp_attn_adapter = self.ngram_embedding_manager = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
            prepare_for_forward=lambda batch, **_: batch,
            drop_sync_wait_carry=lambda: None,
        )
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=[])
        self.dllm_manager = SimpleNamespace(any_staging_reqs=lambda: False)
        self.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=False)
        get_parallel().override_permanently(pp_group=self.pp_group)

    def _limit_requests(self, config: Event) -> None:
        """Resolve how many requests run, of all and of a slot."""
        known = SimpleNamespace(
            model_config=self.model_config, attn_dp_size=1, mambaish_config=None
        )
        most = KVCacheConfigurator.resolve_max_num_reqs(known, config["tokens"])
        self.max_running_requests = most
        if not get_parallel().pp_max_micro_batch_size:
            get_context().override(
                "scheduler.pp_max_micro_batch_size_default",
                pp_max_micro_batch_size=max(most // config["pp"], 1),
            )

    def _make_pools(self, config: Event) -> None:
        tokens, page = config["tokens"], config["page_size"]
        self.max_total_num_tokens = tokens
        self.max_req_len = min(self.model_config.context_len - 1, tokens - 1)
        rows = self.max_running_requests, self.model_config.context_len + 4, "cpu", False
        if self.decodes:
            extra = get_disagg().disaggregation_decode_extra_slots
            self.req_to_token_pool = DecodeReqToTokenPool(*rows, extra)
        else:
            self.req_to_token_pool = ReqToTokenPool(*rows)
        cache = KvOnHost()
        if page == 1:
            allocator = TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", cache, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(
                tokens, page, torch.bfloat16, "cpu", cache, False
            )
        self.token_to_kv_pool_allocator = allocator
        self.radix = config["radix"]
        self.tree_cache = UnifiedRadixCache(
            CacheInitParams(
                disable=not self.radix,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                page_size=page,
                pp_size=config["pp"],
                chunked_prefill_size=config["chunked_prefill_size"],
                is_eagle=self.spec_algorithm.is_eagle(),
                tree_components=(ComponentType.FULL,),
            )
        )

    def _make_sizer(self, a: float, b: float, c: float) -> None:
        parts = (
            *("model_config", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator"),
            *("spec_algorithm", "chunked_prefill_size", "max_prefill_tokens", "page_size"),
            "device",
        )
        known = {name: getattr(self, name) for name in parts}
        sizer = DynamicChunkSizer(model_runner=None, **known)
        longest = int(self.chunked_prefill_size * 1.25)
        lengths = list(range(longest, 0, -max(1, longest // 128)))[:128]
        sizer.predictor.fit(lengths, [a * x * x + b * x + c for x in lengths])
        sizer.predictor.set_target_latency(self.chunked_prefill_size)
        sizer.predictor.is_ready = True
        self.dynamic_chunk_sizer = sizer

    def note(self, kind: str, **fields: Any) -> None:
        """Add a line to the journal."""
        self.journal.append({"kind": kind, **fields, "t": round(self.now, 9)})

    def serve(self) -> list[Event]:
        """Serve all requests and return the journal, its first line left out."""
        alone = self.event_loop_overlap if self.enable_overlap else self.event_loop_normal
        with suppress(Drained):
            if self.prefills:
                self.event_loop_pp_disagg_prefill()
            if self.decodes:
                self.event_loop_pp_disagg_decode()
            (self.event_loop_pp if len(self.stage_free) > 1 else alone)()
        return self.journal

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        """Take in the requests that have arrived, where the loop looks for them."""
        while self.recv_skipper and not self.recv_skipper.handle(self.last_batch):
            if not self.idles:  # else it looks again at once
                return []
        self.spins += self.mode != DisaggregationMode.NULL
        if self.spins > 4 * self.loop_size:
            self._await_transfers()
        while self.coming and self.coming[0]["at"] <= self.now:
            self._let_arrive(self.coming.popleft())
        return []

    def _await_transfers(self) -> None:
        """Go to the next arrival, or to the end of the next transfer, as nothing else happens."""
        if self.decodes:
            under_way = [each.kv_receiver for each in self.disagg_decode_transfer_queue.queue]
        else:
            under_way = [req.disagg_kv_sender for req in self.disagg_prefill_inflight_queue]
        coming = [request["at"] for request in self.coming][:1]
        if not under_way and not self.decodes:
            return
        if not under_way and not coming:
            raise RuntimeError("requests wait for ever")
        self.now = max(self.now, min([*coming, *(each.there_s for each in under_way)]))
        self.spins = 0

    def _pp_pd_get_prefill_transferred_ids(self) -> Any:
        self.rounds.append([super()._pp_pd_get_prefill_transferred_ids()])
        return self.rounds[-1][0]

    def _pp_pd_get_retract_ids(self, mb_id: int) -> Any:
        self.rounds.append([super()._pp_pd_get_retract_ids(mb_id)])
        return self.rounds[-1][0]

    def _pp_pd_get_prealloc_ids(self) -> Any:
        self.rounds[-1].append(super()._pp_pd_get_prealloc_ids())
        return self.rounds[-1][1]

    def _pp_pd_get_decode_transferred_ids(self) -> Any:
        self.rounds[-1].append(super()._pp_pd_get_decode_transferred_ids())
        return self.rounds[-1][2]

    def _pp_recv_pyobj_from_prev_stage(self) -> Any:
        """Receive what the last stage has of the round that began stages - 1 turns ago."""
        self.heard = self.heard or deque(self.rounds[0])
        return self.heard.popleft()

    def process_retract_queue(self, retract_rids: Any) -> Any:
        self.round = {"retracted": retract_rids}
        self.round["resumed"] = super().process_retract_queue(retract_rids)
        return self.round["resumed"]

    def process_prealloc_queue(self, prealloc_rids: Any) -> Any:
        self.round["waiting"] = prealloc_rids[0]
        allocated = super().process_prealloc_queue(prealloc_rids)
        self.round["allocated"] = allocated[0]
        return allocated

    def process_decode_transfer_queue(self, release_rids: Any) -> Any:
        """End a round, and note what it changed."""
        self.round["there"] = release_rids
        self.round["arrived"] = super().process_decode_transfer_queue(release_rids)
        if any(self.round[name] for name in ("resumed", "allocated", "arrived")):
            self.spins = 0
        if any(self.round.values()):
            agreed = {name: [*map(int, rids)] for name, rids in self.round.items()}
            self.note("round", **agreed, free=self._room()[0])
        return self.round["arrived"]

    def get_next_disagg_decode_batch_to_run(self, running_batch: Any) -> Any:
        """Ask where decodes are all there is, and note the answer."""
        return self._noted(
            partial(super().get_next_disagg_decode_batch_to_run, running_batch=running_batch)
        )

    def get_new_prebuilt_batch(self, running_batch: Any) -> Any:
        batch = super().get_new_prebuilt_batch(running_batch)
        self.joined = list(batch.reqs) if batch else []
        return batch

    def process_prefill_chunk(self, last_batch: Any, running_batch: Any) -> None:
        self.begun = _ids(self.waiting_queue), self._room()
        super().process_prefill_chunk(last_batch=last_batch, running_batch=running_batch)

    def send_kv_chunk(self, req: Req, last_chunk: bool = False, end_idx: object = None) -> None:
        """Send KV, in no time but for the last of it."""
        if last_chunk:
            req.disagg_kv_sender.there_s = self.now + self.transfer_s

    def process_disagg_prefill_inflight_queue(self, rids_to_check: Any = None) -> list[Req]:
        """End requests whose KV is gone, and note them."""
        ended: list[Req] = super().process_disagg_prefill_inflight_queue(rids_to_check)
        if ended:
            self.note("released", ids=_ids(ended))
        return ended

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """Ask where prompts are all there is, and note the answer."""
        ask = partial(super().get_new_batch_prefill, running_batch)
        return self._noted(ask) if self.prefills else ask()

    def _let_arrive(self, request: Event) -> None:
        self.spins, identity = 0, request["id"]
        tokens = self.prompts.get(identity)
        if tokens is None:
            tokens = [100 + identity % 400] * request["prompt"]
        params = SamplingParams(
            max_new_tokens=request["max_new"], ignore_eos=request["ignore_eos"], temperature=0
        )
        params.normalize(None)
        ids = array("q", tokens)
        req = Req(str(identity), "", ids, params, eos_token_ids={END_TOKEN}, vocab_size=512)
        self.init_req_max_new_tokens(req)
        self._add_request_to_queue(req)
        self.note(
            "add",
            id=identity,
            at=request["at"],
            prompt=len(tokens),
            output=min(request["output"], params.max_new_tokens),
            max_new=params.max_new_tokens,
            ignore_eos=params.ignore_eos,
        )

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if is_retracted:
            self.retracted.append(_id(req))
        super()._add_request_to_queue(req, is_retracted)

    def send_abort_output(self, abort_req: object, req: Req) -> None:
        """Note the request that is aborted."""
        self.aborted.append(_id(req))

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        """Ask, and note the answer."""
        ask = super().get_next_batch_to_run
        return self._noted(partial(ask, running_batch=running_batch, last_batch=last_batch))

    def _noted(self, ask: Callable[[], Any]) -> Any:
        self.turn = (self.turn + 1) % self.loop_size
        waiting, before = self.begun or (_ids(self.waiting_queue), self._room())
        ratio = self.new_token_ratio_tracker.current
        self.retracted, self.aborted = [], []
        plan = ask()
        batch = plan.batch_to_run
        mode = batch.forward_mode.name.lower() if batch else None
        prompts = set(waiting) if batch and mode != "decode" else set()
        fresh = [req for req in batch.reqs if _id(req) in prompts] if prompts else []
        self.note(
            "ask",
            mb=self.turn,
            mode=mode,
            tokens=_tokens(batch),
            new=[_id(req) for req in fresh if not req.retraction_count],
            resumed=[_id(req) for req in fresh if req.retraction_count],
            chunked=_id(self.chunked_req) if self.chunked_req is not None else None,
            decoding=sorted(_ids(batch.decoding_reqs)) if mode == "mixed" else [],
            retracted=self.retracted,
            ratio=ratio,
            aborted=self.aborted,
            ratio_after=self.new_token_ratio_tracker.current,
            free_before=before[0],
            free_after=self._room()[0],
            evictable_before=before[1],
            evictable=self._room()[1],
            cached={str(_id(req)): req.prefix_len for req in fresh} if self.radix else {},
            running=_ids(plan.running_batch.reqs) if mode != "decode" else None,
            waiting=waiting,
            full=plan.running_batch.batch_is_full,
            **(self._noted_joins() if self.decodes else {}),
        )
        return plan

    def _noted_joins(self) -> Event:
        ended = [req for req in self.joined if req.finished()]
        joined, self.joined = self.joined, []
        return {"joined": _ids(joined), "ended": _ids(ended)}

    @property
    def loop_size(self) -> int:
        """How many slots take turns."""
        return self.pp_loop_size if len(self.stage_free) > 1 else 1

    def _room(self) -> tuple[int, int]:
        free = self.token_to_kv_pool_allocator.available_size()
        return free, self.tree_cache.evictable_size()

    def run_batch(self, batch: Any, pp_proxy_tensors: object = None) -> GenerationBatchResult:
        """Let a batch pass all stages, as soon as each is free."""
        self.spins, self.idles = 0, False
        self.forward_ct += 1
        if self.forward_ct > MOST_BATCHES:
            raise RuntimeError(f"{len(self.outputs)} requests need over {MOST_BATCHES} batches")
        batch.forward_iter = self.forward_ct
        batch.input_ids = batch.prefill_input_ids_cpu = batch.mix_running_indices = None
        base, per_token = self.costs
        tokens = sum(_tokens(batch).values())
        if self.speculative and batch.forward_mode.is_decode():
            tokens *= self.speculative["k"] + 1
        cost = base + per_token * tokens
        end = self.now
        for stage, free in enumerate(self.stage_free):
            end = self.stage_free[stage] = max(end, free) + cost
        self.ends.append(end)
        return GenerationBatchResult()

    def process_batch_result(self, batch: Any, result: GenerationBatchResult) -> None:
        """Wait for the oldest batch in flight, let the package process it, and note it."""
        if len(self.stage_free) == 1:
            self._wait()
        going = [req for req in batch.reqs if not req.finished()]
        if result.accept_lens is None:
            result.next_token_ids = torch.tensor([self.token(req) for req in batch.reqs])
        leaving = {req.rid for req in self.disagg_prefill_inflight_queue}
        if self.prefills:
            self.process_batch_result_disagg_prefill(batch, result)
        elif batch.forward_mode.is_decode():
            self.batch_result_processor.process_batch_result_decode(batch, result)
        else:
            self.batch_result_processor.process_batch_result_prefill(batch, result)
        self.note(
            "done",
            mb=(self.turn + 1) % self.loop_size,
            batch=len(batch.reqs),
            mode=batch.forward_mode.name.lower(),
            ids=_ids(batch.reqs),
            finished=[
                *(_id(req) for req in going if req.finished()),
                *(_id(req) for req in self.disagg_prefill_inflight_queue if req.rid not in leaving),
            ],
            free=self._room()[0],
            **({"accepted": self.accepted} if self.speculative else {}),
        )
        self.accepted = {}

    def token(self, req: Req, later: int = 0) -> int:
        """Return the next token of a request, or one that comes so much later."""
        last = len(req.output_ids) + 1 + later >= self.outputs[req.rid]
        return END_TOKEN if last else TOKEN

    def _wait(self) -> None:
        self.now = max(self.now, self.ends.popleft())

    def _pp_recv_proxy_tensors(self) -> None:
        return None

    def _pp_send_pyobj_to_next_stage(self, data: object, async_send: bool = False) -> list[Any]:
        return []

    def _pp_send_dict_to_next_stage(self, *args: object, **options: object) -> list[Any]:
        return []

    def _pp_send_proxy_to_next_stage(self, result: object) -> None:
        """Nothing: `run_batch` knows all stages."""

    def _pp_recv_dict_from_prev_stage(self) -> tuple[dict[str, Any], None]:
        self._wait()
        return {}, None

    def _pp_prep_batch_result(
        self, batch: Any, metadata: Any, outputs: object
    ) -> GenerationBatchResult:
        if not self.speculative:
            return GenerationBatchResult()
        sent = metadata.fwd_batch
        if sent.forward_mode.is_decode():
            tensors = self._verified(sent)
        else:
            tensors = {"next_token_ids": torch.tensor([self.token(req) for req in sent.reqs])}
            self.drafted.difference_update(req.rid for req in sent.reqs)
        return super()._pp_prep_batch_result(batch, metadata, PPProxyTensors(tensors))

    def _verified(self, sent: Any) -> dict[str, torch.Tensor]:
        """Return what the last stage tells of a verified batch, and note it."""
        most = self.speculative["k"] + 1
        gains = [self._gain(req) for req in sent.reqs]
        self.accepted = {
            req.rid: [len(req.output_ids), gain] for req, gain in zip(sent.reqs, gains, strict=True)
        }
        self.drafted.update(req.rid for req in sent.reqs)
        tokens = torch.tensor(
            [[self.token(req, later) for later in range(most)] for req in sent.reqs]
        )
        accepted = torch.tensor(gains)
        known = torch.tensor([req.kv.kv_committed_len for req in sent.reqs])
        return {
            "next_token_ids": tokens.flatten(),
            "spec_accept_lens": accepted,
            "spec_new_seq_lens": known + accepted,
            "spec_bonus_tokens": tokens.gather(1, accepted[:, None] - 1)[:, 0],
        }

    def _gain(self, req: Req) -> int:
        """Draw how many tokens a step yields; one where nothing was proposed, after a prompt."""
        if req.rid not in self.drafted:
            return 1
        drawn = Random(f"{self.speculative['seed']} {req.rid} {len(req.output_ids)}")
        trials = (
            drawn.random() < self.speculative["acceptance"] for _ in range(self.speculative["k"])
        )
        return 1 + sum(1 for _ in takewhile(bool, trials))

    def on_idle(self) -> None:
        """Go to the next arrival, or end."""
        self.idles = idle = self.is_fully_idle()
        self.spins += 1
        if idle:
            super().on_idle()
            self.note("idle", ratio=self.new_token_ratio_tracker.current)
        elif self.spins < 100:  # in some rounds it admits nobody
            return
        if not self.coming:
            raise Drained if idle else RuntimeError(f"{_ids(self.waiting_queue)} wait for ever")
        self.now = max(self.now, self.coming[0]["at"])


def _id(req: Req) -> int:
    return int(req.rid)


def _ids(reqs: Sequence[Req]) -> list[int]:
    return [_id(req) for req in reqs]


def _tokens(batch: Any) -> dict[str, int]:
    if not batch:
        return {}
    lengths = [1] * len(batch.reqs)
    if batch.forward_mode.is_extend():
        lengths = batch.extend_lens
    return {req.rid: length for req, length in zip(batch.reqs, lengths, strict=True)}
