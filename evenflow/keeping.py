"""What is kept of a request's KV cache while it holds no pages, so that it need not be recomputed.

Two places: pages of the pool that are findable by content (a PrefixCache), and a copy on the host
(swap). Knows rows and pages; which row is admitted or preempted is the Batcher's and its policy's
business.
"""

from __future__ import annotations

from evenflow.groups import Row
from evenflow.kv import PagePool
from evenflow.prefix_cache import PrefixCache


class Keeper:
    """Moves what is kept in and out of a row. A row "waits" while it holds no pages.

    Of a row that waits, `computed` = `kept_tokens` counts the leading tokens that its next prefill
    can skip; at least one token is always left to compute. Copies to and from the host are summed
    up in `swapped_rows` and `swapped_pages` until they are taken. Host memory has no limit.
    """

    __slots__ = ("_cache", "_pool", "_swap", "active", "swapped_pages", "swapped_rows")

    def __init__(self, pool: PagePool, swap: bool) -> None:
        self._pool = pool
        self._cache = pool if isinstance(pool, PrefixCache) else None
        self._swap = swap
        self.active = self._cache is not None or swap
        self.swapped_rows = 0
        self.swapped_pages = 0

    def look_up(self, row: Row) -> None:
        """Update what is kept of a row that waits: the full pages its tokens begin with."""
        prefix = row.request.prefix
        if self._cache is None or prefix is None or row.swapped_tokens:
            return
        self._cache.find(row.chain, prefix, row.prompt_tokens - 1)
        row.computed = row.kept_tokens = len(row.chain) * self._cache.page_tokens

    def resume(self, row: Row) -> None:
        """Give a row that stops waiting the cached pages, or order its copy back from the host."""
        if row.swapped_tokens:
            self._copy(row.swapped_tokens)
            row.swapped_tokens = 0
        elif row.chain and self._cache is not None:
            row.pages = self._cache.hold(row.chain)
        if not row.epoch:
            row.cached_tokens = row.kept_tokens

    def publish(self, row: Row, tokens: int) -> None:
        """Make the row's full pages findable as far as `tokens` tokens have been scheduled."""
        prefix = row.request.prefix
        if self._cache is not None and prefix is not None:
            self._cache.publish(row.pages, row.chain, prefix, tokens)

    def suspend(self, row: Row, tokens: int) -> None:
        """Keep the `tokens` tokens of a row that is about to lose its pages, and will wait."""
        self.publish(row, tokens)
        row.chain = []
        row.kept_tokens = 0
        if self._swap:
            self._copy(tokens)
            row.kept_tokens = row.swapped_tokens = tokens

    def take_copies(self) -> tuple[int, int]:
        """Return the rows and pages copied since the last call."""
        copies = self.swapped_rows, self.swapped_pages
        self.swapped_rows = self.swapped_pages = 0
        return copies

    def _copy(self, tokens: int) -> None:
        self.swapped_rows += 1
        self.swapped_pages += self._pool.pages_for(tokens)
