"""A worker that runs the model: real forward passes of its layers, real tokens on the last stage.

Knows one stage; no scheduler and no sockets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, cycle

import torch

from evenflow.errors import UsageError
from evenflow.runtime.page_tables import PageTable
from evenflow.runtime.tokens import UNKNOWN
from evenflow.runtime.torch import TorchSettings
from evenflow.runtime.torch.carriers import Carrier, Handed, Lane, SentPages, meet
from evenflow.runtime.torch.inputs import BatchInputs
from evenflow.runtime.torch.layers import KvPages
from evenflow.runtime.torch.model import ALONE, Ranks, Stage, drawn_by, sample
from evenflow.runtime.torch.weights import load_stage, random_stage, read_model
from evenflow.runtime.wire import Activation, Cached, Draw, Move, Piece, Step
from evenflow.runtime.worker import Executed, Place


class TorchWorker:
    """Computes the layers of `stage`, one micro-batch after the other.

    `carrier` brings the previous stage's output; None: there is only this stage. The computing
    thread stays on `cores`; preparing and carrying threads run anywhere beside it.
    """

    def __init__(
        self,
        place: Place,
        stage: Stage,
        kv: KvPages,
        carrier: Carrier | None = None,
        cores: tuple[int, ...] = (),
    ) -> None:
        self._place = place
        self._stage = stage
        self._carrier = carrier
        self._table = PageTable(place.page_tokens, place.total_pages)
        self._kv = kv
        self._cores = cores
        self._how: dict[int, Draw] = {}  # of requests that are not greedy
        self._alone = stage.is_first and stage.is_last
        self._newest: dict[int, int] = {}  # tokens that this stage, alone, gave last
        self._preparing, self._computing = Lane(stage.device), Lane(stage.device)

    def prepare(self, step: Step) -> BatchInputs:
        """Bring the page table up to date and make the tensors."""
        rows = self._table.apply(step)
        for request_id in step.dropped:
            self._how.pop(request_id, None)
        self._how |= {draw.request_id: draw for draw in step.draws}
        sampled = [row for row in rows if row.last] if self._stage.is_last else []
        draws = drawn_by(
            [self._how.get(row.request_id) for row in sampled], [row.stop for row in sampled]
        )
        place = self._place
        with self._preparing():
            batch = self._stage.inputs(rows, place.page_tokens, step.tokens, draws)
        if self._carrier is not None and not self._stage.is_first:
            self._carrier.expect(batch.num_tokens)
        starts = accumulate((row.stop - row.start for row in rows), initial=0)
        unknown = [
            (at, row.request_id)
            for at, row in zip(starts, rows, strict=False)
            if step.tokens and step.tokens[at] == UNKNOWN
        ]
        names = [row.request_id for row in sampled]
        return replace(batch, names=names, dropped=step.dropped, unknown=unknown)

    def fetch(self, activation: Activation) -> None:
        assert self._carrier is not None
        with self._preparing():
            self._carrier.fetch()

    def execute(
        self, prepared: BatchInputs, activation: Activation | None, received_s: float
    ) -> Executed:
        """Run the layers; on the last stage, draw the tokens too."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)
            self._cores = ()
        tokens: list[int] = []
        start_s = time.monotonic()
        # NOTE: held until the lane is done. It is memory of another lane, which writes there again
        # once it is not held, however far this lane is behind its launches.
        given = prepared.ids
        if not self._stage.is_first:
            assert self._carrier is not None
            given = self._carrier.take()
        with self._computing():
            for at, request_id in prepared.unknown:
                given[at] = self._newest[request_id]
            out = self._stage.forward(given.to(self._stage.device), prepared, self._kv)
            if self._stage.is_last and (self._alone or not self._place.rank):
                tokens = sample(out, prepared.draws)
        if self._alone:
            for request_id in prepared.dropped:
                self._newest.pop(request_id, None)
            self._newest |= zip(prepared.names, tokens, strict=True)
        end_s = time.monotonic()
        del given  # the stage before may have its memory back
        if self._carrier is None or self._stage.is_last:
            return Executed(received_s, start_s, end_s, 0, tokens)
        with self._computing():  # what the carrier holds no longer is written by this lane again
            self._carrier.give(out)
        return Executed(received_s, start_s, end_s, out.nbytes, tokens)

    def read_kv(self, move: Move) -> bytes:
        """Return the keys, then the values, of some pages in some layers."""
        held = (self._kv.keys, self._kv.values)
        with self._preparing():
            both = torch.stack([part[move.start : move.stop, move.pages].cpu() for part in held])
        data: bytes = both.view(torch.uint8).numpy().tobytes()
        return data

    def write_kv(self, cached: Cached, data: bytes) -> None:
        """Write keys and values of another pool, of as many layers as they are, into pages."""
        held = (self._kv.keys, self._kv.values)
        both = torch.frombuffer(bytearray(data), dtype=held[0].dtype)
        both = both.view(2, -1, len(cached.pages), *held[0].shape[2:]).to(held[0].device)
        with self._preparing():
            for part, values in zip(held, both, strict=True):
                part[cached.start : cached.start + len(values), cached.pages] = values


def make_worker(place: Place, settings: TorchSettings) -> TorchWorker:
    """Make a stage's worker; UsageError for weights or sizes that cannot be."""
    device = _device(place, settings)
    if settings.cores:
        torch.set_num_threads(len(settings.cores))
    ranks = _ranks(place, settings)
    try:
        stage = _stage(settings, str(device), ranks)
        kv = stage.kv_pages(place.total_pages, place.page_tokens)
        warm_up(stage, kv)
    except (torch.OutOfMemoryError, MemoryError):
        raise UsageError(
            f"{settings.model}: layers {settings.start} to {settings.stop} and "
            f"{place.total_pages} KV pages do not fit into the memory of {device}; more stages, "
            "fewer kv.pages or a smaller dtype is right"
        ) from None
    return TorchWorker(place, stage, kv, _carrier(place, settings, stage), settings.cores)


WARM_UP_TOKENS = {"cpu": (2,), "cuda": (2, 16, 128, 512, 2048)}
"""Sizes of what is computed before anything is served. On a GPU kernels are loaded for a size when
it first comes. They take memory then, up to what `Deployment` counts for activations."""
WARM_UP_ROWS = 256


def warm_up(stage: Stage, kv: KvPages) -> None:
    """Compute each kind of micro-batch: the first of its kind takes torch up to a second.

    What it leaves in the first pages is overwritten before it is read.
    """
    room = kv.keys.shape[1] * kv.page_tokens // 2
    for tokens in dict.fromkeys(min(size, room) for size in WARM_UP_TOKENS[stage.device.type]):
        for rows in kinds_of_batches(tokens, kv.page_tokens):
            count = sum(row.stop - row.start for row in rows)
            how = [Draw(0, 1.0, 2, 0.9, 0) if row.request_id % 2 else None for row in rows]
            draws = drawn_by(how, [row.stop for row in rows]) if stage.is_last else ()
            batch = stage.inputs(rows, kv.page_tokens, [0] * count, draws)
            hidden = kv.keys.new_zeros(count, stage.spec.hidden_size)
            out = stage.forward(batch.ids if stage.is_first else hidden, batch, kv)
            if stage.is_last:
                sample(out, batch.draws)
    if stage.device.type == "cuda":
        torch.cuda.synchronize(stage.device)


def kinds_of_batches(tokens: int, page_tokens: int) -> Iterator[list[Piece]]:
    """Iterate over a decode, a first chunk, one with context, decodes, and all of these together.

    Chunks have `tokens` tokens, and so have the contexts of all decodes together.
    """

    def piece(row: int, start: int, stop: int) -> Piece:
        return Piece(row, start, stop, True, list(range(-(-stop // page_tokens))))

    yield [piece(0, 0, 1)]
    if tokens < 2:
        return
    first, later = piece(0, 0, tokens), piece(1, tokens, 2 * tokens)
    rows = min(tokens, WARM_UP_ROWS)
    decodes = [
        piece(row, context, context + 1)
        for row, context in zip(range(rows), cycle((tokens // rows, 0)))
    ]
    yield from ([first], [later], decodes, [first, later, *decodes])


def _device(place: Place, settings: TorchSettings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _ranks(place: Place, settings: TorchSettings) -> Ranks:
    """Connect to the other processes, where torch does that; return this stage's ranks."""
    if place.workers == 1 or settings.transport == "one_process":
        return ALONE
    return meet(place, settings.transport, settings.limit_s)


def _stage(settings: TorchSettings, device: str, ranks: Ranks) -> Stage:
    span = settings.start, settings.stop
    if settings.weights == "checkpoint":
        return load_stage(settings.model, *span, dtype=settings.dtype, device=device, ranks=ranks)
    spec, rope = read_model(settings.model)
    return random_stage(spec, rope, *span, dtype=settings.dtype, device=device, ranks=ranks)


def _carrier(place: Place, settings: TorchSettings, stage: Stage) -> Carrier | None:
    if place.depth == 1:
        return None
    if settings.transport == "one_process":
        return Handed(place, settings.mailboxes)
    like = torch.empty(0, dtype=stage.dtype, device=stage.device)
    return SentPages(place, settings.transport, like, stage.spec.hidden_size)
