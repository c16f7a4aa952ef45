"""The naive simulator of pools: DistServe's prefill and decode, Splitwise's mixed one beside them.

Written from docs/disaggregation.md. Each pool is one of the naive pipelines; what follows from
there being several - who prefills, when KV sets out, who holds which pages - is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.types import Request
from tests.oracle.plain import PAGE_TOKENS, Part, Plain, Row, Setting
from tests.oracle.plain_gllm import GllmSetting, PlainGllm


@dataclass(frozen=True)
class PlainLink:
    """Busy for `per_token_s` a token of the pages that it carries; they arrive a latency later."""

    per_token_s: float = 0.0
    latency_s: float = 0.0


class Pool(Plain):
    """A pool. `asker` is the request of each of its rows, in order of arrival in this pool.

    `keeps`: a request ends with its first token here, and its pages are kept until they are sent.
    """

    keeps = False

    def __init__(self, setting: Setting) -> None:
        super().__init__([], setting)
        self.asker: list[int] = []
        self.prefilled: list[Row] = []

    def new_row(self, request: int, prompt: int, output: int) -> Row:
        self.asker.append(request)
        return Row(len(self.asker) - 1, prompt, output, self.now_s, todo=prompt)

    def fits(self, tokens: int) -> bool:
        return self.can_ever_fit(Row(-1, tokens, 0, 0.0, todo=tokens))

    def waiting_prompt_tokens(self) -> int:
        """Of prompts that were not sent yet, in whole or in part."""
        sent = {id(row): n for _, parts in self.in_flight for row, n, d in parts if not d}
        rows = [*self.waiting, *(row for row in self.running if not row.decoding)]
        return sum(row.todo - row.computed - sent.get(id(row), 0) for row in rows)

    def release(self, row: Row) -> None:
        if self.keeps and row.generated == row.output == 1:
            self.prefilled.append(row)
        else:
            self.free_pages_of(row)

    def free_pages_of(self, row: Row) -> None:
        super().release(row)

    def enter(self, row: Row) -> None:
        """KV arrived: the row decodes here."""
        self.running.append(row)


class GllmPool(Pool, PlainGllm):
    """The same, for gLLM's policies."""

    def waiting_prompt_tokens(self) -> int:
        return self.waiting_tokens()

    def enter(self, row: Row) -> None:
        super().enter(row)
        self.ready.append([row])


@dataclass(eq=False)
class Parcel:
    """KV on its way or waiting for it."""

    request: int
    source: str
    row: Row
    ready_s: float
    destination: str = ""
    start_s: float = math.nan
    end_s: float = math.nan
    arrived: bool = False


def pages_of(row: Row) -> int:
    """Whole pages of the prompt: what crosses."""
    return math.ceil(row.prompt / PAGE_TOKENS)


class PlainPools:
    """One run. `token_s` has the times of each request's tokens, `parcels` the transfers."""

    def __init__(
        self,
        requests: Sequence[Request],
        pools: dict[str, Setting],
        link: PlainLink,
        watermark: float,
        borrow_tokens: int = 0,
    ) -> None:
        self.requests, self.link, self.watermark = requests, link, watermark
        self.borrow_tokens = borrow_tokens
        self.pools = {
            name: (GllmPool if isinstance(setting, GllmSetting) else Pool)(setting)
            for name, setting in pools.items()
        }
        for name in self.names("prefill", "mixed"):
            self.pools[name].keeps = True
        self.now_s = self.link_free_s = 0.0
        self.queue: list[Parcel] = []
        self.parcels: list[Parcel] = []
        self.rows: dict[int, list[Row]] = {i: [] for i in range(len(requests))}
        self.token_s: dict[int, list[float]] = {}

    def run(self) -> PlainPools:
        coming = [i for i in range(len(self.requests)) if self.can_be_served(i)]
        while coming or self.is_busy():
            self.now_s = self.next_instant(coming)
            for pool in self.pools.values():
                pool.now_s = self.now_s
            for name, pool in self.pools.items():
                while pool.in_flight and pool.in_flight[0][0] == self.now_s:
                    self.take_back(name, pool, pool.in_flight.pop(0)[1])
            while coming and self.requests[coming[0]].arrival_s == self.now_s:
                self.arrive(coming.pop(0))
            self.move()
            self.ask()
            while self.move():
                self.ask()
        for pool in self.pools.values():
            assert pool.waiting == pool.running == []
            assert pool.free == pool.setting.total_pages
        for index, rows in self.rows.items():
            self.token_s[index] = rows[-1].token_s if rows else []
        return self

    def ask(self) -> None:
        for pool in self.pools.values():
            pool.ask()

    # -- the clock ------------------------------------------------------------------------------

    def under_way(self) -> list[Parcel]:
        return [parcel for parcel in self.parcels if not parcel.arrived]

    def is_busy(self) -> bool:
        return bool(self.under_way()) or any(pool.in_flight for pool in self.pools.values())

    def next_instant(self, coming: list[int]) -> float:
        times_s = [self.requests[index].arrival_s for index in coming[:1]]
        times_s += [parcel.end_s for parcel in self.under_way()]
        if self.link_free_s > self.now_s:
            times_s.append(self.link_free_s)
        for pool in self.pools.values():
            times_s += [end_s for end_s, _ in pool.in_flight]
            if pool.sent and pool.stage_free_s[0] > self.now_s:
                times_s.append(pool.stage_free_s[0])
        return min(times_s)

    # -- who prefills ---------------------------------------------------------------------------

    def names(self, *names: str) -> list[str]:
        return [name for name in names if name in self.pools]

    def prefillers(self, index: int) -> list[str]:
        """The pools that could compute the prompt and give the first token."""
        tokens = self.requests[index].prompt_tokens + 1
        return [n for n in self.names("prefill", "mixed") if self.pools[n].fits(tokens)]

    def decoders(self, index: int) -> list[str]:
        tokens = self.requests[index].prompt_tokens + self.requests[index].output_tokens
        return [n for n in self.names("decode", "mixed") if self.pools[n].fits(tokens)]

    def can_be_served(self, index: int) -> bool:
        needs_decode = self.requests[index].output_tokens > 1
        return bool(self.prefillers(index) and (self.decoders(index) or not needs_decode))

    def arrive(self, index: int) -> None:
        name = self.prefillers(index)[0]
        if len(self.prefillers(index)) == 2:
            waiting = self.pools["prefill"].waiting_prompt_tokens()
            borrowed = self.pools["mixed"].waiting_prompt_tokens()
            if waiting > max(self.borrow_tokens, borrowed):
                name = "mixed"
        request = self.requests[index]
        pool = self.pools[name]
        row = pool.new_row(index, request.prompt_tokens, output=1)
        self.rows[index].append(row)
        pool.waiting.append(row)

    # -- KV on its way --------------------------------------------------------------------------

    def take_back(self, name: str, pool: Pool, parts: list[Part]) -> None:
        pool.take_back(parts)
        prefilled, pool.prefilled = pool.prefilled, []
        for row in prefilled:
            index = pool.asker[row.index]
            if self.requests[index].output_tokens == 1:
                pool.free_pages_of(row)
            elif name == "mixed" and self.stays(index, row):
                self.hand_over(index, row, pool, pool)
            else:
                self.queue.append(Parcel(index, name, row, self.now_s))

    def stays(self, index: int, row: Row) -> bool:
        """Whether the mixed pool goes on with what it prefilled: the decode pool has no room."""
        if "mixed" not in self.decoders(index):
            return False
        others = "decode" in self.decoders(index) and self.has_room("decode", row)
        return bool(self.queue) or not others

    def has_room(self, name: str, row: Row) -> bool:
        """What waits there goes first; the watermark is for what runs there to grow into."""
        pool = self.pools[name]
        if pool.waiting:
            return False
        to_spare = int(self.watermark * pool.setting.total_pages)
        if not pool.running and pool.free == pool.setting.total_pages:
            to_spare = 0
        return pool.free - pages_of(row) >= to_spare

    def move(self) -> bool:
        """Let KV arrive and set out until neither happens at this instant; say if either did."""
        moved, count = True, 0
        while moved:
            moved, count = False, count + 1
            for parcel in [p for p in self.under_way() if p.end_s == self.now_s]:
                parcel.arrived = True
                source, pool = self.pools[parcel.source], self.pools[parcel.destination]
                self.hand_over(parcel.request, parcel.row, source, pool)
                moved = True
            while self.queue and self.link_free_s <= self.now_s and self.set_out(self.queue[0]):
                self.queue.pop(0)
                moved = True
        return count > 1

    def set_out(self, parcel: Parcel) -> bool:
        for name in self.decoders(parcel.request):
            if name != parcel.source and self.has_room(name, parcel.row):
                self.pools[name].free -= pages_of(parcel.row)
                parcel.destination, parcel.start_s = name, self.now_s
                tokens = pages_of(parcel.row) * PAGE_TOKENS
                self.link_free_s = self.now_s + self.link.per_token_s * tokens
                parcel.end_s = self.link_free_s + self.link.latency_s
                self.parcels.append(parcel)
                return True
        return False

    def hand_over(self, index: int, row: Row, source: Pool, pool: Pool) -> None:
        """Free the pages at the source, and go on decoding in a pool that has set some aside."""
        request = self.requests[index]
        decoding = pool.new_row(index, request.prompt_tokens, request.output_tokens)
        decoding.computed, decoding.generated = row.prompt, 1
        decoding.pages, decoding.token_s = pages_of(row), row.token_s
        source.free_pages_of(row)
        if pool is source:
            pool.free -= decoding.pages
        self.rows[index].append(decoding)
        pool.enter(decoding)
