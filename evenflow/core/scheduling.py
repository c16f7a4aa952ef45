"""What a policy reads and writes: a View of the serving, and a Plan for the next micro-batch.

A View is a live facade over an engine's queues and counters: nothing is copied when a policy is
asked, and nothing here shows the true length of an output.
"""

from __future__ import annotations

from collections import abc
from functools import cache
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol

from evenflow.core.decodes import DecodeGroup, DecodeLengths, Sequence
from evenflow.core.kv import pages_in_use
from evenflow.core.queues import Queues

_is_owed = attrgetter("owed")


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
        """What the prefill must compute: the prompt, and after a preemption also its output."""
        return self._sequence.prompt_tokens

    @property
    def computed(self) -> int:
        """How many of `tokens` need not be planned: scheduled, or kept from before (see
        docs/kv.md)."""
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
        return pages_in_use(seq.chain)

    @property
    def generated(self) -> int:
        """Output tokens so far: more than none only after a preemption."""
        return self._sequence.generated

    @property
    def predicted_output_tokens(self) -> int | None:
        return self._sequence.request.predicted_output_tokens

    @property
    def priority(self) -> int:
        """What its client says of its urgency; the lower goes first."""
        return self._sequence.request.priority

    def begins_with(self, tokens: int) -> tuple[int, ...] | None:
        """Return names of its first blocks, of `tokens` tokens in all; None if it has fewer."""
        prefix = self._sequence.request.prefix
        if prefix is None or min(prefix.tokens, self.tokens) < tokens:
            return None
        return prefix.blocks[: -(-tokens // prefix.block_tokens)]

    @property
    def output_limit(self) -> int:
        """Output tokens that the client allows."""
        return self._sequence.request.output_limit

    @property
    def exact(self) -> bool:
        """Whether the client asks for as many output tokens, no fewer (`ignore_eos`)."""
        return self._sequence.request.max_new_tokens is None


class Decode(NamedTuple):
    """A request whose prompt is computed, with the output tokens that are there of those allowed.

    `exact`: the client asks for as many as it allows.
    """

    request_id: int
    prompt_tokens: int
    generated: int
    output_limit: int
    exact: bool

    @property
    def tokens(self) -> int:
        """Its prompt and its output so far."""
        return self.prompt_tokens + self.generated


class View:
    """The state of serving at the moment a policy is asked. Every counter is O(1).

    What iterates says over what; a policy that looks at every request whenever it is asked is slow.
    Constants of the run: `depth` pipeline stages, `total_pages` of `page_tokens` tokens each.
    """

    __slots__ = ("_pool", "_queues", "depth", "page_tokens", "total_pages")

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
        """Prompts of which nothing is scheduled, first come first; preempted ones at the front,
        where they show as soon as nothing of them is in flight."""
        queues = self._queues
        waiting: abc.Iterable[Sequence] = queues.waiting
        if queues.owed:
            waiting = filterfalse(_is_owed, waiting)
        if not queues.kv.keeps:
            return map(Prompt, waiting)
        return map(Prompt, map(queues.looked_up, waiting))

    @property
    def queue(self) -> abc.Iterator[Prompt]:
        """Those of `waiting`, without looking up what a cache keeps of them."""
        return map(Prompt, filterfalse(_is_owed, self._queues.waiting))

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def partials(self) -> list[Prompt]:
        """Partly scheduled prompts whose next chunk may go now, by arrival."""
        return [Prompt(seq) for seq in self._queues.partials]

    @property
    def prompts(self) -> abc.Iterator[Prompt]:
        """All prompts of which a chunk may go now: `partials`, then `waiting`."""
        return chain(map(Prompt, self._queues.partials), self.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens awaiting prefill: all prompts that wait, and what is left of partly scheduled
        ones, less what a cache kept of them when they were last looked at."""
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
        return sum(group.context for group in self._decode_groups())

    @property
    def decode_lengths(self) -> abc.Iterator[DecodeLengths]:
        """The lengths of each running decode, those in flight as they were sent; looks at each."""
        for group in self._decode_groups():
            yield from group.lengths()

    @property
    def decodes(self) -> list[Decode]:
        """The ready decodes, in the order of their rows; looks at each.

        Where decodes run ahead, these are followed by those whose last allowed token is in flight.
        """
        queues, late = self._queues, self._queues.late_tokens()
        pairs = ((group, seq) for group in queues.ready.groups for seq in group.sequences())
        members = [(seq, group.generated_by(seq)) for group, seq in pairs]
        members.sort(key=lambda member: queues.row_key(member[0]))
        sent = (queues.live[number] for number in late)
        ended = (seq for seq in sent if seq.generated >= seq.request.output_limit)
        members += ((seq, seq.generated) for seq in ended if seq not in queues.ready)
        return [
            Decode(
                seq.request.request_id,
                seq.request.prompt_tokens,
                generated - late[seq.request.request_id],
                seq.request.output_limit,
                seq.request.max_new_tokens is None,
            )
            for seq, generated in members
        ]

    def _decode_groups(self) -> abc.Iterator[DecodeGroup]:
        for ready in self._queues.slots:
            yield from ready.groups
        for batch in self._queues.in_flight.values():
            if batch.decodes is not None:
                yield batch.decodes

    @property
    def prefix_cache(self) -> bool:
        """Whether what requests have in common is kept."""
        return self._queues.kv.keeps and not self._queues.kv.swap

    def cached_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens of one that waits are cached; that they are used now is noted."""
        return self._queues.kv.use(prompt._sequence, prompt.tokens)

    @property
    def slot(self) -> int:
        """Whose turn it is, if each micro-batch that may be in flight has a slot."""
        return self._queues.slot

    @property
    def asked(self) -> int:
        """Questions so far, this one too."""
        return self._queues.asked

    @property
    def idles(self) -> int:
        """How often there was nothing to serve; a request that comes in time prevents it."""
        return self._queues.idles

    @property
    def in_flight(self) -> int:
        """Micro-batches that are in the pipeline."""
        return len(self._queues.in_flight)

    @property
    def rows_in_flight(self) -> int:
        """Rows of the micro-batches in flight: a decode each, and each chunk of a prompt."""
        batches = self._queues.in_flight.values()
        return sum(len(batch.chunks) + len(batch.decodes or ()) for batch in batches)

    @property
    def preemptions(self) -> int:
        """Preemptions since the start of the run."""
        return self._queues.preemptions

    @property
    def expected_output_tokens(self) -> float:
        """Tokens the running decodes are still expected to produce; looks at each of them.

        A request counts with its predicted output, or else with the mean output of the requests
        that have completed (0 before the first), less what it has produced, and never below 0.
        """
        queues = self._queues
        mean = queues.completed_tokens / queues.completed if queues.completed else 0.0
        return sum(
            max((mean if predicted is None else predicted) - generated, 0)
            for _, generated, predicted in self.decode_lengths
        )

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill."""
        return self._pool.pages_for(tokens)

    def decode_pages(self, count: int, order: Order) -> int:
        """Return how many new pages the next token of the first `count` ready decodes needs."""
        return self._queues.ready.due_pages(count, order)

    def ready(self, count: int, order: Order) -> list[tuple[int, int]]:
        """Return the first `count` ready decodes: request ids, and how many pages each holds."""
        first = self._queues.ready.first(count, order)
        return [(seq.request.request_id, len(seq.pages)) for _, seq in first]

    def victim(self, rule: Victim) -> int:
        """Return which request a rule preempts next, of those that it may."""
        return self._queues.victim(rule).request.request_id


Order = Literal["arrival", "first_returned", "last_returned", "last_row"]
"""Which ready decodes go first: by arrival, the longest returned, or the most recently returned;
with `last_row`, of these the last row, then the row before it."""

Victim = Literal[
    "latest_arrived", "last_returned", "most_pages", "latest_admitted", "lowest_priority"
]
"""Which request is preempted when a decode needs a page and none is free: a ready one; or, in
flight or not, the last to start to run, or the least urgent, of several the last to arrive (these
two for policies that say `preempts_in_flight`)."""


class Prefill(NamedTuple):
    """A plan's order to compute the next `tokens` of a request's prompt.

    `hold_tokens`: the request holds pages for at least this many tokens from now on (the whole
    prompt, or the model's length where memory is reserved); 0 means as many as are computed.
    `ends`: the request decodes after these tokens, whatever they leave out (policies that say
    `leaves_out`).
    """

    request_id: int
    tokens: int
    hold_tokens: int = 0
    ends: bool = False


class Plan(NamedTuple):
    """A policy's answer: what the next micro-batch holds. The default plan sends nothing.

    `decodes` ready decodes are taken in `order`. Prefills get their pages first; when a decode then
    needs a page and none is free, ready requests are preempted by the `victims` rule. `preempt`
    names requests to preempt before anything else. `wake_at_s` asks to be asked again at that time.
    `kv_limited` says that work was held back because pages do not suffice (for bubble attribution).
    """

    prefills: abc.Sequence[Prefill] = ()
    decodes: int = 0
    order: Order = "arrival"
    victims: Victim = "latest_arrived"
    preempt: abc.Sequence[int] = ()
    wake_at_s: float | None = None
    kv_limited: bool = False


@cache
def decodes_only(
    decodes: int,
    order: Order = "arrival",
    victims: Victim = "latest_arrived",
    kv_limited: bool = False,
) -> Plan:
    """Return the plan without prefills that takes so many decodes: most plans are such."""
    return Plan((), decodes, order, victims, (), None, kv_limited)


class Upkeep(NamedTuple):
    """What an answer in parts may have between its plans: orders about the queue and the pages.

    `give_up` names a request that ends here, for want of pages; its client gets what there is.
    Those that wait are put into the order `waiting`, if it is given; those to `hold` get what a
    cache keeps of them; and content is evicted until `empty_pages` have none, if so many can be.
    """

    give_up: int | None = None
    waiting: abc.Sequence[int] = ()
    hold: abc.Sequence[int] = ()
    empty_pages: int = 0


class Scheduler(Protocol):
    """A policy: reads a view, returns a plan. It has no clock, no I/O and no unseeded randomness.

    An answer may come in parts: `schedule` then yields plans, and upkeep between them, each of
    which is carried out before the policy goes on, so it sees what is left. Together the plans are
    one micro-batch; at most one of them takes decodes.

    A policy may also have
    - `pipelined_chunks` (bool, default False): consecutive chunks of one prompt may be in flight at
      once;
    - `preempts_in_flight` (bool, default False): it may preempt what micro-batches compute with.
      The pages are free at once, the output still counts when it returns, and until then the
      request waits;
    - `decodes_ahead` ("question" or "round", default None): a decode may go again before its last
      token is there, with the next question (one stage) or after as many as there are stages;
    - `slotted` (bool, default False): each micro-batch that may be in flight has a slot. Slots are
      asked in turn, and a request decodes in the slot of its last chunk;
    - `newest_first` (bool, default False): rows are in the order in which their prompts ended, the
      last first;
    - `by_priority` (bool, default False): who waits does so by `Request.priority`, then by arrival,
      preempted or not, and the order "arrival" is that in which requests began to run;
    - `preempted_last` (bool, default False): who is preempted waits last, not first;
    - `radix_cache` (bool, default False): a prefix cache is a radix tree, see `evenflow.core.kv`;
    - `append_only_pages` (bool, default False): where a prefix cache is on, a request keeps the
      pages it got even if others hold the same, and pages are found as soon as decodes fill them;
    - `padded` (bool, default False): the requests of a micro-batch compute as much as the longest
      of them, ended ones included, until all have ended;
    - `uncapped` (bool, default False): it limits the micro-batches in flight itself, so a
      deployment that sets no cap has none, where else it is the number of stages;
    - `leaves_out` (bool, default False): it may end a prefill before all of the prompt, or after a
      preemption of the output, is computed, with which no model would write the same;
    - `predictor`: which predictor fills in `predicted_output_tokens` before the run;
    - `refuse(prompt_tokens, output_tokens, pool)`, which returns why it could never serve such a
      request, or None.
    """

    def schedule(self, view: View) -> Plan | abc.Iterator[Plan | Upkeep]: ...
