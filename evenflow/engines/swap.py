"""KV pages that are copied to the host when their request is preempted, as in vLLM V0."""

from __future__ import annotations

from typing import Any

from evenflow.compiled import mypyc_attr
from evenflow.core.kv import Holder, KvCache, PagePool
from evenflow.costs.base import work_of


@mypyc_attr(allow_interpreted_subclasses=True)
class SwapCache(KvCache):
    """A KV cache that copies the pages of suspended holders to the host, which has no limit.

    Copies are summed up until a micro-batch is charged with them; what they cost is up to the costs
    (SwapCost).
    """

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self.keeps = True
        self._pages = 0

    def look_up(self, holder: Holder, tokens: int) -> None:
        """Update `kept_tokens` of a waiting holder: of its copy, or else of cached full pages."""
        if holder.swapped_tokens:
            holder.kept_tokens = min(holder.swapped_tokens, tokens)
        else:
            super().look_up(holder, tokens)

    def resume(self, holder: Holder) -> None:
        """Order the copy of a holder that stops waiting, or give it the cached pages."""
        if holder.swapped_tokens:
            self._copy(holder.swapped_tokens)
            holder.swapped_tokens = 0
        else:
            super().resume(holder)

    def suspend(self, holder: Holder, tokens: int) -> None:
        """Copy the pages of a holder that will wait, with `tokens` tokens, and free them."""
        super().suspend(holder, tokens)
        self._copy(tokens)
        holder.kept_tokens = holder.swapped_tokens = tokens

    def _copy(self, tokens: int) -> None:
        self.copies += 1
        self._pages += self.pool.pages_for(tokens)

    def charge(self, batch: Any) -> None:
        """Add to a MicroBatch the pages that were copied since the last one."""
        work = batch.charged or work_of(batch)
        batch.charged = work._replace(swapped_rows=self.copies, swapped_pages=self._pages)
        self.copies = self._pages = 0
