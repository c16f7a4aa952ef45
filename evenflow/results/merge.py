"""Several pipelines' results as one, for metrics of requests. Knows columns only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenflow.results.run import Ints, RunResult

REQUESTS = (
    "request_id",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "first_scheduled_s",
    "first_token_s",
    "completion_s",
    "preemptions",
)
BATCHES = (
    "scheduled_s",
    "prefill_tokens",
    "decode_tokens",
    "sampled_rows",
    "free_pages",
    "available_s",
    "start_s",
    "end_s",
)


def merged(results: Sequence[RunResult]) -> RunResult:
    """Return all requests and all micro-batches of replicas: pipelines of one kind, side by side.

    Requests are in order of request id, micro-batches in the order in which they return. Columns
    hold what each pipeline wrote, so stages of different replicas overlap and `free_pages` is that
    of one replica: for idle time and occupancy, look at each result by itself. When the drivers
    waited is left out. A single result is returned as it is.
    """
    first = results[0]
    if len(results) == 1:
        return first
    by_id = np.argsort(np.concatenate([result.request_id for result in results]), kind="stable")
    returned_s = np.concatenate([result.returned_s for result in results])
    by_return = np.argsort(returned_s, kind="stable")

    def joined(name: str, order: Ints | None = None) -> Any:
        column = np.concatenate([getattr(result, name) for result in results])
        return column if order is None else column[order]

    status = [status for result in results for status in result.status]
    reason = [reason for result in results for reason in result.reason]

    def joined_if_known(name: str, order: Ints) -> Any:
        known = all(getattr(result, name) is not None for result in results)
        return joined(name, order) if known else None

    return RunResult(
        depth=first.depth,
        max_in_flight=first.max_in_flight,
        total_pages=first.total_pages,
        page_tokens=first.page_tokens,
        **{name: joined(name, by_id) for name in REQUESTS},
        status=[status[place] for place in by_id],
        reason=[reason[place] for place in by_id],
        **{name: joined(name, by_return) for name in BATCHES},
        wait_s=np.zeros(0),
        wait_reason=np.zeros(0, dtype=np.int64),
        gap_s=joined("gap_s"),
        gap_count=joined("gap_count"),
        cached_tokens=joined_if_known("cached_tokens", by_id),
        kv_tokens=joined_if_known("kv_tokens", by_return),
        engines=first.engines,
        replicas=sum(result.replicas for result in results),
    )
