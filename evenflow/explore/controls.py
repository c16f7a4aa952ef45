"""Controls of a page: which keys of a run its sliders move, in which range, and what each means.

A policy says which of its parameters are worth trying (`search_space`); of all other keys the table
here does. Words are those below the keys in their classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evenflow.config.links import NodesConfig
from evenflow.config.parts import KvConfig
from evenflow.config.run import RunConfig
from evenflow.config.workload import WorkloadConfig
from evenflow.keys import below_keys
from evenflow.runtimes import runtimes
from evenflow.schedulers import POLICIES, POOLED, parameters, policy
from evenflow.schedulers.limits import Range
from evenflow.specs.gpu import gpus, links

Control = dict[str, Any]
"""Plain data: `key`, `value`, `words`, and `low`, `high`, `log`, `whole` or `choices`."""

WIDE = 8.0
"""The range of a number that has no better one: from 1/8 to 8 times what was given."""

SEEDS, MOST_STAGES, MOST_REQUESTS = 20, 16, 5000
RANKS = (1, 2, 4, 8)


def controls(config: RunConfig, start: RunConfig) -> Iterator[Control]:
    """Yield the controls of all keys but the scheduler's; ranges surround the values of `start`."""
    words = below_keys(RunConfig)
    yield from _of_the_load(config, start)
    if isinstance(config.stages, int):
        yield _number("stages", config.stages, Range(1, MOST_STAGES), words["stages"])
    if config.costs.kind != "affine":
        ranks = config.tensor_parallel
        yield _choice("tensor_parallel", ranks, RANKS, words["tensor_parallel"])
    named: list[tuple[str, Any, Any, str]] = [
        ("gpu", config.gpu, gpus(), words["gpu"]),
        ("link", config.link, links(), words["link"]),
    ]
    if config.nodes is not None:
        between = below_keys(NodesConfig)["link"]
        named.append(("nodes.link", config.nodes.link, links(), between))
    for key, given, known, about in named:
        value = getattr(given, "name", None) or given
        if config.costs.kind != "affine" and (value is None or isinstance(value, str)):
            yield _choice(key, value, [each.name for each in known], about)
    if isinstance(config.cpu_time, str) and config.cpu_time != "profile":
        yield _choice("runtime", config.cpu_time, list(runtimes()), words["runtime"])
    yield _of_the_pages(config, start)


def _of_the_load(config: RunConfig, start: RunConfig) -> Iterator[Control]:
    words = below_keys(WorkloadConfig)
    arrivals = config.workload.arrivals
    for key in ("rate", "scale", "concurrency"):
        value, first = getattr(arrivals, key, None), getattr(start.workload.arrivals, key, None)
        if value is not None:
            what = below_keys(type(arrivals)).get(key, "")
            whole = isinstance(value, int) and key == "concurrency"
            yield _number(f"workload.arrivals.{key}", value, _around(first or value, whole), what)
    if (count := config.workload.requests) is not None:
        most = max(MOST_REQUESTS, start.workload.requests or 0)
        yield _number("workload.requests", count, Range(20, most, log=True), words["requests"])
    yield _number("workload.seed", config.workload.seed, Range(0, SEEDS), words["seed"])


def _of_the_pages(config: RunConfig, start: RunConfig) -> Control:
    words, pages = below_keys(KvConfig), config.kv.pages
    if isinstance(pages, int):
        first = start.kv.pages if isinstance(start.kv.pages, int) else pages
        return _number("kv.pages", pages, _around(first, whole=True), words["pages"])
    key, share = "memory_utilization", config.memory_utilization
    return _number(f"kv.{key}", share, Range(0.3, 1.0), words[key])


def _around(value: float, whole: bool) -> Range:
    if whole:
        return Range(max(1, int(value / WIDE)), max(2, int(value * WIDE)), log=True)
    return Range(value / WIDE, value * WIDE, log=True)


def scheduler_controls(config: RunConfig, below: str) -> list[Control]:
    """Return the controls of a run's scheduler: which it is, and the parameters worth trying.

    `below` begins the keys.
    """
    name, params = config.scheduler.name, config.params
    words = "The policy; its parameters start at their defaults."
    found = [_choice(f"{below}.name", name, [*POLICIES, *POOLED], words)]
    if name in POOLED:
        return found
    cls = policy(name)
    space: Mapping[str, Range | tuple[Any, ...]] = getattr(cls, "search_space", {})
    about = below_keys(cls) if name in POLICIES else {}
    for key, parameter in parameters(cls).items():
        if key in space:
            value = params.get(key, parameter.default)
            make = _number if isinstance(space[key], Range) else _choice
            found.append(make(f"{below}.{key}", value, space[key], about.get(key, "")))
    return found


def steps(control: Control, count: int) -> list[Any]:
    """Return all values of a choice, or at most `count` numbers over a slider's range."""
    if "choices" in control:
        return [each for each in control["choices"] if each is not None]
    low, high, log = control["low"], control["high"], control["log"]
    shares = [at / (count - 1) for at in range(count)]
    values = [low * (high / low) ** s if log else low + s * (high - low) for s in shares]
    rounded = [round(v) if control["whole"] else float(f"{v:.3g}") for v in values]
    return list(dict.fromkeys(rounded))


def _number(key: str, value: Any, reach: Any, words: str) -> Control:
    """Return a slider; where the value lies outside, its range is that much wider."""
    low, high, log = reach
    known = type(value) in (int, float)
    if known:
        low, high = min(low, value if value > 0 or not log else low), max(high, value)
    whole = reach.whole and type(value) is not float
    limits = {"low": low, "high": high, "log": log, "whole": whole}
    return {"key": key, "value": value if known else None, "words": words, **limits}


def _choice(key: str, value: Any, choices: Any, words: str) -> Control:
    listed = [*choices] if value in choices else [value, *choices]
    return {"key": key, "value": value, "words": words, "choices": listed}
