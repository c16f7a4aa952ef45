"""The next token of each row, greedy or drawn. Knows logits and how to draw, no requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenflow.runtime.wire import Draw

LEAST_TEMPERATURE = 1e-5
"""Below it, as in vLLM, tokens are greedy: logits divided by less would not be finite."""


def drawn_by(draws: Sequence[Draw | None], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return what `sample` draws by, of the rows that are not greedy, as numbers to send along.

    How each row draws, None greedily, and the position of its token to come. They are the bits of
    floats: row, temperature, top_k, top_p, and what chance gives, [5 x rows that draw]. numpy draws
    that, before the logits are there, so that CPU and CUDA draw alike.
    """
    rows = [
        (row, how.temperature, how.top_k or np.inf, how.top_p, chance.random())
        for row, (how, position) in enumerate(zip(draws, positions, strict=True))
        if how is not None and how.temperature >= LEAST_TEMPERATURE
        for chance in [np.random.default_rng((how.seed, position))]
    ]
    return np.array(rows, dtype=np.float64).T.flatten().view(np.int64)


def sample(logits: Tensor, draws: Tensor | None = None) -> list[int]:
    """Return a token id for each row of `logits` [rows, vocabulary].

    Greedy, but for the rows in `draws`, which are `drawn_by`. The device is waited for once.
    """
    tokens = logits.argmax(dim=-1)
    if draws is not None and len(draws):
        row, *settings = draws.view(torch.float64).unflatten(0, (5, -1, 1))
        where = row.flatten().long()
        tokens[where] = _draw(logits[where], *settings)
    ids: list[int] = tokens.tolist()
    return ids


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, chance: Tensor
) -> Tensor:
    """Draw a token a row: where a uniform number falls among the summed, sorted probabilities.

    `logits` is [rows, vocabulary], the others are [rows, 1]. Each row is computed by itself, so
    what else is drawn changes nothing; known error: on a GPU the last bit of a sum may follow from
    how many rows there are.
    """
    ordered, ids = torch.sort(logits.float() / temperature.float(), descending=True, stable=True)
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    sums = ordered.masked_fill(places >= top_k, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
    # The token that crosses top_p stays in; rounding may leave all sums below it.
    last = (sums < top_p.float()).sum(dim=-1, keepdim=True)
    last = last.clamp(max=top_k.clamp(max=ordered.shape[-1]).long() - 1)
    limit = (sums.gather(-1, last).double() * chance).float()
    index = torch.searchsorted(sums, limit, right=True).minimum(last)
    return ids.gather(-1, index).flatten()
