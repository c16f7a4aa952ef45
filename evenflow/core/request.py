"""Requests as clients send them. Knows no page and no policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Prefix(NamedTuple):
    """The content of the first `tokens` tokens of a request (prompt, then output).

    Each of `blocks` names the content of `block_tokens` tokens. Two requests have the same tokens
    as far as their blocks are the same from the start on.
    """

    blocks: tuple[int, ...]
    block_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request as the client sends it.

    `arrival_s` is in seconds from the start of the run. `output_tokens` includes the first token,
    which the prefill produces: the true length in a simulation, the limit on a real engine.
    Policies see it only where the client asks for exactly that many (`max_new_tokens` None, as
    benchmarks do with `ignore_eos`). `predicted_output_tokens` is what a predictor says. `prefix`
    is for a prefix cache (None: nothing in common). Of `priority`, the lower goes first.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int | None = None
    prefix: Prefix | None = None
    max_new_tokens: int | None = None
    priority: int = 0

    @property
    def output_limit(self) -> int:
        """Output tokens that the client allows."""
        return self.output_tokens if self.max_new_tokens is None else self.max_new_tokens
