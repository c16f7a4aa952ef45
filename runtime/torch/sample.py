"""The next token of each row, greedy or drawn. Knows logits and settings, no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evenflow.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Describe how a request draws its tokens.

    `temperature` 0 is greedy. Else the `top_k` likeliest tokens (0: all), of them the fewest that
    hold `top_p` of the probability. A request's tokens follow from its `seed` and their positions
    alone, whatever else is in the micro-batch. UsageError on values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"temperature is {self.temperature}; it must be 0 or above")
        if self.top_k < 0 or self.seed < 0:
            raise UsageError(f"top_k {self.top_k} and seed {self.seed} must be 0 or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


GREEDY = Sampling()


def sample(logits: Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Return a token id for each row of `logits` [rows, vocabulary].

    `positions` are the positions of the tokens to come, one a row.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (how, position) in enumerate(zip(settings, positions, strict=True)):
        if how.temperature > 0:
            tokens[row] = _draw(logits[row], how, position)
    return tokens


def _draw(logits: Tensor, how: Sampling, position: int) -> int:
    """Draw one token: where a uniform number falls among the summed, sorted probabilities."""
    ordered, ids = torch.sort(logits.float() / how.temperature, descending=True, stable=True)
    if how.top_k:
        ordered, ids = ordered[: how.top_k], ids[: how.top_k]
    sums = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    kept = int((sums < how.top_p).sum()) + 1  # the token that crosses top_p stays in
    sums = sums[:kept]
    # numpy draws it, so that CPU and CUDA draw alike.
    uniform = np.random.default_rng((how.seed, position)).random()
    index = int(torch.searchsorted(sums, float(sums[-1]) * uniform, right=True))
    return int(ids[min(index, kept - 1)])
