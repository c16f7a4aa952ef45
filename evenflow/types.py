"""The nouns both worlds share: request, chunk, micro-batch, view, plan, the scheduler's protocol.

This module knows no policy, no clock and no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from evenflow.view import View

if TYPE_CHECKING:
    from evenflow.costs.base import Work
    from evenflow.groups import DecodeGroup, Row

__all__ = [
    "Chunk",
    "Handover",
    "MicroBatch",
    "Order",
    "Plan",
    "Prefill",
    "Prefix",
    "Request",
    "Scheduler",
    "SearchSpace",
    "Victim",
    "View",
]

Order = Literal["arrival", "first_returned", "last_returned"]
"""Which ready decodes go first: by arrival, the longest returned, or the most recently returned."""

Victim = Literal["latest_arrived", "last_returned", "most_pages"]
"""Which ready request is preempted when a decode needs a page and none is free."""


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
    is the true length in a simulation, the limit on a real engine; a policy never sees it.
    `predicted_output_tokens` is what a predictor says, for policies that use one. `prefix` says
    what its tokens have in common with other requests (None: nothing), for a prefix cache.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    predicted_output_tokens: int | None = None
    prefix: Prefix | None = None


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


class Prefill(NamedTuple):
    """A plan's order to compute the next `tokens` of a request's prompt.

    `hold_tokens`: the request holds pages for at least this many tokens from now on (the whole
    prompt, or the model's length where memory is reserved); 0 means as many as are computed.
    """

    request_id: int
    tokens: int
    hold_tokens: int = 0


class Plan(NamedTuple):
    """A policy's answer: what the next micro-batch holds. The default plan sends nothing.

    `decodes` ready decodes are taken in `order`. Prefills get their pages first; when a decode then
    needs a page and none is free, ready requests are preempted by the `victims` rule. `preempt`
    names requests to preempt before anything else. `wake_at_s` asks to be asked again at that time.
    `kv_limited` says that work was held back because pages do not suffice (for bubble attribution).
    """

    prefills: Sequence[Prefill] = ()
    decodes: int = 0
    order: Order = "arrival"
    victims: Victim = "latest_arrived"
    preempt: Sequence[int] = ()
    wake_at_s: float | None = None
    kv_limited: bool = False


SearchSpace = Mapping[str, Sequence[Any] | Mapping[str, Any]]
"""Values worth trying of a policy's parameters, by name; see `Scheduler`."""


class Scheduler(Protocol):
    """A policy: reads a view, returns a plan. It has no clock, no I/O and no unseeded randomness.

    A policy may also have
    - `pipelined_chunks` (bool, default False): consecutive chunks of one prompt may be in flight at
      once;
    - `padded` (bool, default False): the rows of a micro-batch compute as much as the longest of
      them, ended ones included, until all have ended;
    - `uncapped` (bool, default False): it limits the micro-batches in flight itself, so a
      deployment that sets no cap has none, where else it is the number of stages;
    - `predictor`: which predictor fills in `predicted_output_tokens` before the run;
    - `search_space` (class attribute): which values are worth trying of its parameters, by name: a
      list of them, or a mapping of `low`, `high` and, if so, `log` and `integer`, as in SWEEP.yaml;
    - `refuse(prompt_tokens, output_tokens, pool)`, which returns why it could never serve such a
      request, or None.
    """

    def schedule(self, view: View) -> Plan: ...


class Chunk(NamedTuple):
    """Tokens [start, stop) of a row's prompt, computed in one micro-batch.

    `last`: the prompt ends here, so the chunk yields a token. `epoch` is the row's when the chunk
    was scheduled: a result of another epoch is stale and never applied.
    """

    row: Row
    start: int
    stop: int
    last: bool
    epoch: int


@dataclass(slots=True, eq=False)
class MicroBatch:
    """What travels through the stages together.

    `decodes` is the group of rows that decode (None: no decode). They compute `decode_tokens`
    tokens: one each, or with speculative decoding the proposals too. `decode_context` is the number
    of tokens those rows attend to, before this step, summed over the rows. `sampled_rows` tokens
    need logits: every decode token and every last chunk. `output_tokens` come out when the
    micro-batch returns: as many, or with speculative decoding those that are accepted. `free_pages`
    counts the pages left when the micro-batch was scheduled, and `kv_tokens` the token slots that
    are filled in the others, its own tokens included. `charged` is the work that costs time where
    it is not just that of the rows: padding, or pages copied to and from the host.
    """

    batch_id: int
    scheduled_s: float
    chunks: Sequence[Chunk]
    decodes: DecodeGroup | None
    prefill_tokens: int
    decode_tokens: int
    decode_context: int
    sampled_rows: int
    free_pages: int
    output_tokens: int
    kv_tokens: int = 0
    charged: Work | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        charged = self.charged or self
        return charged.prefill_tokens + charged.decode_tokens

    def rows(self) -> list[Row]:
        """The rows of the micro-batch, prefill chunks first."""
        decoding = list(self.decodes.rows()) if self.decodes is not None else []
        return [chunk.row for chunk in self.chunks] + decoding
