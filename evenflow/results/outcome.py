"""What a run came to: its result, its summary, its idle time by cause, and all of it as tables.

For measures, for reports and for people. Knows no configuration, and not how the run was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evenflow.results.bubbles import Bubbles, attribute
from evenflow.results.metrics import summarize
from evenflow.results.run import Columns, RunResult

if TYPE_CHECKING:
    from pandas import DataFrame

STEADY_WINDOW = ("steady_start_s", "steady_stop_s")


@dataclass(frozen=True, eq=False, repr=False)
class Outcome:
    """One run, and the wall seconds it took; `label` is what tables call it.

    `replicas` are the results of each pipeline; `result` is the only one, or all of them merged.
    `summary` has the numbers of summary.json, under the keys of vLLM's `bench serve`. The other
    tables are DataFrames with the columns of the files of their names, times in seconds. Where
    there are several pipelines (replicas, or the pools of a system), `batches`, `stages` and
    `bubbles` begin with the column `pipeline`.
    """

    result: RunResult
    summary: dict[str, Any]
    wall_s: float = 0.0
    replicas: tuple[RunResult, ...] = ()
    label: str = ""

    @cached_property
    def idle(self) -> Bubbles:
        """The idle time by cause, of one pipeline or of a system of pools."""
        return attribute(self.result)

    @cached_property
    def parts(self) -> Mapping[str, Outcome]:
        """The run of each replica by name, or this one by its own."""
        if len(self.replicas) < 2:
            return {self.label: self}
        return {
            f"{self.label}, replica {index}": Outcome(replica, summarize(replica))
            for index, replica in enumerate(self.replicas)
        }

    @cached_property
    def pools(self) -> Mapping[str, Outcome]:
        """The run of each pool of a system, whose summary says only what is steady."""
        steady = {key: value for key, value in self.summary.items() if key in STEADY_WINDOW}
        return {name: Outcome(pool, steady) for name, pool in self.result.pools.items()}

    def tables(self, *names: str) -> dict[str, Columns]:
        """Return the tables of the result and the bubbles, or those that are named; of one
        pipeline."""
        tables = self.result.tables(*names)
        return (
            tables if names and "bubbles" not in names else tables | {"bubbles": self.idle.table()}
        )

    @cached_property
    def requests(self) -> DataFrame:
        """A row a request, in order of request id."""
        return _frame(self.result.tables("requests")["requests"])

    @cached_property
    def transfers(self) -> DataFrame:
        """A row a transfer of KV between pools; empty without pools."""
        return _frame(self.result.tables("transfers").get("transfers", {}))

    @cached_property
    def batches(self) -> DataFrame:
        """A row a micro-batch, in the order scheduled."""
        return self._by_pipeline("batches")

    @cached_property
    def stages(self) -> DataFrame:
        """A row a stage and micro-batch: when it starts and ends."""
        return self._by_pipeline("stages")

    @cached_property
    def bubbles(self) -> DataFrame:
        """A row an idle interval of a stage, with its cause."""
        return self._by_pipeline("bubbles")

    def _by_pipeline(self, name: str) -> DataFrame:
        from pandas import concat

        tables = {
            pipeline: _frame(part.tables(name)[name])
            for label, run in self.parts.items()
            for pipeline, part in (run.pools or {label: run}).items()
        }
        if len(tables) == 1:
            return next(iter(tables.values()))
        return concat(tables, names=["pipeline"]).reset_index("pipeline").reset_index(drop=True)


def _frame(columns: Columns) -> DataFrame:
    from pandas import DataFrame

    return DataFrame(columns)
