"""A micro-batch as a stage receives it, and the tensors made from that.

Knows rows, positions and pages; no model and no weights. Every stage makes the same tensors, and
can make them before the activations arrive. They reach a GPU in one copy, from pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenflow.runtime.wire import Piece

Draws = Sequence[int] | NDArray[np.int64]
"""Whole numbers, as `evenflow.runtime.torch.model.drawn_by` gives them."""

GROUP_KEYS = 1 << 16
"""Padded keys up to which a GPU reads short decodes as one group. With 8 heads of 128, an H200
takes 0.2 to 0.3 ms a layer for them, 0.16 ms for the launches of one more group (torch 2.11)."""


class ChunkInputs(NamedTuple):
    """A prompt chunk: tokens [first, first + length) of the micro-batch, `context` keys to see."""

    first: int
    length: int
    context: int
    pages: Tensor  # [pages of these keys]


class DecodeInputs(NamedTuple):
    """Rows of one token each and of similar context, padded to the longest of them."""

    tokens: Tensor  # [rows], where in the micro-batch their tokens are
    pages: Tensor  # [rows * pages], rows padded with page 0
    mask: Tensor  # [rows, 1, 1, pages * page_tokens], True where a key may be seen


class Reach(NamedTuple):
    """Context of the rows in layers that see all of it, or a window of it."""

    chunks: tuple[ChunkInputs, ...]
    decodes: tuple[DecodeInputs, ...]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The tensors of one micro-batch, its tokens in the order of its rows."""

    num_tokens: int
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens], page * page_tokens + offset: where the token's key and value go
    sampled: Tensor  # [sampled rows], the last token of each
    ids: Tensor  # [tokens] on the first stage, [0] on the others
    draws: Tensor  # of `drawn_by`, on the last stage
    reaches: Mapping[int, Reach]  # by window, in tokens; 0: the whole context
    names: Sequence[int] = ()  # the requests of the sampled tokens
    dropped: Sequence[int] = ()  # requests that are no longer served
    unknown: Sequence[tuple[int, int]] = ()  # missing ids: place, and request


def batch_inputs(
    rows: Sequence[Piece],
    page_tokens: int,
    device: torch.device,
    ids: Sequence[int] = (),
    draws: Draws = (),
    *,
    windows: Sequence[int] = (0,),
) -> BatchInputs:
    """Make the tensors of a micro-batch on `device`; `rows` have all of their pages.

    `ids` and `draws` come along as they are. `windows`: those of the layers, 0 for a layer without.

    Rows of a single token are decodes. They are grouped by context, rounded up to a power of two of
    pages. Padding then reads at most twice the keys that are needed, or GROUP_KEYS on a GPU.
    """
    positions, slots, sampled = [], [], []
    first = 0
    for row in rows:
        where = np.arange(row.start, row.stop)
        page_of = np.asarray(row.pages, dtype=np.int64)
        positions.append(where)
        slots.append(page_of[where // page_tokens] * page_tokens + where % page_tokens)
        first += len(where)
        if row.last:
            sampled.append(first - 1)
    seen = {window: list(_seen(rows, page_tokens, window)) for window in windows}
    chunks = {window: [each for each in seen[window] if each.length > 1] for window in windows}
    spare = GROUP_KEYS // page_tokens if device.type == "cuda" else 0
    groups = {window: _groups(seen[window], spare) for window in windows}
    numbers: list[Draws] = [np.concatenate(positions), np.concatenate(slots), sampled, ids, draws]
    for window in windows:
        numbers += [chunk.pages for chunk in chunks[window]]
        numbers += [each for group in groups[window] for each in group]
    there = staged(numbers, device)
    return BatchInputs(
        first,
        next(there),
        next(there),
        next(there),
        next(there),
        next(there),
        {
            window: Reach(
                tuple(ChunkInputs(*chunk[:3], next(there)) for chunk in chunks[window]),
                tuple(_decode_inputs(there, page_tokens, window) for _ in groups[window]),
            )
            for window in windows
        },
    )


def staged(
    numbers: Sequence[Sequence[int] | NDArray[np.int64]], device: torch.device
) -> Iterator[Tensor]:
    """Iterate over whole numbers on a device, each as given: all cross in one copy.

    To a GPU that is from pinned memory. The driver copies other memory to pinned memory itself, and
    the caller waits for each copy.
    """
    sizes = [len(some) for some in numbers]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(numbers, out=host.numpy(), casting="unsafe")  # an empty list is of floats
    return iter(host.to(device, non_blocking=True).split(sizes))


class _Seen(NamedTuple):
    """ChunkInputs of a chunk or a decode, on the host."""

    first: int
    length: int
    context: int
    pages: Sequence[int]


def _seen(rows: Sequence[Piece], page_tokens: int, window: int) -> Iterator[_Seen]:
    """Iterate over what the rows attend to, without pages that a window has left."""
    first = 0
    for row in rows:
        left = max(row.start + 1 - window, 0) // page_tokens if window else 0
        length, pages = row.stop - row.start, row.pages[left : -(-row.stop // page_tokens)]
        yield _Seen(first, length, row.stop - left * page_tokens, pages)
        first += length


Numbers = tuple[list[int], NDArray[np.int64], list[int]]


def _groups(seen: Sequence[_Seen], spare: int = 0) -> list[Numbers]:
    """Return, of each group of decodes, where their tokens are, their pages, and contexts.

    The shortest are one group as long as their padded pages are at most `spare`.
    """
    decodes = [each for each in seen if each.length == 1]
    least = max((spare // max(len(decodes), 1)).bit_length() - 1, 0)
    by_pages: dict[int, list[_Seen]] = {}
    for each in decodes:
        by_pages.setdefault(max((len(each.pages) - 1).bit_length(), least), []).append(each)
    return [_padded(by_pages[doublings]) for doublings in sorted(by_pages)]


def _padded(members: Sequence[_Seen]) -> Numbers:
    table = np.zeros((len(members), max(len(each.pages) for each in members)), dtype=np.int64)
    for index, each in enumerate(members):
        table[index, : len(each.pages)] = each.pages
    firsts, contexts = zip(*((each.first, each.context) for each in members), strict=True)
    return list(firsts), table.ravel(), list(contexts)


def _decode_inputs(there: Iterator[Tensor], page_tokens: int, window: int) -> DecodeInputs:
    """Return the inputs of a group of decodes, from its numbers, which are next in `there`."""
    tokens, pages, contexts = islice(there, 3)
    keys = torch.arange(len(pages) // len(tokens) * page_tokens, device=pages.device)
    visible = keys < contexts[:, None]
    if window:
        visible &= keys >= contexts[:, None] - window
    return DecodeInputs(tokens, pages, visible[:, None, None])
