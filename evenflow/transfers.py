"""The link between pools: KV crosses it first come first served, when there is room for it.

Knows when KV may set out and when it arrives. Does not know pages: whoever it is given finds room.
One transfer uses the whole link; a prompt's KV sets out when the whole of it is there, not layer by
layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from evenflow.request import Handover
from evenflow.results.run import TRANSFERS, Transfers, gathered


class Clock(Protocol):
    """Makes calls at times of the run.

    `late`: after all else that happens at that instant, before any policy is asked.
    """

    def at(self, time_s: float, call: Callable[[float], None]) -> None: ...
    def late(self, time_s: float, call: Callable[[float], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class TransferLink:
    """A link that is busy for `per_token_s` seconds a token of KV, which arrives `latency_s` later.

    `bytes_per_token` of KV over all layers; None: unknown, and then the link is only ideal.
    """

    per_token_s: float = 0.0
    latency_s: float = 0.0
    bytes_per_token: float | None = None

    def crossing(self, tokens: int) -> tuple[float, float]:
        """Return for how many seconds KV of so many tokens keeps it busy, and the latency then."""
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
    link_busy_s: float = 0.0

    @property
    def blocked_s(self) -> float:
        return 0.0 if self.blocked_from_s is None else self.start_s - self.blocked_from_s


class TransferQueue:
    """Sends KV over one link, in the order in which it was put there.

    `place(transfer)` takes pages at a destination and returns its index, or None where nobody has
    room: the head then waits, and all behind it. `deliver(transfer, now_s)` is called at its end.
    With `move`, which takes a transfer as it sets out, that is when `arrive` is called; else, when
    the link says.
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
        """Queue KV that is ready now."""
        self._waiting.append(transfer)
        self.poke(transfer.ready_s)

    def poke(self, now_s: float) -> None:
        """There may be room now: try once all arrivals and returns of this instant are applied."""
        at_s = max(now_s, self._link_free_s)
        if self._waiting and self._try_at_s != at_s < inf:
            self._try_at_s = at_s
            self._clock.late(at_s, self._send)

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
        self._clock.at(self._link_free_s + latency_s, self.arrive)

    def arrive(self, now_s: float) -> None:
        """Deliver what set out first."""
        transfer = self._travelling.popleft()
        transfer.end_s = now_s
        if self._link_free_s == inf:
            self._link_free_s, transfer.link_busy_s = now_s, now_s - transfer.start_s
        self._done.append(transfer)
        self._deliver(transfer, now_s)

    def columns(self) -> Transfers:
        """Return what crossed, in the order in which it set out."""
        return crossed(gathered(TRANSFERS, self._done), self._link.bytes_per_token)

    def news(self) -> dict[str, Any]:
        """Return the columns of what has crossed since this was last asked."""
        told, self._told = self._told, len(self._done)
        return gathered(TRANSFERS, self._done[told:])


def crossed(columns: Mapping[str, Any], bytes_per_token: float | None) -> Transfers:
    """Return transfers of these columns, and how many bytes each was; None: unknown."""
    sizes = None if bytes_per_token is None else columns["tokens"] * bytes_per_token
    return Transfers(**columns, bytes=sizes)
