"""Memory reserved at admission, for the longest request that there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenflow.compiled import mypyc_attr
from evenflow.keys import Count
from evenflow.kv import PagePool
from evenflow.schedulers.admission import UNLIMITED
from evenflow.schedulers.limits import Policy
from evenflow.scheduling import SearchSpace


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Reserving(Policy):
    """Reserves pages for `max_model_len` tokens a request, so that nothing is ever preempted."""

    search_space: ClassVar[SearchSpace] = {
        "max_num_seqs": {"low": 4, "high": 512, "log": True, "integer": True}
    }

    max_num_seqs: Count = 128
    max_model_len: Count | None = None
    max_batch_rows: Count | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is None:
            raise ValueError("max_model_len has to be given: so many tokens are reserved")
        self.reserved_tokens = self.max_model_len
        self.most_rows = self.max_batch_rows or UNLIMITED

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: PagePool) -> str | None:
        """Say why such a request can never run, or return None."""
        tokens, length = prompt_tokens + output_tokens, self.reserved_tokens
        if tokens > length:
            return f"{tokens} tokens exceed the max_model_len of {length} that is reserved"
        pages = pool.pages_for(length)
        if pages > pool.total_pages:
            return f"reserving max_model_len {length} takes {pages} KV pages of {pool.total_pages}"
        return None
