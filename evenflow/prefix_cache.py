"""Paged KV cache in which full pages of known content are found again and shared.

A page is known by its content and that of all pages before it: the cached pages are a tree, and a
prompt is looked up by walking down from the root (the hash chain of serving engines, without the
collisions). Knows neither requests nor policies, and not whether a page has been computed yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenflow.kv import PagePool

if TYPE_CHECKING:
    from evenflow.types import Prefix


class CachedPage:
    """A node of the tree. `page` is its id, -1 once evicted; `holders` requests use it now."""

    __slots__ = ("blocks", "children", "holders", "page", "parent")

    def __init__(self, page: int, parent: CachedPage | None, blocks: tuple[int, ...]) -> None:
        self.page = page
        self.parent = parent
        self.blocks = blocks
        self.children: dict[tuple[int, ...], CachedPage] = {}
        self.holders = 1


def pages_in_use(chain: Sequence[CachedPage]) -> int:
    """Return how many pages of a chain requests hold: who holds one holds those before it."""
    return bisect_left(chain, True, key=lambda node: not node.holders)


class PrefixCache(PagePool):
    """A pool whose published pages stay findable until they are evicted.

    `free_pages` counts pages that no request holds: empty ones, and idle ones, whose content is
    still there. Idle pages are evicted only when no empty one is left, the longest idle first; a
    page is given back after those that follow it in the chain, so it never goes before them.
    """

    __slots__ = ("_idle", "_published", "_root")

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        super().__init__(total_pages, page_tokens)
        self._root = CachedPage(-1, None, ())
        self._published: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> None:
        """Bring `chain` up to date: the cached full pages that the first `tokens` begin with.

        Costs O(1) where nothing has changed since `chain` was found, O(pages that changed) else.
        """
        while chain and chain[-1].page < 0:
            chain.pop()
        node = chain[-1] if chain else self._root
        for index in range(len(chain), self._full_pages(prefix, tokens)):
            found = node.children.get(self._blocks(prefix, index))
            if found is None:
                return
            chain.append(found)
            node = found

    def hold(self, chain: Sequence[CachedPage]) -> list[int]:
        """Count one more holder of each page of a chain; return the page ids."""
        for node in chain:
            if node.holders:
                self.saved_pages += 1
            else:
                del self._idle[node.page]
                self.free_pages -= 1
            node.holders += 1
        return [node.page for node in chain]

    def publish(
        self, pages: list[int], chain: list[CachedPage], prefix: Prefix, tokens: int
    ) -> None:
        """Make the full pages of the first `tokens` tokens findable; `chain` are those that are.

        Where a page of the same content is known already, it takes the place of the one in `pages`,
        which becomes free: the same content is never there twice.
        """
        node = chain[-1] if chain else self._root
        for index in range(len(chain), self._full_pages(prefix, tokens)):
            blocks = self._blocks(prefix, index)
            known = node.children.get(blocks)
            if known is None:
                known = CachedPage(pages[index], node, blocks)
                node.children[blocks] = self._published[known.page] = known
            else:
                super().free([pages[index]])
                pages[index : index + 1] = self.hold([known])
            chain.append(known)
            node = known

    def allocate(self, count: int) -> list[int]:
        """Take `count` page ids, evicting idle pages as needed; ask `free_pages` first.

        Raises ValueError when fewer are free.
        """
        if count <= self.free_pages:
            for _ in range(count - self.free_pages + len(self._idle)):
                self._evict()
        return super().allocate(count)

    def free(self, pages: list[int]) -> None:
        """Give page ids back, the last first; published ones become idle with their last holder."""
        own = []
        for page in reversed(pages):
            node = self._published.get(page)
            if node is None:
                own.append(page)
                continue
            node.holders -= 1
            assert node.holders >= 0, f"page {page} has {node.holders} holders"
            if node.holders:
                self.saved_pages -= 1
            else:
                self._idle[page] = node
                self.free_pages += 1
        super().free(own)

    def _evict(self) -> None:
        page, node = self._idle.popitem(last=False)
        assert node.parent is not None
        del node.parent.children[node.blocks], self._published[page]
        node.page = -1
        self._free_ids.append(page)

    def _full_pages(self, prefix: Prefix, tokens: int) -> int:
        return min(tokens, prefix.tokens) // self.page_tokens

    def _blocks(self, prefix: Prefix, index: int) -> tuple[int, ...]:
        """Return the blocks that a page overlaps; with the pages before, they say what it holds."""
        start = index * self.page_tokens
        stop = start + self.page_tokens - 1
        return prefix.blocks[start // prefix.block_tokens : stop // prefix.block_tokens + 1]

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless every page is empty, idle or held, and counts its holders.

        `held` are the ids of all requests; a page that n of them share is there n times.
        """
        for page, node in self._published.items():
            assert node.page == page, f"page {page} is published as {node.page}"
            counts = f"page {page}: {node.holders} holders counted, {held.count(page)} hold it"
            assert node.holders == held.count(page), counts
            assert (page in self._idle) == (not node.holders), counts
        distinct = list(dict.fromkeys(held))
        shared = [page for page in held if page in self._published]
        assert self.saved_pages == len(shared) - len(set(shared)), f"{self.saved_pages} saved"
        assert len(held) - self.saved_pages == len(distinct), "an unpublished page is held twice"
        self.free_pages -= len(self._idle)
        try:
            super().check_integrity([*distinct, *self._idle])
        finally:
            self.free_pages += len(self._idle)
