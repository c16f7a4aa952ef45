"""A worker that computes nothing: it waits as long as a cost model says, and makes up tokens.

Knows a step's seconds, given with it; no cost model, no sockets.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from evenflow.runtime.page_tables import PageTable
from evenflow.runtime.wire import Activation, Step
from evenflow.runtime.worker import Executed, Place

SPIN_S = 0.0002
"""The end of a wait that is spent awake: the system may wake a sleeper that late."""

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class EmulatedSettings:
    latency_s: float = 0.0

    def make(self, place: Place) -> EmulatedWorker:
        return EmulatedWorker(place, self)


class Prepared(NamedTuple):
    """The inputs of a step: how long it takes, and the tokens that it will yield."""

    work_s: float
    hop_s: float
    num_bytes: int
    tokens: list[int]


class EmulatedWorker:
    """Worker that waits as long as a micro-batch would take, up to a deadline.

    The deadline is counted from the input's arrival or the end of the micro-batch before, so delays
    of the CPU do not add up. On a device with a queue of kernels they do not either.
    """

    def __init__(self, place: Place, settings: EmulatedSettings) -> None:
        self._stage = place.stage
        self._latency_s = settings.latency_s
        self._table = PageTable(place.page_tokens, place.total_pages)
        self._free_s = 0.0
        self._link_free_s = 0.0

    def prepare(self, step: Step) -> Prepared:
        """Bring the page table up to date; runs while the previous micro-batch computes."""
        rows = self._table.apply(step)
        hop_s = step.hops_s[self._stage - 1] if self._stage else 0.0
        tokens = [emulated_token(row.request_id, row.stop) for row in rows if row.last]
        return Prepared(step.work_s[self._stage], hop_s, step.activation_bytes, tokens)

    def fetch(self, activation: Activation) -> None:
        """Do nothing: an emulated activation has no data."""

    def execute(
        self, prepared: Prepared, activation: Activation | None, received_s: float
    ) -> Executed:
        """Wait for the seconds of a micro-batch; return its times and tokens."""
        available_s = self._available_s(prepared, activation, received_s)
        start_s = max(available_s, self._free_s)
        wait_until(start_s + prepared.work_s)
        self._free_s = time.monotonic()
        return Executed(available_s, start_s, self._free_s, prepared.num_bytes, prepared.tokens)

    def _available_s(
        self, prepared: Prepared, activation: Activation | None, received_s: float
    ) -> float:
        """Return when (s) the input arrives, by a link with one micro-batch at a time."""
        if activation is None:
            return received_s
        self._link_free_s = max(self._link_free_s, activation.times[-1]) + prepared.hop_s
        return max(received_s, self._link_free_s + self._latency_s)


def emulated_token(request_id: int, position: int) -> int:
    """Return the made-up token that follows the first `position` tokens of a request."""
    return (7919 * request_id + 104_729 * position) % VOCABULARY


def wait_until(deadline_s: float) -> None:
    """Return at a time of the monotonic clock: sleep, then look at the clock."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if left_s > SPIN_S:
            time.sleep(left_s - SPIN_S)
