"""What a stage is told about a micro-batch, and the tensors it makes of that.

Knows rows, positions and pages; no model and no weights. Every stage makes the same tensors, and
can make them before the activations arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
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
    chunks: tuple[ChunkInputs, ...]
    decodes: tuple[DecodeInputs, ...]


def batch_inputs(rows: Sequence[Piece], page_tokens: int, device: torch.device) -> BatchInputs:
    """Make the tensors of a micro-batch on `device`; `rows` have all of their pages.

    Rows of a single token are decodes; they are grouped by context, rounded up to a power of two
    of pages, so that padding reads at most twice the keys that are needed.
    """
    positions, slots, sampled = [], [], []
    chunks: list[ChunkInputs] = []
    groups: dict[int, list[tuple[int, Piece]]] = {}
    first = 0
    for row in rows:
        length = row.stop - row.start
        where = np.arange(row.start, row.stop)
        page_of = np.asarray(row.pages, dtype=np.int64)
        positions.append(where)
        slots.append(page_of[where // page_tokens] * page_tokens + where % page_tokens)
        num_pages = -(-row.stop // page_tokens)
        if length == 1:
            groups.setdefault((num_pages - 1).bit_length(), []).append((first, row))
        else:
            pages = torch.from_numpy(page_of[:num_pages]).to(device)
            chunks.append(ChunkInputs(first, length, row.stop, pages))
        first += length
        if row.last:
            sampled.append(first - 1)
    return BatchInputs(
        first,
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.from_numpy(np.concatenate(slots)).to(device),
        torch.tensor(sampled, dtype=torch.int64, device=device),
        tuple(chunks),
        tuple(_decode_inputs(groups[key], page_tokens, device) for key in sorted(groups)),
    )


def _decode_inputs(
    members: Sequence[tuple[int, Piece]], page_tokens: int, device: torch.device
) -> DecodeInputs:
    lengths = np.array([row.stop for _, row in members])
    width = -(-int(lengths.max()) // page_tokens)
    table = np.zeros((len(members), width), dtype=np.int64)
    for index, (_, row) in enumerate(members):
        count = -(-row.stop // page_tokens)
        table[index, :count] = row.pages[:count]
    mask = np.arange(width * page_tokens) < lengths[:, None]
    tokens = torch.tensor([first for first, _ in members], dtype=torch.int64)
    return DecodeInputs(
        tokens.to(device),
        torch.from_numpy(table.ravel()).to(device),
        torch.from_numpy(mask[:, None, None]).to(device),
    )
