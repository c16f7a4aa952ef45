"""First-come-first-served admission, shared by policies.

Knows budgets and pages; which budgets a policy has is the policy's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from evenflow.core.scheduling import Order, Plan, Prefill, Prompt, Victim, View

UNLIMITED = 1 << 60
"""The rows or tokens of a micro-batch without a cap."""


def prefill_of(
    request_id: int, tokens: int, hold_tokens: int = 0, *, ends: bool = False
) -> Prefill:
    """Return a Prefill, in half the time that the constructor of a named tuple takes."""
    return tuple.__new__(Prefill, (request_id, tokens, hold_tokens, ends))


def plan_of(
    prefills: Sequence[Prefill],
    decodes: int = 0,
    order: Order = "arrival",
    victims: Victim = "latest_arrived",
    kv_limited: bool = False,
) -> Plan:
    """Return a Plan, in less time than its constructor takes."""
    return tuple.__new__(Plan, (prefills, decodes, order, victims, (), None, kv_limited))


class Room:
    """Room left in the planned micro-batch, and its prefills so far.

    `tokens` of prefill, `rows`, `seats` (requests that may still start to run), `pages` (free ones
    this plan may use). Admission leaves `watermark_pages` for decodes to grow into, once anything
    runs that could. `kv_limited` is set when a prompt did not get the pages it needs.
    """

    __slots__ = ("kv_limited", "pages", "prefills", "rows", "seats", "tokens", "watermark_pages")

    def __init__(
        self, tokens: int, rows: int, seats: int, pages: int, watermark_pages: int = 0
    ) -> None:
        self.tokens = tokens
        self.rows = rows
        self.seats = seats
        self.pages = pages
        self.watermark_pages = watermark_pages
        self.prefills: list[Prefill] = []
        self.kv_limited = False

    def add(self, prompt: Prompt, tokens: int, pages: int, hold_tokens: int) -> None:
        self.prefills.append(prefill_of(prompt.request_id, tokens, hold_tokens))
        self.tokens -= tokens
        self.rows -= 1
        self.pages -= pages

    def go_on(self, partials: Iterable[Prompt]) -> None:
        """Plan the next chunk of prompts that already hold their pages."""
        for prompt in partials:
            if self.tokens <= 0 or self.rows <= 0:
                return
            self.add(prompt, min(prompt.remaining, self.tokens), 0, prompt.tokens)

    def admit(self, view: View, *, chunked: bool, reserved_tokens: int = 0) -> None:
        """Plan waiting prompts, first come first served, until the first that does not fit.

        A prompt gets pages for all of it, or for `reserved_tokens` if that is more. Unchunked, it
        must fit into `tokens` whole, unless the micro-batch holds no other prefill. Else a long
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


def lacks_a_page(view: View, decodes: int, needed: int, order: Order = "arrival") -> bool:
    """Return whether one of `decodes`, which take `needed` pages in all, would find none free.

    Each in turn asks for a free page, even where it needs none.

    Source: `can_append_slot` of Sarathi-Serve, `can_append_slots` of vLLM 0.6.6.
    """
    if decodes == 0 or needed < view.free_pages:
        return False
    return view.decode_pages(decodes - 1, order) >= view.free_pages


@cache
def decodes_only(
    decodes: int,
    order: Order = "arrival",
    victims: Victim = "latest_arrived",
    kv_limited: bool = False,
) -> Plan:
    """Return a plan that takes `decodes` decodes and no prefills, like most plans."""
    return plan_of((), decodes, order, victims, kv_limited)
