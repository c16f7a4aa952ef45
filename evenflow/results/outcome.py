"""Outcome of a run: its result, its summary, its idle time by cause, its tables.

For measures, for reports and for people. Knows no configuration, and not how the run was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evenflow.results.bubbles import Bubbles, attribute
from evenflow.results.metrics import summarize
from evenflow.results.run import Columns, RunResult

if TYPE_CHECKING:
    from pandas import DataFrame

STEADY_WINDOW = ("steady_start_s", "steady_stop_s")


UNFAIR_SHARE, MOST_SHARE = 0.01, 0.1
"""Shares of refused requests above which an answer is not fair, and above which there is none."""


@dataclass(frozen=True, slots=True)
class Served:
    """Counts of the requests asked for and completed, and `why` not all were.

    `why` is the reason of the first one that was not completed; "" where it is not known. The
    request was refused, given up by the policy, or left by its client.
    """

    asked: int
    completed: int
    why: str = ""

    @classmethod
    def of(cls, summary: Mapping[str, Any], why: str = "") -> Served:
        """Return the counts of a run's summary."""
        completed = int(summary.get("completed", 0))
        return cls(completed + int(summary.get("failed", 0)), completed, why)

    @classmethod
    def of_all(cls, parts: Iterable[Served]) -> Served:
        """Return the counts of several runs together."""
        known = list(parts)
        why = next((each.why for each in known if each.why), "")
        return cls(sum(each.asked for each in known), sum(each.completed for each in known), why)

    @property
    def failed(self) -> int:
        """Requests that were asked for and not completed."""
        return self.asked - self.completed

    @property
    def share(self) -> float:
        """The share of the requests that were completed."""
        return self.completed / self.asked if self.asked else 1.0

    @property
    def facts(self) -> dict[str, Any]:
        """The counts as an answer's JSON has them."""
        return {
            "requests_asked": self.asked,
            "completed": self.completed,
            "failed": self.failed,
            "failed_because": self.why,
        }

    @property
    def is_unfair(self) -> bool:
        return 1 - self.share > UNFAIR_SHARE

    @property
    def is_no_answer(self) -> bool:
        return 1 - self.share > MOST_SHARE

    def __str__(self) -> str:
        first = f"; the first: {self.why}" if self.why else ""
        return (
            f"{self.failed:,} of {self.asked:,} requests ({1 - self.share:.1%}) were refused or "
            f"given up{first}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Outcome:
    """One run, and the wall seconds it took; `label` is what tables call it.

    `replicas` are the results of each pipeline; `result` is the only one, or all of them merged.
    `summary` has the numbers of summary.json, under the keys of vLLM's `bench serve`. The other
    tables are DataFrames with the columns of the files of their names, times in seconds. Of several
    pipelines (replicas, or the pools of a system), `batches`, `stages` and `bubbles` begin with the
    column `pipeline`.
    """

    result: RunResult
    summary: dict[str, Any]
    wall_s: float = 0.0
    replicas: tuple[RunResult, ...] = ()
    label: str = ""

    @cached_property
    def served(self) -> Served:
        """Number of requests that were completed."""
        ends = zip(self.result.status, self.result.reason, strict=True)
        reasons = [reason for status, reason in ends if status != "completed"]
        asked = len(self.result.status)
        return Served(asked, asked - len(reasons), next(iter(reasons), ""))

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
        """The run of each pool of a system; its summary has only the steady metrics."""
        steady = {key: value for key, value in self.summary.items() if key in STEADY_WINDOW}
        return {name: Outcome(pool, steady) for name, pool in self.result.pools.items()}

    def tables(self, *names: str) -> dict[str, Columns]:
        """Return the tables of the result and bubbles of one pipeline, or only the named ones."""
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
    def marks(self) -> DataFrame:
        """A row for what a process did; empty without processes."""
        return _frame(self.result.tables("marks").get("marks", {}))

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
