"""Disaggregated prefill and decode, on separate pools (DistServe, Splitwise), simulated or real.

The prefill pool computes a prompt: it serves it as a request of one token and keeps its pages. Its
KV crosses a link when the decode pool has room. The decode pool goes on with the second token. A
mixed pool computes prompts when many wait. It decodes what it prefilled or what the decode pool has
no room for. Each pool is an ordinary driver with an ordinary policy, which knows nothing of the
others. Here is what goes where; the owner of the pools has their clock. Does not know machines that
change pools, nor several engines in a pool.

One transfer uses the whole link. A prompt's KV sets out when the whole of it is there, not layer by
layer.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

import numpy as np

from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.core.world import World
from evenflow.engines.handover import Handover, PoolBatcher
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError
from evenflow.results.recorder import Blocks, Recorder
from evenflow.results.run import (
    TRANSFERS,
    Floats,
    Ints,
    RunResult,
    Transfers,
    gathered,
    of_pools,
)

# -- the link between pools -----------------------------------------------------------------------


class Clock(Protocol):
    """Make calls at given times of the run.

    `late`: after all arrivals and returns of that instant, before any policy is asked; `last`:
    after the `late` ones.
    """

    def late(self, time_s: float, call: Callable[[float], None]) -> None: ...
    def last(self, time_s: float, call: Callable[[float], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class TransferLink:
    """A link that is busy for `per_token_s` seconds a token of KV, which arrives `latency_s` later.

    `bytes_per_token` of KV over all layers; None: unknown, and then the link is only ideal.
    """

    per_token_s: float = 0.0
    latency_s: float = 0.0
    bytes_per_token: float | None = None

    def crossing(self, tokens: int) -> tuple[float, float]:
        """Return the seconds that KV of `tokens` tokens keeps it busy, and the latency after."""
        return self.per_token_s * tokens, self.latency_s


@dataclass(slots=True, eq=False)
class Transfer:
    """The KV of one request on its way from pool to pool (by their index), times in seconds."""

    handover: Handover
    source: int
    tokens: int
    ready_s: float
    destination: int = -1
    start_s: float = float("nan")
    end_s: float = float("nan")
    blocked_from_s: float | None = None
    link_busy_s: float = float("nan")

    @property
    def blocked_s(self) -> float:
        return 0.0 if self.blocked_from_s is None else self.start_s - self.blocked_from_s


class TransferQueue:
    """Send KV over one link, in the order in which it was queued.

    `place(transfer)` takes pages at a destination and returns its index. It returns None where no
    pool has room: the head then waits, and all behind it. `deliver(transfer, now_s)` is called at
    its end. `move`, if given, starts a real copy, at whose end `arrive` has to be called; without
    it the link's times count.
    """

    def __init__(
        self,
        clock: Clock,
        link: TransferLink,
        place: Callable[[Transfer], int | None],
        deliver: Callable[[Transfer, float], None],
        move: Callable[[Transfer], None] | None = None,
    ) -> None:
        self._clock = clock
        self._link = link
        self._place = place
        self._deliver = deliver
        self._move = move
        self._waiting: deque[Transfer] = deque()
        self._travelling: deque[Transfer] = deque()
        self._done: list[Transfer] = []
        self._told = 0
        self._link_free_s = 0.0
        self._try_at_s = -1.0

    def __len__(self) -> int:
        """Transfers that have not set out."""
        return len(self._waiting)

    def put(self, transfer: Transfer) -> None:
        """Queue KV that is ready now, before its pool's `changed`."""
        self._waiting.append(transfer)

    def poke(self, now_s: float) -> None:
        """Retry transfers, as there may be room, once all arrivals and returns of this instant are
        applied.
        """
        at_s = max(now_s, self._link_free_s)
        if self._waiting and self._try_at_s != at_s < inf:
            self._try_at_s = at_s
            self._clock.last(at_s, self._send)

    def _send(self, now_s: float) -> None:
        self._try_at_s = -1.0
        while self._waiting and self._link_free_s <= now_s:
            destination = self._place(self._waiting[0])
            if destination is None:
                if self._waiting[0].blocked_from_s is None:
                    self._waiting[0].blocked_from_s = now_s
                return
            self._set_out(self._waiting.popleft(), destination, now_s)
        self.poke(now_s)

    def _set_out(self, transfer: Transfer, destination: int, now_s: float) -> None:
        transfer.destination = destination
        transfer.start_s = now_s
        self._travelling.append(transfer)
        if self._move is not None:
            self._link_free_s = inf
            self._move(transfer)
            return
        transfer.link_busy_s, latency_s = self._link.crossing(transfer.tokens)
        self._link_free_s = now_s + transfer.link_busy_s
        self._clock.late(self._link_free_s + latency_s, self.arrive)

    def arrive(self, now_s: float) -> None:
        """Deliver the transfer that set out first."""
        transfer = self._travelling.popleft()
        transfer.end_s = now_s
        if self._link_free_s == inf:
            self._link_free_s, transfer.link_busy_s = now_s, now_s - transfer.start_s
        self._done.append(transfer)
        self._deliver(transfer, now_s)

    def columns(self) -> Transfers:
        """Return the completed transfers, in the order in which they set out."""
        return crossed(gathered(TRANSFERS, self._done), self._link.bytes_per_token)

    def news(self) -> dict[str, Any]:
        """Return the columns of transfers completed since the last call."""
        told, self._told = self._told, len(self._done)
        return gathered(TRANSFERS, self._done[told:])


def crossed(columns: Mapping[str, Any], bytes_per_token: float | None) -> Transfers:
    """Return transfers of these columns, and how many bytes each was; None: unknown."""
    sizes = None if bytes_per_token is None else columns["tokens"] * bytes_per_token
    return Transfers(**columns, bytes=sizes)


# -- the pools ------------------------------------------------------------------------------------

CROSSED = "transfer_"
"""Prefix of the columns of Transfers in a block that has columns of requests, too."""


@dataclass(frozen=True, slots=True)
class PooledWorld:
    """One simulation of a disaggregated system; `requests` and `concurrency` as in `World`.

    Each pool is a world that is given no requests. KV sets out when its destination has pages for
    it and a share `watermark` of its pages to spare. All of them count once nothing runs there. A
    prompt goes to the mixed pool when more than `borrow_tokens` prompt tokens wait in the prefill
    pool. Fewer have to wait in the mixed one.
    """

    requests: abc.Sequence[Request]
    prefill: World
    decode: World
    mixed: World | None = None
    link: TransferLink = field(default_factory=TransferLink)
    watermark: float = 0.01
    borrow_tokens: int = 2048
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for pool in self.pools:
            if (pool.virtual_engines, pool.replicas) != (1, 1):
                raise ValueError(f"a pool is one engine, not {pool.virtual_engines}")

    @property
    def shares_link(self) -> bool:
        """Whether the hops between the stages of a pool queue for one link."""
        return any(pool.shares_link for pool in self.pools)

    @property
    def pools(self) -> tuple[World, ...]:
        """The pools, in order."""
        return (self.prefill, self.decode) + (() if self.mixed is None else (self.mixed,))


class Pool(Protocol):
    """One pool of a system: its engine, and the engine's driver.

    `record` counts a request as served here. `changed` says that something happened, and pokes the
    transfers. `adopt` continues a request once its KV is there.
    """

    engine: PoolBatcher

    def record(self, seq: Sequence) -> None: ...
    def changed(self, now_s: float) -> None: ...
    def adopt(self, request_id: int, now_s: float) -> None: ...
    def result(self) -> RunResult: ...


PoolOf = Callable[[str], Pool]
"""Makes the pool of a name; all but `decode` keep a finished request's pages until its KV moved."""


def whole(
    requests: Recorder, pools: abc.Mapping[str, RunResult], transfers: Transfers
) -> RunResult:
    """Return the result of a system, as `of_pools` does.

    Where KV came from another pool, that is when its request arrived.
    """
    came = (transfers.destination == index for index in range(len(pools)))
    seen = {
        name: _arrived(pool, transfers.request_id[those], transfers.end_s[those])
        for (name, pool), those in zip(pools.items(), came, strict=True)
    }
    page_tokens = pools["decode"].page_tokens
    facts: dict[str, Any] = {"max_in_flight": None, "total_pages": 0, "page_tokens": page_tokens}
    return of_pools(requests.result(gap_s=(), gap_count=(), **facts), seen, transfers)


def recovered(
    blocks: Blocks, pools: abc.Mapping[str, RunResult], bytes_per_token: float | None
) -> RunResult:
    """Return the result of a system from the `blocks` that `Pools.flush` wrote."""
    requests = Recorder(1, blocks)
    names = (name for name, column in TRANSFERS.items() if column.path is not None)
    columns = {name: requests.column(CROSSED + name) for name in names}
    return whole(requests, pools, crossed(columns, bytes_per_token))


def _arrived(pool: RunResult, request_id: Ints, end_s: Floats) -> RunResult:
    arrived_s = dict(zip(request_id.tolist(), end_s.tolist(), strict=True))
    requests = zip(pool.request_id.tolist(), pool.arrival_s.tolist(), strict=True)
    arrival_s = np.array([arrived_s.get(*request) for request in requests])
    return replace(
        pool,
        arrival_s=arrival_s,
        first_scheduled_s=np.maximum(pool.first_scheduled_s, arrival_s),
        first_token_s=np.maximum(pool.first_token_s, arrival_s),
    )


class Pools:
    """Route requests to pools, and computed KV from one pool to the next.

    `on_done` is called with the number of requests done. `move` brings the KV of a request to its
    destination, and has `transfers.arrive` called there. None: its link says when that is.
    `blocks`: where `flush` puts what the clients have.
    """

    def __init__(
        self,
        world: PooledWorld,
        clock: Clock,
        pool_of: PoolOf,
        on_done: Callable[[int], None] | None = None,
        move: Callable[[Transfer], None] | None = None,
        *,
        blocks: Blocks | None = None,
    ) -> None:
        self._world = world
        self._on_done = on_done
        self._replace_done: Callable[[int], None] | None = None
        self._served: dict[int, Request] = {}  # as the client sent them
        self._requests = Recorder(1, blocks)  # of requests only: micro-batches are the pools'
        self.transfers = TransferQueue(clock, world.link, self._place, self._deliver, move)
        names = ["prefill", *(["mixed"] if world.mixed is not None else []), "decode"]
        self.pools = {name: pool_of(name) for name in names}
        for name, pool in self.pools.items():
            _require_no_turns(name, pool.engine)
        self._decode, self._mixed = self.pools["decode"], self.pools.get("mixed")
        self._order = list(self.pools.values())
        self._prefilling = self._order[:-1]
        self._decoding = [self._decode, *self._prefilling[1:]]

    def result(self) -> RunResult:
        """Return what happened so far, pool by pool and merged."""
        parts = {name: pool.result() for name, pool in self.pools.items()}
        return whole(self._requests, parts, self.transfers.columns())

    def flush(self, now_s: float) -> None:
        """Write the clients' tokens and the completed transfers to the recorder's blocks."""
        columns = {f"{CROSSED}{name}": column for name, column in self.transfers.news().items()}
        self._requests.flush((), (), {**columns, "flushed_s": np.array([now_s])})

    @property
    def num_done(self) -> int:
        """Number of ended requests: finished or rejected."""
        return self._requests.num_done

    # -- arrivals ---------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._served)

    def when_done(self, call: Callable[[int], None]) -> None:
        """Have `call` called with how many requests are done, whenever some are."""
        self._replace_done = call

    def admit(self, request: Request) -> bool:
        """Give an arrival to a pool that prefills, or refuse it; say whether it is served."""
        prompt = replace(request, output_tokens=1)
        reason = _refusal("prefill", self._prefilling, prompt)
        if reason is None and request.output_tokens > 1:
            reason = _refusal("decode", self._decoding, request)
        if reason is not None:
            self._requests.reject(request, reason)
            return False
        self._served[request.request_id] = request
        takers = [pool for pool in self._prefilling if pool.engine.refusal(prompt) is None]
        self._route(takers).engine.add(prompt)
        return True

    def _route(self, pools: abc.Sequence[Pool]) -> Pool:
        """Choose among the pools that could prefill: the first, unless its queue is too long."""
        first, last = pools[0], pools[-1]
        ahead, behind = (pool.engine.queues.waiting_tokens for pool in (first, last))
        if ahead > self._world.borrow_tokens:
            return last if behind < ahead else first
        return first

    def changed(self, now_s: float, but: Pool | None = None) -> None:
        """Ask the pools that prefill for new prompts, save one that is asked anyway."""
        for pool in self._prefilling:
            if pool is not but:
                pool.changed(now_s)

    # -- from pool to pool ------------------------------------------------------------------------

    def finished(self, pool: Pool, sequences: list[Sequence], now_s: float) -> None:
        """End requests that a pool has finished, or queue their KV for the next pool."""
        ended = 0
        for seq in sequences:
            if seq.generated >= self._served[seq.request.request_id].output_tokens:
                self._end(pool, seq)
                ended += 1
            else:
                self._hand_over(pool, seq, now_s)
        if not ended:
            return
        if self._replace_done is not None:
            self._replace_done(ended)
            self.changed(now_s, but=pool)
        if self._on_done is not None:
            self._on_done(self._requests.num_done)

    def _end(self, pool: Pool, seq: Sequence) -> None:
        request_id = seq.request.request_id
        if pool.engine.keeps_pages:
            pool.engine.release(request_id)
        del self._served[request_id]
        pool.record(seq)
        self._requests.finish([seq])

    def _hand_over(self, pool: Pool, seq: Sequence, now_s: float) -> None:
        request = self._served[seq.request.request_id]
        handover = Handover.of(seq, request)
        if pool is self._mixed and self._stays(pool, handover):
            pool.engine.reserve(handover)
            pool.adopt(request.request_id, now_s)
            return
        pool.record(seq)
        pages = pool.engine.pool
        tokens = pages.pages_for(handover.context_tokens) * pages.page_tokens
        self.transfers.put(Transfer(handover, self._order.index(pool), tokens, now_s))

    def _stays(self, pool: Pool, handover: Handover) -> bool:
        """Say whether the mixed pool also decodes what it prefilled: no other has room now."""
        if pool.engine.refusal(handover.request) is not None:
            return False
        return bool(len(self.transfers)) or not self._takes(self._decode, handover)

    def _takes(self, pool: Pool, handover: Handover) -> bool:
        engine = pool.engine
        spare_pages = int(self._world.watermark * engine.pool.total_pages)
        if not engine.has_room(handover.context_tokens, spare_pages):
            return False
        return engine.refusal(handover.request) is None

    def _place(self, transfer: Transfer) -> int | None:
        """Allocate pages for KV in the first pool that has room; return its index."""
        for pool in self._decoding:
            index = self._order.index(pool)
            if index != transfer.source and self._takes(pool, transfer.handover):
                pool.engine.reserve(transfer.handover)
                return index
        return None

    def _deliver(self, transfer: Transfer, now_s: float) -> None:
        """Complete a transfer: free the source's pages; the request decodes from here on."""
        request_id = transfer.handover.request.request_id
        source, destination = (
            self._order[index] for index in (transfer.source, transfer.destination)
        )
        source.engine.release(request_id)
        destination.adopt(request_id, now_s)
        self.transfers.poke(now_s)
        source.changed(now_s)
        destination.changed(now_s)


def _require_no_turns(name: str, engine: PoolBatcher) -> None:
    """Raise UsageError for a policy that waits in questions: a pool is not asked while KV moves."""
    rules = EngineRules.of(engine.scheduler)
    if rules.ahead is not None or rules.slotted:
        raise UsageError(
            f"{name} pool: policy {engine.policy_name} counts the questions that it is asked, "
            "and a pool is asked none while KV moves; sarathi, or vllm_v1 with "
            "async_scheduling: false, is right"
        )


def _refusal(name: str, pools: abc.Sequence[Pool], request: Request) -> str | None:
    """Return why none of these pools could serve a request, by the first of them; else None."""
    refusals = [pool.engine.refusal(request) for pool in pools]
    return None if None in refusals else f"{name} pool: {refusals[0]}"
