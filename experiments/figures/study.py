"""The means to make a figure: configurations made of layers, runs over seeds, and facts.

The facts are what a reader has to know of the runs: they stand under the picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from evenflow.config.links import link_words
from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.systems import keys_of_system
from evenflow.config.yaml_file import long_form
from evenflow.errors import UsageError, instead_of
from evenflow.experiments.figures.measures import overview
from evenflow.experiments.figures.schema import FigurePlan, Layer, layered
from evenflow.report.shown import Shown, Table
from evenflow.report.tables import is_number, number
from evenflow.results.outcome import Served
from evenflow.schedulers import POOLED, parameters, policy
from evenflow.study.fair import Side, doubts, require_served
from evenflow.study.points import Point, Store
from evenflow.study.trials import Simulator, Trial
from evenflow.study.trials import table as table_of
from evenflow.study.uncertainty import factors, stated

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PLACED = ("stages", "tensor_parallel")
"""Keys of a system that follow from the number of GPUs."""


@dataclass(frozen=True, slots=True, repr=False)
class Drawing(Shown):
    """The result of a figure's module.

    `table` is the data behind the picture, a row a measurement. A terminal shows its columns
    `shown` (None: all). `claims` has our value for each published claim that the figure answers, by
    its id. The value has the shape of the claim's. `beside` has the same by the words of a reading.
    `doubts` say what is not fair.
    """

    figure: Figure
    table: pd.DataFrame
    shown: Sequence[str] | None = None
    claims: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    doubts: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The numbers for a terminal, however wide: long words are cut."""
        cut = partial(self._rows.to_string, max_colwidth=40, max_rows=200)
        return str(cut(index=False, na_rep="-", float_format="{:.5g}".format))

    @property
    def _rows(self) -> pd.DataFrame:
        table = self.table if self.shown is None else self.table.filter(items=list(self.shown))
        return table[~table.astype(str).duplicated()]  # a cell may be a list

    def told(self) -> Iterator[str | Table]:
        table = self._rows
        yield f"{len(table)} rows: {', '.join(map(str, table.columns))}"
        rows = table.map(lambda cell: number(cell) if is_number(cell) else str(cell))
        yield Table([*map(str, table.columns)], rows.to_numpy().tolist())


class Numbers(dict[str, Any]):
    """The numbers of a study, which note the names of the `used` ones."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        super().__init__(numbers)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)


WRITES = "pandas", "evenflow.report.plots"
"""What only tables and pictures need."""


class FigureStudy:
    """One figure being made. `on_progress` is called with the points done and the points asked.

    `wrong` is one of the nine runs that make an interval (`study.uncertainty`). Then every case has
    other seeds, and is as wrong as the stated error of its own costs. All are wrong by the same
    draw.
    """

    def __init__(
        self,
        plan: FigurePlan,
        store: Store,
        executor: Executor,
        on_progress: Callable[[int, int], None] | None = None,
        wrong: int | None = None,
    ) -> None:
        self.plan = plan
        self._wrong = wrong
        self.numbers = Numbers(plan.study)
        self.simulator = Simulator(store, executor, self._tell, writes=WRITES)
        self._on_progress = on_progress or (lambda done, asked: None)
        self._asked = 0
        self._kv_pages: set[int] = set()
        self._schedulers: set[str] = set()
        self._machines: set[str] = set()
        self._failures: list[str] = []
        self._served: list[Served] = []
        self.doubts: list[str] = []
        self._check_parameters()

    @property
    def seeds(self) -> list[int]:
        """The seeds of lengths and arrivals that every case is run with."""
        seeds = list(self.numbers.get("seeds", [0]))
        return seeds if self._wrong is None else [s + self._wrong * len(seeds) for s in seeds]

    @property
    def labels(self) -> list[str]:
        return list(self.plan.keys.systems)

    @property
    def gpus(self) -> int:
        stages = self.plan.run.data.get("stages", 1)
        depth = len(stages) if isinstance(stages, list) else _count("stages", stages)
        return depth * _count("tensor_parallel", self.plan.run.data.get("tensor_parallel", 1))

    @property
    def gpu_counts(self) -> list[int]:
        """1, 2, 4 ... up to the number of GPUs that the figure's run has, and that number."""
        return [*(2**power for power in range((self.gpus - 1).bit_length())), self.gpus]

    def _given(self, label: str) -> Layer:
        given = self.plan.keys.systems[label]
        return keys_of_system(given) if isinstance(given, str) else given

    def keys_of(self, label: str) -> Layer:
        """Return the keys of one of the figure's systems, as they are published or given.

        What the user has set of the run holds in it too: of the policy, the parameters it has.
        """
        keys = self._given(label)
        by_hand = {k: v for k, v in self.plan.by_hand.items() if k in keys and k not in PLACED}
        if "scheduler" in by_hand:
            known = _parameters_of(keys)
            ours = {k: v for k, v in by_hand["scheduler"].items() if k in known}
            by_hand["scheduler"] = ours
        return layered(keys, by_hand)

    def _check_parameters(self) -> None:
        """Raise a UsageError for a parameter set by hand that no system of the figure has."""
        by_hand = self.plan.by_hand.get("scheduler")
        if by_hand is None or not self.labels:
            return
        labels = ", ".join(self.labels)
        if isinstance(by_hand, str) or "name" in by_hand:
            raise UsageError(
                f"--set scheduler: the figure has a policy for each of {labels}; give "
                "--set systems.LABEL=NAME, or --set scheduler.PARAMETER=VALUE"
            )
        known: dict[str, set[str]] = {}
        for keys in map(self._given, self.labels):
            own = long_form("scheduler", keys["scheduler"])
            for name in _parameters_of(keys):
                known.setdefault(name, set()).update({str(own[name])} if name in own else {})
        for name in by_hand:
            if name not in known:
                raise UsageError(
                    f"--set scheduler.{name}: none of {labels} has it; {instead_of(name, known)}"
                )
            if len(known[name]) > 1:
                raise UsageError(
                    f"--set scheduler.{name}: the figure compares {', '.join(sorted(known[name]))} "
                    f"in {labels}; give --set systems.LABEL.scheduler.{name} for one of them"
                )

    def policy(self, label: str) -> str:
        return str(long_form("scheduler", self.keys_of(label)["scheduler"])["name"])

    def system(self, label: str, gpus: int | None = None) -> Layer:
        """Return the keys of one of the figure's systems, on `gpus` GPUs (default: the figure's).

        A system on tensor parallelism gets one stage of all GPUs. Any other as many stages as its
        GPUs make, each of as many ranks as the figure's run has.
        """
        keys = dict(self.keys_of(label))
        count = self.gpus if gpus is None else gpus
        if keys.get("stages") == 1 and "tensor_parallel" in keys:
            return keys | {"tensor_parallel": count}
        if "stages" in keys:
            return keys
        run = self.plan.run.data
        ranks = min(run.get("tensor_parallel", 1), count)
        stages = run["stages"] if count == self.gpus else max(1, count // ranks)
        return {"stages": stages, "tensor_parallel": ranks} | keys

    def config(self, *layers: Layer) -> RunConfig:
        """Return the figure's run, with the study's requests and `layers` merged over it."""
        data: Layer = self.plan.run.data
        if "requests" in self.numbers:
            data = layered(data, {"workload": {"requests": self.numbers["requests"]}})
        for layer in layers:
            data = layered(data, layer)
        config = configured(self.plan.run._replace(data=dict(data)))
        if self._wrong is None:
            return config
        return with_(config, factors(config, stated(config, self.plan.beside), self._wrong))

    def run(
        self,
        cases: Mapping[tuple[Any, ...], RunConfig],
        names: Sequence[str],
        measure: Callable[..., dict[str, Any]] = overview,
        args: Mapping[tuple[Any, ...], Mapping[str, Any]] | None = None,
    ) -> pd.DataFrame:
        """Simulate every case with every seed; return their rows, in order.

        `names` are the columns that a case's key fills. `seed`, what `measure` returns and `error`
        (None unless the run failed) follow. `args` are further arguments of `measure`, by case.
        Raises a UsageError when every run failed.
        """
        self._asked += len(cases) * len(self.seeds)
        rows = []
        for key, config in cases.items():
            more = tuple((args or {}).get(key, {}).items())
            seeded = [with_(config, {"workload.seed": seed}) for seed in self.seeds]
            points = [Point(each, self.plan.beside, measure, more) for each in seeded]
            rows.append((dict(zip(names, key, strict=True)), points))
        trials = self.simulator.trials_of(rows)
        self.note_served(trial.served for trial in trials)
        self.doubts += unfair(trials)
        return self.noted(list(cases.values()), table_of(trials))

    def _tell(self, done: int) -> None:
        """Show progress; a search, which does not know how many it will need, asks for none."""
        self._asked = max(self._asked, done)
        self._on_progress(done, self._asked)

    def noted(self, configs: Sequence[RunConfig], table: pd.DataFrame) -> pd.DataFrame:
        """Return a table of runs, and note facts of it; UsageError if all of them failed."""
        if len(table) and table["error"].notna().all():
            raise UsageError(f"no run succeeded, the first because: {table['error'].iloc[0]}")
        self._schedulers |= {policy_words(config) for config in configs}
        for config in configs:
            self.note_machine(config)
        self._failures += table["error"].dropna().to_list()
        if "kv_pages" in table:
            self._kv_pages |= {int(pages) for pages in table["kv_pages"].dropna()}
        return table

    def note_machine(self, config: RunConfig) -> None:
        """Keep the GPU and the links of a run for the footnote."""
        if config.gpu is not None:
            self._machines.add(machine_words(config))

    def note_served(self, served: Iterable[Served]) -> None:
        """Keep how many requests of runs were completed; UsageError where too few were."""
        for each in served:
            require_served({"": each}, allowed=self.plan.allow_refused)
            self._served.append(each)
            self.doubts += [str(each)] if each.is_unfair else []

    def facts(self) -> dict[str, Any]:
        """Return facts for the reader of the figure: sizes, seeds, KV pages, costs.

        How the GPUs are used, or of several systems, which may differ in that, their number.
        """
        run, served = self.plan.run.data, Served.of_all(self._served)
        numbers: Mapping[str, Any] = self.numbers
        asked: Mapping[str, Any] = {}
        if not self.plan.of_a_paper:
            asked = run.get("workload", {})
            numbers = {key: numbers[key] for key in numbers if key in self.numbers.used}
        layout = {"gpus": self.gpus} if self.labels else {key: run.get(key) for key in PLACED}
        return {
            "not_served": str(served) if served.failed else None,
            "model": run.get("model"),
            "gpu": run.get("gpu"),
            **layout,
            "machines": sorted(self._machines),
            "costs": run.get("costs", "roofline"),
            "schedulers": sorted(self._schedulers),
            **{key: asked[key] for key in ("trace", "arrivals", "requests") if key in asked},
            **{key: value for key, value in numbers.items() if key != "seeds"},
            "seeds": self.seeds if "seeds" in numbers else None,
            "kv_pages": sorted(self._kv_pages),
            "runs": self._asked or None,
            "failed_runs": len(self._failures) or None,
            "failed_because": brief_reasons(self._failures),
            "quick": self.plan.quick and bool(self.plan.keys.quick),
            "set": list(self.plan.overrides),
            "published_set_up": self.plan.published,
        }


def _count(key: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{key}: should be a whole number of at least 1, not {value}")
    return value


def _parameters_of(system: Layer) -> Sequence[str]:
    """Return the parameters of a system's policy; none of one that stands for pools."""
    name = long_form("scheduler", system.get("scheduler"))["name"]
    return () if name in POOLED else list(parameters(policy(name)))


def unfair(trials: Sequence[Trial]) -> list[str]:
    """Return why comparing the systems of a figure's panels is unfair; of no systems, weak."""
    groups: dict[str, dict[str, Side]] = {}
    for trial in trials:
        if not trial.errors:
            place = {key: value for key, value in trial.labels.items() if key != "system"}
            name = str(trial.labels.get("system", "it"))
            groups.setdefault(str(place), {})[name] = trial.side
    return [line for sides in groups.values() for line in doubts(sides)]


IN_THE_PICTURE = (
    "pairs",
    "metrics",
    "deployments",
    "datasets",
    "variants",
    "readings",
    "published_set_up",
)
"""Facts that the panels and the title show, or the data file; the footnote does without."""

MOST_VALUES, MOST_CHARACTERS = 9, 60


def policy_words(config: RunConfig) -> str:
    """Return a policy with its parameters, and its cap on running requests, given or not."""
    name, params = config.scheduler.name, config.params
    cap = None if name in POOLED else parameters(policy(name)).get("max_num_seqs")
    if cap is not None and cap.default is not None:
        params = {"max_num_seqs": cap.default} | params
    return " ".join((name, *(f"{key} {_brief(value)}" for key, value in params.items())))


def machine_words(config: RunConfig) -> str:
    assert config.gpu is not None  # or there is no machine
    link, nodes, all_reduce = config.wires
    words = config.gpu_words
    if link is not None:
        words += f" over {link_words(link)}"
    elif all_reduce is None and config.num_stages * config.tensor_parallel > 1:
        words += f" over {config.unnamed_links}"
    if nodes is not None:
        words += f" in machines of {nodes.gpus}, {link_words(nodes.link)} between"
    return words if all_reduce is None else f"{words}, all-reduce {link_words(all_reduce)}"


def brief_reasons(errors: Sequence[str]) -> list[str]:
    """Return why runs failed, each reason once and cut to a few words."""
    cut = (textwrap.shorten(e, MOST_CHARACTERS, placeholder=" ...") for e in dict.fromkeys(errors))
    return list(dict.fromkeys(cut))


def footnote(facts: Mapping[str, Any], differs: str) -> str:
    """Return the facts as one text, and how the figure differs from the paper's."""
    shown = {
        name.replace("_", " "): value
        for name, value in facts.items()
        if name not in IN_THE_PICTURE and value not in (None, [], {}, False)
        if name != "set" or facts["published_set_up"]
    }
    words = (name if value is True else f"{name}: {_brief(value)}" for name, value in shown.items())
    return f"{'; '.join(words)}. {differs}".strip()


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        if list(value) == ["kind"]:
            return str(value["kind"])
        if any(isinstance(each, Mapping) for each in value.values()):
            return ", ".join(map(str, value))
        return ", ".join(f"{key} {_brief(each)}" for key, each in value.items())
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if len(value) > MOST_VALUES:
        return f"{_brief(value[0])} .. {_brief(value[-1])} ({len(value)} values)"
    return (" | " if any(isinstance(each, str) for each in value) else ", ").join(
        map(_brief, value)
    )
