"""Memory reserved at admission: the part that Orca and static batching share."""

from __future__ import annotations

from typing import ClassVar

from evenflow.kv import PagePool
from evenflow.schedulers.fcfs import at_least, row_cap
from evenflow.types import SearchSpace


class Reserving:
    """Reserves pages for `max_model_len` tokens a request, so that nothing is ever preempted."""

    search_space: ClassVar[SearchSpace] = {
        "max_num_seqs": {"low": 4, "high": 512, "log": True, "integer": True}
    }

    def __init__(
        self,
        *,
        max_num_seqs: int = 128,
        max_model_len: int | None = None,
        max_batch_rows: int | None = None,
    ) -> None:
        if max_model_len is None:
            raise ValueError("max_model_len has to be given: so many tokens are reserved")
        self.max_num_seqs = at_least(max_num_seqs, 1, "max_num_seqs")
        self.max_model_len = at_least(max_model_len, 1, "max_model_len")
        self.max_batch_rows = row_cap(max_batch_rows)

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Say why such a request can never run, or return None."""
        tokens, length = prompt_tokens + output_tokens, self.max_model_len
        if tokens > length:
            return f"{tokens} tokens exceed the max_model_len of {length} that is reserved"
        pages = pool.pages_for(length)
        if pages > pool.total_pages:
            return f"reserving max_model_len {length} takes {pages} KV pages of {pool.total_pages}"
        return None
