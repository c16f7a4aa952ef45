"""What a deployment costs an hour, by a table of GPU prices that the user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, instead_of
from evenflow.schedulers import POOLED
from evenflow.specs.gpu import gpu
from experiments.run_file import yaml_file
from experiments.run_file.pools import divide, system
from experiments.run_file.run import RunConfig


def load_prices(path: Path) -> dict[str, float]:
    """Read a YAML file of `GPU name: dollars per hour`; UsageError naming the row otherwise."""
    document = yaml_file.read(path, "prices, such as L20: 0.8")
    for name, price in document.data.items():
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not number or not 0 < price < math.inf:
            place = document.place((name,))
            raise UsageError(f"{place}: {name}: should be dollars per hour, above 0, not {price!r}")
    return {str(name): float(price) for name, price in document.data.items()}


def dollars_per_hour(config: RunConfig, prices: Mapping[str, float]) -> float:
    """Return what all GPUs of a configuration cost an hour, its replicas included.

    UsageError when the configuration names no GPU, or one that the table does not have.
    """
    replicas = 1 if config.replicas is None else config.replicas.count
    total = sum(count * _price(given, prices) for given, count in _gpus(config))
    return replicas * total


def _gpus(config: RunConfig) -> list[tuple[Any, int]]:
    if config.scheduler.name not in POOLED:
        return [(config.gpu, config.num_stages * config.tensor_parallel)]
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
