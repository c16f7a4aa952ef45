"""Paged KV cache: which page ids are free. Knows neither requests nor policies."""

from __future__ import annotations


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
        if count == 0:
            return []
        taken = ids[-count:]
        del ids[-count:]
        return taken

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
