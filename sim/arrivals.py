"""How requests come in: at their times, or in a closed loop, each at one of several pipelines.

Knows when and where a request enters, and so which replica was sent which prefix; nothing of what
happens to it there, nor what is still in a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Protocol

from simpy import Event

from evenflow.request import Request
from evenflow.world import Router
from sim.clock import Clock


class Entrance(Protocol):
    """A pipeline, as seen from its front door."""

    @property
    def outstanding(self) -> int:
        """Requests that are there and not done."""
        ...

    def admit(self, request: Request) -> bool:
        """Take an arrival; say whether it is served (or else rejected)."""
        ...

    def changed(self, now_s: float) -> None:
        """Hear that everything that arrives now is there."""
        ...

    def when_done(self, call: Callable[[int], None]) -> None:
        """Have `call` called with how many requests are done, whenever some are."""
        ...


class Arrivals:
    """Lets `requests` in. `concurrency`: only as many at once; each that ends lets in the next."""

    def __init__(
        self,
        clock: Clock,
        requests: Sequence[Request],
        concurrency: int | None,
        pipelines: Sequence[Entrance],
        router: Router = "round_robin",
    ) -> None:
        self._clock = clock
        self._backlog = deque(requests)  # not yet arrived
        self._concurrency = concurrency
        self._choose = _chooser(router, pipelines)
        if concurrency is not None:
            for pipeline in pipelines:
                pipeline.when_done(self._replacer(pipeline))
        clock.process(self._come())

    def _come(self) -> Generator[Event, None, None]:
        clock, backlog = self._clock, self._backlog
        if self._concurrency is not None:
            self._tell(self._let_in(self._concurrency))
            return
        while backlog:
            if backlog[0].arrival_s > clock.now:
                yield clock.until(backlog[0].arrival_s)
            entered = []
            while backlog and backlog[0].arrival_s <= clock.now:
                request = backlog.popleft()
                entered.append(self._choose(request))
                entered[-1].admit(request)
            self._tell(entered)

    def _let_in(self, count: int) -> list[Entrance]:
        """Let in as many as can be served; return where requests entered."""
        entered = []
        while count > 0 and self._backlog:
            request = replace(self._backlog.popleft(), arrival_s=self._clock.now)
            entered.append(self._choose(request))
            count -= entered[-1].admit(request)
        return entered

    def _tell(self, entered: Sequence[Entrance]) -> None:
        for pipeline in dict.fromkeys(entered):
            pipeline.changed(self._clock.now)

    def _replacer(self, left: Entrance) -> Callable[[int], None]:
        # The pipeline that a request leaves asks its policy anyway, and must ask only once.
        def replace_done(count: int) -> None:
            self._tell([entrance for entrance in self._let_in(count) if entrance is not left])

        return replace_done


def _chooser(router: Router, pipelines: Sequence[Entrance]) -> Callable[[Request], Entrance]:
    if router == "round_robin":
        turns = cycle(pipelines)
        return lambda _: next(turns)
    if router == "least_outstanding":
        return lambda _: min(pipelines, key=_load)
    affinity = PrefixAffinity(len(pipelines))

    def choose(request: Request) -> Entrance:
        index = affinity.choose(request, lambda index: pipelines[index].outstanding)
        return pipelines[index]

    return choose


def _load(pipeline: Entrance) -> int:
    return pipeline.outstanding


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
