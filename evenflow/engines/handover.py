"""Handover of requests from one engine to another, with their KV.

A finished request's pages stay until `release`, for the other engine to fetch. There `reserve`
takes pages for its KV, and `adopt` puts it among the ready decodes when the KV is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.replay import Call, RecordingBatcher
from evenflow.core.request import Request
from evenflow.engines.ahead import runs_ahead
from evenflow.engines.queues import EngineQueues


class Handover(NamedTuple):
    """State that another engine needs to continue a request once the request's KV is there.

    `generated` output tokens exist, the last of them since `last_token_s`; the KV holds all tokens
    but that one. `preemptions` counts those so far. `first_scheduled_s`: its prompt began to be
    computed.
    """

    request: Request
    generated: int
    first_token_s: float
    last_token_s: float
    preemptions: int
    first_scheduled_s: float = float("nan")

    @classmethod
    def of(cls, seq: Sequence, request: Request) -> Handover:
        """Return the state of a sequence, which stands for `request` elsewhere."""
        times = seq.first_token_s, seq.last_token_s, seq.epoch, seq.first_scheduled_s
        return cls(request, seq.generated, *times)

    @property
    def context_tokens(self) -> int:
        """Tokens of KV to transfer: all that the next decode step attends to."""
        return self.request.prompt_tokens + self.generated - 1

    def sequence(self, prompt_tokens: int) -> Sequence:
        """Return the request as it goes on, with a prefill of `prompt_tokens`."""
        seq = Sequence(self.request, prompt_tokens, self.generated)
        seq.epoch, seq.first_scheduled_s = self.preemptions, self.first_scheduled_s
        seq.first_token_s, seq.last_token_s = self.first_token_s, self.last_token_s
        return seq


class PoolBatcher(Batcher):
    """A Batcher that takes requests over from others and, with `keeps_pages`, hands its own over.

    `moving` sequences hold pages while their KV leaves or arrives.
    """

    def __init__(self, *args: Any, keeps_pages: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keeps_pages = keeps_pages
        self.moving: dict[int, Sequence] = {}
        if keeps_pages:
            self.queues.free = self._keep
        if isinstance(self.queues, EngineQueues):
            self.queues.keeps_pages = keeps_pages
            if self.queues.ahead and keeps_pages:
                raise runs_ahead(self.policy_name)

    def _keep(self, seq: Sequence, held_tokens: int) -> None:
        self.moving[seq.request.request_id] = seq

    @property
    def under_way(self) -> str:
        """Description of the work under way that will change the View; "" when idle."""
        flying, moving = len(self.queues.in_flight), len(self.moving)
        if not moving:
            return super().under_way
        return f"{flying} micro-batches and the KV of {moving} requests are under way"

    def is_lost(self, request_id: int) -> bool:
        """Say whether the next token of a live request is computed again, as its pages are gone."""
        queues = self.queues
        seq = queues.live.get(request_id)
        return seq is not None and isinstance(queues, EngineQueues) and queues.is_lost(seq)

    def release(self, request_id: int) -> None:
        """Free the pages that a finished request kept: its KV is elsewhere, or of no more use."""
        seq = self.moving.pop(request_id)
        self.kv.release(seq, seq.held_tokens)

    def has_room(self, context_tokens: int, spare_pages: int) -> bool:
        """Say whether KV of `context_tokens` tokens has room; waiting requests here go first.

        `spare_pages` stay free for running requests here to grow into, if there are any.
        """
        queues, pool = self.queues, self.pool
        spare = spare_pages if queues.admitted or self.moving else 0
        return not queues.waiting and pool.pages_for(context_tokens) + spare <= pool.free_pages

    def reserve(self, handover: Handover) -> None:
        """Allocate pages for KV about to be sent here; ask `has_room` first.

        A request that was prefilled here keeps its pages: freed, shared ones would be another's.
        """
        request, tokens = handover.request, handover.context_tokens
        num_pages = self.pool.pages_for(tokens)
        kept = self.moving.pop(request.request_id, None)
        if kept is None:
            pages, chain = self.pool.allocate(num_pages), []
        else:
            self.kv.tokens -= kept.held_tokens
            self.pool.free(kept.pages[num_pages:])
            pages, chain = kept.pages[:num_pages], kept.chain
        seq = handover.sequence(tokens)
        seq.computed, seq.pages, seq.chain = tokens, pages, chain
        self.kv.tokens += tokens
        self.moving[request.request_id] = seq

    def adopt(self, request_id: int) -> None:
        """Add a request with arrived KV to the ready decodes: it arrives here with its KV."""
        queues = self.queues
        seq = self.moving.pop(request_id)
        queues.enter(seq)
        queues.admitted[request_id] = seq
        group = queues.empty_group()
        queues.start_decoding(seq, group)
        queues.ready.append(group)


class RecordingPoolBatcher(RecordingBatcher, PoolBatcher):
    """A PoolBatcher that keeps a journal, of KV that comes and goes too."""

    def release(self, request_id: int) -> None:
        super().release(request_id)
        self.record(Call("release", request_id))

    def reserve(self, handover: Handover) -> None:
        super().reserve(handover)
        self.record(Call("reserve", handover))

    def adopt(self, request_id: int) -> None:
        super().adopt(request_id)
        self.record(Call("adopt", request_id))
