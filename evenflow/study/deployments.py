"""Deployments of a run: its layers on GPUs, the policies of engines, commands that start them.

A layout is stages x tensor parallel; a candidate is a layout with a scheduler and its parameters.
Flags are those of vLLM 0.32, SGLang 0.5.23 and gLLM 0.0.6.post1. Their own argument parsers take
random lines (`tools/launch_check.py`). Those of TensorRT-LLM's `serve.py` and `trtllm-bench`
(documents of 1.0 and 1.2) were read and not run. Knows what is possible, not how well it serves;
lists what an engine cannot express.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from evenflow.config import yaml_file
from evenflow.config.build import BUDGETS, Workload, build, model_of
from evenflow.config.parts import SchedulerConfig, limits_of
from evenflow.config.pools import defaults
from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.systems import keys_of_system, systems
from evenflow.config.yaml_file import Document, Patch, find, long_form, patched
from evenflow.core.world import World
from evenflow.errors import MOST_RUNS, UsageError, is_count
from evenflow.report.words import listed
from evenflow.specs.deployment import split_layers
from evenflow.specs.model import models

REQUEST_LIMITS = ("max_num_seqs", "max_batch_size", "max_running_requests")
"""What policies call the most requests that run at a time."""

LAUNCHED = ("vllm_v1", "sglang", "token_throttling")
"""The policies of engines of today, tried beside the run's own: vLLM, SGLang, gLLM."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout: its name in two parts, its keys of RUN.yaml, and the layers per stage.

    `reason`: why it is impossible; "" where it is possible.
    """

    parallel: str
    division: str
    keys: Mapping[str, Any]
    layers: tuple[int, ...] = field(default=(), compare=False)
    reason: str = ""

    @property
    def label(self) -> str:
        return f"{self.parallel}, {self.division}"

    @property
    def short(self) -> str:
        """The name, without the division of layers where that is even or as given."""
        return self.parallel if self.division in ("even", "as given") else self.label


AS_GIVEN = Layout("as given", "as given", {})


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try: a scheduler, its given parameters, a layout."""

    scheduler: str
    params: Mapping[str, Any]
    layout: Layout

    @property
    def policy(self) -> dict[str, Any]:
        """The key `scheduler`."""
        return {"name": self.scheduler, **self.params}

    @property
    def patch(self) -> Patch:
        return {**self.layout.keys, "scheduler": self.policy}


def layouts(
    document: Document,
    workload: Workload,
    beside: Path,
    pairs: Sequence[tuple[int, int]] | None = None,
    shifts: Sequence[int] = (),
) -> list[Layout]:
    """Return the layouts to try, impossible ones with the reason; the one given comes first.

    `pairs` are stages and tensor-parallel ranks; None: the run's own. Each of `shifts` is a
    number of layers to move away from the last stage. Layouts with the same layers on the same GPUs
    are listed once. Where the layers do not follow from a model and its memory there is only the
    one given (`why_fixed`).
    """
    config = configured(document)
    if why_fixed(config):
        return [AS_GIVEN]
    spec = model_of(config, beside)
    assert spec is not None  # it would be fixed
    num_layers = spec.num_layers
    own = (config.num_stages, config.tensor_parallel)
    pairs = [own] if pairs is None else pairs
    wanted = [AS_GIVEN] if own in pairs else []
    wanted += [each for pair in pairs for each in _divisions(num_layers, *pair, shifts)]
    found: dict[Any, Layout] = {}
    for each in wanted:
        tried = _tried(each, document, workload, beside)
        found.setdefault((tried.parallel, tried.layers) if tried.layers else tried.label, tried)
    return list(found.values())


def parse_gpus(text: str) -> tuple[int, ...]:
    """Return the numbers of GPUs that `8`, `4,8` or `4..64` means, in order; else UsageError."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("..")
        ends = [int(end) if end.isdecimal() and len(end) < 9 else 0 for end in (low, high or low)]
        if not 1 <= ends[0] <= ends[1] <= MOST_RUNS:
            words = "should be a number of GPUs, several (4,8) or a range (4..64)"
            raise UsageError(f"--gpus {text:.80}: {words}, from 1 to {MOST_RUNS}")
        numbers.update(range(ends[0], ends[1] + 1))
    return tuple(sorted(numbers))


def on_gpus(config: RunConfig, gpus: Sequence[int]) -> RunConfig:
    """Return the run with replicas on `gpus` GPUs in all; UsageError where none fit exactly."""
    pipeline = config.pipeline_gpus
    if len(gpus) > 1 or gpus[0] % pipeline:
        listed = ",".join(map(str, gpus))
        words = f"one number is right, a multiple of the {pipeline} GPUs of one pipeline"
        raise UsageError(f"--gpus {listed}: {words}; evenflow plan tries several layouts")
    router = "least_outstanding" if config.replicas is None else config.replicas.router
    return with_(config, {"replicas": {"count": gpus[0] // pipeline, "router": router}})


def pairs_of(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Return all factorizations of numbers of GPUs into stages x tensor-parallel ranks."""
    return [(n // ranks, ranks) for n in gpus for ranks in range(1, n + 1) if n % ranks == 0]


def parallel_name(stages: int, ranks: int) -> str:
    """Return the usual name of `stages` stages of `ranks` tensor-parallel GPUs: PP2 x TP4."""
    parts = [f"PP{stages}"] if stages > 1 or ranks == 1 else []
    return " x ".join([*parts, f"TP{ranks}"] if ranks > 1 else parts)


def why_fixed(config: RunConfig) -> str:
    """Return why the layout of a run is fixed; "" where others can be tried."""
    if config.model is None or config.gpu is None or config.costs.kind == "affine":
        return "the run's costs do not follow from a model on a gpu"
    if config.kv.pages != "auto":
        return "the run's kv.pages is a number, not auto"
    if len({*config.gpus}) > 1:
        return "the run's gpu is a list, one for each stage"
    return ""


def _divisions(num_layers: int, stages: int, ranks: int, shifts: Sequence[int]) -> Iterator[Layout]:
    parallel, ways = parallel_name(stages, ranks), {"stages": stages, "tensor_parallel": ranks}
    if stages > num_layers or stages == 1:
        yield Layout(parallel, "even", ways)
        return
    for split in ("even", "balanced"):
        yield Layout(parallel, split, {**ways, "split": split})
    even = split_layers(num_layers, stages)
    for shift in shifts:
        layers = shifted(even, shift)
        if min(layers) >= 1:
            listed = {**ways, "stages": list(layers), "split": "even"}
            yield Layout(parallel, f"last {-shift:+d}", listed)


def shifted(layers: Sequence[int], shift: int) -> tuple[int, ...]:
    """Return the layers with `shift` of the last stage's on the others, from the front on."""
    moved = list(layers)
    for count in range(shift):
        moved[count % (len(moved) - 1)] += 1
        moved[-1] -= 1
    return tuple(moved)


def _tried(layout: Layout, document: Document, workload: Workload, beside: Path) -> Layout:
    try:
        places = dict.fromkeys(layout.keys, f"layout {layout.label}")
        config = with_(document, layout.keys, places)
        built = build(config, beside, workload._replace(requests=workload.requests[:1]))
    except UsageError as error:
        return replace(layout, reason=str(error))
    pools = built.deployment.get("pools")
    layers = () if pools else tuple(built.deployment["layers_per_stage"])
    parallel = parallel_name(config.num_stages, config.tensor_parallel)
    return replace(layout, parallel=parallel, layers=layers)


def budget_key(params: Collection[str]) -> str | None:
    """Return the parameter that limits tokens, or prompt tokens, of a micro-batch; None without."""
    return _first(BUDGETS, params)


def _first(names: Sequence[str], params: Collection[str]) -> str | None:
    return next((each for each in names if each in params), None)


def policies_to_try(named: Sequence[str] | None, config: RunConfig) -> list[str]:
    """Return the schedulers that are named, each once; None: the run's own and LAUNCHED."""
    names = list(dict.fromkeys([config.scheduler.name, *LAUNCHED] if named is None else named))
    if not names:
        raise UsageError("--schedulers: names no scheduler; give at least one")
    return names


@cache
def dispatch_of(scheduler: str) -> str:
    """Return how the system that a policy is from dispatches; stage0 where it is not said."""
    keys = [keys_of_system(each.name) for each in systems()]
    own = [each for each in keys if long_form("scheduler", each["scheduler"])["name"] == scheduler]
    return next((each["dispatch"] for each in own if "dispatch" in each), "stage0")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """An engine's command, and its flags by fact; engines.yaml explains each key."""

    name: str
    command: str
    words: Mapping[str, str]
    policies: Mapping[str, Mapping[str, str]]
    layers: str
    turns_off: Mapping[str, str] = field(default_factory=dict)
    per_node: str = ""
    file: str = ""
    own: bool = False

    def says(self, fact: str, value: Any) -> str | None:
        """Return the words for a fact of a run; None where there are none."""
        flag = self.words.get(fact)
        return self.words.get(f"{fact}={value}", flag and f"{flag} {value}")

    def line(self, words: Sequence[str]) -> str:
        """Return a command of words; what is no flag goes into the engine's file."""
        flags = [word for word in words if word.startswith("-")]
        keys = [word.partition(" ") for word in words if not word.startswith("-")]
        if keys:
            values = {key: yaml.safe_load(value) for key, _, value in keys}
            settings = patched(Document("", {}, {}), values).data
            flags.append(self.file.format(settings=yaml_file.in_a_line(settings)))
        return " ".join(flags)


@cache
def engines() -> tuple[EngineCommand, ...]:
    text = Path(__file__).with_name("engines.yaml").read_text(encoding="utf-8")
    return tuple(EngineCommand(name, **keys) for name, keys in yaml.safe_load(text).items())


def run_yaml(document: Document, beside: Path, final: Path) -> str:
    """Return a run as YAML that runs from any place: its files are named relative to `final`."""
    data = _moved(document.data, beside, final)
    return yaml_file.in_blocks(data)


def _moved(value: Any, beside: Path, final: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(inner, beside, final) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(inner, beside, final) for inner in value]
    if isinstance(value, str) and value and (path := Path(find(value, beside))).exists():
        return os.path.relpath(path, final)
    return value


def most_tokens(config: RunConfig, beside: Path) -> int | None:
    """Return the longest request, in tokens, with which an engine starts; None: the model's.

    An engine refuses a length that its pages cannot hold, one of which vLLM keeps empty. It refuses
    one longer than the model's, too.
    """
    world, spec = build(config, beside).world, model_of(config, beside)
    assert isinstance(world, World)  # plan refuses systems of pools
    pool = max(world.total_pages // world.virtual_engines - 1, 1) * world.page_tokens
    longest = pool if spec is None else min(pool, spec.max_position_embeddings)
    return longest if longest < world.max_model_len else config.max_model_len


def launch_lines(
    config: RunConfig,
    layers: Sequence[int] = (),
    length: int | None = None,
    missed: Collection[str] = (),
) -> list[str]:
    """Return how to start a run's deployment: for each engine its command, and what it leaves out.

    A first line says which defaults of the engines the commands turn off. `layers` of each stage
    are said where they are not even; `length` is what `most_tokens` returns.
    An engine whose policy is in `missed` has no command: with it the deployment misses its SLO.
    """
    if config.model is None:
        return []
    if isinstance(config.stages, list):
        layers = config.stages
    count = config.num_replicas
    lines: list[str] = []
    off: dict[str, None] = {}
    for engine in engines():
        if engine.own and config.scheduler.name not in engine.policies:
            continue
        own = next(iter(engine.policies))
        if own in missed and config.scheduler.name not in engine.policies:
            lines.append(f"{engine.name}: no command, as {own} misses the SLO here")
            continue
        command, left_out = _command(engine, config, layers, length)
        times = "" if count == 1 else f" x {count}"
        lines.append(f"{engine.name}{times}: {command}")
        lines += [f"  not said: {each}" for each in left_out]
        off |= {words: None for flag, words in engine.turns_off.items() if f" {flag}" in command}
    if off:
        lines.insert(
            0, f"These commands turn off engines' defaults, as simulated: {listed([*off])}."
        )
    if count > 1:
        router = "round_robin" if config.replicas is None else config.replicas.router
        lines.append(f"  and a router in front of the {count} of them: {router}")
    return lines


def _command(
    engine: EngineCommand, config: RunConfig, layers: Sequence[int], length: int | None
) -> tuple[str, list[str]]:
    """Return an engine's command for one replica, and the facts that it cannot express."""
    facts = _facts(config, length)
    if config.has_engine_share and config.scheduler.name not in engine.policies:
        facts.pop("memory", None)
    spec = models().get(config.model or "")  # on the Hugging Face Hub; else what the user wrote
    name = config.model or "" if spec is None or " " in spec.source else spec.source
    command = engine.command.format(model=shlex.quote(name))
    flags, left_out = _policy(engine, config)
    said = [engine.says(fact, value) for fact, value in facts.items()]
    words = [*filter(None, said), *flags]
    if len(set(layers)) > 1:
        divided = engine.layers.format(layers=",".join(map(str, layers)))
        words += [] if "=" in divided else [divided]
        command = divided + command if "=" in divided else command
    return f"{command} {engine.line(words)}", [*left_out, *_unsaid(engine, config, facts)]


def _unsaid(engine: EngineCommand, config: RunConfig, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts of a deployment that an engine's flags cannot express."""
    for fact, value in facts.items():
        if fact == "unlike_nodes":
            yield f"nodes {_machines(config)}, with {config.pipeline_gpus} GPUs not as many on each"
        elif engine.says(fact, value) is None:
            yield fact if value is True else f"{fact} {value}"
    if config.max_model_len and facts["length"] < config.max_model_len:
        yield f"max_model_len {config.max_model_len}; no more fits the model and the pages"
    if "nodes" in facts and engine.per_node:
        yield f"what differs from node to node: {engine.per_node}"
    if len({*config.gpus}) > 1:
        yield f"the GPU of each stage: {', '.join(spec.name for spec in config.gpus)}"
    if config.dtype not in (None, "bfloat16", "float16"):
        yield f"dtype {config.dtype}; name a checkpoint whose weights are in it"


def _facts(config: RunConfig, length: int | None) -> dict[str, Any]:
    """Return the facts of a run that engines need, in the order of their flags."""
    nodes = _machines(config)
    unlike = nodes is not None and config.pipeline_gpus % nodes > 0  # engines have as many on each
    share = "free_gpu_memory_fraction" if config.memory == "trtllm" else "memory"
    facts = {
        "tensor_parallel": config.tensor_parallel,
        "data_parallel": config.data_parallel if config.data_parallel > 1 else None,
        "stages": config.num_stages,
        share: config.memory_utilization,
        "page": config.kv.page_tokens,
        "length": length or config.max_model_len,
        "nodes": None if unlike else nodes,
        "prefix_cache": config.kv.prefix_cache,
        "expert_parallel": config.expert_parallel if _has_experts(config) else None,
        "unlike_nodes": unlike or None,
        "enforce_eager": config.enforce_eager or None,
        "kv_dtype": config.kv_dtype,
        "speculative": None if config.speculative is None else True,
    }
    return {fact: value for fact, value in facts.items() if value is not None}


def _has_experts(config: RunConfig) -> bool:
    spec = models().get(config.model or "")
    return config.expert_parallel or (spec is not None and spec.num_experts > 0)


def _machines(config: RunConfig) -> int | None:
    """Return the number of machines of a pipeline, None for one."""
    nodes = config.wires.nodes
    if nodes is None or config.pipeline_gpus <= nodes.gpus:
        return None
    return -(-config.pipeline_gpus // nodes.gpus)


def _policy(engine: EngineCommand, config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the flags of a run's policy, or of the engine's own with the same budget."""
    name, own = config.scheduler.name, next(iter(engine.policies))
    waits = {"async_scheduling": False} if config.in_step else {}
    given = {**defaults(name), **waits, **config.params}
    left_out = []
    if name not in engine.policies:
        left_out.append(f"the policy {name}; this is {engine.name}'s own with the same limits")
        same = SchedulerConfig(name=own, params=_same_limits(given, engine.policies[own]))
        given = {**defaults(own), **limits_of(same, config.gpus), **same.params}
        name = own
    flags = [(*key.partition("=")[::2], flag) for key, flag in engine.policies[name].items()]
    known = {key for key, _, _ in flags}
    if not left_out and (unsaid := [key for key in config.scheduler.params if key not in known]):
        left_out.append(", ".join(f"{key} {given[key]}" for key in unsaid))
    words = [
        flag if only or key == "name" else f"{flag} {given[key]}"
        for key, only, flag in flags
        if (str(given.get(key)) == only if only else key == "name" or given.get(key) is not None)
        if flag.startswith("-") or key in config.scheduler.params
    ]
    return words, left_out


def _same_limits(given: Mapping[str, Any], theirs: Collection[str]) -> dict[str, Any]:
    """Return a policy's limits on tokens and requests of a step in another policy's parameters.

    No more requests than tokens, which vLLM refuses (0.33, config/scheduler.py).
    """
    found = [(_first(names, given), _first(names, theirs)) for names in (BUDGETS, REQUEST_LIMITS)]
    limits = {own: given[key] for key, own in found if key and own and is_count(given[key])}
    most = next(iter(limits.values()), 0)
    return {own: min(value, most) for own, value in limits.items()}
