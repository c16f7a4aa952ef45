"""The KV cache: which pages are free, what full pages hold, and what of it each request has.

A `PagePool` hands out pages; in a `PrefixCache` full pages of known content are found again and
shared; a `KvCache` gives them to holders, and keeps what it can of a holder that loses its pages.
Knows no queue and no policy: who is admitted or preempted is not decided here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, abc
from dataclasses import dataclass, field
from itertools import islice

from evenflow.core.request import Prefix, Request


class PagePool:
    """Hands out page ids; an id means the same page on every stage.

    `free_pages` + the pages held by requests is always `total_pages`. Pages that were never used
    are counted, not listed, so a pool of a million pages costs no more than a pool of ten thousand.
    `saved_pages`: what requests that share pages would hold more without sharing (here none do).
    """

    __slots__ = ("_free_ids", "_unused", "free_pages", "page_tokens", "saved_pages", "total_pages")

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        if total_pages < 1 or page_tokens < 1:
            raise ValueError(
                f"a pool needs at least one page of one token, not {total_pages} x {page_tokens}"
            )
        self.total_pages = total_pages
        self.page_tokens = page_tokens
        self.free_pages = total_pages
        self.saved_pages = 0
        self._free_ids: list[int] = []
        self._unused = 0  # pages [_unused, total_pages) were never handed out

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill."""
        return -(-tokens // self.page_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take `count` page ids; ask `free_pages` first.

        Raises ValueError when fewer are free.
        """
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

    @property
    def empty_pages(self) -> int:
        """Free pages without content (here all of them)."""
        return self.free_pages

    def make_room(self, count: int) -> None:
        """Empty as many pages as there are of `count`."""

    def free(self, pages: list[int]) -> None:
        """Give page ids back."""
        self.free_pages += len(pages)
        self._free_ids += pages

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless the `held` ids and the free ones are all pages, once each."""
        free = [*self._free_ids, *range(self._unused, self.total_pages)]
        counts = f"{self.free_pages} free, {len(held)} held, {self.total_pages} in all"
        assert len(free) == self.free_pages, counts
        assert len(free) + len(held) == self.total_pages, counts
        assert len(set(free).union(held)) == self.total_pages, counts


class CachedPage:
    """A node of the tree. `page` is its id, -1 once evicted; `holders` requests use it now.

    `twins`, where there may be any, are all nodes of its content by page, the oldest first, which
    is the one that is found; they share `children`.
    """

    __slots__ = ("blocks", "children", "holders", "page", "parent", "twins")

    def __init__(self, page: int, parent: CachedPage | None, blocks: tuple[int, ...]) -> None:
        self.page = page
        self.parent = parent
        self.blocks = blocks
        self.children: dict[tuple[int, ...], CachedPage] = {}
        self.twins: dict[int, CachedPage] | None = None
        self.holders = 1

    def twin(self, page: int) -> CachedPage:
        """Return a node of the same content on another page."""
        other = CachedPage(page, self.parent, self.blocks)
        other.children = self.children
        assert self.twins is not None
        other.twins = self.twins
        other.twins[page] = other
        return other

    def evicted(self) -> None:
        """Leave the tree; the next of the twins is found from now on."""
        assert self.parent is not None
        del self.parent.children[self.blocks]
        if self.twins is not None:
            del self.twins[self.page]
            for oldest in islice(self.twins.values(), 1):
                self.parent.children[self.blocks] = oldest
        self.page = -1


def pages_in_use(chain: abc.Sequence[CachedPage]) -> int:
    """Return how many pages of a chain requests hold.

    Who holds one holds those before it, or twins of them.
    """
    if chain and chain[0].twins is not None:
        return sum(node.holders > 0 for node in chain)
    return bisect_left(chain, True, key=lambda node: not node.holders)


@dataclass(slots=True, eq=False)
class Holder:
    """A request as the KV cache knows it; it "waits" while it holds no `pages`.

    Of a holder that waits, `kept_tokens` counts the leading tokens that need not be computed again:
    they are in the `chain` of cached pages (found while it waits, held from then on) or,
    `swapped_tokens` of them, on the host.
    """

    request: Request
    pages: list[int] = field(default_factory=list, kw_only=True)
    chain: list[CachedPage] = field(default_factory=list, kw_only=True)
    kept_tokens: int = field(default=0, kw_only=True)
    swapped_tokens: int = field(default=0, kw_only=True)


class PrefixCache(PagePool):
    """A pool whose published pages stay findable until they are evicted.

    A page is known by its content and that of all pages before it: the cached pages are a tree, and
    a prompt is looked up by walking down from the root (the hash chain of serving engines, without
    the collisions). Whether a page has been computed yet is not known here.
    `free_pages` counts pages that no request holds: empty ones, and idle ones, whose content is
    still there. Idle pages are evicted only when no empty one is left, the longest idle first; a
    page is given back after those that follow it in the chain, so it never goes before them.
    `append_only`: a request keeps the pages it got, so the same content may be there several times.
    """

    __slots__ = ("_idle", "_published", "_root", "append_only")

    late = False
    """Whether content enters once it is computed; else it is known from when it is scheduled."""

    def __init__(
        self, total_pages: int, page_tokens: int = 16, *, append_only: bool = False
    ) -> None:
        super().__init__(total_pages, page_tokens)
        self.append_only = append_only
        self._root = CachedPage(-1, None, ())
        self._published: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Bring `chain` up to date: the cached full pages that the first `tokens` begin with.

        Return how many there are. Costs O(1) where nothing has changed since `chain` was found,
        O(pages that changed) else.
        """
        while chain and (chain[-1].page < 0 or self.append_only):
            chain.pop()
        node = chain[-1] if chain else self._root
        for index in range(len(chain), self._full_pages(prefix, tokens)):
            found = node.children.get(self._blocks(prefix, index))
            if found is None:
                break
            chain.append(found)
            node = found
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
        """Make the full pages of the first `tokens` tokens findable; in `chain` are those that are.

        Where a page of the same content is known already, it takes the place of the holder's, which
        becomes free: the same content is never there twice, unless pages are append-only.
        """
        pages, chain = holder.pages, holder.chain
        node = chain[-1] if chain else self._root
        for index in range(len(chain), self._full_pages(prefix, tokens)):
            blocks = self._blocks(prefix, index)
            known = node.children.get(blocks)
            if known is None:
                known = CachedPage(pages[index], node, blocks)
                node.children[blocks] = self._published[known.page] = known
                if self.append_only:
                    known.twins = {known.page: known}
            elif self.append_only:
                known = self._published[pages[index]] = known.twin(pages[index])
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
        self._evict_page(next(iter(self._idle.values())))

    def _evict_page(self, node: CachedPage) -> None:
        page = node.page
        node.evicted()
        del self._idle[page], self._published[page]
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


class KvCache:
    """The pages of a pool in the hands of holders, and what is kept of those that wait.

    Two places keep it: pages of the pool that are findable by content, if `pool` is a PrefixCache,
    and with `swap` a copy on the host, which has no limit. `keeps`: whether either does. `tokens`
    are computed and held, shared ones once for each holder. Copies to and from the host are summed
    up until they are taken.
    """

    __slots__ = (
        "_cache",
        "_swapped_pages",
        "_swapped_rows",
        "append_only",
        "keeps",
        "late",
        "pool",
        "swap",
        "tokens",
    )

    def __init__(self, pool: PagePool, *, swap: bool = False) -> None:
        self.pool = pool
        self.swap = swap
        self.tokens = 0
        self._cache = pool if isinstance(pool, PrefixCache) else None
        self.keeps = self._cache is not None or swap
        self.late = self._cache is not None and self._cache.late
        self.append_only = self._cache is not None and self._cache.append_only
        self._swapped_rows = self._swapped_pages = 0

    @property
    def held_tokens(self) -> int:
        """Tokens that are computed and held, those of shared pages once."""
        return self.tokens - self.pool.saved_pages * self.pool.page_tokens

    def release(self, holder: Holder, tokens: int) -> None:
        """Free all pages of a holder, in which `tokens` tokens are."""
        self.tokens -= tokens
        self.pool.free(holder.pages)
        holder.pages = []

    def look_up(self, holder: Holder, tokens: int) -> None:
        """Update what is kept of a holder that waits: full pages that its `tokens` begin with."""
        prefix = holder.request.prefix
        if self._cache is None or prefix is None or holder.swapped_tokens:
            return
        pages = self._cache.find(holder.chain, prefix, tokens)
        holder.kept_tokens = pages * self._cache.page_tokens

    def use(self, holder: Holder, tokens: int) -> int:
        """Return how many of a holder's first `tokens` are cached; they are used by this."""
        prefix = holder.request.prefix
        if self._cache is None or prefix is None:
            return 0
        return self._cache.find([], prefix, tokens) * self._cache.page_tokens

    def resume(self, holder: Holder) -> None:
        """Give a holder that stops waiting the cached pages, or order its copy from the host."""
        if holder.swapped_tokens:
            self._copy(holder.swapped_tokens)
            holder.swapped_tokens = 0
        elif holder.chain and self._cache is not None:
            holder.pages = self._cache.hold(holder.chain)

    def publish(self, holder: Holder, tokens: int) -> None:
        """Make a holder's full pages findable as far as `tokens` tokens have been scheduled."""
        prefix = holder.request.prefix
        if self._cache is not None and prefix is not None:
            self._cache.publish(holder, prefix, tokens)

    def suspend(self, holder: Holder, tokens: int) -> None:
        """Free the pages of a holder that will wait; keep what it can of the `tokens` in them."""
        if not (self.late or self.append_only):
            self.publish(holder, tokens)
        holder.chain = []
        holder.kept_tokens = 0
        if self.swap:
            self._copy(tokens)
            holder.kept_tokens = holder.swapped_tokens = tokens
        self.release(holder, tokens)

    def take_copies(self) -> tuple[int, int]:
        """Return the holders and pages copied since the last call."""
        copies = self._swapped_rows, self._swapped_pages
        self._swapped_rows = self._swapped_pages = 0
        return copies

    def _copy(self, tokens: int) -> None:
        self._swapped_rows += 1
        self._swapped_pages += self.pool.pages_for(tokens)


@dataclass(slots=True, eq=False)
class Run:
    """Pages that follow one another in the tree of a `RadixCache`, and when they were last used."""

    pages: list[CachedPage]
    used: tuple[int, int]

    @property
    def is_idle_leaf(self) -> bool:
        return not self.pages[-1].children and not self.pages[-1].holders


class RadixCache(PrefixCache):
    """A prefix cache that evicts the leaf that was used least recently, as a whole.

    Source: SGLang 0.5.23 (its UnifiedRadixCache). Who holds what, and what is found, is as in a
    `PrefixCache`; what is pushed out is not.

    To look a prompt up is to use what it begins with. A run is split where a prompt was found to
    begin with a part of it, where another goes on differently, and where a prompt ends whose output
    is in it. Content enters when it has been computed (`late`): chunk by chunk, and output at the
    end of its request.
    """

    __slots__ = ("_run_of", "_runs", "_uses")

    late = True

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        super().__init__(total_pages, page_tokens)
        self._runs: dict[Run, None] = {}
        self._run_of: dict[int, Run] = {}
        self._uses = 0

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Bring `chain` up to date, as a PrefixCache does; what is found is used now."""
        chain.clear()
        pages = super().find(chain, prefix, tokens)
        runs = list(self._along(chain))
        self._uses += 1
        for distance, run in enumerate(reversed(runs)):
            run.used = self._uses, -distance
        return pages

    def publish(self, holder: Holder, prefix: Prefix, tokens: int) -> None:
        """Make the full pages of the first `tokens` tokens findable; all of them are used now."""
        super().publish(holder, prefix, tokens)
        self._use(holder.chain)
        prompt_pages = self._full_pages(prefix, holder.request.prompt_tokens)
        if prompt_pages < len(holder.chain):
            self._use(holder.chain[:prompt_pages])

    def _use(self, chain: abc.Sequence[CachedPage]) -> None:
        for run in self._along(chain):
            run.used = self._next_use()
        new = [node for node in chain if node.page not in self._run_of]
        if new:
            self._add(Run(new, self._next_use()))

    def _along(self, chain: abc.Sequence[CachedPage]) -> abc.Iterator[Run]:
        """Iterate over the runs of a path, the last of them split where the path leaves it."""
        start = 0
        while start < len(chain) and (run := self._run_of.get(chain[start].page)) is not None:
            stop = start + len(run.pages)
            path = chain[start:stop]
            same = next(
                (at for at, page in enumerate(path) if page is not run.pages[at]), len(path)
            )
            if same < len(run.pages):
                run = self._split(run, same)
            yield run
            start += same

    def _split(self, run: Run, count: int) -> Run:
        """Let the first pages of a run be one of their own; return it."""
        first = Run(run.pages[:count], self._next_use())
        run.pages = run.pages[count:]
        run.used = self._next_use()
        self._add(first)
        return first

    def _add(self, run: Run) -> None:
        self._runs[run] = None
        self._run_of.update((node.page, run) for node in run.pages)

    def _next_use(self) -> tuple[int, int]:
        self._uses += 1
        return self._uses, 0

    def _evict(self) -> None:
        victim = min((run for run in self._runs if run.is_idle_leaf), key=_last_use)
        del self._runs[victim]
        for node in reversed(victim.pages):
            del self._run_of[node.page]
            self._evict_page(node)


def _last_use(run: Run) -> tuple[int, int]:
    return run.used
