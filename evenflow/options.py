"""Parameters of functions and commands: a type for Python, one for a terminal, and its name there.

`Annotated[Limits, list[str] | None, Option("--slo")]` takes all of `Limits` in Python and texts in
a terminal. Without a second type both take the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from typer import Argument, Option

from evenflow import completions
from evenflow.core.scheduling import Scheduler
from evenflow.errors import MOST_RUNS

if TYPE_CHECKING:
    from evenflow.config.run import RunConfig
    from evenflow.results.outcome import Outcome

RunFile: TypeAlias = Union[str, Path, Mapping[str, Any], "RunConfig"]
"""A RUN.yaml's path, its keys, or a checked configuration."""

Policy: TypeAlias = str | Mapping[str, Any] | type[Scheduler] | Scheduler
"""A policy's name or `module:Class`; a mapping of `name` and parameters; a class; an object."""

AnyProcess: TypeAlias = str | Mapping[str, Any] | Callable[..., Iterator[Any]]
"""A process's `module:function`; a mapping of its `name` and parameters; a function of a world."""

Limits: TypeAlias = Mapping[str, float] | str | Sequence[str]
"""Limits by metric, `{"p99_itl_ms": 200}`, or as the option `--slo` says them, "p99_itl_ms=200"."""

Changes: TypeAlias = Mapping[str, Any] | Sequence[str] | None
"""New values of keys, `{"kv.pages": 4000}`, or as the option `--set` says them, "kv.pages=4000"."""

Names: TypeAlias = str | Sequence[str]
"""Names, or a text that parts them by commas."""


Folder: TypeAlias = str | Path | None

Run = Annotated[RunFile, Path, Argument(metavar="RUN.yaml", help="The run's configuration.")]
RunPath = Annotated[Path, Argument(metavar="RUN.yaml", help="The run's configuration.")]
SweepFile = Annotated[
    str | Path | Mapping[str, Any],
    Path,
    Argument(metavar="SWEEP.yaml", help="What to vary, in which run."),
]
Runs = Annotated[
    Sequence[str | Path],
    list[Path],
    Argument(metavar="RUN.yaml...", help="The configurations of some runs."),
]
Against = Annotated[
    Folder, Path | None, Option("--against", metavar="FILE", help="A baseline that --write made.")
]
FailIf = Annotated[
    Names,
    list[str],
    Option("--fail-if", metavar="METRIC>LIMIT", help="Exit with 1: >200, or of a change >+3%."),
]
Write = Annotated[
    Folder, Path | None, Option("--write", metavar="FILE", help="Write the numbers: a baseline.")
]
Saved = Annotated[
    Union[str, Path, "Outcome"], Path, Argument(metavar="OUT", help="The folder of a run.")
]
Results = Annotated[
    Sequence[str | Path],
    list[Path],
    Argument(metavar="RESULT...", help="Results of a benchmark of this run."),
]
Entries = Annotated[
    Sequence[str],
    list[str] | None,
    Argument(metavar="[NAME ...]", help="E.g. vllm083, closed-vllm, MY.yaml; default: all."),
]
FigureNames = Annotated[
    Sequence[str] | Mapping[str, Mapping[str, Any]],
    list[str] | None,
    Argument(
        metavar="[NAME ...]",
        help="E.g. gllm-12, gllm, MY.yaml; default: all.",
        autocompletion=completions.figures,
    ),
]
Quick = Annotated[bool, Option("--quick", help="A coarse pass: fewer points.")]
Formats = Annotated[
    Names, str, Option("--format", metavar="KIND,...", help="png, svg and pdf: some of these.")
]
Width = Annotated[float | None, Option("--width", metavar="INCHES", help="Of the whole figure.")]
Style = Annotated[str | None, Option("--style", metavar="NAME", help="Of matplotlib, or a file.")]
Data = Annotated[
    Folder,
    Path | None,
    Option("--data", metavar="DIR", help="Holds the runs; default: EVENFLOW_SHARED."),
]
_SET = Option(
    "--set",
    metavar="KEY=VALUE",
    help="Override a key; may be given repeatedly.",
    autocompletion=completions.changes,
)
Set = Annotated[Changes, list[str] | None, _SET]
SetTexts = Annotated[list[str] | None, _SET]
SetOfSweep = Annotated[
    Changes,
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key, or run.KEY.",
        autocompletion=completions.changes_of_sweep,
    ),
]
SetOfFigures = Annotated[
    Changes,
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A key of the run, study.KEY or systems.LABEL."),
]
Out = Annotated[Folder, Path | None, Option("--out", metavar="DIR", help="Where to write.")]
OutPath = Annotated[Path | None, Option("--out", metavar="DIR", help="Where to write.")]
Force = Annotated[
    bool, Option("--force", help="Write beside files that evenflow did not write; they stay.")
]
Save = Annotated[
    Literal["summary", "requests", "all"],
    Option("--save", help="summary.json only; with the requests; or everything."),
]
Format = Annotated[
    Literal["csv", "parquet"], Option("--format", help="Of a run's tables; parquet needs pyarrow.")
]
Window = Annotated[
    tuple[float, float] | str | None,
    str | None,
    Option("--window", metavar="A..B", help="The seconds that the timeline shows."),
]
Pipeline = Annotated[
    Literal["recurrence", "processes"] | None,
    Option("--pipeline", help="A SimPy process a stage and link, or the same times as a formula."),
]
Advise = Annotated[bool, Option("--advise", help="Also: what would help, and what bubbles cost.")]
Intervals = Annotated[
    bool, Option("--intervals", help="Also: 90 % intervals, from nine more simulations.")
]
ClaimIntervals = Annotated[
    bool, Option("--intervals", help="Also: 90 % intervals, ten times the runs.")
]
Costs = Annotated[
    Sequence[str] | str | None,
    str | None,
    Option("--costs", metavar="KIND,KIND", help="Compare: silicon, aiconfigurator, default."),
]
Every = Annotated[int, Option("--every", metavar="N", help="Every Nth run of an entry.")]
AllowRefused = Annotated[
    bool, Option("--allow-refused", help="Answer though more than 10 % of requests are refused.")
]
Engine = Annotated[
    str | None,
    Option("--engine", metavar="NAME", help="vllm: real vLLM serves, with our policy in it."),
]
Schedulers = Annotated[
    Sequence[Policy] | Mapping[Any, Policy] | str,
    str,
    Option(
        "--schedulers",
        metavar="A,B,...",
        help="Policies, or FILE.py:Class.",
        autocompletion=completions.schedulers,
    ),
]
SchedulersToTry = Annotated[
    Names | None,
    str | None,
    Option(
        "--schedulers",
        metavar="A,B,...",
        help="Which to try.",
        autocompletion=completions.schedulers,
    ),
]
Systems = Annotated[
    Names,
    str,
    Option(
        "--systems",
        metavar="A,B,...",
        help="Names of evenflow systems.",
        autocompletion=completions.systems,
    ),
]
Slo = Annotated[
    Limits,
    list[str],
    Option("--slo", metavar="METRIC=LIMIT", help="A limit; may be given repeatedly."),
]
MedianQueue = Annotated[
    float | None,
    Option("--max-median-queue-s", help="Limit the median scheduling delay (seconds)."),
]
Gpus = Annotated[
    int | str | Sequence[int] | None,
    str | None,
    Option("--gpus", metavar="N", help="How many GPUs: 8; of a plan also 4,8 or 4..64."),
]
Tolerance = Annotated[float, Option("--tolerance", help="How exactly, as a share of the rate.")]
Searches = Annotated[
    int, Option("--replications", max=MOST_RUNS, help="Seeds, of a file also its next rows.")
]
Seeds = Annotated[
    int,
    Option(
        "--replications", max=MOST_RUNS, help="Seeds of each point; of a file also its next rows."
    ),
]
Rate = Annotated[
    float | str | None,
    str | None,
    Option("--rate", metavar="RATE", help="Requests/s, or a multiple of the run's: 2x."),
]
Price = Annotated[float | None, Option("--price", metavar="DOLLARS", help="Of one GPU, an hour.")]
Budgets = Annotated[
    Sequence[int] | str | None,
    str | None,
    Option("--budgets", metavar="N,M,...", help="Tokens of a micro-batch to try."),
]
With = Annotated[
    Mapping[str, Mapping[str, Any]] | Sequence[str],
    list[str],
    Option(
        "--with",
        metavar="PROCESS=KEYS",
        help="A process for each simulation: outage={mtbf_s: 86400, restart_s: 120}.",
    ),
]
Exhaustive = Annotated[bool, Option("--exhaustive", help="Simulate every point, on all requests.")]
Resume = Annotated[
    bool, Option("--resume/--fresh", help="Use what is in DIR already, or remove it.")
]
RetryFailed = Annotated[
    bool, Option("--retry-failed", help="Simulate points again that failed before.")
]
Check = Annotated[bool, Option("--check", help="Also: does the gain hold on unseen requests?")]
Executor = Annotated[
    str, Option("--executor", metavar="NAME", help="process, dask, or dask:ADDRESS of a scheduler.")
]
Workers = Annotated[int | None, Option("--workers", min=1, help="Default: the number of cores.")]
