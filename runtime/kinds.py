"""Workers of a configuration: emulated, torch's or vLLM's, and what they cannot compute.

Knows what each kind asks of a run; serves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evenflow.config.build import Built
from evenflow.config.run import RunConfig
from evenflow.config.workers import EmulatedWorkers, SamplingConfig, TorchWorkers, VllmWorkers
from evenflow.config.yaml_file import find
from evenflow.core.world import World
from evenflow.engines.ahead import IN_STEP
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError, require_package
from evenflow.profiler.machine import device_name, driver_version
from evenflow.runtime.serve import Workers
from evenflow.runtime.tokens import RandomTexts
from evenflow.runtime.torch import TorchSettings
from evenflow.runtime.torch import settings as on_torch
from evenflow.specs.deployment import split_layers
from evenflow.specs.huggingface import read_dtype
from evenflow.specs.model import listed, model
from evenflow.specs.modelspec import ModelSpec

ONLY_SIMULATED = "can only be simulated; for a real run"
"""Why a key is refused, in the words of the error."""


def refuse(why: str, *rows: tuple[str, bool, str]) -> None:
    """Raise UsageError for the first key that is refused, and say what would be right."""
    for key, refused, right in rows:
        if refused:
            raise UsageError(f"{key}: {why}, {right} is right")


def servable(built: Built) -> World:
    """Return the world of one pipeline with a separate link for each hop; else UsageError."""
    world = built.world
    if not isinstance(world, World):
        raise UsageError("scheduler: of pools only evenflow run serves; one policy is right")
    refuse(ONLY_SIMULATED, ("link.shared", world.shares_link, "false"))
    return world


def workers_of(config: RunConfig, built: Built, beside: Path, first: int = 0) -> Workers:
    """Return workers, after the `first` that exist; UsageError for impossible ones."""
    world = servable(built)
    if isinstance(config.workers, EmulatedWorkers):
        return _emulated(config.workers, world)
    if isinstance(config.workers, VllmWorkers):
        return _vllm(config, config.workers, world, beside)
    return _torch(config, config.workers, built, beside, first)


def _emulated(workers: EmulatedWorkers, world: World) -> Workers:
    from evenflow.runtime.emulated import EmulatedSettings

    latencies_s = [hop.latency_s for hop in world.hops or ()] or [0.0] * (world.depth - 1)
    return Workers(
        [EmulatedSettings(latency_s) for latency_s in (0.0, *latencies_s)],
        start_limit_s=workers.start_limit_s,
        coupled=workers.metadata != "ahead",
    )


def _vllm(config: RunConfig, workers: VllmWorkers, world: World, beside: Path) -> Workers:
    from evenflow.runtime.vllm import EngineSettings, EngineWorkers, require_vllm

    assert config.model is not None  # the schema asks for it
    _check_all_is_computed(world)
    check_all_is_known(world)
    if config.max_in_flight not in (None, config.num_stages):
        raise UsageError(
            f"max_in_flight: vLLM has a micro-batch for each of its {config.num_stages} stages; "
            "null is right"
        )
    path = Path(find(config.model, beside))
    _check_weights(workers, str(path))
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise UsageError(f"model: {path} is no folder with a config.json, which vLLM needs")
    vllm = require_vllm(workers.threads, workers.patience_s)
    dtype, spec = workers.dtype or read_dtype(str(path)), model(str(path))
    engine = EngineSettings(
        workers,
        str(folder.resolve()),
        dtype,
        4 * spec.kv_bytes_per_token() // spec.kv_value_bytes,
    )
    texts = _texts(config, workers.sampling, spec)
    facts = {"vllm": vllm.__version__, "torch": version("torch"), "dtype": dtype}
    return EngineWorkers((), text_of=texts, facts=facts, engine=engine)


def _torch(
    config: RunConfig, workers: TorchWorkers, built: Built, beside: Path, first: int
) -> Workers:
    world = servable(built)
    assert config.model is not None  # the schema asks for it
    _check_all_is_computed(world)
    if config.dtype or config.kv_dtype:
        raise UsageError(
            "dtype, kv_dtype: are of the costs; what workers of torch compute in is workers.dtype"
        )
    path = find(config.model, beside)
    for package in ("torch", "safetensors"):
        require_package(package, "workers: torch", "torch safetensors")
    ranks = config.tensor_parallel
    transport = on_torch.transport_of(workers.transport, workers.device, world.depth, ranks)
    _check_weights(workers, path)
    spec = model(path)
    dtype = workers.dtype or ("bfloat16" if listed(path) else read_dtype(path))
    spans = _spans(config, workers, built, spec, dtype)
    settings = on_torch.torch_settings(
        listed(path) or str(Path(path).resolve()),
        spans,
        threads=workers.threads,
        first=first,
        weights=workers.weights,
        device=workers.device,
        dtype=dtype,
        transport=transport,
        limit_s=workers.start_limit_s,
    )
    return Workers(
        settings,
        transport == "one_process",
        _texts(config, workers.sampling, spec),
        workers.patience_s,
        workers.start_limit_s,
        _facts(settings, ranks) | {"notes": _notes(settings, built)},
        coupled=workers.metadata != "ahead",
    )


def _texts(config: RunConfig, how: SamplingConfig, spec: ModelSpec) -> RandomTexts:
    sampling = how.temperature, how.top_k, how.top_p
    return RandomTexts(spec.vocab_size, config.workload.seed, sampling, how.seed)


def _spans(
    config: RunConfig, workers: TorchWorkers, built: Built, spec: ModelSpec, dtype: str
) -> list[tuple[int, int]]:
    """Return the layers [start, stop) of each rank; UsageError where they cannot be there."""
    world, ranks = servable(built), config.tensor_parallel
    on_torch.require_divisible(spec, ranks)
    layers = built.deployment.get("layers_per_stage") or split_layers(
        spec.num_layers, config.stages
    )
    spans = [span for span in on_torch.cut(layers) for _ in range(ranks)]
    tokens = world.total_pages * world.page_tokens
    share = config.memory_utilization if workers.device == "cuda" else 1.0
    free = [int(share * free) for free in on_torch.free_bytes(workers.device)]
    on_torch.require_memory(spec, spans, tokens, dtype, free, ranks=ranks)
    return spans


def check_all_is_known(world: World) -> None:
    if EngineRules.of(world.make_scheduler()).ahead:
        raise UsageError(
            "scheduler: its decodes run ahead of their last token, which only emulated workers of "
            f"`run` serve, and torch's for sglang on one stage; {IN_STEP}"
        )


def _check_all_is_computed(world: World) -> None:
    rules = EngineRules.of(world.make_scheduler())
    if world.depth > 1 or rules.delivers:
        check_all_is_known(world)
    if rules.cuts:
        raise UsageError(
            "scheduler: it may leave out part of a prompt or of its output, so a model would write "
            "something else; where a model computes, another policy or variant is right"
        )


def _facts(settings: Sequence[TorchSettings], ranks: int) -> dict[str, Any]:
    first = settings[0]
    return {
        "device": device_name(first.device),
        "driver": driver_version(first.device),
        "torch": version("torch"),
        "dtype": first.dtype,
        "transport": first.transport,
        "cores": [list(stage.cores) for stage in settings],
        "layers_per_stage": [stage.stop - stage.start for stage in settings[::ranks]],
        "tensor_parallel": ranks,
    }


def _notes(settings: Sequence[TorchSettings], built: Built) -> list[str]:
    """Return the differences between the run and the costs it is compared with, in lines."""
    source, first, notes = built.cost_source, settings[0], on_torch.sharing(settings)
    if source["kind"] == "profile" and source["dtype"] != first.dtype:
        measured = f"{source['path']} was measured in {source['dtype']}"
        notes.append(f"the model runs in {first.dtype}, and {measured}")
    return notes


def notes_of(provenance: Mapping[str, Any]) -> Sequence[str]:
    """Return the notes in a real run's provenance on how it differs from its costs."""
    notes: Sequence[str] = provenance.get("workers", {}).get("notes", ())
    return notes


def _check_weights(workers: TorchWorkers | VllmWorkers, path: str) -> None:
    if workers.weights == "checkpoint" and not Path(path).is_dir():
        raise UsageError(
            f"model: {path} is no folder with weights; such a folder, or workers.weights: random, "
            "is right"
        )
