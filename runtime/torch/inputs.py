"""What a stage is told about a micro-batch, and the tensors it makes of that.

Knows rows, positions and pages; no model and no weights. Every stage makes the same tensors, and
can make them before the activations arrive. They reach a GPU in one copy, from pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.wire import Piece


class ChunkInputs(NamedTuple):
    """A prompt chunk: tokens [first, first + length) of the micro-batch, `context` keys to see."""

    first: int
    length: int
    context: int
    pages: Tensor  # [pages of the row]


class DecodeInputs(NamedTuple):
    """Rows of one token each and of similar context, padded to the longest of them."""

    tokens: Tensor  # [rows], where in the micro-batch their tokens are
    pages: Tensor  # [rows * pages], rows padded with page 0
    mask: Tensor  # [rows, 1, 1, pages * page_tokens], True where a key may be seen


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The tensors of one micro-batch, its tokens in the order of its rows."""

    num_tokens: int
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens], page * page_tokens + offset: where the token's key and value go
    sampled: Tensor  # [sampled rows], the last token of each
    ids: Tensor  # [tokens] on the first stage, [0] on the others
    draws: Tensor  # of `runtime.torch.sample.drawn_by`, on the last stage
    chunks: tuple[ChunkInputs, ...]
    decodes: tuple[DecodeInputs, ...]
    names: Sequence[int] = ()  # the requests of the sampled tokens
    dropped: Sequence[int] = ()  # requests that are no longer served
    unknown: Sequence[tuple[int, int]] = ()  # where an id is missing, and whose newest token it is


def batch_inputs(
    rows: Sequence[Piece],
    page_tokens: int,
    device: torch.device,
    ids: Sequence[int] = (),
    draws: Sequence[int] | NDArray[np.int64] = (),
) -> BatchInputs:
    """Make the tensors of a micro-batch on `device`; `rows` have all of their pages.

    `ids` and `draws` come along as they are.

    Rows of a single token are decodes; they are grouped by context, rounded up to a power of two
    of pages, so that padding reads at most twice the keys that are needed.
    """
    positions, slots, sampled = [], [], []
    chunks: list[tuple[int, Piece]] = []
    by_pages: dict[int, list[tuple[int, Piece]]] = {}
    first = 0
    for row in rows:
        where = np.arange(row.start, row.stop)
        page_of = np.asarray(row.pages, dtype=np.int64)
        positions.append(where)
        slots.append(page_of[where // page_tokens] * page_tokens + where % page_tokens)
        if len(where) == 1:
            doublings = (_num_pages(row, page_tokens) - 1).bit_length()
            by_pages.setdefault(doublings, []).append((first, row))
        else:
            chunks.append((first, row))
        first += len(where)
        if row.last:
            sampled.append(first - 1)
    groups = [_padded(by_pages[doublings], page_tokens) for doublings in sorted(by_pages)]
    there = staged(
        [
            *(np.concatenate(positions), np.concatenate(slots), sampled, ids, draws),
            *(row.pages[: _num_pages(row, page_tokens)] for _, row in chunks),
            *(numbers for group in groups for numbers in group),
        ],
        device,
    )
    return BatchInputs(
        first,
        next(there),
        next(there),
        next(there),
        next(there),
        next(there),
        tuple(ChunkInputs(at, row.stop - row.start, row.stop, next(there)) for at, row in chunks),
        tuple(_decode_inputs(next(there), next(there), next(there), page_tokens) for _ in groups),
    )


def staged(
    numbers: Sequence[Sequence[int] | NDArray[np.int64]], device: torch.device
) -> Iterator[Tensor]:
    """Iterate over whole numbers on a device, each as given: all cross in one copy.

    To a GPU that is from pinned memory: of what is not pinned the driver makes such a copy itself,
    and the caller waits for each.
    """
    sizes = [len(some) for some in numbers]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(numbers, out=host.numpy(), casting="unsafe")  # an empty list is of floats
    return iter(host.to(device, non_blocking=True).split(sizes))


def _num_pages(row: Piece, page_tokens: int) -> int:
    return -(-row.stop // page_tokens)


def _padded(
    members: Sequence[tuple[int, Piece]], page_tokens: int
) -> tuple[list[int], NDArray[np.int64], list[int]]:
    """Return where the tokens of decodes are, their pages in rows of one length, and contexts."""
    width = max(_num_pages(row, page_tokens) for _, row in members)
    table = np.zeros((len(members), width), dtype=np.int64)
    for index, (_, row) in enumerate(members):
        count = _num_pages(row, page_tokens)
        table[index, :count] = row.pages[:count]
    return [first for first, _ in members], table.ravel(), [row.stop for _, row in members]


def _decode_inputs(
    tokens: Tensor, pages: Tensor, contexts: Tensor, page_tokens: int
) -> DecodeInputs:
    keys = torch.arange(len(pages) // len(tokens) * page_tokens, device=pages.device)
    return DecodeInputs(tokens, pages, (keys < contexts[:, None])[:, None, None])
