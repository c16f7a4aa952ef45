"""The naive simulator of static batching: batches that are formed once and kept apart."""

from __future__ import annotations

import math

from tests.oracle.plain import PAGE_TOKENS, Part, Row
from tests.oracle.plain_gllm import PlainGllm


class PlainStatic(PlainGllm):
    """One run. A batch that returned goes on with those of its requests that have not ended."""

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
