"""A simulated run whose last request is rejected, for tests of what shows a RunResult."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from evenflow.results.run import RunResult
from evenflow.sim import simulate
from evenflow.types import Request
from tests.worlds import small_world

MAX_MODEL_LEN = 2048
OUTPUT_TOKENS = 12
REASON = "needs 9000 pages, </script> the pool has 2000"


def synthetic_run(
    requests: int = 40, depth: int = 4, budget: int = 512, seed: int = 0, rate: float = 20.0
) -> RunResult:
    """Serve Poisson arrivals in chunked prefills; `rate` requests/s, `budget` tokens a batch."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    prompts = [*rng.integers(50, 1500, requests - 1).tolist(), MAX_MODEL_LEN]
    lengths = enumerate(zip(arrivals_s, prompts, strict=True))
    asked = [Request(index, at_s, prompt, OUTPUT_TOKENS) for index, (at_s, prompt) in lengths]
    sizes = {"depth": depth, "total_pages": 2000, "max_model_len": MAX_MODEL_LEN}
    params = {"token_budget": budget}
    result = simulate(small_world(asked, "sarathi", params, times_s=(0.01, 2e-5), **sizes))
    return replace(result, reason=[*result.reason[:-1], REASON])


def nothing_ran() -> RunResult:
    """Return a run all of whose requests were rejected before any micro-batch."""
    result = synthetic_run()
    never = np.full(len(result.request_id), np.nan)
    batches = len(result.scheduled_s)
    columns = {field.name: getattr(result, field.name) for field in fields(result)}
    of_batches = {
        name: column[:0]
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and len(column) == batches
    }
    return replace(
        result,
        **of_batches,
        first_token_s=never,
        completion_s=never,
        gap_s=result.gap_s[:0],
        gap_count=result.gap_count[:0],
        status=["rejected"] * len(never),
    )
