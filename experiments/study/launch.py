"""What to start: a run as a RUN.yaml elsewhere, and as commands of vLLM, SGLang and gLLM.

Flags are those of vLLM 0.32 and SGLang 0.5.23, whose own argument parsers took the lines that the
tests compare with (docs/plan.md), and of gLLM's `cli_args.py` (commit 03cd714), read and not run.
What an engine cannot express is told.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from evenflow.specs.model import models
from experiments.run_file.pools import defaults
from experiments.run_file.run import RunConfig
from experiments.run_file.yaml_file import Document, find

_BUDGETS = ("token_budget", "max_num_batched_tokens", "chunked_prefill_size", "max_prefill")


def budget_key(params: Collection[str]) -> str | None:
    """Return what a policy calls the most tokens, or prompt tokens, of a micro-batch, if it has."""
    return next((each for each in _BUDGETS if each in params), None)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's command, and its flags by what they say; engines.yaml explains each key."""

    name: str
    command: str
    flags: Mapping[str, str]
    policies: Mapping[str, Mapping[str, str]]
    switches: Mapping[str, str]
    layers: str = ""
    fixed: Mapping[str, str] = field(default_factory=dict)


@cache
def engines() -> tuple[Engine, ...]:
    """Return the engines of engines.yaml."""
    text = Path(__file__).with_name("engines.yaml").read_text(encoding="utf-8")
    return tuple(Engine(name, **keys) for name, keys in yaml.safe_load(text).items())


def run_yaml(document: Document, beside: Path, final: Path) -> str:
    """Return a run as YAML that runs from any place: its files are named relative to `final`."""
    data = _moved(document.data, beside, final)
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)


def _moved(value: Any, beside: Path, final: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(inner, beside, final) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(inner, beside, final) for inner in value]
    if isinstance(value, str) and value and (path := Path(find(value, beside))).exists():
        return os.path.relpath(path, final)
    return value


def launch_lines(config: RunConfig, layers: Sequence[int] = ()) -> list[str]:
    """Return how to start a run's deployment: for each engine its command, and what it leaves out.

    `layers` of each stage are said where they are not even.
    """
    if config.model is None:
        return []
    count = 1 if config.replicas is None else config.replicas.count
    lines = []
    for engine in engines():
        command, left_out = _command(engine, config, layers)
        times = "" if count == 1 else f" x {count}"
        lines.append(f"{engine.name}{times}: {command}")
        lines += [f"  not said: {each}" for each in left_out]
    if count > 1:
        router = "round_robin" if config.replicas is None else config.replicas.router
        lines.append(f"  and a router in front of the {count} of them: {router}")
    return lines


def _command(engine: Engine, config: RunConfig, layers: Sequence[int]) -> tuple[str, list[str]]:
    """Return an engine's command for one replica, and what of the run it does not say."""
    values = {
        "tensor_parallel": config.tensor_parallel,
        "data_parallel": config.data_parallel if config.data_parallel > 1 else None,
        "stages": config.num_stages,
        "memory": config.kv.memory_utilization,
        "page": config.kv.page_tokens,
        "length": config.max_model_len,
        "kv_dtype": config.kv_dtype,
    }
    words = [engine.command.format(model=shlex.quote(_repository(config.model or "")))]
    words += [f"{flag} {values[key]}" for key, flag in engine.flags.items() if values[key]]
    chosen = {"no_cache": not config.kv.prefix_cache, "experts": config.expert_parallel}
    words += [flag for key, flag in engine.switches.items() if chosen[key]]
    flags, left_out = _policy(engine, config)
    words += flags
    if config.kv_dtype and "kv_dtype" not in engine.flags:
        left_out.append(f"kv_dtype {config.kv_dtype}")
    if config.dtype not in (None, "bfloat16", "float16"):
        left_out.append(f"dtype {config.dtype}; name a checkpoint whose weights are in it")
    if len(set(layers)) > 1:
        listed = ",".join(map(str, layers))
        words += [] if engine.layers else [f"--assigned-layers {listed}"]
        words[0] = engine.layers.format(layers=listed) + words[0]
    return " ".join(words), left_out


def _repository(model: str) -> str:
    """Return where a model of the table is on the Hugging Face Hub; else what the user wrote."""
    spec = models().get(model)
    return model if spec is None or " " in spec.source else spec.source


def _policy(engine: Engine, config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the flags of a run's policy, or of the engine's own with the same budget."""
    name, own = config.scheduler.name, next(iter(engine.policies))
    given = {**defaults(name), **config.scheduler.params}
    flags = engine.policies.get(name)
    left_out = []
    if flags is None:
        left_out.append(f"the policy {name}; this is {engine.name}'s own with the same budget")
        flags = engine.policies[own]
        theirs, ours = budget_key(given), budget_key(flags)
        given, name = {**defaults(own), **({str(ours): given[theirs]} if theirs else {})}, own
    elif unsaid := [key for key in config.scheduler.params if key not in flags]:
        left_out.append(", ".join(f"{key} {given[key]}" for key in unsaid))
    words = [f"{flag} {given[key]}" for key, flag in flags.items() if given.get(key) is not None]
    return [*words, *([engine.fixed[name]] if name in engine.fixed else [])], left_out
