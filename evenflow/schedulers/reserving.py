"""Memory reserved at admission, for the longest request there may be: static batching, and Orca."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenflow.compiled import mypyc_attr
from evenflow.core.kv import PagePool
from evenflow.core.rules import Rules
from evenflow.core.scheduling import Plan, View
from evenflow.engines.padding import PaddedRules
from evenflow.keys import Count
from evenflow.schedulers.admission import UNLIMITED, Room
from evenflow.schedulers.limits import Policy, Range, SearchSpace


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Reserving(Policy):
    """Reserves pages for `max_model_len` tokens a request, so that nothing is ever preempted."""

    search_space: ClassVar[SearchSpace] = {"max_num_seqs": Range(4, 512, log=True)}

    max_num_seqs: Count = 128
    """Most requests that are admitted at a time."""
    max_model_len: Count | None = None
    """Most tokens of a request; null: the run's."""
    max_batch_rows: Count | None = None
    """Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit."""

    def __post_init__(self) -> None:
        if self.max_model_len is None:
            raise ValueError("max_model_len has to be given: so many tokens are reserved")
        self.reserved_tokens = self.max_model_len
        self.most_rows = self.max_batch_rows or UNLIMITED

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Return why a request of these lengths can never run, or None."""
        tokens, length = prompt_tokens + output_tokens, self.reserved_tokens
        if tokens > length:
            return f"{tokens} tokens exceed the max_model_len of {length} that is reserved"
        pages = pool.pages_for(length)
        if pages > pool.total_pages:
            return f"reserving max_model_len {length} takes {pages} KV pages of {pool.total_pages}"
        return None


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Static(Reserving):
    """Decode a batch until its last request ends, then admit the next one.

    Source: FasterTransformer, as described by Orca (OSDI'22, section 2) and Sarathi-Serve (OSDI'24,
    section 2.4, "decode-prioritising"). Memory is reserved for `max_model_len` tokens a request.

    With several stages, up to `depth` independent static batches exist and never merge; they share
    `max_num_seqs` evenly. A request's pages go back when it ends, not when its batch ends.
    `padded`: classic static batching, where every member costs as much as the longest. Prompts are
    as long as the longest of the batch, and ended members decode on until it ends.
    """

    padded: bool = False
    """Whether each request costs as much as the longest of its batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = PaddedRules() if self.padded else Rules()

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


class Orca(Reserving):
    """All ready decodes, and whole waiting prompts in the same micro-batch.

    Source: Orca (OSDI'22), algorithm 1. Pages for `max_model_len` tokens are reserved at admission,
    so nothing is ever preempted. The head of the queue blocks what is behind it. No token cap.
    Nothing is reserved for KV that comes from another pool: its decodes take pages first.
    """

    def schedule(self, view: View) -> Plan:
        decodes = min(view.ready_decodes, self.most_rows)
        seats = self.max_num_seqs - view.running
        needed = view.decode_pages(decodes, "arrival") if decodes else 0
        room = Room(UNLIMITED, self.most_rows - decodes, seats, view.free_pages - needed)
        room.admit(view, chunked=False, reserved_tokens=self.reserved_tokens)
        return Plan(room.prefills, decodes, kv_limited=room.kv_limited)
