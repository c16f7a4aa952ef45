"""Parts of TD-Pipe's tests: a policy with estimates, a Batcher of four stages, requests at 0 s."""

from __future__ import annotations

from typing import Any

from evenflow.batcher import Batcher
from evenflow.costs import AffineCost, estimates
from evenflow.kv import PagePool
from evenflow.schedulers import create
from evenflow.types import Request

COSTS = AffineCost(0.005, 0.0001, 4)
NO_SWITCH = {"request_finish_ratio": 1.0}


def td_pipe(**params: object) -> Any:
    return create("td_pipe", params, max_model_len=4096, **estimates(COSTS))


def batcher_of(policy: Any, pages: int = 10**6) -> Batcher:
    return Batcher(policy, PagePool(pages), depth=4, max_in_flight=None, max_model_len=4096)


def offline(count: int, prompt: int, output: int, predicted: int | None = None) -> list[Request]:
    return [Request(i, 0.0, prompt, output, predicted or output) for i in range(count)]
