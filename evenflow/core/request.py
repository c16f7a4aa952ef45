"""What a client sends, and what of it one engine tells another. Knows no page and no policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LATEST_S = 1e12
"""The latest time of a run, 30,000 years: beyond it, float seconds no longer tell milliseconds."""


class Prefix(NamedTuple):
    """What the first `tokens` tokens of a request (prompt, then output) are, as a chain of blocks.

    Each of `blocks` names the content of `block_tokens` tokens. Two requests have the same tokens
    as far as their blocks are the same from the start on.
    """

    blocks: tuple[int, ...]
    block_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request as the client sends it.

    `arrival_s` is in seconds from the start of the run; `prompt_tokens` and `output_tokens` count
    tokens, and the output includes the first token (the one the prefill produces). `output_tokens`
    is the true length in a simulation, the limit on a real engine; no policy sees it where the
    client allows more.
    `predicted_output_tokens` is what a predictor says, for policies that use one. `prefix` says
    what its tokens have in common with other requests (None: nothing), for a prefix cache.
    `max_new_tokens` is what the client allows; None: it asks for exactly `output_tokens`, as
    benchmarks do (`ignore_eos`), so there the length is no secret. Of `priority`, the lower goes
    first, as vLLM has it, with policies that say `by_priority`.
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


class Handover(NamedTuple):
    """What another engine needs to go on with a request once the request's KV is there.

    `generated` output tokens exist, the last of them since `last_token_s`; the KV holds all tokens
    but that one. `preemptions` counts those so far. `first_scheduled_s`: its prompt began to be
    computed.
    """

    request: Request
    generated: int
    first_token_s: float
    last_token_s: float
    preemptions: int
    first_scheduled_s: float = float("nan")

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV crosses: what the next decode step attends to."""
        return self.request.prompt_tokens + self.generated - 1
