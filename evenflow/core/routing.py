"""The router that divides requests among pipelines; the same in both worlds.

Knows the unfinished requests and the prefixes of each pipeline, not what is still in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from operator import attrgetter
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from evenflow.core.request import Request

Router = Literal["round_robin", "least_outstanding", "prefix_affinity"]
"""The pipeline of the next request: each in turn; the one with the fewest requests that are not
done, the first of equals; or one that was sent the longest part of its prefix before."""


class Target(Protocol):
    """A pipeline as a router sees it: its number of unfinished requests."""

    @property
    def outstanding(self) -> int: ...


Some = TypeVar("Some", bound=Target)


def router_of(router: Router, pipelines: Sequence[Some]) -> Callable[[Request], Some]:
    """Return the choice of a pipeline for each request, called in the order of arrivals."""
    if router == "round_robin":
        turns = cycle(pipelines)
        return lambda _: next(turns)
    if router == "least_outstanding":
        return lambda _: min(pipelines, key=attrgetter("outstanding"))
    return PrefixAffinity(pipelines).choose


class _Node(NamedTuple):
    """A block of content after the blocks above it, and the replicas that were sent it."""

    children: dict[int, _Node]
    replicas: set[int]


class PrefixAffinity(Generic[Some]):
    """Send a request where the longest part of its prompt's prefix was sent before.

    Of several pipelines the one with the fewest requests; of all where less than half of the prompt
    matches, so that a system prompt does not send all requests to one.
    """

    def __init__(self, pipelines: Sequence[Some]) -> None:
        self._pipelines = pipelines
        self._root = _Node({}, set(range(len(pipelines))))

    def choose(self, request: Request) -> Some:
        """Return the pipeline for a request, and remember that it was sent there."""
        node, blocks, matched = self._root, _prompt_blocks(request), 0
        while matched < len(blocks) and blocks[matched] in node.children:
            node = node.children[blocks[matched]]
            matched += 1
        candidates = node.replicas if 2 * matched >= len(blocks) else self._root.replicas
        chosen = min(sorted(candidates), key=lambda index: self._pipelines[index].outstanding)
        node = self._root
        for block in blocks:
            node = node.children.setdefault(block, _Node({}, set()))
            node.replicas.add(chosen)
        return self._pipelines[chosen]


def _prompt_blocks(request: Request) -> tuple[int, ...]:
    """Return the full blocks of the prompt."""
    if (prefix := request.prefix) is None:
        return ()
    return prefix.blocks[: min(request.prompt_tokens, prefix.tokens) // prefix.block_tokens]
