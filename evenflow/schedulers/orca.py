"""Orca: iteration-level scheduling with selective batching and reserved memory."""

from __future__ import annotations

from evenflow.schedulers.admission import UNLIMITED, Room
from evenflow.schedulers.reserving import Reserving
from evenflow.scheduling import Plan, View


class Orca(Reserving):
    """All ready decodes, and whole waiting prompts in the same micro-batch.

    Source: Orca (OSDI'22), algorithm 1. Pages for `max_model_len` tokens are reserved at admission,
    so nothing is ever preempted; the head of the queue blocks what is behind it. No token cap.
    Nothing is reserved for KV that comes from another pool: its decodes take pages first.
    """

    def schedule(self, view: View) -> Plan:
        decodes = min(view.ready_decodes, self.most_rows)
        seats = self.max_num_seqs - view.running
        needed = view.decode_pages(decodes, "arrival") if decodes else 0
        room = Room(UNLIMITED, self.most_rows - decodes, seats, view.free_pages - needed)
        room.admit(view, chunked=False, reserved_tokens=self.reserved_tokens)
        return Plan(room.prefills, decodes, kv_limited=room.kv_limited)
