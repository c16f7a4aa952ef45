"""Orders about the queue and the pages, between the plans of an answer in parts."""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass

from evenflow.core.batcher import Batcher
from evenflow.core.queues import Queues
from evenflow.core.scheduling import Action
from evenflow.engines.queues import EngineQueues


@dataclass(frozen=True, kw_only=True)
class Upkeep(Action):
    """Orders about the queue and the pages, carried out in this order.

    `give_up`: a request that ends early, as pages do not suffice. `waiting`: the new order of the
    waiting requests; None: as it is. `hold`: waiting requests that take hold of their cached pages.
    `rows`: the order of a slot's decodes. `empty_pages`: cached pages are evicted until that many
    are empty, or none is left to evict.
    """

    give_up: int | None = None
    waiting: abc.Sequence[int] = ()
    hold: abc.Sequence[int] = ()
    rows: abc.Sequence[int] = ()
    empty_pages: int = 0

    def apply(self, batcher: Batcher) -> None:
        """Carry it out on the Batcher."""
        if self.give_up is not None:
            seq = batcher.preemptible(self.give_up)
            batcher.queues.abort(seq)
            batcher.given_up.append(seq)
        if self.waiting:
            reorder(batcher.queues, self.waiting)
        batcher.queues.resume(map(batcher.served, self.hold))
        if self.rows and isinstance(batcher.queues, EngineQueues):
            batcher.queues.order_rows([batcher.queues.live[number] for number in self.rows])
        batcher.pool.make_room(self.empty_pages)


@dataclass(frozen=True)
class Take(Action):
    """Requests get pages for their next tokens; full pages enter the prefix cache, computed or not.

    Source: vLLM, which may preempt what it has scheduled in the same step.
    """

    tokens: abc.Mapping[int, int]
    """Of each request."""

    def apply(self, batcher: Batcher) -> None:
        """Carry it out on the Batcher."""
        assert isinstance(batcher.queues, EngineQueues)
        for request_id, tokens in self.tokens.items():
            batcher.queues.take_pages(batcher.preemptible(request_id), tokens)


def reorder(queues: Queues, request_ids: abc.Iterable[int]) -> None:
    """Put the waiting sequences into another order; ValueError unless it names all of them."""
    waiting = [queues.live[request_id] for request_id in request_ids]
    if {*waiting} != {*queues.waiting} or len(waiting) != len(queues.waiting):
        raise ValueError("another order names all that wait, once each")
    queues.waiting = deque(waiting)
