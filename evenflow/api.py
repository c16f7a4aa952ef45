"""The functions of `import evenflow as ef` and of the command line; they return tables.

`ef.simulate` is `evenflow simulate`, and so on. A parameter with an option of the command line has
it in its type. Nothing is written unless a folder is given as `out`. Each function loads what it
needs. Knows which pieces answer a question; each piece does its own work.
"""
# Annotations are read when the module is loaded: `from __future__` would make texts of them.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow import inputs
from evenflow import options as given
from evenflow.arguments import checked
from evenflow.errors import UsageError
from evenflow.options import AnyProcess, Changes, Policy
from evenflow.report.echo import Watch

if TYPE_CHECKING:
    from evenflow.experiments.figures.make import Figures
    from evenflow.experiments.reproduce import Reproduced
    from evenflow.experiments.reproduce.calibrate import Calibrated
    from evenflow.experiments.reproduce.scores import Scored
    from evenflow.report.page import Addition
    from evenflow.results.outcome import Outcome
    from evenflow.study.capacity import Capacity
    from evenflow.study.check import Checked
    from evenflow.study.compare import Comparison, Difference
    from evenflow.study.planned import Planned
    from evenflow.study.runs import Job, SimulatedRun
    from evenflow.study.sweep_file import Sweep
    from evenflow.study.swept import Swept
    from evenflow.study.trials import How
    from evenflow.study.uncertainty import Prediction


@checked
def simulate(
    run: given.Run,
    *,
    scheduler: Policy | None = None,
    set: given.Set = None,
    pipeline: given.Pipeline = None,
    processes: Sequence[AnyProcess] | None = None,
    save: given.Save = "all",
    format: given.Format = "csv",
    window: given.Window = None,
    out: given.Out = None,
    force: given.Force = False,
    advise: given.Advise = False,
    intervals: given.Intervals = False,
    on_done: Callable[[int], None] | None = None,
    lean: bool = False,
    watch: Watch | None = None,
) -> "SimulatedRun":
    """Simulate one configuration.

    `simulate("run.yaml", set={"kv.pages": 4000}).summary`. `scheduler` replaces the run's. A class
    is called; an object is copied for each engine, seed and run, and never changed itself.
    `processes` join the run in place of the configured ones: functions of a world that yield events
    of SimPy. `set` and `pipeline` replace keys of the run. `out`, `save`, `format` and `force` are
    as for `SimulatedRun.write`. `window`: the seconds that the timeline shows. `advise` and
    `intervals` simulate more, for `.additions`. `on_done` is called with the number of requests
    done, `watch` shows it. `lean`: only what `save` asks for is kept in memory. Raises UsageError
    for invalid input, in one line, and PolicyError when a policy breaks its promise.
    """
    from evenflow.config.files import inputs_of
    from evenflow.report.tables import check_format
    from evenflow.study.runs import SimulatedRun, run_job, write_run

    check_format(format)
    shown = inputs.window_of(window)
    job, file = inputs.job_of(run, scheduler, set, pipeline, processes)
    with _staged(out, force, inputs_of(job.config, file)) as scratch:
        with _watched(watch, [job.label], len(job.workload.requests)) as bar:
            tell = on_done if bar is None else bar.done
            outcome = run_job(job, tell, whole=not lean or advise or save == "all")
        simulated = SimulatedRun(**vars(outcome), file=file)
        more = list(_additions(job, simulated, intervals, advise, watch))
        simulated.additions.extend(more)
        if scratch is not None:
            write_run(scratch, simulated, save, file.name, shown, more=more, form=format)
    return simulated


@checked
def compare(
    run: given.Run,
    schedulers: given.Schedulers = "",
    *,
    systems: given.Systems = "",
    set: given.Set = None,
    save: given.Save = "all",
    format: given.Format = "csv",
    allow_refused: given.AllowRefused = False,
    out: given.Out = None,
    force: given.Force = False,
    watch: Watch | None = None,
) -> "Comparison":
    """Simulate several schedulers, or published systems, on the same requests, side by side.

    `.table` has a row for each. Schedulers are as for `simulate`. A class or an object goes by the
    name of its class, or by its key in a mapping: `{"a": Mine(1), "b": Mine(2)}`. `systems` are
    names of `evenflow systems`. `set`, `out`, `save`, `format` and `force` are as for `simulate`,
    with a folder for each. Raises UsageError for invalid input, and where a scheduler refuses more
    than a tenth of the requests, unless `allow_refused`.
    """
    from evenflow.config.files import inputs_of
    from evenflow.config.run import configured
    from evenflow.config.systems import systems_of
    from evenflow.report.tables import check_format
    from evenflow.study.compare import line_up, run_all

    check_format(format)
    policies = inputs.policies_of(schedulers)
    published = systems_of(inputs.names_in(systems))
    document, file = inputs.document_of(run)
    first = None if "scheduler" in document.data or not policies else policies[0]
    config = configured(inputs.changed(document, set, getattr(first, "entry", first)))
    jobs = line_up([*policies, *published], config, file.parent)
    with _staged(out, force, inputs_of(config, file)) as scratch:
        with _watched(watch, [job.label for job in jobs], len(jobs[0].workload.requests)) as bar:
            comparison = run_all(jobs, scratch, save, bar, format, published=published)
        comparison.require_served(allowed=allow_refused)
        if scratch is not None:
            comparison.write(scratch, file.name)
    return comparison


@checked
def diff(a: given.Saved, b: given.Saved) -> "Difference":
    """Compare two saved runs: what differs in how they were made, and in what they came to.

    `diff("out/a", "out/b")`, each a saved folder, or a run that is at hand. `.config` has what
    differs in the configuration, `.metrics` the numbers that differ. These have paired 95 %
    intervals where both served the same requests. `.warnings` say why it may not be fair. Requests
    of one run wait for each other: an interval is of these requests, not of other seeds. UsageError
    for a folder that holds no run.
    """
    from evenflow.study.compare import diff as study_diff

    return study_diff(a, b)


@checked
def check(
    runs: given.Runs,
    *,
    against: given.Against = None,
    fail_if: given.FailIf = (),
    write: given.Write = None,
    set: given.Set = None,
    allow_refused: given.AllowRefused = False,
    watch: Watch | None = None,
) -> "Checked":
    """Simulate several runs, and say by how much their numbers differ from a baseline's.

    `fail_if` bounds a number ("p99_itl_ms>200"), its change (">+5") or relative change (">+3%").
    `.failures` names what is beyond, which ends the command with status 1. `against` is a baseline,
    JSON as github-action-benchmark has it, and `write` makes one. `.table` has a row a run and
    metric. `set` and `allow_refused` are as for `compare`. Raises UsageError for invalid input.
    """
    from evenflow.report.echo import visible
    from evenflow.study.check import check as study_check
    from evenflow.study.check import parse_fail_if
    from evenflow.study.runs import run_job

    def simulate_one(job: "Job") -> "Outcome":
        with _watched(watch, [job.label], len(job.workload.requests)) as bar:
            return run_job(job, None if bar is None else bar.done, whole=False)

    bounds = list(map(parse_fail_if, [fail_if] if isinstance(fail_if, str) else fail_if))
    files = list(map(str, runs))
    if twice := next((file for file in files if files.count(file) > 1), None):
        raise UsageError(f"{visible(twice)}: is there twice; name each run once")
    jobs = [
        inputs.job_of(file, None, set, None, None)[0]._replace(name=visible(file)) for file in files
    ]
    before, after = (None if path is None else Path(path) for path in (against, write))
    return study_check(jobs, simulate_one, before, bounds, after, allow_refused=allow_refused)


@checked
def sweep(
    file: given.SweepFile,
    *,
    executor: given.Executor = "process",
    resume: given.Resume = True,
    retry_failed: given.RetryFailed = False,
    workers: given.Workers = None,
    set: given.SetOfSweep = None,
    check: given.Check = False,
    allow_refused: given.AllowRefused = False,
    out: given.Out = None,
    force: given.Force = False,
    watch: Watch | None = None,
) -> "Swept":
    """Simulate a grid or a search over any keys of a run, several times each, and compare.

    `file` is a SWEEP.yaml's path, or its keys. `.points` has a row a run, `.table` a point.
    `check`: the best point and the default also see requests that the sweep did not, in `.checks`.
    `allow_refused`: a point counts even where it refuses more than a tenth of the requests. `set`
    gives its keys, or `run.KEY`, new values. With `out` results are kept there and found again, and
    the command's files are written. Raises UsageError for invalid input.
    """
    from evenflow.study.sweep import sweep as study_sweep

    asked = sweep_asked(file, set)
    reads = [Path(asked.document.name)]
    who = {"executor": executor, "workers": workers, "watch": watch}
    how = _how(out, force, reads, resume=resume, retry_failed=retry_failed, **who)
    return study_sweep(asked, how, on_unseen=check, allow_refused=allow_refused)


@checked
def capacity(
    run: given.Run,
    slo: given.Slo = (),
    *,
    gpus: given.Gpus = None,
    max_median_queue_s: given.MedianQueue = None,
    tolerance: given.Tolerance = 0.02,
    replications: given.Searches = 1,
    price: given.Price = None,
    allow_refused: given.AllowRefused = False,
    set: given.Set = None,
    executor: given.Executor = "process",
    workers: given.Workers = None,
    out: given.Out = None,
    force: given.Force = False,
    watch: Watch | None = None,
) -> "Capacity":
    """Find the largest request rate that keeps limits on latency.

    `.rate` of `capacity("run.yaml", {"p99_itl_ms": 200})` is the mean over the replications with
    its interval (requests/s), known within `tolerance` of itself. `.points` has a row for each rate
    simulated, `.served` how many requests were completed. `gpus`: of that many; `price`:
    dollars of a GPU an hour. `allow_refused` is as for `compare`, `set`, `out` and `force` are as
    for `sweep`. Raises UsageError for invalid input.
    """
    from evenflow.config.files import inputs_of
    from evenflow.config.run import configured
    from evenflow.study.capacity import CapacityQuestion
    from evenflow.study.capacity import capacity as study_capacity
    from evenflow.study.deployments import on_gpus, parse_gpus
    from evenflow.study.slo import checked_price, num_gpus, parse_slo

    document, file = inputs.document_of(run, set)
    config = configured(document)
    config = config if gpus is None else on_gpus(config, parse_gpus(inputs.gpu_counts(gpus)))
    limits = tuple(parse_slo(slo, max_median_queue_s))
    per_hour = None if price is None else checked_price(price) * num_gpus(config)
    asked = (config, limits, file.parent, tolerance, replications, per_hour, allow_refused)
    who = {"executor": executor, "workers": workers, "watch": watch}
    return study_capacity(
        CapacityQuestion(*asked), _how(out, force, inputs_of(config, file), **who)
    )


@checked
def plan(
    run: given.Run,
    slo: given.Slo = (),
    gpus: given.Gpus = None,
    *,
    rate: given.Rate = None,
    price: given.Price = None,
    schedulers: given.SchedulersToTry = None,
    budgets: given.Budgets = None,
    with_: given.With = (),
    replications: given.Seeds = 1,
    exhaustive: given.Exhaustive = False,
    max_median_queue_s: given.MedianQueue = None,
    intervals: given.Intervals = False,
    allow_refused: given.AllowRefused = False,
    set: given.Set = None,
    executor: given.Executor = "process",
    workers: given.Workers = None,
    out: given.Out = None,
    force: given.Force = False,
    watch: Watch | None = None,
) -> "Planned":
    """Find the cheapest deployment that keeps limits on latency, and say how to start it.

    Where no deployment of `gpus` GPUs does, find the nearest. `.table` has a row for each that
    does, the best first, `.points` one for all that was simulated. `rate`: requests/s, or a
    multiple of the run's own ("2x"). `price`: dollars of a GPU an hour; `budgets`: tokens of a
    micro-batch. `with_` has processes that join each simulation, by name, `{"outage": {"mtbf_s":
    86400, "restart_s": 120}}`. `.spare` is how many GPUs more that takes than without them.
    `exhaustive` simulates every point. `slo`, `set`, `out`, `allow_refused` and `force` are as for
    `capacity`, `intervals` as for `simulate`. Raises UsageError for invalid input.
    """
    from evenflow.study.deployments import parse_gpus
    from evenflow.study.plan import plan as study_plan
    from evenflow.study.plan_question import Ask, parse_budgets, parse_with
    from evenflow.study.slo import parse_slo

    if gpus is None:
        raise UsageError("--gpus: says how many there may be, such as --gpus 4..64")
    document, file = inputs.document_of(run, set)
    ask = Ask(
        slo=tuple(parse_slo(slo, max_median_queue_s)),
        gpus=parse_gpus(inputs.gpu_counts(gpus)),
        rate=None if rate is None else str(rate),
        price=price,
        schedulers=None if schedulers is None else inputs.names_in(schedulers),
        budgets=parse_budgets(budgets) if isinstance(budgets, str) else budgets,
        joining=parse_with(with_),
        replications=replications,
        exhaustive=exhaustive,
        allow_refused=allow_refused,
        intervals=intervals,
    )
    who = {"executor": executor, "workers": workers, "watch": watch}
    return study_plan(document, file.parent, ask, _how(out, force, [file], **who))


@checked
def figures(
    names: given.FigureNames = (),
    *,
    quick: given.Quick = False,
    set: given.SetOfFigures = None,
    intervals: given.ClaimIntervals = False,
    formats: given.Formats = "png,svg",
    width: given.Width = None,
    style: given.Style = None,
    allow_refused: given.AllowRefused = False,
    executor: given.Executor = "process",
    workers: given.Workers = None,
    out: given.Out = None,
    force: given.Force = False,
    watch: Watch | None = None,
    say: Callable[[list[Any]], None] | None = None,
) -> "Figures":
    """Make the papers' figures, and the table that compares their claims with ours.

    Each figure has `.figure`, `.table` and `.claims`. `names` are of papers' figures or a figure's
    YAML, or map names to the keys of other figures. None: all of the papers. `quick`: fewer points.
    `allow_refused` is as for `compare`, `set`, `out` and `force` are as for `sweep`. With `out` the
    table of claims is written too, and pictures in `formats` (png, svg, pdf). `width` is in inches,
    `style` one of matplotlib. `intervals` are of the claims. `say` is called with what is done.
    Raises UsageError for a figure that cannot be made, once the other figures are made.
    """
    from tempfile import TemporaryDirectory

    from evenflow.experiments.figures.make import chosen, make_all
    from evenflow.experiments.figures.schema import Look
    from evenflow.report.folder import claimed
    from evenflow.study.points import executor_of

    look = Look(width, style, tuple(formats.split(",") if isinstance(formats, str) else formats))
    sets = tuple(inputs.texts_of(inputs.by_name(set)))
    asked = inputs.by_name(names or ())
    plans = chosen(asked, sets, quick=quick, allow_refused=allow_refused, look=look)
    with ExitStack() as stack:
        folder = Path(out or stack.enter_context(TemporaryDirectory()))
        stack.enter_context(claimed(folder, force=force))
        pool = stack.enter_context(executor_of(executor, workers))
        return make_all(plans, folder, pool, watch, say, intervals=intervals, tables=bool(asked))


@checked
def reproduce(
    names: given.Entries = (),
    *,
    data: given.Data = None,
    set: given.Set = None,
    intervals: given.Intervals = False,
    costs: given.Costs = None,
    every: given.Every = 1,
    workers: given.Workers = None,
    out: given.Out = None,
    force: given.Force = False,
    watch: Watch | None = None,
) -> "Reproduced | Scored":
    """Simulate runs that others measured on real GPUs, and print how far off that is.

    `.table` has a row a run and metric, with its error. No names: the whole catalogue. `data` is
    the folder of the runs, by default EVENFLOW_SHARED. `intervals`: nine more simulations of each
    run tell how far it may be off. `costs` are kinds of costs to compare, `default` with all else
    left to the defaults, too. Then the result is the errors of each. `every`: that many runs of an
    entry count as one. `set`, `out` and `force` are as for `sweep`. Raises UsageError for invalid
    input.
    """
    from evenflow.experiments.reproduce import chosen, data_folder, scores, write
    from evenflow.experiments.reproduce import reproduce as reproduce_entries
    from evenflow.report.folder import claimed

    entries = chosen(names or (), every)
    folder = data_folder(None if data is None else Path(data))
    kinds = costs.split(",") if isinstance(costs, str) else costs
    how, overrides = _how(workers=workers, watch=watch), inputs.texts_of(set)
    with nullcontext() if out is None else claimed(Path(out), force=force):
        found: Reproduced | Scored
        if kinds:
            found = scores.score(entries, folder, how, overrides, kinds)
        else:
            found = reproduce_entries(entries, folder, how, overrides, intervals=intervals)
        with _staged(out, force) as scratch:
            if scratch is None:
                pass
            elif isinstance(found, scores.Scored):
                scores.write(scratch, found)
            else:
                write.write(scratch, found)
    return found


@checked
def calibrate(
    run: given.Run,
    results: given.Results,
    *,
    set: given.Set = None,
    workers: given.Workers = None,
    watch: Watch | None = None,
) -> "Calibrated":
    """Find the CPU time of an engine from a benchmark's results: a `runtime` to paste.

    `run` is what was measured, `results` are files of `bench serve`, GuideLLM or the kinds that
    `reproduce` reads. `.runtime` and `.constants` are found. `set` gives keys of the run new
    values. Raises UsageError for invalid input.
    """
    from evenflow.experiments.reproduce.calibrate import calibrate as calibrate_run
    from evenflow.experiments.reproduce.forms import read_results

    document, file = inputs.document_of(run, set)
    runs = [each for path in results for each in read_results(Path(path))]
    if not runs:
        raise UsageError("results: none are given; a file of a benchmark of this run is right")
    return calibrate_run(document, file.parent, runs, _how(workers=workers, watch=watch))


@checked
def intervals(
    run: given.RunFile, *, set: Changes = None, workers: int | None = None
) -> "Prediction":
    """Simulate a run ten times: `.table` has a 90 % interval of each mean, P99 and throughput.

    It follows from the costs' stated error, the host's constants and the seed (`.error` says
    which). `set` gives keys of the run new values. Raises UsageError for invalid input.
    """
    from evenflow.study.uncertainty import predict

    document, file = inputs.document_of(run, set)
    return predict(document, file.parent, _how(workers=workers))


def sweep_asked(file: str | Path | Mapping[str, Any], set: Changes = None) -> "Sweep":
    """Return the Sweep of a SWEEP.yaml, given by path or keys, with some keys changed."""
    from evenflow.config.yaml_file import Document
    from evenflow.study.sweep_file import load_sweep, sweep_of

    if isinstance(file, Mapping):
        document = Document("the sweep", inputs.by_name(dict(file)), {})
        return sweep_of(document, Path(), inputs.texts_of(set))
    return load_sweep(Path(file), inputs.texts_of(set))


def _additions(
    job: "Job", run: "SimulatedRun", intervals: bool, advise: bool, watch: Watch | None
) -> Iterator["Addition"]:
    """Yield the additions asked for beside a run, from more simulations."""
    if intervals:
        from evenflow.study.uncertainty import predict

        document = job.config.document(job.label)
        yield predict(document, job.beside, _how(watch=watch)).addition
    if advise:
        from evenflow.study.advice import advise as study_advise

        yield study_advise(job, run, _how(watch=watch)).addition


def _how(
    out: str | Path | None = None, force: bool = False, reads: Sequence[Path] = (), **how: Any
) -> "How":
    from evenflow.study.trials import How

    return How(None if out is None else Path(out), force, reads, **how)


def _staged(
    out: str | Path | None, force: bool, reads: Sequence[Path] = ()
) -> AbstractContextManager[Path | None]:
    from evenflow.report.folder import staged

    return nullcontext() if out is None else staged(Path(out), force=force, reads=reads)


def _watched(watch: Watch | None, labels: list[str], total: int) -> AbstractContextManager[Any]:
    return nullcontext() if watch is None else watch(labels, total)
