"""Runs of the real driver on a virtual clock: as told, or where all takes a random time more."""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np

from evenflow.core.replay import RecordingBatcher
from evenflow.engines.handover import RecordingPoolBatcher
from evenflow.engines.pools import PooledWorld
from evenflow.results.run import Around, RunResult, around_stages
from evenflow.runtime.driver import Driver
from evenflow.runtime.pools import PoolDriver, PooledDriver
from evenflow.runtime.wire import Free, Message, Returned, Step
from evenflow.sim import World
from evenflow.types import Request
from tests.worlds import small_world

WORLD = small_world(
    [Request(i, 0.013 * i, 30 + 11 * i % 80, 1 + 7 * i % 40) for i in range(60)],
    "sarathi",
    {"token_budget": 64},
    depth=3,
    times_s=(0.01, 1e-5),
    total_pages=400,
)
JITTER_S = 0.0004


class VirtualPipeline:
    """A pipeline whose stages take the seconds that steps name, and whose clock it moves.

    `beside` others: waiting at the first of them moves the clock, which is that of all.
    """

    results = None

    def __init__(self, depth: int, beside: list[VirtualPipeline] | None = None) -> None:
        self.sides = [] if beside is None else beside
        self.sides.append(self)
        self.free_s = [0.0] * depth
        self.coming: list[tuple[float, Message]] = []
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self.sides[0]._now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.sides[0]._now_s = now_s

    def clock(self) -> float:
        return self.now_s

    def watch(self, _: object) -> None: ...

    def send(self, step: Step) -> None:
        at_s, times = self.now_s, []
        for stage, work_s in enumerate(step.work_s):
            start_s = max(at_s, self.free_s[stage])
            times += [at_s, start_s, start_s + work_s]
            at_s = self.free_s[stage] = start_s + work_s
        self.tell(times[2], Free(step.batch_id))
        self.tell(at_s, Returned(step.batch_id, times, tokens_of(step)))

    def tell(self, at_s: float, message: Message) -> None:
        self.coming.append((at_s, message))
        self.coming.sort(key=lambda entry: entry[0])

    def receive(self, timeout_s: float) -> list[Message]:
        if self is self.sides[0]:
            self.now_s = self.wakes_s(timeout_s)
        return self.come()

    def wakes_s(self, timeout_s: float) -> float:
        """Return when something comes to one of them, or the time is up."""
        due_s = (at_s for at_s, _ in chain(*(side.coming for side in self.sides)))
        return min([self.now_s + timeout_s, *due_s])

    def come(self) -> list[Message]:
        """Return the messages that have come by now."""
        messages = [message for at_s, message in self.coming if at_s <= self.now_s]
        del self.coming[: len(messages)]
        return messages


def tokens_of(step: Step) -> list[int]:
    return [0] * (sum(piece.last for piece in step.pieces) + len(step.decodes))


class NoisyPipeline(VirtualPipeline):
    """Every stage and every message takes a random time more. Stages start `late_s` late."""

    def __init__(
        self, world: World, seed: int, late_s: float, beside: list[VirtualPipeline] | None = None
    ) -> None:
        super().__init__(world.depth, beside)
        self._late_s = late_s
        self._rng = np.random.default_rng(seed)
        self._hops = world.hops
        self.now_s = 0.125  # the clock of a machine does not begin with the run
        self.link_free_s = [0.0] * world.depth
        self.heard_s = [0.0, 0.0]

    def noise_s(self) -> float:
        return float(self._rng.exponential(JITTER_S))

    def send(self, step: Step) -> None:
        self.now_s += self.noise_s()  # what the driver computes
        at_s, times = self.now_s + self.noise_s(), []
        for stage, work_s in enumerate(step.work_s):
            start_s = max(at_s, self.free_s[stage]) + self._late_s
            self.free_s[stage] = start_s + work_s + self.noise_s()
            times += [at_s, start_s, self.free_s[stage]]
            if stage < len(self._hops):
                sent_s = max(self.free_s[stage], self.link_free_s[stage]) + step.hops_s[stage]
                self.link_free_s[stage] = sent_s
            at_s = max(self.free_s[stage], self.link_free_s[stage]) + self.noise_s()
        if len(step.work_s) > 1:
            self._hear(0, times[2], Free(step.batch_id))
        self._hear(1, times[-1], Returned(step.batch_id, times, tokens_of(step)))

    def _hear(self, sender: int, at_s: float, message: Message) -> None:
        self.heard_s[sender] = max(self.heard_s[sender], at_s + self.noise_s())
        self.tell(self.heard_s[sender], message)

    def receive(self, timeout_s: float) -> list[Message]:
        if self is self.sides[0]:
            self.now_s = max(self.now_s + 1e-7, self.wakes_s(timeout_s))  # time passes in any case
        return self.come()


def drive(world: World, pipeline: Any = None, **limits: Any) -> tuple[Any, ...]:
    """Run the real driver; return it and its engines."""
    pipeline = pipeline or VirtualPipeline(world.depth)
    engines = [world.batcher(RecordingBatcher) for _ in range(world.virtual_engines)]
    real = Driver(world, engines, pipeline, clock=pipeline.clock, **limits)
    real.run()
    return real, *engines


def serve_noisily(world: World, seed: int = 0, late_s: float = 0.0) -> tuple[Any, list[Any]]:
    """Return a run of the real driver, as `runtime.serve` does, and the journals of its engines."""
    driver, *engines = drive(world, NoisyPipeline(world, seed, late_s))
    return SimpleNamespace(result=driver.result(), heard=driver.heard), [
        engine.journal for engine in engines
    ]


def serve_pools_noisily(world: PooledWorld, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return a run of real drivers of pools as `runtime.pools` does, and each pool's journal."""
    beside: list[VirtualPipeline] = []
    drives, engines = {}, {}
    for name in ("prefill", "mixed", "decode"):
        pool = getattr(world, name)
        if pool is not None:
            pipeline = NoisyPipeline(pool, seed + len(drives), 0.0, beside)
            kind: Any = partial(RecordingPoolBatcher, keeps_pages=name != "decode")
            engines[name] = pool.batcher(kind)
            drives[name] = partial(
                PoolDriver, pool, [engines[name]], pipeline, clock=beside[0].clock
            )
    driver = PooledDriver(world, drives)
    driver.run()
    result = driver.result()
    each = [
        SimpleNamespace(result=part, heard=pool.heard)
        for part, pool in zip(result.pools.values(), driver.drivers, strict=True)
    ]
    return SimpleNamespace(result=result, pipelines=each), {
        name: engine.journal for name, engine in engines.items()
    }


class KnownHost(VirtualPipeline):
    """Stages whose messages, driver and inputs take times that are known."""

    DRIVER_S, PER_ROW_S, PER_PROMPT_TOKEN_S = 1e-3, 4e-5, 2e-6
    MESSAGE_S, PREPARE_S, HOP_S, PER_BYTE_S = 3e-4, 2e-4, 5e-4, 1e-8

    def send(self, step: Step) -> None:
        rows = len(step.pieces) + len(step.decodes)
        prompt = sum(piece.stop - piece.start for piece in step.pieces)
        self.now_s += self.DRIVER_S + self.PER_ROW_S * rows + self.PER_PROMPT_TOKEN_S * prompt
        hop_s = self.HOP_S + self.PER_BYTE_S * step.activation_bytes
        at_s, late_s, times = self.now_s + self.MESSAGE_S, self.PREPARE_S, list[float]()
        for stage, work_s in enumerate(step.work_s):
            start_s = max(at_s, self.free_s[stage]) + late_s
            self.free_s[stage] = start_s + work_s
            times += [at_s, start_s, self.free_s[stage]]
            at_s, late_s = self.free_s[stage] + hop_s, 0.0
        self.tell(times[2] + self.MESSAGE_S, Free(step.batch_id))
        self.tell(times[-1] + self.MESSAGE_S, Returned(step.batch_id, times, tokens_of(step)))

    def receive(self, timeout_s: float) -> list[Message]:
        self.now_s = max(self.now_s, self.wakes_s(timeout_s))
        return self.come()


def serve_with_known_host(world: World) -> tuple[RunResult, Around]:
    """Serve a world on stages whose host takes known times, as a profiler has it."""
    driver, _ = drive(world, KnownHost(world.depth))
    result, heard = driver.result(), driver.heard
    return result, around_stages(result, heard.freed_s, heard.returned_s)
