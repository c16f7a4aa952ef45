"""Torch pipelines for tests: stages as threads of this process, and the requests they serve."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import evenflow.runtime.pipeline
from evenflow.core.batcher import Batcher
from evenflow.runtime.driver import Driver
from evenflow.runtime.pipeline import WorkerPipeline
from evenflow.runtime.tokens import RandomTexts, TextOf
from evenflow.runtime.torch import TorchSettings
from evenflow.runtime.torch.settings import cut, torch_settings
from evenflow.runtime.worker import run_stages
from evenflow.sim import World
from evenflow.specs.deployment import split_layers
from evenflow.types import Request
from tests.tiny_models import PAGE_TOKENS, SHAPE, continued
from tests.worlds import small_world

LAYERS, VOCABULARY = SHAPE["num_hidden_layers"], SHAPE["vocab_size"]
PAGES = 18
MAX_MODEL_LEN = PAGES * PAGE_TOKENS
TEXTS = RandomTexts(VOCABULARY, seed=0)
REQUESTS = [
    Request(i, 0.0, 5 + 13 * i % 31, 1 + 7 * i % 17, predicted_output_tokens=1) for i in range(10)
]
"""More than the pages hold at once, and said to be shorter, so some are preempted."""


class ThreadProcess:
    """What the pipeline needs of a process, as a thread: torch is here already."""

    def __init__(self, target: Any, args: Any, name: str, daemon: bool) -> None:
        assert target.__name__ == "run_process"
        self.name, self.pid, self.exitcode = name, 0, None
        self.sentinel, self._alive = os.pipe()
        self._stages = args[0]
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def _run(self) -> None:
        run_stages(self._stages)
        os.close(self._alive)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive(), "a stage does not end"
        if timeout is None:
            os.close(self.sentinel)

    def is_alive(self) -> bool:
        return self._thread.is_alive()


class Threads:
    """Stands for multiprocessing, as far as a pipeline uses it."""

    Process = ThreadProcess

    @staticmethod
    def get_context(method: str) -> type[Threads]:
        return Threads


def threads_for_processes(patch: pytest.MonkeyPatch) -> None:
    """Let pipelines start threads."""
    patch.setattr(evenflow.runtime.pipeline, "multiprocessing", Threads)


def settings_of(folder: Path, stages: int, ranks: int = 1, **more: Any) -> list[TorchSettings]:
    """Return the settings of a checkpoint's stages, of so many ranks, on no core in particular."""
    spans = [span for span in cut(split_layers(LAYERS, stages)) for _ in range(ranks)]
    return torch_settings(str(folder), spans, **({"threads": 1} | more))


def pipeline_of(settings: Sequence[TorchSettings], **more: Any) -> WorkerPipeline:
    """Return a pipeline of these stages with PAGES pages."""
    together = settings[0].transport == "one_process"
    return WorkerPipeline(settings, PAGE_TOKENS, PAGES, together=together, **more)


def world_of(name: str, stages: int, params: dict[str, Any] | None = None, **more: Any) -> World:
    """Return REQUESTS, or others, over PAGES pages, with a policy made as a simulation makes it."""
    requests = more.pop("requests", REQUESTS)
    sizes = {"total_pages": PAGES, "max_model_len": MAX_MODEL_LEN, "page_tokens": PAGE_TOKENS}
    return small_world(requests, name, params, depth=stages, times_s=(0.001, 1e-5), **sizes, **more)


def serve(
    pipeline: WorkerPipeline,
    world: World,
    *engines: Batcher,
    text_of: TextOf = TEXTS,
    cached: list[int] | None = None,
) -> dict[int, list[int]]:
    """Serve to the end; return the tokens of each request. Add how many were `cached`, of each."""
    tokens: dict[int, list[int]] = defaultdict(list)

    def on_token(request_id: int, token: int) -> None:
        tokens[request_id].append(token)

    driver = Driver(
        world, engines or [world.batcher()], pipeline, text_of=text_of, on_token=on_token
    )
    driver.run()
    result = driver.result()
    assert result.status == ["completed"] * len(world.requests)
    if cached is not None and result.cached_tokens is not None:
        cached += result.cached_tokens.tolist()
    return tokens


def generated(model: Any, requests: Sequence[Request] = REQUESTS) -> dict[int, list[int]]:
    """Return what transformers continues the prompt of each request with."""
    return {
        request.request_id: continued(model, TEXTS(request).prompt_ids, request.output_tokens)
        for request in requests
    }
