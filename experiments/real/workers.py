"""From a configuration to the workers of a real run, emulated or torch, and what they compute with.

Refuses what no worker can do; no processes are started here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow.errors import UsageError
from evenflow.specs.deployment import split_layers
from evenflow.specs.model import model, models
from evenflow.world import World
from experiments.run_file.build import Built
from experiments.run_file.run import RunConfig
from experiments.run_file.workers import EmulatedWorkers, TorchWorkers
from experiments.run_file.yaml_file import find
from profiler.environment import device_name, driver_version

if TYPE_CHECKING:
    from runtime.tokens import TextOf
    from runtime.torch.settings import TorchSettings
    from runtime.worker import Settings


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of a run: what each is made from, all in one process if `together`.

    `text_of` gives the requests their token ids, where workers compute with them; `facts` go into
    the provenance.
    """

    settings: Sequence[Settings]
    together: bool = False
    text_of: TextOf | None = None
    patience_s: float = 30.0
    start_limit_s: float = 60.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def crew_of(config: RunConfig, built: Built, beside: Path) -> Crew:
    """Return the workers that a configuration asks for; UsageError for what cannot be."""
    assert isinstance(built.world, World)
    if isinstance(config.workers, EmulatedWorkers):
        return _emulated(config.workers, built.world)
    return _torch(config, config.workers, built, beside)


def _emulated(workers: EmulatedWorkers, world: World) -> Crew:
    from runtime.emulated import EmulatedSettings, Faults

    faults = [Faults()] * world.depth
    for given in workers.faults or ():
        if given.stage >= world.depth:
            raise UsageError(
                f"workers.faults: stage {given.stage} is none of the {world.depth}, "
                f"0 to {world.depth - 1}"
            )
        faults[given.stage] = Faults(given.slow_factor, given.dies_after, given.link_delay_s)
    latencies_s = (
        [0.0, *(hop.latency_s for hop in world.hops)] if world.hops else [0.0] * world.depth
    )
    return Crew([EmulatedSettings(*both) for both in zip(latencies_s, faults, strict=True)])


def _torch(config: RunConfig, workers: TorchWorkers, built: Built, beside: Path) -> Crew:
    from runtime.tokens import RandomTexts
    from runtime.torch.settings import cut, require_memory, torch_settings, transport_of

    world = built.world
    assert isinstance(world, World)
    assert config.model is not None  # the schema asks for it
    path = find(config.model, beside)
    if find_spec("torch") is None or find_spec("safetensors") is None:
        raise UsageError("workers: torch needs torch: pip install 'evenflow[torch]'")
    transport = transport_of(workers.transport, workers.device, world.depth)
    _check_weights(workers, path)
    spec = model(path)
    if workers.device == "cpu":
        kv_tokens = world.total_pages * world.page_tokens
        require_memory(spec, world.depth, kv_tokens, workers.dtype)
    layers = built.deployment.get("layers_per_stage") or split_layers(
        spec.num_layers, config.stages
    )
    settings = torch_settings(
        path if path in models() else str(Path(path).resolve()),
        cut(layers),
        threads=workers.threads,
        weights=workers.weights,
        device=workers.device,
        dtype=workers.dtype,
        transport=transport,
    )
    given = workers.sampling
    sampling = given.temperature, given.top_k, given.top_p
    return Crew(
        settings,
        transport == "one_process",
        RandomTexts(spec.vocab_size, config.workload.seed, sampling, given.seed),
        workers.patience_s,
        settings[0].limit_s,
        _facts(settings),
    )


def _facts(settings: Sequence[TorchSettings]) -> dict[str, Any]:
    """Say what computes, for the provenance."""
    first = settings[0]
    return {
        "device": device_name(first.device),
        "driver": driver_version(first.device),
        "torch": version("torch"),
        "transport": first.transport,
        "cores": [list(each.cores) for each in settings],
        "layers_per_stage": [each.stop - each.start for each in settings],
    }


def _check_weights(workers: TorchWorkers, path: str) -> None:
    if workers.weights == "checkpoint" and not Path(path).is_dir():
        raise UsageError(
            f"model: {path} is no folder with weights; such a folder, or workers.weights: random, "
            "is right"
        )
