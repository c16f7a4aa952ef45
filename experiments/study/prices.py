"""What a deployment is made of and costs: its GPUs, dollars an hour, dollars a million tokens.

And what a GPU gives and a user gets, the two sides of what to choose between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, instead_of
from evenflow.schedulers import POOLED
from evenflow.specs.gpu import gpu
from experiments.outcome import Outcome
from experiments.report.tables import is_number
from experiments.run_file import yaml_file
from experiments.run_file.pools import divide, system
from experiments.run_file.run import RunConfig

S_PER_HOUR = 3600


def with_cost(outcome: Outcome, *, price: float | None) -> dict[str, Any]:
    """Return a run's summary with its GPUs and what they give; at a `price` also what it costs.

    `price` is that of a GPU an hour, in dollars.
    """
    gpus, own = _gpus_of(outcome), outcome.summary
    return own | {"gpus": gpus} | _per_gpu_and_user(gpus, own) | costs(gpus, own, price)


def per_gpu_and_user(outcome: Outcome) -> dict[str, float]:
    """Return the output tokens a second of a GPU, and those that a user sees: 1 / mean TPOT."""
    return _per_gpu_and_user(_gpus_of(outcome), outcome.summary)


def _per_gpu_and_user(gpus: int, values: Mapping[str, float]) -> dict[str, float]:
    tpot_ms = values["mean_tpot_ms"]
    speed = {"output_speed_per_user": 1e3 / tpot_ms} if tpot_ms > 0 else {}
    return {"output_throughput_per_gpu": values["output_throughput"] / gpus} | speed


def _gpus_of(outcome: Outcome) -> int:
    return num_gpus(RunConfig.model_validate(outcome.result.provenance["config"]))


def costs(gpus: int, values: Mapping[str, float], price: float | None) -> dict[str, float]:
    """Return dollars an hour, and for a million tokens that are served; {} without a price."""
    if price is None:
        return {}
    tokens = values["total_token_throughput"] * S_PER_HOUR / 1e6
    each = {"dollars_per_hour": gpus * price}
    return each | ({"dollars_per_million_tokens": gpus * price / tokens} if tokens else {})


def load_prices(path: Path) -> dict[str, float]:
    """Read a YAML file of `GPU name: dollars per hour`; UsageError naming the row otherwise."""
    document = yaml_file.read(path, "prices, such as L20: 0.8")
    for name, price in document.data.items():
        if not is_number(price) or not 0 < price < math.inf:
            place = document.place((name,))
            raise UsageError(f"{place}: {name}: should be dollars per hour, above 0, not {price!r}")
    return {str(name): float(price) for name, price in document.data.items()}


def dollars_per_hour(config: RunConfig, prices: Mapping[str, float]) -> float:
    """Return what all GPUs of a configuration cost an hour, its replicas included.

    UsageError when the configuration names no GPU, or one that the table does not have.
    """
    return sum(count * _price(given, prices) for given, count in _gpus(config))


def num_gpus(config: RunConfig) -> int:
    """Return how many GPUs a configuration has, those of its replicas included."""
    return sum(count for _, count in _gpus(config))


def _gpus(config: RunConfig) -> list[tuple[Any, int]]:
    replicas = 1 if config.replicas is None else config.replicas.count
    if config.scheduler.name not in POOLED:
        return [(config.gpu, replicas * config.pipeline_gpus)]
    given = system(config.scheduler)
    pools = given.pools()
    shares = divide(config, given).items()
    return [(pools[name].gpu or config.gpu, share.gpus) for name, share in shares]


def _price(given: Any, prices: Mapping[str, float]) -> float:
    if given is None:
        raise UsageError("--per-dollar: the run names no gpu; add the key gpu to it")
    name = gpu(given).name
    if name not in prices:
        raise UsageError(
            f"--per-dollar: the price of {name} is missing; {instead_of(name, prices)}"
        )
    return prices[name]
