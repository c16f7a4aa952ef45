"""vLLM (v0): prefills first, and never in one micro-batch with decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenflow.compiled import mypyc_attr
from evenflow.keys import Count
from evenflow.kv import PagePool
from evenflow.schedulers.admission import UNLIMITED, Room
from evenflow.schedulers.limits import Fraction, Policy
from evenflow.scheduling import Plan, SearchSpace, View, decodes_only


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class VLLM(Policy):
    """Whole prompts while any fits, otherwise all ready decodes.

    Source: vLLM v0 scheduler (SOSP'23, section 4.5; the "separate batching" of TD-Pipe). Pages are
    allocated as needed; when none is free the latest-arrived ready request is preempted and
    recomputed. There is no balancing: the first call after several returns takes all ready decodes.
    """

    search_space: ClassVar[SearchSpace] = {
        "max_num_batched_tokens": {"low": 1024, "high": 16384, "log": True, "integer": True},
        "max_num_seqs": {"low": 16, "high": 1024, "log": True, "integer": True},
        "watermark": {"low": 0.0, "high": 0.1},
    }

    max_num_batched_tokens: Count | None = None
    """Most tokens of a micro-batch; null: `max_model_len`."""
    max_num_seqs: Count = 256
    """Most requests that are admitted at a time."""
    watermark: Fraction = 0.01
    """The share of the pages that an admission leaves free."""
    max_batch_rows: Count | None = None
    """Most rows of a micro-batch: decodes, and chunks of prompts; null: no limit."""
    max_model_len: Count | None = None
    """Most tokens of a request; null: the run's."""

    def __post_init__(self) -> None:
        budget = self.max_num_batched_tokens or self.max_model_len
        if budget is None:
            raise ValueError("max_num_batched_tokens or max_model_len has to be given")
        self._budget = budget
        self._most_rows = self.max_batch_rows or UNLIMITED

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        if prompt_tokens > self._budget:
            limit = f"max_num_batched_tokens {self._budget}"
            return f"a prompt of {prompt_tokens} tokens exceeds {limit}"
        return None

    def schedule(self, view: View) -> Plan:
        kv_limited = False
        if view.num_waiting:
            room = Room(
                tokens=self._budget,
                rows=self._most_rows,
                seats=self.max_num_seqs - view.running,
                pages=view.free_pages,
                watermark_pages=int(self.watermark * view.total_pages),
            )
            room.admit(view, chunked=False)
            if room.prefills:
                return Plan(room.prefills)
            kv_limited = room.kv_limited
        decodes = min(view.ready_decodes, self._most_rows)
        return decodes_only(decodes, "arrival", "latest_arrived", kv_limited)
