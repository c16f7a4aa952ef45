"""From a configuration to a real run: what can be served, its outcome, its replay.

A run is served by `evenflow.runtime.serve`; its folder is written as a
simulation's is. No command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evenflow.config.build import Built, Workload, build, load_workload
from evenflow.config.parts import RuntimeConfig
from evenflow.config.pools import runs_of_pools, system
from evenflow.config.run import RunConfig, load_config, with_
from evenflow.config.workers import VllmWorkers
from evenflow.config.yaml_file import find, read
from evenflow.core.batcher import Batcher
from evenflow.core.replay import replay
from evenflow.core.request import Prefix, Request
from evenflow.engines.handover import PoolBatcher
from evenflow.engines.pools import PooledWorld
from evenflow.engines.recovery import Lives
from evenflow.errors import PolicyError, UsageError, require_package
from evenflow.report.folder import killed_runs, reading
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome
from evenflow.runtime import journal
from evenflow.runtime.kinds import (
    ONLY_SIMULATED,
    check_all_is_known,
    refuse,
    servable,
    workers_of,
)
from evenflow.runtime.records import LINK, Records, write_served
from evenflow.runtime.serve import (
    ALONE,
    LAST,
    ServedRun,
    ServeOptions,
    Workers,
    names_of,
    parts_of,
    serve,
)
from evenflow.runtime.tokens import RandomTexts
from evenflow.runtime.torch import TorchSettings
from evenflow.runtime.torch import settings as on_torch
from evenflow.runtimes import RuntimeOverheads
from evenflow.schedulers import POOLED
from evenflow.specs.model import model
from evenflow.study.runs import Job
from evenflow.traces.formats import encoder

if TYPE_CHECKING:
    import socket

    from evenflow.runtime.http.live import LiveServer

CLIENTS = "clients"
"""What stands for the trace in the provenance of a served run."""


def serve_job(
    job: Job,
    on_done: Callable[[int], None] | None = None,
    options: ServeOptions = ALONE,
    *,
    records: Records | None = None,
    title: str = "",
) -> ServedRun:
    """Serve a job as `evenflow.runtime.serve` does, with its options.

    The result says where it comes from. `records` keep what happens, under a `title`. UsageError
    for a configuration that cannot be served; its processes need the option `mortal`.
    """
    check_servable(job.config, joined=options.mortal is not None)
    built = job.built()
    workers = {name: _reading(job, each) for name, each in workers_by_pipeline(job, built).items()}
    world, facts = built.world, {name: dict(each.facts) for name, each in workers.items()}
    parts = parts_of(world, workers)
    head: dict[str, Any] = {"num_requests": len(job.workload.requests)}
    if isinstance(world, PooledWorld):
        head[LINK] = world.link.bytes_per_token
    elif options.live is not None:
        check_all_is_known(world)
    stated = {"pools": facts} if isinstance(world, PooledWorld) else next(iter(facts.values()))
    source = job.source(built, workers=stated) | {"setup": job.config.real_setup()}
    if records is not None:
        records.begin(parts, provenance=source, label=_label(job), title=title, **head)
        options = replace(
            options, record=records.journal, on_token=records.on_token, blocks=records.part
        )
    served = serve(world, workers, on_done, options)
    pipelines = [_sourced(part, source) for part in served.pipelines]
    return replace(_sourced(served, source), pipelines=pipelines)


def _sourced(served: ServedRun, source: dict[str, Any]) -> ServedRun:
    return replace(served, result=replace(served.result, provenance=source))


def _reading(job: Job, workers: Workers) -> Workers:
    """Return workers that read the prompts of the trace, where there are any, for made-up ones."""
    prompts, texts = job.workload.prompt_ids, workers.text_of
    if prompts is None or not isinstance(texts, RandomTexts):
        return workers
    known = texts.vocabulary
    number, most = max(enumerate(map(max, prompts)), key=lambda each: each[1])
    if most >= known:
        raise UsageError(
            f"workload.tokenizer: {job.config.workload.tokenizer} makes token {most} of request "
            f"{number}, and the model knows {known}; that of the model is right"
        )
    return replace(workers, text_of=replace(texts, prompts=prompts))


def workers_by_pipeline(job: Job, built: Built) -> dict[str, Workers]:
    """Return each pipeline's workers by name, "" for the only one; UsageError if impossible."""
    config, workers = job.config, job.config.workers
    several = [("workers.device", getattr(workers, "device", "cpu") != "cpu", "cpu")]
    if built.pools:
        own = runs_of_pools(config, system(config.scheduler))
        computes, ranks = workers.kind != "emulated", {run.tensor_parallel for run in own.values()}
        ahead = getattr(workers, "metadata", "ahead") == "ahead"
        several += [
            ("workers.metadata", not ahead, "ahead"),
            ("workers.kind", computes and "mixed" in own, "emulated, or no mixed"),
            ("workers.kind", len(ranks) > 1, "one tensor_parallel"),
        ]
        refuse("with pools", *several)
        runs = {name: (run, built.pools[name]) for name, run in own.items()}
    else:
        if config.num_replicas > 1:
            refuse("with replicas", *several)
        runs = dict.fromkeys(names_of(servable(built)), (config, built))
    made = dict[str, Workers]()
    for name, (run, part) in runs.items():
        first = sum(len(each.settings) for each in made.values())
        made[name] = workers_of(run, part, job.beside, first)
    return made


def outcome_of(job: Job, served: ServedRun) -> Outcome:
    result = served.result
    summary = summarize(result, job.config.goodput)
    several = served.pipelines if result.replicas > 1 else [served]
    replicas = tuple(part.result for part in several)
    return Outcome(result, summary, served.wall_s, replicas, _label(job))


def _label(job: Job) -> str:
    return f"{job.label}, {'emulated' if job.config.workers.kind == 'emulated' else 'real'}"


def job_of(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    clients: bool = False,
    engine: str | None = None,
    joined: bool = False,
    say: Callable[[str], object] = str,
) -> Job:
    """Return the job that a file and its overrides describe; UsageError if it cannot be served.

    The CPU time of a `runtime` is for simulations. A real run has its own, which `say` gets in a
    line. `clients` have the requests: a workload is not read. An `engine` serves in the place of
    the workers of the file, and asks as it does. `joined`: its processes act on the workers.
    """
    if clients:
        overrides = [*overrides, f"workload={{trace: {CLIENTS}}}"]
    if engine not in (None, "vllm"):
        raise UsageError(f"--engine {engine}: vllm is the only engine that serves here")
    if engine is not None:
        given = read(path).data.get("workers")
        if not (isinstance(given, Mapping) and given.get("kind") == engine):
            overrides = [f"workers={{kind: {engine}}}", *overrides]
    config = load_config(path, overrides)
    if isinstance(config.workers, VllmWorkers):
        config = with_(config, {"dispatch": "engine_loop"})
    if _prepares(config.cpu_time):
        if config.runtime is not None:
            named = f" {config.runtime}" if isinstance(config.runtime, str) else ""
            spent = "a real run spends the CPU time of this machine"
            say(f"note: runtime{named} is not charged: {spent}")
        config = with_(config, {"runtime": "ideal"})
    check_servable(config, joined=joined)
    if clients:
        name = config.scheduler.name
        refuse(
            "for clients",
            (f"scheduler {name}", name in POOLED, "one policy"),
            ("replicas", config.replicas is not None, "null"),
        )
        return Job(config, Workload([], {"name": CLIENTS, "dropped": {}}), path.parent)
    return Job(config, real_workload(config, path.parent), path.parent)


def real_workload(config: RunConfig, beside: Path) -> Workload:
    """Return the workload of a real run. A model's output differs from the trace's, so prefixes end
    with the prompts where one computes. It reads the prompts, if they are known and there is a
    tokenizer. What they have in common, a prefix cache keeps.
    """
    computes, tokenizer = config.workers.kind != "emulated", config.workload.tokenizer
    workload = load_workload(config, beside, keep_text=computes and tokenizer is not None)
    if not computes:
        return workload
    requests = list(map(_prompt_alone, workload.requests))
    if workload.texts is None or tokenizer is None:
        return workload._replace(requests=requests)
    prompt_ids = list(map(encoder(find(tokenizer, beside)), workload.texts))
    if config.kv.prefix_cache:
        requests = [
            replace(request, prefix=Prefix(tuple(ids), 1, len(ids)))
            for request, ids in zip(requests, prompt_ids, strict=True)
        ]
    return workload._replace(requests=requests, prompt_ids=prompt_ids)


def _prompt_alone(request: Request) -> Request:
    if request.prefix is None or request.prefix.tokens <= request.prompt_tokens:
        return request
    return replace(request, prefix=request.prefix._replace(tokens=request.prompt_tokens))


def serve_into(
    folder: Path,
    job: Job,
    title: str,
    on_done: Callable[[int], None] | None = None,
    live: LiveServer | None = None,
) -> tuple[ServedRun, Outcome, list[str]]:
    """Serve a job and write its files as `simulate` does, with the journal beside them.

    Return what came of it, and what to say of files that could not be written. UsageError when the
    results cannot be. Once all is served, Ctrl-C and SIGTERM are ignored, until `saving` ends.
    """
    lost: list[str] = []
    records = Records(folder, job, lost.append)
    try:
        served = serve_job(
            job, on_done, ServeOptions(live=live, saves=True), records=records, title=title
        )
    finally:
        records.close()
    outcome = outcome_of(job, served)
    write_served(folder, outcome, served.facts(), title, lost)
    return served, outcome, lost


def replay_folder(folder: Path) -> tuple[str | None, str | None]:
    """Feed the inputs of a recorded run to a fresh Batcher; return the first difference, or None.

    Beside it, what is missing of a journal that was cut because its driver was killed. UsageError
    when the folder holds no record, or one that cannot be read.
    """
    with reading(folder):
        if not (paths := journal.journals_in(folder)):
            killed = [f"; {run} is of a run that was killed" for run in killed_runs(folder)[:1]]
            what = f"no such file; a folder that evenflow run wrote has one{''.join(killed)}"
            raise UsageError(f"{folder / journal.NAME}: {what}")
        for path in paths:
            difference, missing = _replay_file(path)
            if difference is not None or missing is not None:
                break
    return difference, missing


def recorded(built: Built, pool: str | None) -> Batcher:
    """Return a fresh Batcher as that of a recorded run, or of a pool or an engine of it."""
    part = built.pools.get(pool or "")
    if part is None:
        return servable(built).batcher()
    return servable(part).batcher(partial(PoolBatcher, keeps_pages=pool != LAST))


def _replay_file(path: Path) -> tuple[str | None, str | None]:
    config, beside, pool = journal.read_head(path)
    built = build(config, beside)
    batcher = cast("Batcher", Lives(lambda: recorded(built, pool)))
    entries = journal.Entries(path)
    try:
        difference = replay(entries, batcher)
    except PolicyError as error:
        return str(error), None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if difference is not None or not entries.cut:
        return difference, None
    live, in_flight = len(batcher.queues.live), len(batcher.queues.in_flight)
    return None, (
        f"the journal is cut after {entries.last_s:.1f} s, as its driver was killed: "
        f"{live} requests had not ended, and {in_flight} micro-batches were on their way"
    )


def check_servable(config: RunConfig, *, joined: bool = False) -> None:
    """Raise UsageError for keys that only a simulation supports yet; `joined`: but processes."""
    require_package("zmq", "a real run", "pyzmq")
    name, vllm = config.scheduler.name, config.workers.kind == "vllm"
    one_policy = "one policy, or workers of another kind"
    refuse(
        ONLY_SIMULATED,
        (f"scheduler {name}", name in POOLED and vllm, one_policy),
        ("disaggregation_mode", "disaggregation_mode" in config.scheduler.params, "none"),
        ("replicas", config.replicas is not None and vllm, "one pipeline"),
        ("data_parallel", config.data_parallel > 1, "1"),
        ("expert_parallel", config.expert_parallel, "false"),
        ("speculative", config.speculative is not None, "null"),
        ("kv.prefix_cache", config.kv.prefix_cache and vllm, "false"),
        ("kv.swap", config.kv.swap, "false"),
        ("processes", bool(config.processes) and not joined, "null"),
        ("workload.after", bool(config.workload.after), "nothing before"),
        ("tensor_parallel", vllm and config.tensor_parallel > 1, "1"),
    )


def _prepares(runtime: RuntimeConfig | str) -> bool:
    """Say whether a simulation charges for CPU time that a real run neither spends nor waits for.

    `schedule_s`, and what a profile measured, stand for the messages and the driver, which a real
    run has itself.
    """
    if isinstance(runtime, str):
        return runtime not in ("ideal", "profile")
    charged = runtime.make(num_stages=1)
    return charged != RuntimeOverheads(schedule_s=charged.schedule_s)


def check_comparable(job: Job) -> None:
    """Raise UsageError where no simulation matches the run: stages that take turns."""
    check_servable(job.config, joined=True)
    if job.config.processes:
        several = job.config.replicas is not None or job.config.scheduler.name in POOLED
        refuse(
            "with processes",
            ("workers.kind", job.config.workers.kind != "emulated", "emulated"),
            ("replicas, or pools", several, "one pipeline"),
        )
    if job.config.virtual_engines and job.config.dispatch == "eager":
        raise UsageError(
            "dispatch: eager, where virtual engines send at one instant and no record has their "
            "order; stage0 is right"
        )
    for workers in workers_by_pipeline(job, job.built()).values():
        if job.config.workers.kind == "torch" and not workers.together:
            for note in on_torch.sharing(cast("Sequence[TorchSettings]", workers.settings)):
                raise UsageError(
                    f"workers.transport: {note}; one_process, fewer stages or a GPU for each is "
                    "right"
                )


def live_server(
    config: RunConfig,
    beside: Path,
    bound: socket.socket,
    *,
    tokenizer: Path | None = None,
    max_queue: int | None = None,
    allowed_hosts: Sequence[str] = (),
) -> LiveServer:
    """Return the server of a configuration's model on a bound socket."""
    from evenflow.runtime.http import Serving
    from evenflow.runtime.http.live import LiveServer
    from evenflow.runtime.http.text import Codec, end_ids

    path = None if config.model is None else Path(find(config.model, beside))
    folder = path if path is not None and path.is_dir() else None
    if tokenizer is None and folder is not None and (folder / "tokenizer.json").is_file():
        tokenizer = folder / "tokenizer.json"
    vocab_size = None if path is None else model(str(path)).vocab_size
    kind, ends = config.workers.kind, frozenset[int]() if folder is None else end_ids(folder)
    codec = Codec(tokenizer, vocab_size, ends, made_up=kind == "emulated")
    name = config.model or "evenflow"
    return LiveServer(Serving(name, codec, kind, max_queue, allowed_hosts), bound)
