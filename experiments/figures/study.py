"""What a figure's module works with: configurations made of layers, runs of them over seeds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure

from evenflow.config import RunConfig, configured
from evenflow.errors import UsageError
from evenflow.schedulers import POOLED, policy
from evenflow.yaml_file import SHORT_FORMS, Document
from experiments.figures.schema import Plan
from experiments.points import Point, Store, run_points
from experiments.runs import Outcome
from experiments.systems import SYSTEMS

Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a figure's module makes.

    `table` is the data behind the picture, a row a measurement, of which a terminal shows the
    columns `shown` (None: all); `claims` has our value for each published claim the figure answers,
    by the claim's id and in the shape of its value.
    """

    figure: Figure
    table: pd.DataFrame
    shown: Sequence[str] | None = None
    claims: Mapping[str, Any] = field(default_factory=dict)


def overview(outcome: Outcome) -> dict[str, Any]:
    """Return a run's summary, and the pages and the cap it had."""
    deployment = outcome.result.provenance["deployment"]
    return {**outcome.summary, "kv_pages": deployment.get("kv_pages")}


class Study:
    """One figure being made. `on_progress` is called with the points done and the points asked."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        executor: Executor,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.plan = plan
        self.numbers = plan.study
        self.store = store
        self.executor = executor
        self._on_progress = on_progress or (lambda done, asked: None)
        self._done = 0
        self._asked = 0
        self._kv_pages: set[int] = set()
        self._schedulers: set[str] = set()

    @property
    def seeds(self) -> list[int]:
        """The seeds of lengths and arrivals that every case is run with."""
        return list(self.numbers.get("seeds", [0]))

    @property
    def gpus(self) -> int:
        """How many GPUs the figure's run has."""
        stages = self.plan.run.data.get("stages", 1)
        depth = stages if isinstance(stages, int) else len(stages)
        return depth * int(self.plan.run.data.get("tensor_parallel", 1))

    def keys_of(self, label: str) -> Keys:
        """Return the keys of one of the figure's systems, as they are published or given."""
        given = self.plan.keys.systems[label]
        return _published(given) if isinstance(given, str) else given

    @property
    def gpu_counts(self) -> list[int]:
        """1, 2, 4 ... up to the number of GPUs that the figure's run has."""
        return [count for count in range(1, self.gpus + 1) if count & (count - 1) == 0]

    def system(self, label: str, gpus: int | None = None) -> Keys:
        """Return the keys of one of the figure's systems, on so many GPUs (default: `gpus`).

        A system on tensor parallelism gets one stage of all GPUs, any other as many stages.
        """
        keys = dict(self.keys_of(label))
        count = self.gpus if gpus is None else gpus
        if keys.get("stages") == 1 and "tensor_parallel" in keys:
            return keys | {"tensor_parallel": count}
        return keys if "stages" in keys else {"stages": count, "tensor_parallel": 1} | keys

    def config(self, *layers: Keys) -> RunConfig:
        """Return the figure's run with `layers` of keys over it; mappings merge, the last wins."""
        data: Keys = self.plan.run.data
        for layer in layers:
            data = layered(data, layer)
        document = Document(self.plan.run.name, dict(data), self.plan.run.places)
        return configured(document)

    def run(
        self,
        cases: Mapping[tuple[Any, ...], RunConfig],
        names: Sequence[str],
        measure: Callable[..., dict[str, Any]] = overview,
        **more: Any,
    ) -> pd.DataFrame:
        """Simulate every case with every seed; return a row each, in order.

        `names` are the columns that a case's key fills; `seed`, what `measure` returns and `error`
        (None unless the run failed) follow. `more` are further arguments of `measure`. Raises a
        UsageError when every run failed.
        """
        rows: list[dict[str, Any]] = []
        points = []
        for key, config in cases.items():
            for seed in self.seeds:
                workload = config.workload.model_copy(update={"seed": seed})
                seeded = config.model_copy(update={"workload": workload})
                points.append(Point(seeded, self.plan.beside, measure, tuple(more.items())))
                rows.append({**dict(zip(names, key, strict=True)), "seed": seed})
        tell = self.progress(len(points))
        records = run_points(points, self.store, self.executor, tell)
        if records and all(record.error for record in records):
            raise UsageError(f"no run succeeded, the first because: {records[0].error}")
        table = pd.DataFrame(
            [{**row, **r.values, "error": r.error} for row, r in zip(rows, records, strict=True)]
        )
        self.note(list(cases.values()), table)
        return table

    def progress(self, asked: int) -> Callable[[int], None]:
        """Announce points to come; return what to call with the number of them that are done.

        A search, which does not know how many it will need, announces none.
        """
        self._asked += asked
        told = 0

        def tell(count: int) -> None:
            nonlocal told
            self._done += count - told
            told = count
            self._asked = max(self._asked, self._done)
            self._on_progress(self._done, self._asked)

        return tell

    def note(self, configs: Sequence[RunConfig], table: pd.DataFrame) -> None:
        """Keep what the footnote says of runs: their policies, and the column `kv_pages`."""
        self._schedulers |= {_words(config) for config in configs}
        if "kv_pages" in table:
            self._kv_pages |= {int(pages) for pages in table["kv_pages"].dropna()}

    def facts(self) -> dict[str, Any]:
        """Return what the reader of the figure has to know: sizes, seeds, KV pages, costs."""
        run, numbers = self.plan.run.data, self.numbers
        return {
            "model": run.get("model"),
            "gpu": run.get("gpu"),
            "costs": run.get("costs", "roofline"),
            "schedulers": sorted(self._schedulers),
            **{key: value for key, value in numbers.items() if key != "seeds"},
            "seeds": self.seeds if self._asked else None,
            "kv_pages": sorted(self._kv_pages),
            "runs": self._asked or None,
            "quick": self.plan.quick,
            "set": list(self.plan.overrides),
        }


def _words(config: RunConfig) -> str:
    """Return a policy with its parameters, and its cap on running requests, given or not."""
    params = config.scheduler.params
    if (cap := _default_cap(config.scheduler.name)) is not None:
        params = {"max_num_seqs": cap} | params
    return " ".join((config.scheduler.name, *(f"{key} {value}" for key, value in params.items())))


def _default_cap(name: str) -> int | None:
    if name in POOLED:
        return None
    cap = inspect.signature(policy(name)).parameters.get("max_num_seqs")
    return None if cap is None else cap.default


def layered(under: Keys, over: Keys) -> dict[str, Any]:
    """Return `under` with the keys of `over` in place; mappings merge, if they are of one kind."""
    merged = dict(under)
    for key, value in over.items():
        below, above = _long_form(key, merged.get(key)), _long_form(key, value)
        if isinstance(below, Mapping) and isinstance(above, Mapping) and _alike(below, above):
            merged[key] = layered(below, above)
        else:
            merged[key] = value
    return merged


def _long_form(key: str, value: object) -> object:
    return {SHORT_FORMS[key]: value} if key in SHORT_FORMS and isinstance(value, str) else value


def _alike(below: Keys, above: Keys) -> bool:
    return all(below.get(k) == above[k] for k in SHORT_FORMS.values() if k in above)


def _published(name: str) -> dict[str, Any]:
    for system in SYSTEMS:
        if system.name == name:
            return dict(yaml.safe_load(system.keys))
    raise UsageError(f"{name}: no such system; known: {', '.join(s.name for s in SYSTEMS)}")


def mean_over_seeds(
    table: pd.DataFrame, names: Sequence[str], metrics: Sequence[str]
) -> pd.DataFrame:
    """Return mean, least and most of each metric over the seeds, indexed by `names`."""
    return table.groupby(list(names), sort=False, dropna=False)[list(metrics)].agg(
        ["mean", "min", "max"]
    )
