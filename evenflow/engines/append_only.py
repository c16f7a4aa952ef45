"""A prefix cache in which requests keep the pages they got, as vLLM's."""

from __future__ import annotations

from collections import abc
from itertools import islice

from evenflow.core.kv import CachedPage, PrefixCache
from evenflow.core.request import Prefix


class TwinPage(CachedPage):
    """A tree node whose content lies on one or more pages.

    `twins`: the nodes of that content by page; a lookup finds the first, the oldest. They share
    `children`.
    """

    __slots__ = ("twins",)

    def __init__(self, page: int, parent: CachedPage | None, blocks: tuple[int, ...]) -> None:
        super().__init__(page, parent, blocks)
        self.twins: dict[int, TwinPage] = {page: self}

    def twin(self, page: int) -> TwinPage:
        """Return a node of the same content on another page."""
        other = TwinPage(page, self.parent, self.blocks)
        other.children = self.children
        other.twins = self.twins
        other.twins[page] = other
        return other

    def leave(self) -> None:
        """Leave the tree; lookups find the next oldest twin from now on."""
        parent = self.parent
        del self.twins[self.page]
        super().leave()
        assert parent is not None
        for oldest in islice(self.twins.values(), 1):
            parent.children[self.blocks] = oldest

    def num_held(self, chain: abc.Sequence[CachedPage]) -> int:
        """Count the pages of a chain that requests hold; holders of one may hold twins of those
        before.
        """
        return sum(node.holders > 0 for node in chain)


class AppendOnlyCache(PrefixCache):
    """A prefix cache in which several pages may hold the same content."""

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Find the cached full pages of the first `tokens` anew; return how many."""
        chain.clear()
        return super().find(chain, prefix, tokens)

    def _enter(self, page: int, parent: CachedPage, blocks: tuple[int, ...]) -> CachedPage:
        node = TwinPage(page, parent, blocks)
        parent.children[blocks] = self._published[page] = node
        return node

    def _share(self, pages: list[int], index: int, known: CachedPage) -> CachedPage:
        assert isinstance(known, TwinPage)
        node = self._published[pages[index]] = known.twin(pages[index])
        return node
