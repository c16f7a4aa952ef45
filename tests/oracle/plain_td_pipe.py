"""The naive simulator of TD-Pipe: future KV use by the table, even batches, the two intensities.

Written from the paper's algorithm 1 and section 3. Whole prompts; no cap on the rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.types import Request
from tests.oracle.plain import PAGE_TOKENS, Part, Row
from tests.oracle.plain_gllm import GllmSetting, PlainGllm

POINTS = [*range(32, 1025, 32)]
CODE_POINTS = [5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


@dataclass(frozen=True)
class TDPipeSetting(GllmSetting):
    """The `variant` is the `paper`, a `reading` of it, or as the public `code` does."""

    variant: str = "paper"
    max_num_batched_tokens: int = 2048
    kv_occupancy_ratio: float | None = None
    request_finish_ratio: float | None = None
    work_stealing: bool = True
    future_points: Sequence[int] = tuple(POINTS)

    @property
    def code(self) -> bool:
        return self.variant == "code"


class PlainTDPipe(PlainGllm):
    """One run. `turn` counts the batches of a decode phase."""

    setting: TDPipeSetting

    def __init__(self, requests: Sequence[Request], setting: TDPipeSetting) -> None:
        super().__init__(requests, setting)
        self.predicted = [request.predicted_output_tokens for request in requests]
        self.prefilling = True
        self.started_with = self.finished = 0
        self.usage = dict.fromkeys(setting.future_points, 0)

    def ask(self) -> None:
        """As the parent, but without a cap; while there is anything that could be sent."""
        while self.waiting or self.ready:
            if self.setting.dispatch == "stage0" and self.stage_free_s[0] > self.now_s:
                return
            self.preempted = False
            parts = self.td_pipe()
            if parts:
                self.send(parts)
            elif not self.preempted:
                return

    def take_back(self, parts: list[Part]) -> None:
        before = len(self.running)
        super().take_back(parts)
        self.finished += before - len(self.running)

    def td_pipe(self) -> list[Part]:
        if not self.prefilling and self.ends_decode():
            self.prefilling = True
            self.usage = self.usage_of_decodes()
        if self.prefilling:
            parts = self.prefill_batch()
            if parts and not self.is_full(self.usage, self.free):
                return parts
            self.prefilling, self.turn = False, 0
            self.started_with, self.finished = len(self.running), 0
            if parts:
                return parts
        return self.decode_batch()

    # -- prefill --------------------------------------------------------------------------------

    def count(self, usage: dict[int, int], row: Row, tokens: int) -> None:
        """Add a request that has `tokens` now at each point that it is predicted to reach."""
        predicted = self.predicted[row.index]
        for point in usage:
            if predicted is None or point <= predicted - row.generated:
                usage[point] += tokens + point

    def is_full(self, usage: dict[int, int], free: int) -> bool:
        total = self.setting.total_pages
        if self.setting.kv_occupancy_ratio is not None:
            return (total - free) / total >= self.setting.kv_occupancy_ratio
        if self.setting.code:
            return max(usage.values()) >= 0.9 * total * PAGE_TOKENS
        return max(usage.values()) > total * PAGE_TOKENS

    def usage_of_decodes(self) -> dict[int, int]:
        usage = dict.fromkeys(self.setting.future_points, 0)
        for row in self.running:
            self.count(usage, row, row.context)
        return usage

    def prefill_batch(self) -> list[Part]:
        parts: list[Part] = []
        for row in self.next_prompts(self.waiting, self.free):
            self.count(self.usage, row, row.todo)
            self.waiting.remove(row)
            self.running.append(row)
            row.pages = math.ceil(row.todo / PAGE_TOKENS)
            self.free -= row.pages
            parts.append((row, row.todo, False))
        return parts

    def next_prompts(self, waiting: list[Row], free: int) -> list[Row]:
        """The next micro-batch: prompts up to the limit, or one that is longer alone."""
        chosen: list[Row] = []
        for row in waiting:
            tokens = sum(other.todo for other in chosen) + row.todo
            free -= math.ceil(row.todo / PAGE_TOKENS)
            if free < 0 or (chosen and tokens > self.setting.max_num_batched_tokens):
                break
            chosen.append(row)
        return chosen

    # -- decode ---------------------------------------------------------------------------------

    def decode_batch(self) -> list[Part]:
        if not self.ready or len(self.in_flight) >= self.setting.depth:
            return []
        first_round = self.turn < self.setting.depth
        live = self.started_with if first_round else len(self.running)
        batches = [live // self.setting.depth] * self.setting.depth
        for extra in range(live % self.setting.depth):
            batches[extra] += 1
        rows = batches[self.turn % self.setting.depth]
        if not first_round and not self.setting.work_stealing:
            rows = len(self.ready[0])
        newest = not first_round and self.setting.work_stealing
        prefills = any(not is_decode for _, parts in self.in_flight for _, _, is_decode in parts)
        if prefills and sum(map(len, self.ready)) < rows:
            return []
        self.turn += 1
        if newest and self.setting.code and rows < sum(map(len, self.ready)):
            self.oldest_first(max(rows, 1))
            newest = False
        return self.decode(max(rows, 1), newest)

    def oldest_first(self, count: int) -> None:
        """Have the rows that arrived first taken first."""
        every = sorted((row for rows in self.ready for row in rows), key=by_index)
        chosen = every[:count]
        rest = [[row for row in rows if row not in chosen] for rows in self.ready]
        self.ready = [chosen, *(rows for rows in rest if rows)]

    def choose_victim(self, chosen: list[Row]) -> Row:
        return max([*(row for rows in self.ready for row in rows), *chosen], key=by_index)

    # -- from decode to prefill -----------------------------------------------------------------

    def ends_decode(self) -> bool:
        setting = self.setting
        if not self.waiting or not self.running:
            return bool(self.waiting)
        if self.turn < setting.depth or len(self.in_flight) >= setting.depth:
            return False
        if math.ceil(self.waiting[0].todo / PAGE_TOKENS) > self.free:
            return False
        if setting.code and self.turn % setting.depth:
            return False
        if setting.request_finish_ratio is not None:
            return self.finished / self.started_with >= setting.request_finish_ratio
        return self.prefill_is_better()

    def decode_s(self, rows: float, context: float) -> float:
        cost = self.setting
        return cost.base_s + cost.per_token_s * rows + cost.per_context_s * context

    def peak_rows(self) -> int:
        """The power of two from which twice the rows give less than 5 % more rows a second."""
        rows = 256 if self.setting.code else 1
        while not self.setting.code and rows < 8192:
            if 2 * rows / self.decode_s(2 * rows, 0) < 1.05 * rows / self.decode_s(rows, 0):
                break
            rows *= 2
        return rows

    def prefill_is_better(self) -> bool:
        """SI < TI, with SI = (bs / T(bs)) / peak and TI = 1 - bubble / total."""
        depth = self.setting.depth
        rows, peak = max(len(self.running) // depth, 1), self.peak_rows()
        if self.setting.code and rows >= 192:
            return False
        context = sum(row.context for row in self.running) / len(self.running)
        pending_s = self.pending_prefills_s()
        if not pending_s:
            return False
        step_s = self.decode_s(rows, round(rows * context))
        achieved, best = rows / step_s, peak / self.decode_s(peak, round(peak * context))
        waits = 1 if self.setting.variant == "paper" else depth - 1
        bubble_s = max(max(pending_s) - step_s, 0) * waits
        total_s = sum(pending_s) + depth * step_s + bubble_s
        return achieved / best < 1 - bubble_s / total_s

    def pending_prefills_s(self) -> list[float]:
        usage, free, waiting = self.usage_of_decodes(), self.free, list(self.waiting)
        times_s: list[float] = []
        while batch := self.next_prompts(waiting, free):
            waiting = waiting[len(batch) :]
            for row in batch:
                self.count(usage, row, row.todo)
                free -= math.ceil(row.todo / PAGE_TOKENS)
            if self.is_full(usage, free):
                break
            tokens = sum(row.todo for row in batch)
            times_s.append(self.setting.base_s + self.setting.per_token_s * tokens)
        return times_s


def by_index(row: Row) -> int:
    return row.index
