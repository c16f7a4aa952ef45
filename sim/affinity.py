"""Which replica was sent which prefix. Knows what was sent, not what is still in a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from evenflow.types import Request


class _Node:
    """A block of content after the blocks above it, and the replicas that were sent it."""

    __slots__ = ("children", "replicas")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.replicas: set[int] = set()


class PrefixAffinity:
    """Sends a request where the longest part of its prompt's prefix was sent before.

    Of several such replicas the one with the least load; and of all replicas where less than half
    of the prompt matches, so that a prefix that all requests share (a system prompt) does not send
    them all to one.
    """

    def __init__(self, replicas: int) -> None:
        self._root = _Node()
        self._root.replicas.update(range(replicas))

    def choose(self, request: Request, load: Callable[[int], int]) -> int:
        """Return the replica for a request, and remember that it was sent there."""
        node, blocks, matched = self._root, list(_prompt_blocks(request)), 0
        while matched < len(blocks) and blocks[matched] in node.children:
            node = node.children[blocks[matched]]
            matched += 1
        candidates = node.replicas if 2 * matched >= len(blocks) else self._root.replicas
        chosen = min(sorted(candidates), key=load)
        node = self._root
        for block in blocks:
            node = node.children.setdefault(block, _Node())
            node.replicas.add(chosen)
        return chosen


def _prompt_blocks(request: Request) -> Iterator[int]:
    """Iterate over the full blocks of the prompt."""
    if request.prefix is not None:
        full = min(request.prompt_tokens, request.prefix.tokens) // request.prefix.block_tokens
        yield from request.prefix.blocks[:full]
