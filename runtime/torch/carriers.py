"""Carriers of a micro-batch's hidden states from one stage to the next.

Knows tensors and their order; no model and no messages. `give` runs in the thread that
computes, `expect` and `fetch` in the one that prepares, `take` again in the first.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from evenflow.children import meeting
from evenflow.runtime.torch.model import ALONE, Ranks
from evenflow.runtime.worker import Place


class Carrier(Protocol):
    """Carries hidden states [tokens, hidden], in the order of the micro-batches.

    `expect` is called with the number of tokens to come next, as soon as it is known. `fetch`
    returns when they are here. `take` hands them out: they may be on another device, and the caller
    holds them until it has read them.
    """

    def expect(self, num_tokens: int) -> None: ...

    def fetch(self) -> None: ...

    def take(self) -> Tensor: ...

    def give(self, hidden: Tensor) -> None: ...


class Lane:
    """Place where one thread computes or copies: a stream of a GPU, or the CPU as it is.

    What was issued in its `with` block is done at the end of the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class SentPages:
    """Torch's send and receive between processes, both non-blocking.

    With `gloo` the data cross the host's memory, whatever the device; with `nccl` each stage needs
    a separate GPU. Receives are posted as soon as a micro-batch is announced, so that its data move
    while an earlier one computes. Both neighbours are connected once it is made.
    """

    def __init__(self, place: Place, backend: str, like: Tensor, hidden_size: int) -> None:
        self._before, self._after = place.number - place.ranks, place.number + place.ranks
        self._like = like
        self._hidden_size = hidden_size
        self._crosses = torch.device("cpu") if backend == "gloo" else like.device
        self._due: deque[tuple[Tensor, Any]] = deque()
        self._here: deque[Tensor] = deque()
        self._sending: tuple[Tensor, Any] | None = None
        self._greet(place)

    def _greet(self, place: Place) -> None:
        """Send a number over each hop, stage after stage, from this one thread.

        NCCL makes a pair's communicator at its first message, and blocks the thread until the other
        side is there. While serving, that thread sends heartbeats.
        """
        number = self._like.new_zeros(1, device=self._crosses)
        if place.stage:
            distributed.irecv(number, src=self._before).wait()
        if not place.is_last:
            distributed.isend(number, dst=self._after).wait()
        number.item()  # waits for what a GPU does of it

    def expect(self, num_tokens: int) -> None:
        shape = (num_tokens, self._hidden_size)
        buffer = torch.empty(shape, dtype=self._like.dtype, device=self._crosses)
        self._due.append((buffer, distributed.irecv(buffer, src=self._before)))

    def fetch(self) -> None:
        buffer, receiving = self._due.popleft()
        receiving.wait()
        self._here.append(buffer.to(self._like.device))

    def take(self) -> Tensor:
        return self._here.popleft()

    def give(self, hidden: Tensor) -> None:
        if self._sending is not None:
            self._sending[1].wait()  # long gone: the next stage expects it since it was announced
        hidden = hidden.to(self._crosses)
        self._sending = hidden, distributed.isend(hidden, dst=self._after)


def meet(place: Place, backend: str, limit_s: float) -> Ranks:
    """Connect the processes of all stages, over the loopback interface alone; return this stage's.

    They find each other by a file in the run's folder. Raises when one is missing after `limit_s`.
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback[0]
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(meeting(place.folder), place.workers),
        rank=place.number,
        world_size=place.workers,
        timeout=(limit := timedelta(seconds=limit_s)),
    )
    if place.ranks == 1:
        return ALONE
    group, _ = distributed.new_subgroups(place.ranks, timeout=limit)
    return Ranks(place.rank, place.ranks, group)


class Handed:
    """Stages of one process: the tensor itself goes into the next one's mailbox."""

    def __init__(self, place: Place, mailboxes: tuple[deque[Tensor], ...]) -> None:
        self._from = mailboxes[place.stage - 1] if place.stage else deque[Tensor]()
        self._to = deque[Tensor]() if place.is_last else mailboxes[place.stage]

    def expect(self, num_tokens: int) -> None:
        """Do nothing: it is there before the message is."""

    def fetch(self) -> None:
        """Do nothing: it is here already."""

    def take(self) -> Tensor:
        return self._from.popleft()

    def give(self, hidden: Tensor) -> None:
        self._to.append(hidden)
