"""A prefix cache as a radix tree, as SGLang's."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from evenflow.core.kv import CachedPage, Holder, PrefixCache
from evenflow.core.request import Prefix


@dataclass(slots=True, eq=False)
class TreeNode:
    """Pages that follow one another in the tree of a `RadixCache`; `used` orders last uses."""

    pages: list[CachedPage]
    used: tuple[int, int]

    @property
    def is_idle_leaf(self) -> bool:
        return not self.pages[-1].children and not self.pages[-1].holders


class RadixCache(PrefixCache):
    """A prefix cache that evicts the leaf that was used least recently, as a whole.

    Source: SGLang 0.5.23 (its UnifiedRadixCache). Pages are held and found as in a `PrefixCache`,
    but evicted by node. A lookup is a use of what it finds. A node is split where a lookup ends in
    it, or another prompt goes on differently. So it is where a prompt ends whose output is in it.
    `pairs`: tokens are known with the one after each, as where EAGLE proposes tokens.
    """

    pairs: bool = False

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        super().__init__(total_pages, page_tokens)
        self._nodes: dict[TreeNode, None] = {}
        self._node_of: dict[int, TreeNode] = {}
        self._uses = 0

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Update `chain`, as a PrefixCache does; what is found is used now."""
        chain.clear()
        pages = super().find(chain, prefix, tokens)
        nodes = list(self._along(chain))
        self._uses += 1
        for distance, node in enumerate(reversed(nodes)):
            node.used = self._uses, -distance
        return pages

    def publish(self, holder: Holder, prefix: Prefix, tokens: int) -> None:
        """Make the full pages of the first `tokens` tokens findable; all of them are used now."""
        super().publish(holder, prefix, tokens)
        self._use(holder.chain)
        prompt_pages = self._full_pages(prefix, holder.request.prompt_tokens)
        if prompt_pages < len(holder.chain):
            self._use(holder.chain[:prompt_pages])

    def _full_pages(self, prefix: Prefix, tokens: int) -> int:
        return (min(tokens, prefix.tokens) - self.pairs) // self.page_tokens

    def _blocks(self, prefix: Prefix, index: int) -> tuple[int, ...]:
        if not self.pairs:
            return super()._blocks(prefix, index)
        start, size = index * self.page_tokens, prefix.block_tokens
        return prefix.blocks[start // size : (start + self.page_tokens) // size + 1]

    def _use(self, chain: abc.Sequence[CachedPage]) -> None:
        for node in self._along(chain):
            node.used = self._next_use()
        new = [page for page in chain if page.page not in self._node_of]
        if new:
            self._add(TreeNode(new, self._next_use()))

    def _along(self, chain: abc.Sequence[CachedPage]) -> abc.Iterator[TreeNode]:
        """Iterate over the nodes of a path, the last of them split where the path leaves it."""
        start = 0
        while start < len(chain) and (node := self._node_of.get(chain[start].page)) is not None:
            path = chain[start : start + len(node.pages)]
            same = next(
                (at for at, page in enumerate(path) if page is not node.pages[at]), len(path)
            )
            if same < len(node.pages):
                node = self._split(node, same)
            yield node
            start += same

    def _split(self, node: TreeNode, count: int) -> TreeNode:
        """Move the first pages of a node into a node before it; return that."""
        first = TreeNode(node.pages[:count], self._next_use())
        node.pages = node.pages[count:]
        node.used = self._next_use()
        self._add(first)
        return first

    def _add(self, node: TreeNode) -> None:
        self._nodes[node] = None
        self._node_of.update((page.page, node) for page in node.pages)

    def _next_use(self) -> tuple[int, int]:
        self._uses += 1
        return self._uses, 0

    def _evict(self) -> None:
        victim = min(
            (node for node in self._nodes if node.is_idle_leaf), key=lambda node: node.used
        )
        del self._nodes[victim]
        for page in reversed(victim.pages):
            del self._node_of[page.page]
            self._evict_page(page)
