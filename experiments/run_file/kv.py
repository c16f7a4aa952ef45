"""The schema of KV memory: pages, what is shared between requests, and what moves to the host."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from experiments.run_file.fields import Count, Keys, NonNegative, Positive, Share, expect, is_count


class HostLinkConfig(Keys):
    """The link of each GPU to its host: GB/s (1e9 bytes), and microseconds a request copied."""

    bandwidth_gb_s: Positive
    latency_us: NonNegative = 0.0


class KvConfig(Keys):
    """Paged KV memory; `pages: auto` counts what fits beside the weights on the fullest stage.

    `prefix_cache`: requests share the pages of common prefixes. `swap`: preempted requests are
    copied to the host over `host_link` and back, instead of being recomputed.
    """

    page_tokens: Count = 16
    pages: Annotated[
        int | Literal["auto"],
        expect(lambda v: v == "auto" or is_count(v), "auto or a whole number of at least 1"),
    ] = "auto"
    memory_utilization: Share = 0.9
    prefix_cache: bool = False
    swap: bool = False
    host_link: HostLinkConfig | None = None

    @model_validator(mode="after")
    def _swap_over_a_link(self) -> Self:
        for needed, present, reason, key in (
            (self.swap, self.host_link is not None, "kv.swap", '"kv.host_link"'),
            (self.host_link is not None, self.swap, "kv.host_link", '"kv.swap: true"'),
        ):
            if needed and not present:
                raise PydanticCustomError("needed", "", {"reason": reason, "key": key})
        return self
