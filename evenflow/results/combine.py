"""Several results as one: those of replicas side by side, and of the pools of one system.

Knows the columns of a run, not how they came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evenflow.results.run import (
    BATCHES,
    GAPS,
    REQUESTS,
    STAGES,
    TALLY,
    Ints,
    RunResult,
    Tally,
    Transfers,
)


def merged(results: Sequence[RunResult]) -> RunResult:
    """Return all requests and all micro-batches of replicas: pipelines of one kind, side by side.

    Requests are in order of request id, micro-batches in the order in which they return. Columns
    hold what each pipeline wrote, so stages of different replicas overlap and `free_pages` is that
    of one replica: for idle time and occupancy, look at each result by itself. When the drivers
    waited is left out. A single result is returned as it is.
    """
    if len(results) == 1:
        return results[0]
    by_id = _order(results, "request_id")
    by_return = _order(results, "returned_s")
    return replace(
        results[0],
        **_joined(results, REQUESTS, by_id),
        **_joined(results, [*BATCHES, *STAGES], by_return),
        **_joined(results, GAPS),
        kept_tally=_tally(results),
        wait_s=np.zeros(0),
        wait_reason=np.zeros(0, dtype=np.int64),
        replicas=sum(result.replicas for result in results),
    )


def of_pools(
    requests: RunResult, pools: Mapping[str, RunResult], transfers: Transfers
) -> RunResult:
    """Return the result of a system of pools: the request columns of `requests`, the rest of them.

    The whole has the stages of all pools, side by side in their order; a micro-batch takes no time
    on those of the other pools, so that busy time and returns are right. Micro-batches are in the
    order scheduled; those of one instant in the order of the pools. Requests are the clients'; a
    pool's are as the pool saw them: a prefill pool makes one token of each, a decode pool sees a
    request arrive when its KV does. `free_pages` counts those of the micro-batch's own pool.
    """
    parts = list(pools.values())
    depths = [part.depth for part in parts]
    wide = [
        _among_others(part, sum(depths[:index]), sum(depths[index + 1 :]))
        for index, part in enumerate(parts)
    ]
    caps = [part.max_in_flight for part in parts if part.max_in_flight is not None]
    return replace(
        requests,
        depth=sum(depths),
        max_in_flight=sum(caps) if len(caps) == len(parts) else None,
        total_pages=sum(part.total_pages for part in parts),
        **_joined(wide, [*BATCHES, *STAGES], schedule_order(pools)) | {"kv_tokens": None},
        **_joined(parts, GAPS),
        pools=dict(pools),
        transfers=transfers,
    )


def schedule_order(pools: Mapping[str, RunResult]) -> Ints:
    """Return which micro-batch, counted pool after pool, is which of the whole's."""
    return _order(pools.values(), "scheduled_s")


def _order(results: Iterable[RunResult], name: str) -> Ints:
    column = np.concatenate([getattr(result, name) for result in results])
    return np.argsort(column, kind="stable")


def _tally(results: Sequence[RunResult]) -> Tally | None:
    """Return what is left of the micro-batches of replicas that did not keep them."""
    tallies = [result.kept_tally for result in results if result.kept_tally is not None]
    if not tallies:
        return None
    columns = _joined(tallies, TALLY)
    order = np.argsort(columns["returned_s"], kind="stable")
    rows = {name: columns[name][order] for name in ("returned_s", "sampled_rows")}
    began = [tally for tally in tallies if len(tally.returned_s)]
    if began:  # the first one is that of the micro-batch that returns first
        rows["start_s"] = min(began, key=lambda tally: tally.returned_s[0]).start_s
    return Tally(**columns | rows)


def _joined(
    results: Sequence[object], columns: Iterable[str], order: Ints | slice = slice(None)
) -> dict[str, Any]:
    """Return columns of several results as one, in an order; None where one of them has none."""
    whole: dict[str, Any] = {}
    for name in columns:
        parts = [getattr(result, name) for result in results]
        if any(part is None for part in parts):
            whole[name] = None
        else:
            column = np.concatenate(parts)[order]
            whole[name] = column.tolist() if isinstance(parts[0], list) else column
    return whole


def _among_others(part: RunResult, before: int, after: int) -> RunResult:
    """Return a pool with stages of others around its own, which take no time."""
    entered = np.repeat(part.scheduled_s[:, None], before, axis=1)
    left = np.repeat(part.returned_s[:, None], after, axis=1)
    stages = {name: np.hstack([entered, getattr(part, name), left]) for name in STAGES}
    return replace(part, depth=before + part.depth + after, **stages)  # type: ignore[arg-type]
