"""The KV cache: free pages, the content of full pages, and the pages of each request."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, abc
from typing import Any

from evenflow.compiled import mypyc_attr
from evenflow.core.request import Prefix, Request


class CachedPage:
    """A node of the tree of cached pages: `page` is its id, -1 once evicted.

    `holders` counts the requests that use it now; `blocks` names its content.
    """

    __slots__ = ("blocks", "children", "holders", "page", "parent")

    def __init__(self, page: int, parent: CachedPage | None, blocks: tuple[int, ...]) -> None:
        self.page = page
        self.parent = parent
        self.blocks = blocks
        self.children: dict[tuple[int, ...], CachedPage] = {}
        self.holders = 1

    def leave(self) -> None:
        """Leave the tree."""
        assert self.parent is not None
        del self.parent.children[self.blocks]
        self.page = -1

    def num_held(self, chain: abc.Sequence[CachedPage]) -> int:
        """Count the pages of a chain that requests hold: a holder of one holds those before it."""
        return bisect_left(chain, True, key=lambda node: not node.holders)


class Holder:
    """A request as seen by the KV cache; it is waiting while it holds no `pages`.

    Of a waiting holder, the first `kept_tokens` need not be computed again. They are in the `chain`
    of cached pages (found while it waits, held from then on) or, `swapped_tokens`, on the host.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pages: list[int] = []
        self.chain: list[CachedPage] = []
        self.kept_tokens = self.swapped_tokens = 0


class PagePool:
    """A pool of page ids; an id means the same page on every stage.

    `free_pages` + the pages held by requests is always `total_pages`. Pages that were never used
    are counted, not listed. `saved_pages`: pages that requests would hold more without sharing.
    `keeps`: content can be found again. Here nothing is shared and no content is kept.
    """

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        if total_pages < 1 or page_tokens < 1:
            raise ValueError(
                f"a pool needs at least one page of one token, not {total_pages} x {page_tokens}"
            )
        self.total_pages = total_pages
        self.page_tokens = page_tokens
        self.free_pages = total_pages
        self.saved_pages = 0
        self.keeps = False
        self._free_ids: list[Any] = []  # numbers, which compiled code passes on unread
        self._unused = 0  # pages [_unused, total_pages) were never handed out

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill."""
        return -(-tokens // self.page_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` page ids; ValueError when fewer are free."""
        if count > self.free_pages:
            raise ValueError(f"{count} pages asked of {self.free_pages} free")
        self.free_pages -= count
        ids = self._free_ids
        if len(ids) < count:
            start = self._unused
            self._unused = start + count - len(ids)
            ids.extend(range(start, self._unused))
        if count == 1:
            return [ids.pop()]
        rest = len(ids) - count
        taken = ids[rest:]
        del ids[rest:]
        return taken

    def free(self, pages: list[int]) -> None:
        """Give page ids back."""
        self.free_pages += len(pages)
        self._free_ids += pages

    @property
    def empty_pages(self) -> int:
        """Free pages without content (here all of them)."""
        return self.free_pages

    def make_room(self, count: int) -> None:
        """Empty `count` pages, or as many as there are."""

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Update `chain`: cached full pages of the first `tokens`; return how many."""
        return 0

    def hold(self, chain: abc.Sequence[CachedPage]) -> list[int]:
        """Count one more holder of each page of a chain; return the page ids."""
        return []

    def publish(self, holder: Holder, prefix: Prefix, tokens: int) -> None:
        """Make the full pages of a holder's first `tokens` tokens findable."""


class PrefixCache(PagePool):
    """Page pool with a prefix cache: published pages stay findable until evicted.

    A page is known by its content and that of all pages before it: cached pages are a tree, and a
    lookup walks down from the root. `free_pages` counts pages that no request holds: empty ones,
    and idle ones with content. Idle pages are evicted when no empty one is left, the longest idle
    first. A page is given back after its successors, so it is never evicted before them.
    """

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        super().__init__(total_pages, page_tokens)
        self.keeps = True
        self._root = CachedPage(-1, None, ())
        self._published: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Update `chain`: the cached full pages of the first `tokens`; return how many.

        Costs O(1) where nothing has changed since `chain` was found, else O(pages that changed).
        """
        while chain and chain[-1].page < 0:
            chain.pop()
        node = chain[-1] if chain else self._root
        for index in range(len(chain), self._full_pages(prefix, tokens)):
            child = node.children.get(self._blocks(prefix, index))
            if child is None:
                break
            chain.append(child)
            node = child
        return len(chain)

    def hold(self, chain: abc.Sequence[CachedPage]) -> list[int]:
        """Count one more holder of each page of a chain; return the page ids."""
        for node in chain:
            if node.holders:
                self.saved_pages += 1
            else:
                del self._idle[node.page]
                self.free_pages -= 1
            node.holders += 1
        return [node.page for node in chain]

    def publish(self, holder: Holder, prefix: Prefix, tokens: int) -> None:
        """Make the full pages of a holder's first `tokens` findable, and put them into `chain`.

        A known page of the same content takes the place of the holder's, which becomes free: no
        content is there twice.
        """
        chain = holder.chain
        node = chain[-1] if chain else self._root
        for index in range(len(chain), self._full_pages(prefix, tokens)):
            blocks = self._blocks(prefix, index)
            known = node.children.get(blocks)
            if known is None:
                node = self._enter(holder.pages[index], node, blocks)
            else:
                node = self._share(holder.pages, index, known)
            chain.append(node)

    def _enter(self, page: int, parent: CachedPage, blocks: tuple[int, ...]) -> CachedPage:
        node = CachedPage(page, parent, blocks)
        parent.children[blocks] = self._published[page] = node
        return node

    def _share(self, pages: list[int], index: int, known: CachedPage) -> CachedPage:
        super().free([pages[index]])
        (pages[index],) = self.hold([known])
        return known

    def allocate(self, count: int) -> list[int]:
        """Take `count` page ids, evicting idle pages as needed; ValueError when fewer are free."""
        if count <= self.free_pages:
            self.make_room(count)
        return super().allocate(count)

    @property
    def empty_pages(self) -> int:
        """Free pages without content."""
        return self.free_pages - len(self._idle)

    def make_room(self, count: int) -> None:
        """Evict idle pages until `count` pages are empty, or none is idle."""
        while self._idle and self.empty_pages < count:
            self._evict()

    def free(self, pages: list[int]) -> None:
        """Give page ids back, the last first; published ones become idle with their last holder."""
        empty = []
        for page in reversed(pages):
            node = self._published.get(page)
            if node is None:
                empty.append(page)
                continue
            node.holders -= 1
            assert node.holders >= 0, f"page {page} has {node.holders} holders"
            if node.holders:
                self.saved_pages -= 1
            else:
                self._idle[page] = node
                self.free_pages += 1
        super().free(empty)

    def _evict(self) -> None:
        self._evict_page(next(iter(self._idle.values())))

    def _evict_page(self, node: CachedPage) -> None:
        page = node.page
        node.leave()
        del self._idle[page], self._published[page]
        self._free_ids.append(page)

    def _full_pages(self, prefix: Prefix, tokens: int) -> int:
        return min(tokens, prefix.tokens) // self.page_tokens

    def _blocks(self, prefix: Prefix, index: int) -> tuple[int, ...]:
        """Return the blocks that a page overlaps; with the pages before, they name its content."""
        start = index * self.page_tokens
        stop = start + self.page_tokens - 1
        return prefix.blocks[start // prefix.block_tokens : stop // prefix.block_tokens + 1]


@mypyc_attr(allow_interpreted_subclasses=True)
class KvCache:
    """Pages of a pool held by requests, with `tokens` tokens, shared ones counted per holder.

    `keeps`: KV that a waiting holder computed before may still be kept. `copies` are due (none).
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tokens = 0
        self.keeps = pool.keeps
        self.copies = 0

    @property
    def held_tokens(self) -> int:
        """Tokens that are computed and held; tokens of shared pages count once."""
        return self.tokens - self.pool.saved_pages * self.pool.page_tokens

    def look_up(self, holder: Holder, tokens: int) -> None:
        """Update `kept_tokens` of a waiting holder: the cached full pages of its `tokens`."""
        prefix = holder.request.prefix
        if prefix is not None:
            pages = self.pool.find(holder.chain, prefix, tokens)
            holder.kept_tokens = pages * self.pool.page_tokens

    def resume(self, holder: Holder) -> None:
        """Give a holder that stops waiting the cached pages of its chain."""
        holder.pages = self.pool.hold(holder.chain)

    def publish(self, holder: Holder, tokens: int) -> None:
        """Make a holder's full pages findable as far as `tokens` tokens have been scheduled."""
        prefix = holder.request.prefix
        if prefix is not None:
            self.pool.publish(holder, prefix, tokens)

    def suspend(self, holder: Holder, tokens: int) -> None:
        """Free the pages of a holder that will wait, in which `tokens` tokens are."""
        holder.chain = []
        holder.kept_tokens = 0
        self.release(holder, tokens)

    def release(self, holder: Holder, tokens: int) -> None:
        """Free all pages of a holder, in which `tokens` tokens are."""
        self.tokens -= tokens
        self.pool.free(holder.pages)
        holder.pages = []

    def charge(self, batch: Any) -> None:
        """Add to a MicroBatch the cost of the copies that are due."""
