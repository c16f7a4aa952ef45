"""FasterTransformer: request-level (static) batching."""

from __future__ import annotations

from evenflow.kv import PagePool
from evenflow.schedulers.fcfs import UNLIMITED, Room, at_least, row_cap
from evenflow.types import Plan
from evenflow.view import View


class Static:
    """Decode a batch until its last request ends, then admit the next one.

    Source: FasterTransformer, as described by Orca (OSDI'22, section 2) and Sarathi-Serve (OSDI'24,
    section 2.4, "decode-prioritising"). Memory is reserved for `max_model_len` tokens a request.

    With several stages, up to `depth` independent static batches exist and never merge; they share
    `max_num_seqs` evenly. A request's pages go back when it ends, not when its batch ends.
    `padded`: classic static batching, where every member costs as much as the longest: prompts are
    as long as the longest of the batch, and ended members decode on until it ends.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 128,
        max_model_len: int | None = None,
        max_batch_rows: int | None = None,
        padded: bool = False,
    ) -> None:
        self.max_num_seqs = at_least(max_num_seqs, 1, "max_num_seqs")
        self.max_model_len = at_least(max_model_len or 1, 1, "max_model_len")
        self.max_batch_rows = row_cap(max_batch_rows)
        self.padded = padded

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        return refuse_reserved(self.max_model_len, prompt_tokens + output_tokens, pool)

    def schedule(self, view: View) -> Plan:
        sizes = view.ready_group_sizes
        if sizes:
            return Plan(decodes=sizes[0], order="first_returned")
        share = max(self.max_num_seqs // view.depth, 1)
        seats = min(share, self.max_num_seqs - view.running)
        if view.in_flight >= view.depth:
            return Plan()
        room = Room(UNLIMITED, min(self.max_batch_rows, share), seats, view.free_pages)
        room.admit(view, chunked=False, reserved_tokens=self.max_model_len)
        return Plan(room.prefills, kv_limited=room.kv_limited)


def refuse_reserved(max_model_len: int, tokens: int, pool: PagePool) -> str | None:
    """Say why a request can never run where `max_model_len` tokens are reserved for each."""
    if tokens > max_model_len:
        return f"{tokens} tokens exceed the max_model_len of {max_model_len} that is reserved"
    pages = pool.pages_for(max_model_len)
    if pages > pool.total_pages:
        return (
            f"reserving max_model_len {max_model_len} takes {pages} KV pages of {pool.total_pages}"
        )
    return None
