"""The workers of a run that vLLM serves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from evenflow.world import World
from runtime.serve import Workers
from runtime.vllm.settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkers(Workers):
    """vLLM's workers, and its engine, which asks in the place of our driver."""

    engine: EngineSettings

    def seen(self, world: World) -> World:
        """Return the world as results show it: vLLM tells no times of its stages, so they are one.

        It computes from when it could, as one server of micro-batches, until one is back.
        """
        return replace(world, depth=1, link=None, hop_links=None)

    def start(self, world: World, name: str = "") -> AbstractContextManager[Any]:
        """Return vLLM's engine for the stages of a world, to be entered."""
        from runtime.vllm.engine import Engine

        return Engine(self.engine, world)

    def driver(self) -> Callable[..., Any]:
        """Return the driver that goes with it."""
        from runtime.vllm.driver import EngineDriver

        return EngineDriver
