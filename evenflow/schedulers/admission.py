"""First-come-first-served admission, and memory reserved at admission: what policies share.

Knows budgets and pages; which budgets a policy has is the policy's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from evenflow.keys import Count
from evenflow.kv import PagePool
from evenflow.schedulers.limits import checked
from evenflow.scheduling import Prefill, Prompt, SearchSpace, View

UNLIMITED = 1 << 60
"""The rows or tokens of a micro-batch without a cap."""


@dataclass(slots=True)
class Room:
    """What the micro-batch being planned still has room for, and the prefills planned so far.

    `tokens` of prefill, `rows`, `seats` (requests that may still start to run), `pages` (free ones
    this plan may use). Admission leaves `watermark_pages` for decodes to grow into, once anything
    runs that could. `kv_limited` is set when a prompt did not get the pages it needs.
    """

    tokens: int
    rows: int
    seats: int
    pages: int
    watermark_pages: int = 0
    prefills: list[Prefill] = field(default_factory=list)
    kv_limited: bool = False

    def add(self, prompt: Prompt, tokens: int, pages: int, hold_tokens: int) -> None:
        self.prefills.append(Prefill(prompt.request_id, tokens, hold_tokens))
        self.tokens -= tokens
        self.rows -= 1
        self.pages -= pages

    def go_on(self, partials: Iterable[Prompt]) -> None:
        """Plan the next chunk of prompts whose pages are already held."""
        for prompt in partials:
            if self.tokens <= 0 or self.rows <= 0:
                return
            self.add(prompt, min(prompt.remaining, self.tokens), 0, prompt.tokens)

    def admit(self, view: View, *, chunked: bool, reserved_tokens: int = 0) -> None:
        """Plan waiting prompts, first come first served, until the first that does not fit.

        A prompt gets pages for all of it, or for `reserved_tokens` if that is more. Unchunked, it
        must fit into `tokens` whole, unless the micro-batch holds no other prefill: else a long
        prompt would wait for ever.
        """
        for prompt in view.waiting:
            if self.tokens <= 0 or self.rows <= 0 or self.seats <= 0:
                return
            pages = -(-max(prompt.tokens, reserved_tokens) // view.page_tokens) - prompt.pages
            spare = self.watermark_pages if view.running or self.prefills else 0
            if pages > self.pages - spare:
                self.kv_limited = True
                return
            tokens = min(prompt.remaining, self.tokens) if chunked else prompt.remaining
            if tokens > self.tokens and self.prefills:
                return
            self.add(prompt, tokens, pages, max(prompt.tokens, reserved_tokens))
            self.seats -= 1


class Reserving:
    """Reserves pages for `max_model_len` tokens a request, so that nothing is ever preempted."""

    search_space: ClassVar[SearchSpace] = {
        "max_num_seqs": {"low": 4, "high": 512, "log": True, "integer": True}
    }

    @checked
    def __init__(
        self,
        *,
        max_num_seqs: Count = 128,
        max_model_len: Count | None = None,
        max_batch_rows: Count | None = None,
    ) -> None:
        if max_model_len is None:
            raise ValueError("max_model_len has to be given: so many tokens are reserved")
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_batch_rows = max_batch_rows or UNLIMITED

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Say why such a request can never run, or return None."""
        tokens, length = prompt_tokens + output_tokens, self.max_model_len
        if tokens > length:
            return f"{tokens} tokens exceed the max_model_len of {length} that is reserved"
        pages = pool.pages_for(length)
        if pages > pool.total_pages:
            return f"reserving max_model_len {length} takes {pages} KV pages of {pool.total_pages}"
        return None
