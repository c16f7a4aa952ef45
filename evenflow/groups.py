"""Rows, and the groups in which they decode together: a step costs O(changes), not O(rows).

Rows that decode together advance together, so a group keeps one tick; what a row needs later (its
next page, its end) waits in a bucket under the tick at which it happens. Nothing here knows a
policy, a pool or a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from evenflow.types import Request
from evenflow.view import DecodeLengths, Prompt

if TYPE_CHECKING:
    from evenflow.padding import Rectangle
    from evenflow.prefix_cache import CachedPage


@dataclass(slots=True, eq=False)
class Row:
    """The serving state of one request, owned by the Batcher.

    Lengths: `0 <= computed <= prompt_tokens`, where `prompt_tokens` is what the current prefill
    must compute (the prompt, plus what was generated before a preemption) and `computed` what has
    been scheduled of it. A decoding row attends to `context` tokens. `order` numbers arrivals.
    `epoch` counts preemptions, so that a result from before one is recognised. An `aborted` row is
    still there only while micro-batches compute with its pages. The current prefill starts at
    `kept_tokens`: what is before is in the `chain` of cached pages (found while the row waits, held
    from its first chunk on) or, `swapped_tokens` of it, on the host. `cached_tokens` of the prompt
    were never computed.
    """

    request: Request
    order: int
    prompt_tokens: int
    computed: int = 0
    chunks_in_flight: int = 0
    generated: int = 0
    epoch: int = 0
    decoding: bool = False
    aborted: bool = False
    kept_tokens: int = 0
    swapped_tokens: int = 0
    cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    chain: list[CachedPage] = field(default_factory=list)
    prompt: Prompt = field(init=False)
    first_scheduled_s: float = float("nan")
    first_token_s: float = float("nan")
    last_token_s: float = float("nan")
    completion_s: float = float("nan")
    # While in a group: context = base + group.tick, and the ticks of its next page and its end.
    base: int = 0
    joined_tick: int = 0
    page_tick: int = -1
    finish_tick: int = -1

    def __post_init__(self) -> None:
        self.prompt = Prompt(self)

    @property
    def remaining(self) -> int:
        """Prompt tokens not yet scheduled."""
        return self.prompt_tokens - self.computed

    @property
    def held_tokens(self) -> int:
        """Tokens in its pages, once its prompt is computed: all but the last one generated."""
        return self.request.prompt_tokens + self.generated - 1


Buckets = dict[int, list[Row]]


class DecodeGroup:
    """Rows that decode in lock-step: an ordered handle with its length and total context.

    `members` maps request ids to rows, in the order in which they joined. `context` is the number
    of tokens the rows attend to, summed. `last_s` is when the rows that have stepped together last
    got a token; rows that joined since then remember their own time. A step yields `stride` tokens
    a row: one, unless tokens are speculated. `rectangle` is what the group is padded to, where it
    is.
    """

    __slots__ = (
        "_fresh",
        "context",
        "finish_at",
        "last_s",
        "members",
        "page_at",
        "rectangle",
        "stride",
        "tick",
    )

    def __init__(self) -> None:
        self.members: dict[int, Row] = {}
        self._fresh: list[Row] = []
        self.tick = 0
        self.stride = 1
        self.context = 0
        self.last_s = float("nan")
        self.rectangle: Rectangle | None = None
        self.page_at: Buckets = {}
        self.finish_at: Buckets = {}

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, row: Row) -> bool:
        return row.request.request_id in self.members

    def rows(self) -> Iterator[Row]:
        """Iterate over the members in the order in which they joined."""
        return iter(self.members.values())

    def empty(self) -> DecodeGroup:
        """Return a group of the same kind without rows."""
        return DecodeGroup()

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step yields."""
        return len(self.members)

    def context_of(self, row: Row) -> int:
        return row.base + self.tick

    def last_token_of(self, row: Row) -> float:
        """Return when a member got its last token."""
        return row.last_token_s if row in self._fresh else self.last_s

    def lengths(self) -> Iterator[DecodeLengths]:
        """Iterate over the lengths of the members."""
        tick = self.tick
        for row in self.members.values():
            generated = row.generated + tick - row.joined_tick
            predicted = row.request.predicted_output_tokens
            yield DecodeLengths(row.base + tick, generated, predicted)

    def join(self, row: Row, context: int, page_tokens: int) -> None:
        """Add a row that attends to `context` tokens; it got the last one at `row.last_token_s`."""
        tick = self.tick
        self.members[row.request.request_id] = row
        self.context += context
        row.base = context - tick
        row.joined_tick = tick
        steps = row.request.output_tokens - row.generated
        room = len(row.pages) * page_tokens - context
        row.finish_tick = tick + steps
        self.finish_at.setdefault(row.finish_tick, []).append(row)
        row.page_tick = tick + room if room < steps else -1
        if room < steps:
            self.page_at.setdefault(row.page_tick, []).append(row)
        if len(self.members) == 1:
            self.last_s = row.last_token_s
        elif row.last_token_s != self.last_s:
            self._fresh.append(row)

    def leave(self, row: Row) -> int:
        """Remove a row; return the number of tokens it attends to."""
        del self.members[row.request.request_id]
        context = row.base + self.tick
        self.context -= context
        self.settle(row)
        _discard(self.finish_at, row.finish_tick, row)
        if row.page_tick >= 0:
            _discard(self.page_at, row.page_tick, row)
        if row in self._fresh:
            self._fresh.remove(row)
        else:
            row.last_token_s = self.last_s
        return context

    def settle(self, row: Row) -> None:
        """Bring the row's own count of generated tokens up to date."""
        row.generated += self.tick - row.joined_tick
        row.joined_tick = self.tick

    def split(self, count: int, page_tokens: int) -> DecodeGroup:
        """Move the first `count` members into a group of their own."""
        return self._move(list(islice(self.members.values(), count)), page_tokens)

    def split_last(self, count: int, page_tokens: int) -> DecodeGroup:
        """Move the last `count` members into a group of their own."""
        rows = list(islice(reversed(self.members.values()), count))
        return self._move(rows[::-1], page_tokens)

    def _move(self, rows: list[Row], page_tokens: int) -> DecodeGroup:
        part = self.empty()
        for row in rows:
            part.join(row, self.leave(row), page_tokens)
        return part

    def absorb(self, other: DecodeGroup, page_tokens: int) -> None:
        """Take over every member of another group."""
        for row in list(other.rows()):
            self.join(row, other.leave(row), page_tokens)

    def due_pages(self) -> list[Row]:
        """Return the rows whose next token needs a new page."""
        return self.page_at.get(self.tick, [])

    def grow(self, pages: list[int], page_tokens: int) -> None:
        """Give one page to each row that is due."""
        self._grow_at(self.tick, pages, page_tokens)

    def _grow_at(self, tick: int, pages: list[int], page_tokens: int) -> None:
        due = self.page_at.pop(tick)
        later = tick + page_tokens
        again: list[Row] = []
        for row, page in zip(due, pages, strict=True):
            row.pages.append(page)
            row.page_tick = -1
            if row.finish_tick > later:
                row.page_tick = later
                again.append(row)
        if again:
            self.page_at.setdefault(later, []).extend(again)

    def step(self, now_s: float, gap_s: list[float], gap_count: list[int]) -> list[Row]:
        """Record one token for every member at `now_s`; return the members that end with it.

        Appends the times since each member's previous token to `gap_s`, with how many rows they
        hold for. The rows that end have left the group.
        """
        size = settled = len(self.members)
        if self._fresh:
            settled -= len(self._fresh)
            for row in self._fresh:
                gap_s.append(now_s - row.last_token_s)
                gap_count.append(1)
            self._fresh = []
        if settled:
            gap_s.append(now_s - self.last_s)
            gap_count.append(settled)
        self.last_s = now_s
        self.tick += 1
        self.context += size
        if self.tick not in self.finish_at:
            return []
        finished = self.finish_at.pop(self.tick)
        for row in finished:
            del self.members[row.request.request_id]
            self.context -= row.base + self.tick
            row.generated = row.request.output_tokens
        return finished


def _discard(buckets: Buckets, tick: int, row: Row) -> None:
    bucket = buckets[tick]
    bucket.remove(row)
    if not bucket:
        del buckets[tick]
