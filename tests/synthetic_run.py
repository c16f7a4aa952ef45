"""A toy pipeline that makes a plausible RunResult, for tests of what shows one."""

from __future__ import annotations

import numpy as np

from evenflow.result import RunResult

BASE_S, PER_TOKEN_S, OUTPUT_TOKENS = 0.01, 2e-5, 12


def synthetic_run(
    requests: int = 40, depth: int = 4, budget: int = 512, seed: int = 0, rate: float = 20.0
) -> RunResult:
    """Serve Poisson arrivals: each micro-batch takes `budget` prompt tokens and all ready decodes.

    Stages follow the tandem recurrence start[k][i] = max(end[k][i-1], end[k-1][i]). The last
    request is rejected.
    """
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, requests))
    prompt = rng.integers(50, 1500, requests)
    first, completion = np.full(requests, np.nan), np.full(requests, np.nan)
    left, made = prompt.copy(), np.zeros(requests, dtype=int)
    returns: list[tuple[float, list[int]]] = []  # in order: (returned_s, rows that get a token)
    busy_until = np.zeros(depth)
    batches: list[tuple[float, int, int, int, int]] = []
    gaps, waits, last = [], [], np.full(requests, np.nan)
    starts, ends, available = [], [], []
    now, waiting, ready = 0.0, list(range(requests - 1)), []
    while waiting or ready or returns:
        while returns and returns[0][0] <= now:
            at, rows = returns.pop(0)
            made[rows] += 1
            gaps += [at - last[row] for row in rows if made[row] > 1]
            last[rows] = at
            first[[row for row in rows if made[row] == 1]] = at
            completion[[row for row in rows if made[row] == OUTPUT_TOKENS]] = at
            ready += [row for row in rows if made[row] < OUTPUT_TOKENS]
        can_send = len(returns) < depth
        room, rows, prefill = budget, list(ready), 0
        while can_send and waiting and room and arrival[waiting[0]] <= now:
            tokens = min(room, int(left[waiting[0]]))
            left[waiting[0]] -= tokens
            room, prefill = room - tokens, prefill + tokens
            if not left[waiting[0]]:
                rows.append(waiting.pop(0))
        if not can_send or not (rows or prefill):
            events = [arrival[waiting[0]]] if can_send and waiting else []
            waits += [now] if can_send else []
            now = max(now, min(events + [at for at, _ in returns[:1]], default=now))
            continue
        held = int((prompt - left)[np.isnan(completion)].sum()) // 16
        batches.append((now, prefill, len(ready), len(rows), max(0, 2000 - held)))
        ready, at = [], now
        for stage in range(depth):
            available.append(at)
            starts.append(max(at, busy_until[stage]))
            at = busy_until[stage] = starts[-1] + BASE_S + PER_TOKEN_S * (prefill + len(rows))
            ends.append(at)
        returns.append((at, rows))
        now = max(now, busy_until[0])
    scheduled, prefills, decodes, sampled, free = map(np.array, zip(*batches, strict=True))
    shape = (len(batches), depth)
    end = np.array(ends).reshape(shape)
    status = ["completed"] * (requests - 1) + ["rejected"]
    return RunResult(
        depth=depth,
        max_in_flight=depth,
        total_pages=2000,
        page_tokens=16,
        request_id=np.arange(requests),
        arrival_s=arrival,
        prompt_tokens=prompt,
        output_tokens=np.full(requests, OUTPUT_TOKENS),
        first_scheduled_s=arrival,
        first_token_s=first,
        completion_s=completion,
        preemptions=np.zeros(requests, dtype=np.int64),
        status=status,
        reason=[""] * (requests - 1) + ["needs 9000 pages, </script> the pool has 2000"],
        scheduled_s=scheduled,
        prefill_tokens=prefills,
        decode_tokens=decodes,
        sampled_rows=sampled,
        free_pages=free,
        available_s=np.array(available).reshape(shape),
        start_s=np.array(starts).reshape(shape),
        end_s=end,
        wait_s=np.array(waits),
        wait_reason=np.zeros(len(waits), dtype=np.int64),
        gap_s=np.array(gaps),
        gap_count=np.ones(len(gaps), dtype=np.int64),
    )
