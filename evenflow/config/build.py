"""Build what a simulation needs from a checked configuration: the requests and the world.

Names are resolved here: the model, the GPU, the links and the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from evenflow.config.costs import MEASURED_COSTS, EngineCosts, Hardware, MadeCosts
from evenflow.config.files import make_importable
from evenflow.config.run import RunConfig
from evenflow.config.workload import Workload
from evenflow.config.yaml_file import find
from evenflow.core.decodes import ONE_TOKEN
from evenflow.core.kv import KvCache
from evenflow.core.rules import rules_of
from evenflow.core.world import Link, World
from evenflow.costs import StageCost, balanced_by, balanced_layers, estimates, prefill_work
from evenflow.costs.launches import LAUNCH_S, launched
from evenflow.engines.rules import EngineRules
from evenflow.engines.swap import SwapCache
from evenflow.errors import PolicyError, UsageError, is_count
from evenflow.keys import MOST_MODEL_LEN
from evenflow.runtimes import RuntimeOverheads
from evenflow.schedulers import POOLED, create
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.memory import memories
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec
from evenflow.traces import with_own_prefixes
from evenflow.types import Request, Scheduler
from evenflow.user_code import user_code

if TYPE_CHECKING:
    from evenflow.engines.pools import PooledWorld
    from evenflow.traces.predict import Predictor

__all__ = ["Built", "Workload", "build", "load_workload", "reads_text"]


def load_workload(config: RunConfig, beside: Path, *, keep_text: bool = False) -> Workload:
    """Load the trace and give its requests their arrival times.

    A relative path is looked for in the current folder, then in `beside`, the configuration's.
    `keep_text` keeps the prompts even where this configuration's scheduler reads none.
    """
    return config.workload.load(beside, keep_text=keep_text or reads_text(config))


def reads_text(config: RunConfig) -> bool:
    """Say whether the scheduler's predictor may read the prompts."""
    predictor = config.scheduler.params.get("predictor")
    return isinstance(predictor, dict) and predictor.get("kind") == "classifier"


class Built(NamedTuple):
    """A world ready to simulate, and the sources of its costs and its pages.

    `pools` are the parts of a world of pools, each built as a separate run.
    """

    world: World | PooledWorld
    formula: dict[str, Any]
    deployment: dict[str, Any]
    costs: MadeCosts | None = None
    pools: Mapping[str, Built] = MappingProxyType({})

    @property
    def host(self) -> RuntimeOverheads:
        """The CPU time measured with the costs; zero where none was measured."""
        if self.costs is None:
            return next(iter(self.pools.values())).host
        return self.costs.host

    @property
    def cost_source(self) -> dict[str, Any]:
        """The source of the seconds; for tables, also the share that no measurement surrounds.

        That share is known after the run.
        """
        source = self.formula if self.costs is None else self.formula | self.costs.source()
        parts = {name: built.cost_source for name, built in self.pools.items()}
        return source | ({"pools": parts} if parts else {})


NO_REQUESTS = Workload([], {})

MakeScheduler = Callable[..., Scheduler]
"""A policy made from facts of the deployment (`evenflow.schedulers.FACTS`), given by name."""


def build(
    config: RunConfig,
    beside: Path,
    workload: Workload = NO_REQUESTS,
    make_scheduler: MakeScheduler | None = None,
) -> Built:
    """Return the world that a configuration describes; UsageError for an impossible one.

    `make_scheduler` makes the policy in place of the one that the configuration names. The policy
    is made once here, so that a mistake in its parameters is found before the run.
    """
    make_importable([config.scheduler.name, dict(config.scheduler.params)], beside)
    if config.scheduler.name in POOLED and make_scheduler is None:
        if workload.before:
            raise UsageError(f"workload.after: not with {config.scheduler.name}; leave it out")
        return _build_pools(config, beside, workload)
    return _build_world(config, beside, workload, make_scheduler)


def _build_pools(config: RunConfig, beside: Path, workload: Workload) -> Built:
    """Return the world of a system of pools, each built as a separate run.

    Where policies of several pools predict lengths, the last pool's predictions hold.
    """
    from evenflow.config.pools import runs_of_pools, system, transfer_link
    from evenflow.engines.pools import PooledWorld

    given = system(config.scheduler)
    for key, plain in (("virtual_engines", False), ("replicas", None), ("data_parallel", 1)):
        if getattr(config, key) != plain:
            raise UsageError(
                f"{key}: not with {config.scheduler.name}, whose pools are one engine each; leave "
                "it out"
            )
    built = {}
    for name, part in runs_of_pools(config, given).items():
        try:
            built[name] = _build_world(part, beside, workload, in_step=True)
        except UsageError as error:
            raise UsageError(f"scheduler {config.scheduler.name}: {name} pool: {error}") from None
        workload = workload._replace(requests=list(built[name].world.requests))
    worlds: dict[str, Any] = {
        name: replace(pool.world, requests=(), concurrency=None) for name, pool in built.items()
    }
    link = transfer_link(config, given, model_of(config, beside))
    world = PooledWorld(
        requests=workload.requests,
        **worlds,
        link=link,
        watermark=given.watermark,
        borrow_tokens=getattr(given.pools().get("mixed"), "borrow_tokens", 0),
        concurrency=config.workload.concurrency,
    )
    facts = {name: pool.deployment for name, pool in built.items()}
    deployment = {"pools": facts, "kv_bytes_per_token": link.bytes_per_token}
    return Built(world, _formula(config), deployment, pools=built)


def _build_world(
    config: RunConfig,
    beside: Path,
    workload: Workload,
    make_scheduler: MakeScheduler | None = None,
    *,
    in_step: bool = False,
) -> Built:
    """Return the world of pipelines with one policy."""
    hardware = _hardware(config, beside)
    made = config.costs.make(hardware).scaled(config.scale.costs)
    costs, spec, speculative = made.cost, hardware.spec, config.speculative
    groups = config.data_parallel
    given_pages = config.kv.pages if isinstance(config.kv.pages, int) else 0
    most = given_pages * config.kv.page_tokens if spec is None else spec.max_position_embeddings
    max_model_len = config.max_model_len or min(most, MOST_MODEL_LEN)
    alike = made.on_ranks(costs, groups)
    waits = in_step or config.in_step
    make = _scheduler_maker(config, alike, max_model_len, make_scheduler, in_step=waits)
    scheduler = make()
    placed = _with_room_for(scheduler, hardware.placed, config)
    pages = given_pages or hardware._replace(placed=placed).deployment.kv_pages()
    link, hop_links = _hops(config, made)
    overheads = config.overheads(made.host)
    costs = made.on_ranks(config.kv.swapped(costs, hardware), groups)
    if hardware.placed is not None:
        costs = _launched(costs, hardware.placed, overheads, config)
    if speculative is not None:
        costs = speculative.drafted(costs, config.costs, hardware)
    if overheads.compile_s:
        from evenflow.engines.compiling import compiling

        costs = compiling(costs, placed, overheads.compile_s, workload.requests)
    predictor = _predictor(scheduler, config.workload.seed, beside)
    known = with_own_prefixes if config.kv.prefix_cache else list
    engines = config.virtual_engines
    engines = config.num_stages if engines is True else int(engines) or 1
    world = World(
        requests=known(_predicted(workload.requests, workload.texts, predictor)),
        make_scheduler=make,
        costs=costs,
        depth=config.num_stages,
        total_pages=pages * groups,
        max_model_len=max_model_len,
        page_tokens=config.kv.page_tokens,
        max_in_flight=_cap(config, scheduler),
        virtual_engines=engines if groups == 1 else groups,
        pipelined_chunks=config.pipelined_chunks,
        overheads=_charged(overheads, predictor),
        link=link,
        hop_links=hop_links,
        concurrency=config.workload.concurrency,
        decoding=ONE_TOKEN if speculative is None else speculative.make(),
        replicas=config.num_replicas,
        router="round_robin" if config.replicas is None else config.replicas.router,
        prefix_cache=config.kv.prefix_cache,
        kv=SwapCache if config.kv.swap else KvCache,
        before=tuple(known(_predicted(part, None, predictor)) for part in workload.before),
        **_loop(config, engines, EngineRules.of(scheduler)),
    )
    facts = _deployment_facts(world, placed)
    if config.scheduler.params.get("token_budget") == "auto":
        facts["token_budget"] = getattr(scheduler, "budget", None)
    return Built(world, _formula(config), facts, made)


def _launched(
    costs: StageCost, placed: Deployment, overheads: RuntimeOverheads, config: RunConfig
) -> StageCost:
    """Return the costs with the launches of kernels that no CUDA graph replays."""
    launch_s, eager = overheads.launch_s, config.enforce_eager
    if eager and not launch_s:
        launch_s = LAUNCH_S * config.scale.host
    if not launch_s:
        return costs
    return launched(costs, placed, launch_s, overheads.graph_tokens, eager=eager)


def _loop(config: RunConfig, engines: int, rules: EngineRules) -> dict[str, Any]:
    """Return the fields of a world that set the loop and the dispatch of its engines."""
    groups, waits = config.data_parallel, config.attention_dp_config
    options = {"wait": None if waits is None else waits.make()}
    dispatch = config.dispatch or ("engine_loop" if rules.in_turns else "stage0")
    if dispatch == "engine_loop":
        if engines > 1:
            words = "dispatch: engine_loop is the loop of one engine; virtual_engines: 1"
            raise UsageError(words)
        if (rules.prefills or rules.receives) and groups > 1:
            raise UsageError("disaggregation_mode is for one engine; data_parallel: 1")
        from evenflow.engines.consensus import DecodeLoop, PrefillLoop
        from evenflow.engines.lock_step import EngineLockStep
        from evenflow.engines.loop import EngineLoop

        together = {"loop": EngineLockStep, "loop_options": options}
        server = PrefillLoop if rules.prefills else DecodeLoop
        alone = {"loop": server if rules.prefills or rules.receives else EngineLoop}
        return together if groups > 1 else alone
    if groups == 1:
        return {"dispatch": dispatch}
    from evenflow.engines.lock_step import LockStep

    return {"dispatch": dispatch, "loop": LockStep, "loop_options": options}


def _hops(config: RunConfig, made: MadeCosts) -> tuple[Link | None, tuple[Link, ...] | None]:
    """Return the link between stages, or one a hop if they differ; a profile may have its own."""
    token_bytes = made.cost.transfer_bytes(prefill_work(1))
    if config.link is None and made.hop is not None:
        latency_s, per_byte_s = made.hop
        return Link(token_bytes * per_byte_s, latency_s), None
    return config.wires.hops(config.num_stages, config.stage_gpus, token_bytes)


def model_of(config: RunConfig, beside: Path) -> ModelSpec | None:
    """Return the model in the precision that the configuration says; None without a model."""
    if config.model is None:
        return None
    return _served(config, model(find(config.model, beside), config.dtype, config.kv_dtype))


def _served(config: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Return a float32 model in 16 bits, as engines serve it on GPUs where nobody says a dtype.

    A profile has the dtype that was measured, and workers of torch compute in the file's. Source:
    vLLM 0.33, config/model.py: _resolve_auto_dtype; SGLang 0.5.23, _get_and_verify_dtype.
    """
    is_own = config.costs.kind == "profile" or config.workers.kind == "torch"
    if config.dtype is not None or config.gpu is None or is_own or spec.dtype_bytes == 2:
        return spec
    return spec.changed(dtype_bytes=2)


def _hardware(config: RunConfig, beside: Path) -> Hardware:
    """Return the model on the GPUs that the configuration names."""
    spec = model_of(config, beside)
    kinds = set(config.gpus)  # refuses what is none, whether these costs need it or not
    if len(kinds) > 1 and config.costs.kind in ("profile", *MEASURED_COSTS):
        raise UsageError(
            f"gpu: {config.gpu_words} in one pipeline: costs: {config.costs.kind} are of one GPU; "
            "costs: roofline is right"
        )
    nodes = config.wires.nodes
    hardware = Hardware(
        config.stages,
        config.tensor_parallel,
        spec,
        None if spec is None else _deployment(config, spec, beside),
        config.fabric,
        nodes is not None and config.stage_gpus > nodes.gpus,
        lambda path: find(path, beside),
    )
    if config.split == "even":
        return hardware
    layers = _balanced(config, hardware)
    return hardware._replace(placed=replace(hardware.deployment, layers_per_stage=layers))


def _deployment(config: RunConfig, spec: ModelSpec, beside: Path) -> Deployment | None:
    """Return the model on its GPUs; None without a GPU."""
    if config.gpu is None:
        split_layers(spec.num_layers, config.stages)
        return None

    def draft_of(name: str) -> ModelSpec:
        return spec.mtp() if name == "mtp" else _served(config, model(find(name, beside)))

    draft = None if config.speculative is None else config.speculative.draft_model
    gpus = config.gpus
    return Deployment(
        spec,
        gpus[0],
        split_layers(spec.num_layers, config.stages),
        config.tensor_parallel,
        memory_utilization=config.memory_utilization,
        page_tokens=config.kv.page_tokens,
        expert_parallel=config.expert_parallel,
        data_parallel=config.data_parallel,
        draft=None if draft is None else draft_of(draft),
        verified_tokens=1 if config.speculative is None else config.speculative.k + 1,
        gpus=gpus if len({*gpus}) > 1 else (),
    )


BUDGETS = (
    "token_budget",
    "max_num_batched_tokens",
    "chunked_prefill_size",
    "max_prefill",
    "max_num_tokens",
)
"""What policies call the most tokens, or prompt tokens, of a micro-batch."""


def _with_room_for(
    scheduler: Scheduler, placed: Deployment | None, config: RunConfig
) -> Deployment | None:
    """Return the deployment with memory for the most tokens and sequences that a policy sends.

    Engines measure a step of that size before they divide the rest into pages. A policy without
    these limits keeps the deployment's.
    """
    said = [getattr(scheduler, key, None) for key in BUDGETS]
    if "auto" in said:
        said = [getattr(scheduler, "budget", None)]
    tokens = next(filter(is_count, said), None)
    rows = getattr(scheduler, "max_num_seqs", getattr(scheduler, "max_batch_size", None))
    known = {"activation_tokens": tokens, "logits_rows": rows if is_count(rows) else None}
    found: dict[str, Any] = {key: value for key, value in known.items() if value}
    memory = memories().get(config.memory)
    if memory is not None and config.enforce_eager:
        memory = replace(memory, graph_gib=0.0, graph_layer_gib=0.0)
    found["memory"] = memory
    return placed and replace(placed, **found)


def _balanced(config: RunConfig, hardware: Hardware) -> tuple[int, ...]:
    """Return the layers of balanced stages: by the run's costs where a roofline may lack layers."""
    if not isinstance(config.stages, int):
        raise UsageError(
            f"split: balanced: stages lists the layers already, {config.stages}; give their number"
        )
    placed = hardware.deployment
    if placed.gpus:
        raise UsageError(
            f"split: balanced: is of one GPU, not {config.gpu_words}; as stages, a list of the "
            "layers of each is right"
        )
    model, ranks = placed.model, placed.tensor_parallel
    if isinstance(config.costs, EngineCosts):
        alone = replace(placed, layers_per_stage=(1,) * model.num_layers)
        made = config.costs.make(hardware._replace(stages=model.num_layers, placed=alone))
        return balanced_by(made.on_ranks(made.cost, placed.data_parallel), config.stages)
    fabric = hardware.fabric()
    return balanced_layers(model, placed.gpu, config.stages, tensor_parallel=ranks, fabric=fabric)


def _scheduler_maker(
    config: RunConfig,
    costs: StageCost,
    max_model_len: int,
    make_scheduler: MakeScheduler | None,
    *,
    in_step: bool,
) -> Callable[[], Scheduler]:
    name, params = config.scheduler.name, config.params
    make_scheduler = make_scheduler or partial(create, name, params)
    facts = {
        "max_model_len": max_model_len,
        "in_step": in_step,
        "depth": config.num_stages,
        "data_parallel": config.data_parallel,
        "page_tokens": config.kv.page_tokens,
        **estimates(costs),
    }

    def make() -> Scheduler:
        raised = f"scheduler {name}: its constructor raised"
        with user_code(name, lambda words: PolicyError(f"{raised} {words}")):
            return make_scheduler(**facts)

    return make


def _predictor(scheduler: Scheduler, seed: int, beside: Path) -> Predictor | None:
    """Return the predictor that a policy names; None where it names none."""
    spec = rules_of(scheduler).predictor
    if spec is None:
        return None
    from evenflow.traces.predict import make_predictor

    if isinstance(spec, Mapping):
        spec = dict(spec)
        if spec.get("kind") == "noisy":
            spec.setdefault("seed", seed)
        if isinstance(spec.get("path"), str):
            spec["path"] = find(spec["path"], beside)
    return make_predictor(spec)


def _predicted(
    requests: list[Request], texts: Sequence[str] | None, predictor: Predictor | None
) -> list[Request]:
    """Return the requests with the output lengths that are predicted, if any are."""
    if predictor is None or not requests:
        return requests
    from evenflow.traces.predict import with_predictions

    return with_predictions(requests, predictor, None if texts is None else texts[: len(requests)])


def _charged(overheads: RuntimeOverheads, predictor: Predictor | None) -> RuntimeOverheads:
    """Return CPU time whose front end also waits for what a predictor takes to read a prompt."""
    if predictor is None:
        return overheads
    return replace(overheads, tokenize_s=overheads.tokenize_s + predictor.per_token_s)


def _cap(config: RunConfig, scheduler: Scheduler) -> int | None:
    given = config.max_in_flight
    if given is None:
        return rules_of(scheduler).cap(config.num_stages)
    return None if given == "unlimited" else given


UNTOLD = ("fp8_tflops", "fp4_tflops", "int8_tops", "p95_error", "visible_gb")
"""Fields of a GpuSpec that do not change the seconds of 16-bit models."""


def _formula(config: RunConfig) -> dict[str, Any]:
    """Return the formula that the seconds come from, as a source without a device of ours."""
    source: dict[str, Any] = {"kind": config.costs.kind}
    if config.costs.kind == "roofline" and config.gpus:
        facts = [
            {key: value for key, value in asdict(spec).items() if key not in UNTOLD}
            for spec in dict.fromkeys(config.gpus)
        ]
        source["gpu"] = facts if len(facts) > 1 else facts[0]
    return source | {"device": None, "driver": None, "torch": None}


def _deployment_facts(world: World, deployment: Deployment | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "stages": world.depth,
        "kv_pages": world.total_pages,
        "page_tokens": world.page_tokens,
        "max_model_len": world.max_model_len,
    }
    if deployment is None:
        return facts
    stages = range(deployment.depth)
    return facts | {
        "layers_per_stage": list(deployment.layers_per_stage),
        "weight_bytes_per_gpu": list(map(deployment.weight_bytes, stages)),
        "activation_bytes_per_gpu": list(map(deployment.activation_bytes, stages)),
        **_engine_facts(deployment),
        "kv_bytes_per_token": list(map(deployment.kv_bytes_per_token, stages)),
        **({"precision": precision} if (precision := deployment.precision()) else {}),
    }


def _engine_facts(deployment: Deployment) -> dict[str, Any]:
    if deployment.memory is None:
        return {}
    others = map(deployment.other_bytes, range(deployment.depth))
    return {"memory_like": deployment.memory.name, "other_bytes_per_gpu": list(others)}
