"""The naive simulator of gLLM: Token Throttling, and Sarathi-Serve's policy on its runtime (w/ CK).

Written from the equations and the public code's integer rules. Chunks of one prompt follow each
other without waiting; pages are taken as tokens are computed. Rows that return together keep their
order; what is taken of them is taken from the front, and the larger part of a merger comes first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.types import Request
from tests.oracle.plain import PAGE_TOKENS, Part, Plain, Row, Setting


@dataclass(frozen=True)
class GllmSetting(Setting):
    """The policy is `throttle` or `couple`."""

    iterations: int = 8
    max_prefill: int = 2048
    min_prefill: int = 32
    kv_thresh: float = 0.05
    use_wt: bool = True
    use_ut: bool = True
    victim: str = "latest"


def larger_first(rows: list[Row], others: list[Row]) -> list[Row]:
    return rows + others if len(rows) >= len(others) else others + rows


class PlainGllm(Plain):
    """One run. `ready` holds the decodes that returned, a list for each micro-batch."""

    setting: GllmSetting

    def __init__(self, requests: Sequence[Request], setting: GllmSetting) -> None:
        super().__init__(requests, setting)
        self.ready: list[list[Row]] = []
        self.chunks_out: Counter[Row] = Counter()
        self.turn = 0

    # -- the runtime ----------------------------------------------------------------------------

    def send(self, parts: list[Part]) -> None:
        for row, tokens, is_decode in parts:
            if not is_decode:
                row.computed += tokens
                self.chunks_out[row] += 1
        super().send(parts)

    def take_back(self, parts: list[Part]) -> None:
        returned = []
        for row, _, is_decode in [*[p for p in parts if p[2]], *[p for p in parts if not p[2]]]:
            self.chunks_out[row] -= not is_decode
            if self.chunks_out[row] or row.computed < row.todo:
                continue
            row.generated += 1
            row.token_s.append(self.now_s)
            if row.generated == row.output:
                self.running.remove(row)
                self.release(row)
            else:
                returned.append(row)
        if returned:
            self.ready.append(returned)

    def preempt(self, row: Row) -> None:
        self.ready = [[other for other in rows if other is not row] for rows in self.ready]
        self.ready = [rows for rows in self.ready if rows]
        super().preempt(row)

    def partials(self) -> list[Row]:
        rows = [row for row in self.running if row.computed < row.todo]
        return sorted(rows, key=lambda row: row.index)

    # -- prefill --------------------------------------------------------------------------------

    def waiting_tokens(self) -> int:
        return sum(row.todo - row.computed for row in [*self.waiting, *self.partials()])

    def budget(self) -> int:
        """Equation 3 in whole tokens, and no more than the pages above the reserve."""
        setting, total = self.setting, self.setting.total_pages
        above = PAGE_TOKENS * max(self.free - int(setting.kv_thresh * total), 0)
        if setting.depth == 1:
            return min(setting.max_prefill, above)
        idle, thresh = self.free / total, setting.kv_thresh
        if idle < thresh:
            return 0
        ramp = round(setting.max_prefill * (idle - thresh) / (1 - thresh))
        spread = max(self.waiting_tokens() // setting.iterations, setting.min_prefill)
        tokens = setting.max_prefill
        if setting.use_ut:
            tokens = min(tokens, ramp)
        if setting.use_wt:
            tokens = min(tokens, spread)
        return min(tokens, above)

    def prefill(self, budget: int) -> list[Part]:
        """First come first served, a page whenever a token needs one."""
        parts: list[Part] = []
        for row in [*self.partials(), *self.waiting]:
            room = (row.pages + self.free) * PAGE_TOKENS - row.computed
            tokens = min(row.todo - row.computed, budget, room)
            if tokens <= 0 or len(parts) == self.row_limit():
                break
            if row in self.waiting:
                self.waiting.remove(row)
                self.running.append(row)
            pages = max(math.ceil((row.computed + tokens) / PAGE_TOKENS), row.pages)
            self.free -= pages - row.pages
            row.pages = pages
            budget -= tokens
            parts.append((row, tokens, False))
        return parts

    # -- decode ---------------------------------------------------------------------------------

    def running_decodes(self) -> int:
        sent = sum(is_decode for _, parts in self.in_flight for _, _, is_decode in parts)
        return sent + sum(map(len, self.ready))

    def share(self) -> int:
        """Equation 4; `turn` spreads the remainder."""
        running, depth = self.running_decodes(), self.setting.depth
        if running < depth:
            return 1
        self.turn += 1
        return (running + (self.turn - 1) % depth) // depth

    def take(self, count: int, newest: bool) -> list[Row]:
        """Take the first rows out, from the micro-batch that returned last or first on."""
        chosen: list[Row] = []
        while self.ready and len(chosen) < count:
            rows = self.ready.pop(-1 if newest else 0)
            more, left = rows[: count - len(chosen)], rows[count - len(chosen) :]
            chosen = larger_first(chosen, more)
            if left:
                self.ready.insert(len(self.ready) if newest else 0, left)
        return chosen

    def decode(self, count: int, newest: bool) -> list[Part]:
        chosen = self.take(count, newest)
        while sum(row.needs_page for row in chosen) > self.free:
            victim = self.choose_victim(chosen)
            chosen = [row for row in chosen if row is not victim]
            self.preempt(victim)
            chosen = larger_first(chosen, self.take(count - len(chosen), newest))
        for row in chosen:
            self.free -= row.needs_page
            row.pages += row.needs_page
        return [(row, 1, True) for row in chosen]

    def choose_victim(self, chosen: list[Row]) -> Row:
        every = [*(row for rows in self.ready for row in rows), *chosen]
        if self.setting.victim == "most_pages":
            return max(every, key=lambda row: (row.pages, row.index))
        return max(reversed(every), key=lambda row: row.token_s[-1])

    # -- the policies ---------------------------------------------------------------------------

    def throttle(self) -> list[Part]:
        parts = self.prefill(self.budget()) if self.waiting_tokens() else []
        if self.ready:
            return parts + self.decode(min(self.share(), self.row_limit() - len(parts)), True)
        if parts or self.in_flight:
            return parts
        parts = self.prefill(self.setting.max_prefill)  # the reserve protects nobody
        if not parts and len(self.partials()) > 1:
            self.preempt(self.partials()[-1])
        return parts

    def couple(self) -> list[Part]:
        preempted = False
        while (rows := self.oldest_ready()) and not self.have_pages(rows):
            self.preempt(self.choose_victim([]))
            preempted = True
        parts = self.decode(self.row_limit(), newest=False)
        room = self.setting.max_prefill - len(parts)
        partials = self.partials()
        closed = preempted and bool(parts or partials)
        while room > 0 and len(parts) < self.row_limit():
            row = partials.pop(0) if partials else None if closed else self.admit_whole()
            if row is None:
                break
            tokens = min(row.todo - row.computed, room)
            room -= tokens
            parts.append((row, tokens, False))
        return parts

    def have_pages(self, rows: list[Row]) -> bool:
        """Return whether a page is free for each in turn, needed or not."""
        return sum(row.needs_page for row in rows[:-1]) < self.free

    def oldest_ready(self) -> list[Row]:
        return [row for rows in self.ready for row in rows][: self.row_limit()]

    def admit_whole(self) -> Row | None:
        if not self.waiting:
            return None
        return self.admit(math.ceil(self.waiting[0].todo / PAGE_TOKENS), reserve=0)


class PlainStatic(PlainGllm):
    """One run of static batching: batches are formed once and kept apart.

    A batch that returned goes on with those of its requests that have not ended.
    """

    def can_ever_fit(self, row: Row) -> bool:
        reserved = math.ceil(self.setting.max_model_len / PAGE_TOKENS)
        return super().can_ever_fit(row) and reserved <= self.setting.total_pages

    def static(self) -> list[Part]:
        if self.ready:
            return [(row, 1, True) for row in self.ready.pop(0)]
        if len(self.in_flight) == self.setting.depth:
            return []
        share = max(self.setting.max_num_seqs // self.setting.depth, 1)
        parts: list[Part] = []
        while self.waiting and len(parts) < min(share, self.row_limit()):
            row = self.admit(math.ceil(self.setting.max_model_len / PAGE_TOKENS), reserve=0)
            if row is None:
                break
            parts.append((row, row.todo, False))
        return parts
