"""FasterTransformer: request-level (static) batching."""

from __future__ import annotations

from dataclasses import dataclass

from evenflow.compiled import mypyc_attr
from evenflow.schedulers.admission import UNLIMITED, Room
from evenflow.schedulers.reserving import Reserving
from evenflow.scheduling import Plan, View


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Static(Reserving):
    """Decode a batch until its last request ends, then admit the next one.

    Source: FasterTransformer, as described by Orca (OSDI'22, section 2) and Sarathi-Serve (OSDI'24,
    section 2.4, "decode-prioritising"). Memory is reserved for `max_model_len` tokens a request.

    With several stages, up to `depth` independent static batches exist and never merge; they share
    `max_num_seqs` evenly. A request's pages go back when it ends, not when its batch ends.
    `padded`: classic static batching, where every member costs as much as the longest: prompts are
    as long as the longest of the batch, and ended members decode on until it ends.
    """

    padded: bool = False

    def schedule(self, view: View) -> Plan:
        sizes = view.ready_group_sizes
        if sizes:
            return Plan(decodes=sizes[0], order="first_returned")
        share = max(self.max_num_seqs // view.depth, 1)
        seats = min(share, self.max_num_seqs - view.running)
        if view.in_flight >= view.depth:
            return Plan()
        room = Room(UNLIMITED, min(self.most_rows, share), seats, view.free_pages)
        room.admit(view, chunked=False, reserved_tokens=self.reserved_tokens)
        return Plan(room.prefills, kv_limited=room.kv_limited)
