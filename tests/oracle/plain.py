"""A second, deliberately naive simulator, to compare the real one with.

It follows requests one by one through plain lists, recomputes everything at every event, and is
written from the definitions of the policies. It knows nothing of how Evenflow does the same:
of Evenflow it knows only the requests and the shape of a cost. No links, no CPU overheads, no
prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from evenflow.costs.base import BatchShape
from evenflow.types import Request

PAGE_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """A deployment and a policy: one of the methods of `Plain` that choose parts.

    A stage takes base_s + per_token_s * tokens + per_context_s * tokens that the decodes attend to.
    """

    policy: str
    depth: int
    total_pages: int
    max_model_len: int
    dispatch: str = "stage0"
    base_s: float = 0.005
    per_token_s: float = 0.00002
    per_context_s: float = 0.0
    token_budget: int = 512
    max_num_seqs: int = 256
    max_batch_rows: int | None = None
    watermark: float = 0.01


@dataclass(frozen=True)
class ContextCost:
    """Evenflow's counterpart of the costs here: a base a stage, then per token and per context."""

    bases_s: tuple[float, ...]
    per_token_s: float
    per_context_s: float

    @property
    def depth(self) -> int:
        return len(self.bases_s)

    def times(self, batch: BatchShape) -> list[float]:
        tokens = batch.prefill_tokens + batch.decode_tokens
        return [
            base_s + self.per_token_s * tokens + self.per_context_s * batch.decode_context
            for base_s in self.bases_s
        ]

    def transfer_bytes(self, batch: BatchShape) -> float:
        return 0.0


@dataclass(eq=False)
class Row:
    """A request on its way. `todo` tokens are to be computed before a token comes out."""

    index: int
    prompt: int
    output: int
    arrival_s: float
    todo: int
    computed: int = 0
    generated: int = 0
    pages: int = 0
    in_flight: bool = False
    preemptions: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return self.computed == self.todo

    @property
    def context(self) -> int:
        """What a decode attends to: the prompt and all generated tokens but the last."""
        return self.prompt + self.generated - 1

    @property
    def needs_page(self) -> bool:
        return self.context == self.pages * PAGE_TOKENS


Part = tuple[Row, int, bool]
"""A row, the tokens it computes in a micro-batch, and whether it decodes."""


class Plain:
    """One run. `rows` keep the times of their tokens.

    `sent` keeps (scheduled_s, prefill tokens, decode tokens, free pages) of each micro-batch.
    """

    now_s = 0.0

    def __init__(self, requests: Sequence[Request], setting: Setting) -> None:
        self.setting = setting
        self.rows = [
            Row(i, r.prompt_tokens, r.output_tokens, r.arrival_s, todo=r.prompt_tokens)
            for i, r in enumerate(requests)
        ]
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.free = setting.total_pages
        self.last_kind_was_prefill = False
        self.preempted = False
        self.stage_free_s = [0.0] * setting.depth
        self.in_flight: list[tuple[float, list[Part]]] = []
        self.sent: list[tuple[float, int, int, int]] = []

    def run(self) -> Plain:
        coming = [row for row in self.rows if self.can_ever_fit(row)]
        while coming or self.in_flight:
            times = [row.arrival_s for row in coming[:1]] + [end_s for end_s, _ in self.in_flight]
            if self.sent and self.stage_free_s[0] > self.now_s:
                times.append(self.stage_free_s[0])
            self.now_s = min(times)
            while coming and coming[0].arrival_s == self.now_s:
                self.waiting.append(coming.pop(0))
            while self.in_flight and self.in_flight[0][0] == self.now_s:
                self.take_back(self.in_flight.pop(0)[1])
            self.ask()
        assert self.waiting == self.running == []
        assert self.free == self.setting.total_pages
        return self

    def can_ever_fit(self, row: Row) -> bool:
        tokens = row.prompt + row.output
        held = self.setting.max_model_len if self.setting.policy == "orca" else tokens
        pages = math.ceil(held / PAGE_TOKENS)
        return tokens <= self.setting.max_model_len and pages <= self.setting.total_pages

    def ask(self) -> None:
        """Ask until there is no room or no work; a preemption may make room for another try."""
        while len(self.in_flight) < self.setting.depth:
            if self.setting.dispatch == "stage0" and self.stage_free_s[0] > self.now_s:
                return
            self.preempted = False
            parts = getattr(self, self.setting.policy)()
            if parts:
                self.send(parts)
            elif not self.preempted:
                return

    def send(self, parts: list[Part]) -> None:
        tokens = sum(n for _, n, _ in parts)
        decoding = [row for row, _, is_decode in parts if is_decode]
        cost = self.setting
        takes_s = cost.base_s + cost.per_token_s * tokens
        takes_s += cost.per_context_s * sum(row.context for row in decoding) + self.copies_s()
        time_s = self.now_s
        for stage in range(self.setting.depth):
            time_s = max(time_s, self.stage_free_s[stage]) + takes_s
            self.stage_free_s[stage] = time_s
        for row, _, _ in parts:
            row.in_flight = True
        self.in_flight.append((time_s, parts))
        self.sent.append((self.now_s, tokens - len(decoding), len(decoding), self.free))

    def copies_s(self) -> float:
        """What a micro-batch waits for on each stage beside its own work."""
        return 0.0

    def take_back(self, parts: list[Part]) -> None:
        for row, tokens, is_decode in parts:
            row.in_flight = False
            if not is_decode:
                row.computed += tokens
            if not row.decoding:
                continue
            row.generated += 1
            row.token_s.append(self.now_s)
            if row.generated == row.output:
                self.running.remove(row)
                self.release(row)

    def release(self, row: Row) -> None:
        self.free += row.pages
        row.pages = 0

    def preempt(self, row: Row) -> None:
        self.preempted = True
        self.running.remove(row)
        self.release(row)
        row.todo, row.computed = row.prompt + row.generated, 0
        row.preemptions += 1
        self.waiting.insert(0, row)

    def idle(self) -> list[Row]:
        """The running rows that are not in flight, by arrival."""
        return sorted((r for r in self.running if not r.in_flight), key=lambda row: row.index)

    def row_limit(self) -> int:
        return self.setting.max_batch_rows or 10**9

    def decodes(self, *, spare: bool = True) -> list[Part]:
        """Choose decodes; with `spare`, a page has to be free for each, needed or not."""
        chosen = []
        for row in [row for row in self.idle() if row.decoding][: self.row_limit()]:
            while row in self.running and (spare or row.needs_page) and self.free == 0:
                self.preempt(self.idle()[-1])
            if row not in self.running:
                continue
            if row.needs_page:
                self.free -= 1
                row.pages += 1
            chosen.append((row, 1, True))
        return chosen

    def admit(self, pages: int, reserve: int) -> Row | None:
        """Move the head of the queue to the running rows if it may; it takes its pages now."""
        if len(self.running) >= self.setting.max_num_seqs:
            return None
        if self.free - pages < (reserve if self.running else 0):
            return None
        row = self.waiting.pop(0)
        row.pages = pages
        self.free -= pages
        self.running.append(row)
        return row

    def admit_paged(self) -> Row | None:
        pages = math.ceil(self.waiting[0].todo / PAGE_TOKENS)
        return self.admit(pages, int(self.setting.watermark * self.setting.total_pages))

    def chunks(self, parts: list[Part], *, mixed: bool = True) -> list[Part]:
        """Chunks of partial prompts, then of new ones, beside `parts` and within the budget.

        Nothing new beside anything else where a page was missing; unless `mixed`, nor beside a
        partial prompt.
        """
        parts = list(parts)
        room = self.setting.token_budget - sum(n for _, n, _ in parts)
        partial = [row for row in self.idle() if not row.decoding]
        going_on = len(parts) + len(partial)
        while room > 0 and len(parts) < self.row_limit():
            if partial:
                row: Row | None = partial.pop(0)
            elif self.waiting and not (going_on and (self.preempted or not mixed)):
                row = self.admit_paged()
            else:
                row = None
            if row is None:
                break
            tokens = min(row.todo - row.computed, room)
            room -= tokens
            parts.append((row, tokens, False))
        return parts

    def sarathi(self) -> list[Part]:
        return self.chunks(self.decodes())

    def hybrid_only(self) -> list[Part]:
        """Whole prompts beside the decodes: one if any budget is left, more while they fit."""
        parts = decodes = self.decodes()
        room = self.setting.token_budget - len(decodes)
        open_ = not (decodes and self.preempted)
        while open_ and self.waiting and room > 0 and len(parts) < self.row_limit():
            tokens = self.waiting[0].todo - self.waiting[0].computed
            row = self.admit_paged() if parts is decodes or tokens <= room else None
            if row is None:
                break
            room -= tokens
            parts = [*parts, (row, tokens, False)]
        return parts

    def chunked_only(self) -> list[Part]:
        decode_first = self.last_kind_was_prefill
        parts = self.decodes() if decode_first else self.chunks([], mixed=False)
        if not parts and not self.preempted:
            decode_first = not decode_first
            parts = self.decodes() if decode_first else self.chunks([], mixed=False)
        if parts:
            self.last_kind_was_prefill = not decode_first
        return parts

    def vllm(self) -> list[Part]:
        return self.whole_prompts() or self.decodes() or self.whole_prompts()

    def whole_prompts(self) -> list[Part]:
        parts: list[Part] = []
        room = self.setting.max_model_len
        while self.waiting and len(parts) < self.row_limit():
            room -= self.waiting[0].todo - self.waiting[0].computed
            row = self.admit_paged() if room >= 0 else None
            if row is None:
                break
            parts.append((row, row.todo - row.computed, False))
        return parts

    def orca(self) -> list[Part]:
        parts = self.decodes(spare=False)
        while self.waiting and len(parts) < self.row_limit():
            row = self.admit(math.ceil(self.setting.max_model_len / PAGE_TOKENS), reserve=0)
            if row is None:
                break
            parts.append((row, row.todo, False))
        return parts
