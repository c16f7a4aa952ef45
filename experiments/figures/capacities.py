"""Capacities for a figure: the largest rate under an SLO for each of its cases, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pandas as pd

from evenflow.errors import UsageError
from experiments.figures.study import Study
from experiments.run_file.run import RunConfig
from experiments.study.capacity import Capacity, Question, capacity_of
from experiments.study.slo import Condition
from experiments.study.trials import Simulator

AT_ONCE = 4
"""Searches side by side: each waits for its own probes, and the processes should not."""

KNEE = ("p99_itl_ms", "median_queue_ms", "total_token_throughput", "steady_total_token_throughput")
"""What is kept of the run at the capacity."""

Case = tuple[RunConfig, tuple[Condition, ...]]
Found = TypeVar("Found")


def tbt_slo(tbt_s: float, queue_s: float) -> tuple[Condition, ...]:
    """Return Sarathi-Serve's SLO: limits on P99 TBT and on the median scheduling delay."""
    return Condition("p99_itl_ms", 1e3 * tbt_s), Condition("median_queue_ms", 1e3 * queue_s)


def capacities(
    study: Study, cases: Mapping[tuple[Any, ...], Case], names: Sequence[str]
) -> pd.DataFrame:
    """Search the capacity of every case; return a row for each and each seed, in order.

    `names` are the columns that a case's key fills. `capacity` (requests/s) is 0 where even a rate
    at which requests do not meet fails, and missing where the run is too short to tell (`status`)
    or cannot be (`error`); `fails_at` is the rate just above, `failed` what fails there; KNEE are
    numbers of the run at the capacity, and with `enough_requests` its length would not matter.
    Seeds count up from the first of the figure's. Raises a UsageError when no case can be run.
    """
    found = _side_by_side([partial(_search, study, *case) for case in cases.values()])
    table = pd.DataFrame(
        {**dict(zip(names, key, strict=True)), **row}
        for key, rows in zip(cases, found, strict=True)
        for row in rows
    )
    if table["error"].notna().all():
        raise UsageError(f"no run succeeded, the first because: {table['error'].iloc[0]}")
    table["capacity"] = table["capacity"].astype(float)
    study.note([config for config, _ in cases.values()], table)
    return table


def _side_by_side(searches: Sequence[Callable[[], Found]]) -> list[Found]:
    threads = ThreadPoolExecutor(AT_ONCE)
    try:
        return [future.result() for future in [threads.submit(search) for search in searches]]
    finally:  # when interrupted, those that run end as soon as the processes are gone
        threads.shutdown(wait=False, cancel_futures=True)


def _search(study: Study, config: RunConfig, slo: tuple[Condition, ...]) -> list[dict[str, Any]]:
    workload = config.workload.model_copy(update={"seed": study.seeds[0]})
    seeded = config.model_copy(update={"workload": workload})
    beside, tolerance = study.plan.beside, float(study.numbers["tolerance"])
    question = Question(seeded, slo, beside, tolerance, len(study.seeds))
    try:
        simulator = Simulator(study.store, study.executor, study.progress(0))
        answer = capacity_of(question, simulator, curve=())
    except UsageError as error:
        return [{"seed": seed, "error": str(error)} for seed in study.seeds]
    shared = {"kv_pages": answer.provenance["deployment"]["kv_pages"], "error": None}
    return [
        {"seed": seed, **row, **shared}
        for seed, row in zip(study.seeds, _rows(answer), strict=True)
    ]


def _rows(answer: Capacity) -> Iterator[dict[str, Any]]:
    runs = {(each.replication, each.rate): each.values for each in answer.measured}
    for index, end in enumerate(answer.searches):
        rate = 0.0 if end.status == "never" else end.rate
        knee = runs.get((index, end.rate or 0.0), {})
        yield {
            "capacity": rate,
            "fails_at": end.fails_at,
            "failed": " ".join(end.failed),
            "status": end.status,
            "enough_requests": end.enough_requests,
            **{name: knee.get(name) for name in KNEE},
        }
