"""The table of a figure: its cases run or searched over the seeds, and columns made of others.

Draws nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pandas as pd

from evenflow.errors import UsageError
from experiments.figures.axes import Case, cases_of
from experiments.figures.study import Study
from experiments.run_file.run import RunConfig, with_
from experiments.study.capacity import Capacity, Question, capacity_of
from experiments.study.slo import Condition
from experiments.study.trials import Simulator

SEARCH = "capacity"
"""The measure that is no measure of one run, but the largest rate within the limits."""


def table_of(study: Study) -> pd.DataFrame:
    """Run a figure's cases, or call the function that has its rows; add the columns it asks for.

    The columns up to `seed` say which run a row is of.
    """
    keys = study.plan.keys
    table = function(keys.table)(study) if keys.table else run_cases(study, cases_of(study))
    for name, made_by in keys.add.items():
        table[name] = function(made_by)(study, table)
    if keys.over is not None:
        of = {name: columns_of(study, table, [own])[0] for name, own in keys.over.of.items()}
        ratios = over(table, of, keys.over.reference, inverse=keys.over.inverse)
        table[list(ratios.columns)] = ratios
    return table


def columns_of(study: Study, table: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return columns of a table, in place of a number of the study all those that it lists."""
    found = [[name] if name in table else study.numbers[name] for name in names]
    return [name for several in found for name in several]


def run_cases(
    study: Study,
    cases: list[Case],
    measure: str | None = None,
    more: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Run cases with every seed; return a row each. `measure` is the figure's, if not another's.

    `more` are its arguments, by default the values of the case, or numbers of the study, that
    `args` names; `columns` those that the values of a case fill, by default all.
    """
    keys = study.plan.keys
    columns = columns or keys.columns or list(cases[0].values)
    runs = {tuple(case.values[name] for name in columns): case for case in cases}
    configs = {key: case.config(study) for key, case in runs.items()}
    measure = measure or keys.measure
    if measure == SEARCH:
        limit_s = study.numbers["median_queue_s"]
        searches = {
            key: (config, tbt_slo(runs[key].tbt_s or 0.0, limit_s))
            for key, config in configs.items()
        }
        return capacities(study, searches, columns)
    args = {key: _args(study, case) if more is None else more for key, case in runs.items()}
    return study.run(configs, columns, function(measure), args)


def _args(study: Study, case: Case) -> dict[str, Any]:
    given = study.plan.keys.args
    return {name: case.values.get(of, study.numbers.get(of)) for name, of in given.items()}


def over(
    table: pd.DataFrame,
    columns: Mapping[str, str],
    reference: Mapping[str, Any],
    *,
    inverse: bool = False,
) -> pd.DataFrame:
    """Return columns by name over those of the run at `reference`, all else of the run equal.

    `inverse`: those of the run at `reference` over the row's.
    """
    first = {name: table[name].iloc[0] for name, value in reference.items() if value is None}
    reference = {**reference, **first}
    run = [name for name in table.loc[:, :"seed"].columns if name not in reference]
    base = table.loc[at(table, reference), [*run, *columns.values()]]
    known = table[run].merge(base, on=run, how="left").set_index(table.index)
    ratios = {name: table[of] / known[of] for name, of in columns.items()}
    if inverse:
        ratios = {name: known[of] / table[of] for name, of in columns.items()}
    return pd.DataFrame(ratios)


def at(table: pd.DataFrame, values: Mapping[str, Any]) -> pd.Series[bool]:
    """Say of each row whether its columns have these values, or those of the columns named."""
    chosen = pd.Series(True, table.index)
    for name, value in values.items():
        of = table[value] if isinstance(value, str) and value in table else value
        chosen &= table[name] == of
    return chosen


def function(name: str) -> Callable[..., Any]:
    """Return the function that a figure names: MODULE.FUNCTION, or one of the measures."""
    module, _, own = name.rpartition(".")
    try:
        found = importlib.import_module(f"experiments.figures.{module or 'measures'}")
        made: Callable[..., Any] = getattr(found, own)
    except (ImportError, AttributeError):
        raise UsageError(f"{name}: no such function for a figure, like measures.seat_use") from None
    return made


# -- capacities ------------------------------------------------------------------------------------

AT_ONCE = 4
"""Searches side by side: each waits for its own probes, and the processes should not."""

KNEE = ("p99_itl_ms", "median_queue_ms", "total_token_throughput", "steady_total_token_throughput")
"""What is kept of the run at the capacity."""

Asked = tuple[RunConfig, tuple[Condition, ...]]
Found = TypeVar("Found")


def tbt_slo(tbt_s: float, queue_s: float) -> tuple[Condition, ...]:
    """Return Sarathi-Serve's SLO: limits on P99 TBT and on the median scheduling delay."""
    return Condition("p99_itl_ms", 1e3 * tbt_s), Condition("median_queue_ms", 1e3 * queue_s)


def capacities(
    study: Study, cases: Mapping[tuple[Any, ...], Asked], names: Sequence[str]
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
    seeded = with_(config, {"workload.seed": study.seeds[0]})
    beside, tolerance = study.plan.beside, float(study.numbers["tolerance"])
    question = Question(seeded, slo, beside, tolerance, len(study.seeds))
    try:
        simulator = Simulator(study.store, study.executor, study.progress(0))
        answer = capacity_of(question, simulator, curve=())
    except UsageError as error:
        return [{"seed": seed, "error": str(error)} for seed in study.seeds]
    shared = {
        "limit_ms": slo[0].limit,
        "kv_pages": answer.provenance["deployment"]["kv_pages"],
        "error": None,
    }
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
