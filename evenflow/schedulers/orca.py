"""Orca: iteration-level scheduling with selective batching and reserved memory."""

from __future__ import annotations

from evenflow.kv import PagePool
from evenflow.schedulers.fcfs import UNLIMITED, Room, at_least, row_cap
from evenflow.schedulers.static import refuse_reserved
from evenflow.types import Plan
from evenflow.view import View


class Orca:
    """All ready decodes, and whole waiting prompts in the same micro-batch.

    Source: Orca (OSDI'22), algorithm 1. Pages for `max_model_len` tokens are reserved at admission,
    so nothing is ever preempted; the head of the queue blocks what is behind it. No token cap.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 128,
        max_model_len: int | None = None,
        max_batch_rows: int | None = None,
    ) -> None:
        self.max_num_seqs = at_least(max_num_seqs, 1, "max_num_seqs")
        self.max_model_len = at_least(max_model_len or 1, 1, "max_model_len")
        self.max_batch_rows = row_cap(max_batch_rows)

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        return refuse_reserved(self.max_model_len, prompt_tokens + output_tokens, pool)

    def schedule(self, view: View) -> Plan:
        decodes = min(view.ready_decodes, self.max_batch_rows)
        seats = self.max_num_seqs - view.running
        room = Room(UNLIMITED, self.max_batch_rows - decodes, seats, view.free_pages)
        room.admit(view, chunked=False, reserved_tokens=self.max_model_len)
        return Plan(room.prefills, decodes, kv_limited=room.kv_limited)
