"""Systems of several pools of stages: the results of the pools as one, and what crossed between.

The whole has the stages of all pools, side by side in their order; a micro-batch takes no time on
those of the other pools, so that busy time and returns are right. Its requests are the clients'; a
pool's are as the pool saw them: a prefill pool makes one token of each, a decode pool sees a
request arrive when its KV does. `free_pages` counts those of the micro-batch's own pool.
Knows columns, not how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from evenflow.results.run import Floats, Ints, RunResult, Transfers

BATCH_COLUMNS = ("scheduled_s", "prefill_tokens", "decode_tokens", "sampled_rows", "free_pages")


def merge(requests: RunResult, pools: Mapping[str, RunResult], transfers: Transfers) -> RunResult:
    """Return the result of the whole: the request columns of `requests`, the rest of the pools.

    Micro-batches are in the order scheduled; those of one instant in the order of the pools.
    """
    order = schedule_order(pools)
    parts = list(pools.values())
    before = np.cumsum([0, *(part.depth for part in parts)])
    spread = [_spread(part, start, before[-1]) for part, start in zip(parts, before, strict=False)]
    available_s, start_s, end_s = (
        np.concatenate(column)[order] for column in zip(*spread, strict=True)
    )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])[order]
        for name in BATCH_COLUMNS
    }
    caps = [part.max_in_flight for part in parts]
    return replace(
        requests,
        depth=int(before[-1]),
        max_in_flight=None if None in caps else sum(cap for cap in caps if cap is not None),
        total_pages=sum(part.total_pages for part in parts),
        **columns,
        available_s=available_s,
        start_s=start_s,
        end_s=end_s,
        kv_tokens=None,
        gap_s=np.concatenate([part.gap_s for part in parts]),
        gap_count=np.concatenate([part.gap_count for part in parts]),
        pools=dict(pools),
        transfers=transfers,
    )


def schedule_order(pools: Mapping[str, RunResult]) -> Ints:
    """Return which micro-batch, counted pool after pool, is which of the whole's."""
    scheduled_s = np.concatenate([part.scheduled_s for part in pools.values()])
    return np.argsort(scheduled_s, kind="stable")


def _spread(part: RunResult, start: int, depth: int) -> tuple[Floats, Floats, Floats]:
    """Return a pool's stage times as [m, depth]: stages before and after it take no time."""
    entered, left = part.scheduled_s[:, None], part.end_s[:, -1:]
    stop = depth - start - part.depth
    outside = [np.repeat(entered, start, axis=1), np.repeat(left, stop, axis=1)]
    return (
        np.hstack([outside[0], part.available_s, outside[1]]),
        np.hstack([outside[0], part.start_s, outside[1]]),
        np.hstack([outside[0], part.end_s, outside[1]]),
    )


def summarize_pools(result: RunResult, duration: float) -> dict[str, float | int]:
    """Return what a system of pools adds to the summary; nothing for one that has none.

    `transfer_wait` is from the first token to the start of the transfer, `transfer` from start to
    end, both per transfer. `backpressure_s` is how long KV stayed on the prefill side with the link
    free, because no pool had room. `duration` in seconds.
    """
    moved = result.transfers
    if moved is None:
        return {}
    per_s = 1 / duration if duration > 0 else 0.0
    summary: dict[str, float | int] = {
        f"{name}_busy_share": float((part.end_s - part.start_s).sum()) * per_s / part.depth
        for name, part in result.pools.items()
    }
    waits_ms, travels_ms = (
        1e3 * (moved.start_s - moved.ready_s),
        1e3 * (moved.end_s - moved.start_s),
    )
    if moved.bytes_per_token is not None:
        summary["transferred_bytes"] = float(moved.tokens.sum() * moved.bytes_per_token)
    return summary | {
        "num_transfers": len(moved.tokens),
        "mean_transfer_wait_ms": _mean(waits_ms),
        "p99_transfer_wait_ms": float(np.percentile(waits_ms, 99)) if len(waits_ms) else 0.0,
        "mean_transfer_ms": _mean(travels_ms),
        "transfer_link_busy_share": float(moved.link_busy_s.sum()) * per_s,
        "backpressure_s": float(moved.blocked_s.sum()),
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
