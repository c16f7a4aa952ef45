"""Interface of a policy: it reads a View of the serving, and writes a Plan of a micro-batch.

A View is a live facade: nothing is copied, and nothing shows the true length of an output.
"""

from __future__ import annotations

from collections import abc
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, get_args

from evenflow.compiled import mypyc_attr
from evenflow.core.decodes import Decode, Sequence
from evenflow.core.queues import Queues
from evenflow.errors import one_of


@mypyc_attr(allow_interpreted_subclasses=True)
class Prompt:
    """A request that awaits prefill, as a policy sees it. Lengths are in tokens."""

    __slots__ = ("_sequence", "request_id")

    def __init__(self, seq: Sequence) -> None:
        self._sequence = seq
        self.request_id = seq.request.request_id

    @property
    def arrival_s(self) -> float:
        return self._sequence.request.arrival_s

    @property
    def tokens(self) -> int:
        """Tokens to prefill: the prompt, and after a preemption also the output."""
        return self._sequence.prompt_tokens

    @property
    def computed(self) -> int:
        """Number of `tokens` that are scheduled, or kept from before (see docs/kv.md)."""
        return self._sequence.computed

    @property
    def remaining(self) -> int:
        return self._sequence.prompt_tokens - self._sequence.computed

    @property
    def pages(self) -> int:
        """KV pages it holds or, while it waits, would share with requests that hold them."""
        seq = self._sequence
        if seq.pages or not seq.chain:
            return len(seq.pages)
        return seq.chain[0].num_held(seq.chain)

    @property
    def generated(self) -> int:
        """Output tokens so far: more than none only after a preemption."""
        return self._sequence.generated

    @property
    def predicted_output_tokens(self) -> int | None:
        return self._sequence.request.predicted_output_tokens

    @property
    def priority(self) -> int:
        """The urgency that its client states; the lower goes first."""
        return self._sequence.request.priority

    @property
    def output_limit(self) -> int:
        """Output tokens that the client allows."""
        return self._sequence.request.output_limit


@mypyc_attr(allow_interpreted_subclasses=True)
class View:
    """The state of serving at the moment a policy is asked. Every counter is O(1).

    A policy that iterates over the requests at each question is slow. Constants of the run: `depth`
    pipeline stages, `total_pages` of `page_tokens` tokens each.
    """

    def __init__(self, queues: Queues, depth: int) -> None:
        self._queues = queues
        self._pool = queues.kv.pool
        self.depth = depth
        self.total_pages = self._pool.total_pages
        self.page_tokens = self._pool.page_tokens

    @property
    def now_s(self) -> float:
        return self._queues.now_s

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    @property
    def waiting(self) -> abc.Iterator[Prompt]:
        """Prompts of which nothing is scheduled, first come first; preempted ones at the front."""
        queues = self._queues
        if not queues.kv.keeps:
            return map(Prompt, queues.waiting)
        return map(Prompt, map(queues.looked_up, queues.waiting))

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def partials(self) -> abc.Sequence[Prompt]:
        """Partly scheduled prompts that may send their next chunk now, by arrival."""
        return [Prompt(seq) for seq in self._queues.partials]

    @property
    def prompts(self) -> abc.Iterator[Prompt]:
        """All prompts of which a chunk may go now: `partials`, then `waiting`."""
        return chain(map(Prompt, self._queues.partials), self.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens awaiting prefill, less what was cached when their prompts were last looked up."""
        return self._queues.waiting_tokens

    @property
    def running(self) -> int:
        """Requests that were admitted and have not finished: partly prefilled or decoding."""
        return len(self._queues.admitted)

    @property
    def running_decodes(self) -> int:
        """Decoding requests, ready and in flight."""
        return self._queues.running_decodes

    @property
    def ready_decodes(self) -> int:
        """Decoding requests that are not in flight."""
        return self._queues.ready.num_sequences

    @property
    def ready_group_sizes(self) -> list[int]:
        """Sizes of the groups in which the ready decodes returned, longest returned first."""
        return [len(group) for group in self._queues.ready.groups]

    @property
    def decode_context_tokens(self) -> int:
        """Tokens that the running decodes attend to, those in flight as they were sent, summed."""
        return sum(group.context for group in self._queues.decode_groups())

    @property
    def decode_lengths(self) -> abc.Iterator[Decode]:
        """All running decodes, those in flight as they were sent; O(decodes)."""
        return chain.from_iterable(one.decodes(self.now_s) for one in self._queues.decode_groups())

    @property
    def decodes(self) -> abc.Iterator[Decode]:
        """The ready decodes, which a plan may name, longest returned first; O(decodes)."""
        return chain.from_iterable(one.decodes(self.now_s) for one in self._queues.ready.groups)

    @property
    def slot(self) -> int:
        """The slot of the next micro-batch."""
        return self._queues.batches % self._queues.num_slots

    @property
    def in_flight(self) -> int:
        """Micro-batches that are in the pipeline."""
        return len(self._queues.in_flight)

    @property
    def rows_in_flight(self) -> int:
        """Rows of the micro-batches in flight: their decodes and chunks of prompts."""
        batches = self._queues.in_flight.values()
        return sum(len(batch.chunks) + len(batch.decodes or ()) for batch in batches)

    @property
    def preemptions(self) -> int:
        """Preemptions since the start of the run."""
        return self._queues.preemptions

    @property
    def expected_output_tokens(self) -> float:
        """Tokens the running decodes are still expected to produce; O(decodes).

        Without a prediction, a request is expected to produce the mean of the completed ones.
        """
        queues = self._queues
        mean = queues.completed_tokens / max(queues.completed, 1)
        pairs = ((one.generated_tokens, one.predicted_output_tokens) for one in self.decode_lengths)
        return sum(max((mean if end is None else end) - tokens, 0) for tokens, end in pairs)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill."""
        return self._pool.pages_for(tokens)

    def decode_pages(self, count: int, order: Order) -> int:
        """Return how many new pages the next step of the first `count` ready decodes needs."""
        known = order if order in ORDERS else one_of(ORDERS, order)
        return self._queues.ready.due_pages(count, known)

    def ready(self, count: int, order: Order) -> list[tuple[int, int]]:
        """Return the first `count` ready decodes: request ids, and how many pages each holds."""
        first = self._queues.ready.first(count, one_of(ORDERS, order))
        return [(seq.request.request_id, len(seq.pages)) for seq in first]

    def victim(self, rule: Victim) -> int:
        """Return the request that a rule preempts next."""
        return self._queues.victim(one_of(self._queues.victims, rule)).request.request_id


Order = Literal["arrival", "first_returned", "last_returned", "last_row"]
"""Which ready decodes go first: by arrival, the longest returned, or the most recently returned;
with `last_row`, of these the last row, then the row before it."""
ORDERS = get_args(Order)

Victim = Literal[
    "latest_arrived", "last_returned", "most_pages", "latest_admitted", "lowest_priority"
]
"""The request that is preempted when a decode needs a page and none is free.

The last two are for rules that preempt in flight: the last to start to run, or the least urgent."""


class Prefill(NamedTuple):
    """A plan's order to compute the next `tokens` of a request's prompt.

    `hold_tokens`: the request holds pages for at least this many tokens from now on (the whole
    prompt, or more where memory is reserved). 0 means as many as are computed. `ends`: the request
    decodes after these tokens, whatever they leave out, where the policy's rules allow it.
    """

    request_id: int
    tokens: int
    hold_tokens: int = 0
    ends: bool = False


class Plan(NamedTuple):
    """A policy's answer: the content of the next micro-batch. The default plan sends nothing.

    `decodes`: how many ready decodes are taken in `order`, or the requests whose decodes are.
    Prefills get their pages first. When a decode then needs a page and none is free, requests are
    preempted by the `victims` rule. `preempt` names requests to preempt before anything else.
    `wake_at_s` asks to be asked again at that time. `kv_limited` says that work was held back
    because pages do not suffice (for bubble attribution).
    """

    prefills: abc.Sequence[Prefill] = ()
    decodes: int | abc.Sequence[int] = 0
    order: Order = "arrival"
    victims: Victim = "latest_arrived"
    preempt: abc.Sequence[int] = ()
    wake_at_s: float | None = None
    kv_limited: bool = False


@mypyc_attr(allow_interpreted_subclasses=True)
class Action:
    """A part of an answer besides plans: an order about the queue or the pages."""

    def apply(self, batcher: Any) -> None:
        """Carry it out on the Batcher."""


class Scheduler(Protocol):
    """A policy: reads a view, returns a plan. It has no clock, no I/O and no unseeded randomness.

    An answer may come in parts: `schedule` then yields plans, and actions between them. Each is
    carried out before the policy goes on, so it sees what is left. Together the plans are one
    micro-batch; at most one of them takes decodes.

    A policy may also have
    - `rules`: how its requests are served, where that is not the plain way, see `Rules`;
    - `refuse(prompt_tokens, output_tokens, pool)`, which returns why it could never serve a
      request of these lengths, or None.
    """

    def schedule(self, view: View) -> Plan | abc.Iterator[Plan | Action]: ...
