"""SGLang's queues of a server that sends its KV to another, or gets it from there.

Which requests go on is the package's (0.5.23). Ours are transfers, which take the same time each:
every rank knows the same, and the other server is ready from the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation import decode, prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import (
    DecodePreallocQueue,
    DecodeRequest,
    DecodeTransferQueue,
)
from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, ReqToMetadataIdxAllocator
from sglang.srt.managers import scheduler_pp_mixin
from sglang.srt.managers.schedule_batch import Req


class Transfer:
    """The KV of a request on its way, which takes `transfer_s` seconds once it has begun."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.there_s: float | None = None

    def poll(self) -> KVPoll:
        """Say how far it is."""
        if self.there_s is None:
            return KVPoll.WaitingForInput
        return KVPoll.Success if self.there_s <= self._scheduler.now else KVPoll.Transferring

    def send_metadata(self, *args: object, **options: object) -> None:
        """Begin: there are pages for it."""
        self.there_s = self._scheduler.now + self._scheduler.transfer_s

    def init(self, *args: object) -> None:
        """Nothing."""

    clear = init

    def pop_decode_prefix_len(self) -> int:
        return 0


class KvOnHost:
    """Stands in for the KV of all requests, some of which is copied to the host and back."""

    cpu_copy_carries_mamba = False

    def get_cpu_copy(self, *args: object, **options: object) -> tuple[()]:
        return ()

    def load_cpu_copy(self, *args: object, **options: object) -> None:
        """Nothing."""


class BootstrapQueue(PrefillBootstrapQueue):  # type: ignore[misc]
    """The package's queue of requests whose decode server has to be ready."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.scheduler_stage_metrics = scheduler.scheduler_stage_metrics
        self.pp_size = len(scheduler.stage_free)
        self.pp_rank = 0
        self.pp_poll_sync_work_list: list[Any] = []
        self.queue: list[Req] = []
        scheduler.req_to_metadata_buffer_idx_allocator = SimpleNamespace(
            available_size=lambda: 1, alloc=lambda: 0, free=lambda index: None
        )
        self.req_to_metadata_buffer_idx_allocator = scheduler.req_to_metadata_buffer_idx_allocator

    def create_sender(self, req: Req, num_kv_heads: int) -> bool:
        """Give a request its sender, and ask one token of it."""
        req.disagg_kv_sender = Transfer(self.scheduler)
        req.bootstrap_host = FAKE_BOOTSTRAP_HOST
        self._process_req(req)
        req.pending_bootstrap = True
        return True


class TransferQueue(DecodeTransferQueue):  # type: ignore[misc]
    """The package's queue of requests whose KV is on its way to a decode server."""

    enable_staging = enable_deferred_kv_release = False
    gloo_group = staging_handler = None
    tp_rank = 0

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.tree_cache = scheduler, scheduler.tree_cache
        self.spec_algorithm = scheduler.spec_algorithm
        self.queue: list[DecodeRequest] = []
        self._deferred_releases: list[Any] = []
        self.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(
            2 * scheduler.req_to_token_pool.size
        )
        nothing: list[Any] = [None] * 12
        nothing[1] = torch.zeros(7, dtype=torch.int64)
        told = (*nothing, None, torch.zeros(1, dtype=torch.int64))
        decode._generate_fake_prefill_handoff_output_id = scheduler.token
        self.metadata_buffers = SimpleNamespace(
            get_buf=lambda index: told, clear_slot=lambda index: None
        )


class PreallocQueue(DecodePreallocQueue):  # type: ignore[misc]
    """The package's queue of requests whose KV is to get pages in a decode server."""

    enable_staging = is_mla_backend = False
    gloo_group = host_pool = token_to_kv_pool = None
    host_reserved_tokens = pp_rank = tp_rank = _num_published_destinations = 0

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.tree_cache = scheduler, scheduler.tree_cache
        self.transfer_queue = scheduler.disagg_decode_transfer_queue
        names = ("metadata_buffers", "req_to_metadata_buffer_idx_allocator")
        self.metadata_buffers, self.req_to_metadata_buffer_idx_allocator = (
            getattr(self.transfer_queue, name) for name in names
        )
        self.req_to_token_pool = scheduler.req_to_token_pool
        self.token_to_kv_pool_allocator = scheduler.token_to_kv_pool_allocator
        self.max_total_num_tokens = scheduler.max_total_num_tokens
        self.num_reserved_decode_tokens = scheduler.num_reserved_decode_tokens
        self.pp_size = len(scheduler.stage_free)
        self.queue: list[DecodeRequest] = []
        self.retracted_queue: list[Req] = []
        self.pending_reqs: list[DecodeRequest] = []
        self.held_rebootstrap_reqs: list[Req] = []
        self._prefill_dp_rank_queries: dict[str, Any] = {}
        self.kv_manager = SimpleNamespace(kv_args=SimpleNamespace(state_types=[]))

    def _create_receiver_and_enqueue(self, req: Req, is_rebootstrap: bool = False) -> DecodeRequest:
        req.bootstrap_host = FAKE_BOOTSTRAP_HOST
        self.queue.append(DecodeRequest(req=req, kv_receiver=Transfer(self.scheduler)))
        return self.queue[-1]


def _polls(transfers: Sequence[Transfer], *groups: object, **options: object) -> list[KVPoll]:
    """Poll transfers; all ranks know the same."""
    return [transfer.poll() for transfer in transfers]


for module in (prefill, scheduler_pp_mixin):
    module.poll_and_all_reduce_attn_cp_tp_group = _polls
prefill.poll_and_all_reduce_prefill_pp = _polls
decode.poll_and_all_reduce = _polls
decode.all_reduce_flags = lambda flags, **options: flags
