"""What a policy may read: a live facade over the Batcher's counters and queues.

Nothing is copied when a policy is asked, and nothing here shows the true length of an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from evenflow.prefix_cache import pages_in_use

if TYPE_CHECKING:
    from evenflow.batcher import Batcher
    from evenflow.groups import DecodeGroup, Row
    from evenflow.types import Order, Victim


class Prompt:
    """A request that awaits prefill, as a policy sees it. Lengths are in tokens."""

    __slots__ = ("_row", "request_id")

    def __init__(self, row: Row) -> None:
        self._row = row
        self.request_id = row.request.request_id

    @property
    def arrival_s(self) -> float:
        return self._row.request.arrival_s

    @property
    def tokens(self) -> int:
        """What the prefill must compute: the prompt, and after a preemption also its output."""
        return self._row.prompt_tokens

    @property
    def computed(self) -> int:
        """How many of `tokens` need not be planned: scheduled, or kept from before (see
        docs/kv.md)."""
        return self._row.computed

    @property
    def remaining(self) -> int:
        return self._row.prompt_tokens - self._row.computed

    @property
    def pages(self) -> int:
        """KV pages it holds or, while it waits, would share with requests that hold them."""
        row = self._row
        if row.pages or not row.chain:
            return len(row.pages)
        return pages_in_use(row.chain)

    @property
    def generated(self) -> int:
        """Output tokens so far: more than none only after a preemption."""
        return self._row.generated

    @property
    def predicted_output_tokens(self) -> int | None:
        return self._row.request.predicted_output_tokens


class DecodeLengths(NamedTuple):
    """A running decode: the tokens it attends to, and its output so far and as predicted."""

    context_tokens: int
    generated_tokens: int
    predicted_output_tokens: int | None


class View:
    """The state of serving at the moment a policy is asked. Every counter is O(1).

    What iterates says over what; a policy that looks at every row whenever it is asked is slow.
    Constants of the run: `depth` pipeline stages, `total_pages` of `page_tokens` tokens each.
    """

    __slots__ = ("_batcher", "depth", "page_tokens", "total_pages")

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.depth = batcher.depth
        self.total_pages = batcher.pool.total_pages
        self.page_tokens = batcher.pool.page_tokens

    @property
    def now_s(self) -> float:
        return self._batcher.now_s

    @property
    def free_pages(self) -> int:
        return self._batcher.pool.free_pages

    @property
    def waiting(self) -> Iterator[Prompt]:
        """Prompts of which nothing is scheduled, first come first; preempted ones at the front."""
        batcher = self._batcher
        if not batcher.keeper.active:
            return (row.prompt for row in batcher.waiting)
        return (batcher.looked_up(row).prompt for row in batcher.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._batcher.waiting)

    @property
    def partials(self) -> Sequence[Prompt]:
        """Partly scheduled prompts whose next chunk may go now, by arrival."""
        return [row.prompt for row in self._batcher.partials]

    @property
    def prompts(self) -> Iterator[Prompt]:
        """All prompts of which a chunk may go now: `partials`, then `waiting`."""
        for row in self._batcher.partials:
            yield row.prompt
        yield from self.waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens awaiting prefill: all prompts that wait, and what is left of partly scheduled
        ones, less what a cache kept of them when they were last looked at."""
        return self._batcher.waiting_tokens

    @property
    def running(self) -> int:
        """Requests that were admitted and have not finished: partly prefilled or decoding."""
        return self._batcher.running

    @property
    def running_decodes(self) -> int:
        """Decoding requests, ready and in flight."""
        return self._batcher.running_decodes

    @property
    def ready_decodes(self) -> int:
        """Decoding requests that are not in flight."""
        return self._batcher.ready.rows

    @property
    def ready_group_sizes(self) -> Sequence[int]:
        """Sizes of the groups in which the ready decodes returned, longest returned first."""
        return self._batcher.ready.group_sizes

    @property
    def decode_context_tokens(self) -> int:
        """Tokens that the running decodes attend to, those in flight as they were sent, summed."""
        return sum(group.context for group in self._decode_groups())

    @property
    def decode_lengths(self) -> Iterator[DecodeLengths]:
        """The lengths of each running decode, those in flight as they were sent; looks at each."""
        for group in self._decode_groups():
            yield from group.lengths()

    def _decode_groups(self) -> Iterator[DecodeGroup]:
        yield from self._batcher.ready.groups
        for batch in self._batcher.in_flight.values():
            if batch.decodes is not None:
                yield batch.decodes

    @property
    def in_flight(self) -> int:
        """Micro-batches that are in the pipeline."""
        return len(self._batcher.in_flight)

    @property
    def preemptions(self) -> int:
        """Preemptions since the start of the run."""
        return self._batcher.preemptions

    @property
    def expected_output_tokens(self) -> float:
        """Tokens the running decodes are still expected to produce; looks at each of them.

        A request counts with its predicted output, or else with the mean output of the requests
        that have completed (0 before the first), less what it has produced, and never below 0.
        """
        batcher = self._batcher
        mean = batcher.completed_tokens / batcher.completed if batcher.completed else 0.0
        return sum(
            max((mean if predicted is None else predicted) - generated, 0)
            for _, generated, predicted in self.decode_lengths
        )

    def decode_pages(self, count: int, order: Order) -> int:
        """Return how many new pages the next token of the first `count` ready decodes needs."""
        return self._batcher.ready.due_pages(count, order)

    def victim(self, rule: Victim) -> int:
        """Return which request a rule preempts next, of those that run and are not in flight."""
        return self._batcher.victim(rule).request.request_id
