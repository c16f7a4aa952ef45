"""Sequences, the groups in which they decode together, and the queue of ready groups.

Sequences that decode together advance together, so a group keeps one tick. The next page and the
end of a sequence wait in buckets under their ticks: a step costs O(changes), not O(sequences).
"""

from __future__ import annotations

from collections import abc
from heapq import nsmallest
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

from evenflow.compiled import mypyc_attr
from evenflow.core.kv import Holder
from evenflow.core.request import Request

NAN: Final = float("nan")


class Sequence(Holder):
    """The serving state of one request, owned by the Batcher.

    `prompt_tokens` is what the current prefill must compute: the prompt, and after a preemption the
    output so far. `computed` of it has been scheduled, or kept. `cached_tokens` of the prompt were
    never computed; the last `left_out` never are, where a prefill ends early. `order` numbers
    arrivals, `epoch` counts preemptions. An `aborted` sequence waits for micro-batches to return.
    """

    order: int
    # In the group it joined last: context = base + group.tick, ticks of its next page and its end.
    group: DecodeGroup
    base: int
    joined_tick: int
    page_tick: int
    finish_tick: int

    def __init__(self, request: Request, prompt_tokens: int, generated: int = 0) -> None:
        super().__init__(request)
        self.prompt_tokens = prompt_tokens
        self.generated = generated
        self.computed = self.cached_tokens = self.left_out = self.chunks_in_flight = self.epoch = 0
        self.decoding = self.aborted = False
        self.first_scheduled_s = self.first_token_s = self.last_token_s = self.completion_s = NAN

    @property
    def remaining(self) -> int:
        """Prompt tokens not yet scheduled."""
        return self.prompt_tokens - self.computed

    @property
    def held_tokens(self) -> int:
        """Tokens in its pages: the computed ones, of a decode all but the last one generated."""
        if self.decoding:
            return self.request.prompt_tokens + self.generated - 1 - self.left_out
        return self.computed


by_arrival = attrgetter("order")


class Decode(NamedTuple):
    """A running decode: it attends to `context_tokens`, and got its last token `idle_s` s ago.

    `slot` is that of the micro-batch in which it is or was last; -1: in another engine.
    """

    request_id: int
    context_tokens: int
    generated_tokens: int
    predicted_output_tokens: int | None
    output_limit: int
    slot: int
    idle_s: float


Buckets = dict[int, list[Sequence]]


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeGroup:
    """Sequences that decode in lock-step: an ordered handle with its length and total context.

    `members` are by request id, in the order in which they joined; they attend to `context` tokens,
    summed. `last_s` is when the group last stepped, and `slot` that of its micro-batch. A member
    that joined since then has its own last time. A step yields `stride` tokens a member (here one).
    """

    def __init__(self) -> None:
        self.members: dict[int, Sequence] = {}
        self._fresh: list[Sequence] = []
        self.tick = 0
        self.stride = 1
        self.context = 0
        self.slot = -1
        self.last_s = NAN
        self.page_at: Buckets = {}
        self.finish_at: Buckets = {}

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.request.request_id in self.members

    def sequences(self) -> abc.Iterator[Sequence]:
        """Iterate over the members in the order in which they joined."""
        return iter(self.members.values())

    def empty(self) -> DecodeGroup:
        """Return a group of the same kind without members."""
        return type(self)()

    def limit_of(self, seq: Sequence) -> int:
        """Return the number of output tokens at which a member leaves the group."""
        return seq.request.output_tokens

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step yields."""
        return len(self.members)

    def context_of(self, seq: Sequence) -> int:
        return seq.base + self.tick

    def last_token_of(self, seq: Sequence) -> float:
        """Return when a member got its last token."""
        return seq.last_token_s if seq in self._fresh else self.last_s

    def decodes(self, now_s: float) -> abc.Iterator[Decode]:
        """Iterate over the members as a policy sees them."""
        for seq in self.members.values():
            request, idle_s = seq.request, now_s - self.last_token_of(seq)
            tokens = seq.base + self.tick, self.generated_by(seq), request.predicted_output_tokens
            yield Decode(request.request_id, *tokens, request.output_limit, self.slot, idle_s)

    def generated_by(self, seq: Sequence) -> int:
        """Return how many output tokens a member has."""
        return seq.generated + self.tick - seq.joined_tick

    def join(self, seq: Sequence, context: int, page_tokens: int) -> None:
        """Add a sequence that attends to `context` tokens, the last of `seq.last_token_s`."""
        tick = self.tick
        seq.group = self
        self.members[seq.request.request_id] = seq
        self.context += context
        seq.base = context - tick
        seq.joined_tick = tick
        steps = self.limit_of(seq) - seq.generated
        room = len(seq.pages) * page_tokens - context
        seq.finish_tick = tick + steps
        self.finish_at.setdefault(seq.finish_tick, []).append(seq)
        seq.page_tick = tick + room if room < steps else -1
        if room < steps:
            self.page_at.setdefault(seq.page_tick, []).append(seq)
        if len(self.members) == 1:
            self.last_s = seq.last_token_s
        elif seq.last_token_s != self.last_s:
            self._fresh.append(seq)

    def leave(self, seq: Sequence) -> int:
        """Remove a sequence; return the number of tokens it attends to."""
        del self.members[seq.request.request_id]
        context = seq.base + self.tick
        self.context -= context
        self.settle(seq)
        _discard(self.finish_at, seq.finish_tick, seq)
        if seq.page_tick >= 0:
            _discard(self.page_at, seq.page_tick, seq)
        if seq in self._fresh:
            self._fresh.remove(seq)
        else:
            seq.last_token_s = self.last_s
        return context

    def settle(self, seq: Sequence) -> None:
        """Bring the sequence's count of generated tokens up to date."""
        seq.generated += self.tick - seq.joined_tick
        seq.joined_tick = self.tick

    def split(self, count: int, page_tokens: int, *, last: bool = False) -> DecodeGroup:
        """Move the first `count` members, or the last, into another group."""
        members = self.members.values()
        first = list(islice(reversed(members) if last else members, count))
        part = self.empty()
        part.slot = self.slot
        part.absorb(self, page_tokens, first[::-1] if last else first)
        return part

    def absorb(self, other: DecodeGroup, page_tokens: int, members: abc.Iterable[Sequence]) -> None:
        """Take over members of another group."""
        for seq in members:
            self.join(seq, other.leave(seq), page_tokens)

    def due_pages(self) -> list[Sequence]:
        """Return the sequences that need a new page for their next step."""
        return self.page_at.get(self.tick, [])

    def grow(self, pages: list[int], page_tokens: int) -> None:
        """Give one page to each sequence that is due."""
        self._grow_at(self.tick, pages, page_tokens)

    def _grow_at(self, tick: int, pages: list[Any], page_tokens: int) -> None:
        due, later = self.page_at.pop(tick), tick + page_tokens
        for index, seq in enumerate(due):
            seq.pages.append(pages[index])  # a number, which compiled code passes on unread
            seq.page_tick = later if seq.finish_tick > later else -1
        again = [seq for seq in due if seq.page_tick > 0]
        if again:
            self.page_at[later] = self.page_at[later] + again if later in self.page_at else again

    def advance(self, now_s: float, gap_s: list[float], gap_count: list[int]) -> None:
        """Record one token for every member, and the gaps."""
        size = settled = len(self.members)
        if self._fresh:
            settled -= len(self._fresh)
            for seq in self._fresh:
                gap_s.append(now_s - seq.last_token_s)
                gap_count.append(1)
            self._fresh = []
        if settled:
            gap_s.append(now_s - self.last_s)
            gap_count.append(settled)
        self.last_s = now_s
        self.tick += 1
        self.context += size

    def step(self, now_s: float, gap_s: list[float], gap_count: list[int]) -> list[Sequence]:
        """Record one token for every member, and the gaps; return the members that end."""
        self.advance(now_s, gap_s, gap_count)
        if self.tick not in self.finish_at:
            return []
        finished = self.finish_at.pop(self.tick)
        for seq in finished:
            del self.members[seq.request.request_id]
            self.context -= seq.base + self.tick
            seq.generated = self.limit_of(seq)
        return finished


def _discard(buckets: Buckets, tick: int, seq: Sequence) -> None:
    bucket = buckets[tick]
    bucket.remove(seq)
    if not bucket:
        del buckets[tick]


@mypyc_attr(allow_interpreted_subclasses=True)
class Decoding:
    """Plain decode step, as in papers: one row and one token per sequence."""

    @property
    def row_tokens(self) -> int:
        """Tokens that a sequence computes in a step."""
        return 1

    def group(self) -> DecodeGroup:
        """Return a group of decodes without members."""
        return DecodeGroup()


ONE_TOKEN = Decoding()


class ReadyQueue:
    """Groups in the order in which they returned; `num_sequences` counts their members.

    Taking whole groups costs O(1) a group; taking part of one costs O(members that move).
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.groups: list[DecodeGroup] = []
        self.num_sequences = 0

    def __contains__(self, seq: Sequence) -> bool:
        return seq.decoding and seq.group in self.groups and seq in seq.group

    def append(self, group: DecodeGroup) -> None:
        self.groups.append(group)
        self.num_sequences += len(group.members)

    def remove(self, seq: Sequence) -> int:
        """Remove a member; return the number of tokens it attends to."""
        self.num_sequences -= 1
        context = seq.group.leave(seq)
        if not seq.group.members:
            self.groups.remove(seq.group)
        return context

    def due_pages(self, count: int, order: str) -> int:
        """Return how many of the first `count` members need a page for their next step."""
        if count >= self.num_sequences:
            return sum([len(group.due_pages()) for group in self.groups])
        ticks = ((seq.page_tick, seq.group) for seq in self.first(count, order))
        return sum(0 <= tick - group.tick < group.stride for tick, group in ticks)

    def take(self, count: int, order: str) -> DecodeGroup:
        """Remove the first `count` members in `order` and return them as one group."""
        if order == "last_row" or (order == "arrival" and count < self.num_sequences):
            return self.take_rows(self.first(count, order))
        self.num_sequences -= count
        if not self.num_sequences and len(self.groups) == 1:
            return self.groups.pop()
        end = 0 if order == "first_returned" else -1
        taken = self._take_from(end, count)
        while len(taken.members) < count:
            taken = self._merge(taken, self._take_from(end, count - len(taken)))
        return taken

    def top_up(self, group: DecodeGroup, count: int, order: str) -> DecodeGroup:
        """Return the group with as many more members as there are, up to `count`."""
        missing = min(count - len(group), self.num_sequences)
        if missing <= 0:
            return group
        more = self.take(missing, order)
        return self._merge(group, more) if len(group) else more

    def _take_from(self, end: int, count: int) -> DecodeGroup:
        group = self.groups[end]
        excess = len(group.members) - count
        if excess <= 0:
            return self.groups.pop(end)
        if count <= excess:
            return group.split(count, self._page_tokens)
        self.groups[end] = group.split(excess, self._page_tokens, last=True)
        return group

    def _merge(self, one: DecodeGroup, other: DecodeGroup) -> DecodeGroup:
        larger, smaller = (one, other) if len(one) >= len(other) else (other, one)
        larger.absorb(smaller, self._page_tokens, list(smaller.sequences()))
        return larger

    def take_rows(self, members: abc.Sequence[Sequence]) -> DecodeGroup:
        """Remove these members and return them as one group, in this order."""
        taken = self.groups[0].empty()
        for seq in members:
            taken.join(seq, self.remove(seq), self._page_tokens)
        return taken

    def first(self, count: int, order: str) -> list[Sequence]:
        """Return the first `count` members in `order`."""
        groups = self.groups[::-1] if order in ("last_returned", "last_row") else self.groups
        turned = reversed if order == "last_row" else iter
        members = chain(*(turned(group.members.values()) for group in groups))
        if order == "arrival":
            return nsmallest(count, members, key=by_arrival)
        return list(islice(members, count))
