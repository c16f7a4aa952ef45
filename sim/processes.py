"""Processes of the user's: SimPy generators that join a run, and what they may touch there."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simpy
from simpy import Environment, Event, Interrupt
from simpy.core import EmptySchedule

from evenflow.engines.recovery import take_again
from evenflow.errors import UsageError, UserProcessError
from evenflow.results.run import Mark
from evenflow.sim.arrivals import ArrivalSource
from evenflow.sim.replica import Replica
from evenflow.sim.stages import Machine
from evenflow.user_code import end_copy, place_of, shown, words_of

UserProcess = Callable[["ProcessWorld"], Generator[Event, Any, None]]
"""A function of the user's that yields events of `world.env`."""

SIMPY = str(Path(simpy.__file__).parent)

RIGHT = "yield world.env.timeout(seconds) waits"

MOST_IDLE_WAKES = 1_000_000
"""How often in a row a process may wake while nothing comes or returns."""


class Queue(NamedTuple):
    """Requests of which nothing is computed, and requests that run."""

    waiting: int
    running: int


class Part:
    """A stage or a link: `slow` and `stop` it, `start` it again."""

    def __init__(self, name: str, machine: Machine, log: Callable[[str, str], None]) -> None:
        self._name, self._machine, self._log = name, machine, log

    def slow(self, factor: float) -> None:
        """Take `factor` times as long from now on, what is under way included; 1: as before."""
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"slow({factor!r}): a finite factor above 0 is right")
        self._machine.slow(float(factor))
        speed = f"takes {factor:g} times as long" if factor != 1 else "is as fast as planned"
        self._log("slow", f"{self._name} {speed}")

    def stop(self, *, finish: bool = False) -> None:
        """Stop, as a process that gets SIGSTOP; what it works on waits there.

        `finish`: that is completed meanwhile, as by a GPU whose host stops, and goes on after.
        """
        if not self._machine.is_stopped:
            self._machine.stop(finish=finish)
            self._log("stop", f"{self._name} stops")

    def start(self) -> None:
        """Go on after `stop`."""
        if self._machine.is_stopped:
            self._machine.start()
            self._log("start", f"{self._name} goes on")

    @property
    def is_stopped(self) -> bool:
        return self._machine.is_stopped


class ReplicaHandle:
    """One of the pipelines: its `stages`, its `links` between them, its queue."""

    def __init__(self, name: str, replica: Replica, log: Callable[[str, str], None]) -> None:
        self._name, self._replica, self._log = name, replica, log
        self.stages = self._parts("stage", replica.stages)
        self.links = self._parts("link", replica.links)

    def _parts(self, kind: str, machines: Sequence[Machine]) -> list[Part]:
        named = enumerate(machines)
        return [Part(f"{self._name}{kind} {k}", machine, self._log) for k, machine in named]

    @property
    def queue(self) -> Queue:
        """Number of requests that wait and run."""
        running = sum(len(engine.queues.admitted) for engine in self._replica.engines)
        return Queue(self._replica.outstanding - running, running)

    def fail(self, restart_s: float, *, reject: bool = False) -> None:
        """Die, and serve again after `restart_s`: what is in flight is lost, and all KV.

        Its requests are computed again, in the order in which they came, their output so far behind
        their prompts. With `reject` they end.
        """
        if not (math.isfinite(restart_s) and restart_s >= 0):
            raise ValueError(f"fail({restart_s!r}): a finite number of seconds is right")
        lost = self._replica.fail(restart_s)
        words = f"{len(lost)} requests {'end' if reject else 'wait'}, back in {restart_s:g} s"
        self._log("fail", f"{self._name or 'the pipeline '}dies: {words}")
        if reject:
            self._replica.give_up(lost)
        else:
            for seq in lost:
                take_again(self._replica.engines, seq)


class Fleet(Sequence["ReplicaHandle"]):
    """All pipelines, drained and removed ones too."""

    def __init__(
        self,
        started: Sequence[Replica],
        start: Callable[[], Replica],
        env: Environment,
        source: ArrivalSource,
        log: Callable[[str, str], None],
    ) -> None:
        self._start, self._env, self._source, self._log = start, env, source, log
        self.added = self._env.event()
        """Event of the next pipeline that is added."""
        self._named = len(started) > 1
        self._open: dict[int, Replica] = {}
        self._all: list[ReplicaHandle] = []
        for replica in started:
            self._add(replica)

    def _add(self, replica: Replica) -> ReplicaHandle:
        number = len(self._all)
        name = f"replica {number} " if number or self._named else ""
        self._open[number] = replica
        self._all.append(ReplicaHandle(name, replica, self._log))
        return self._all[-1]

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: Any) -> Any:
        return self._all[number]

    @property
    def open(self) -> list[int]:
        """The numbers of the pipelines that take requests."""
        return list(self._open)

    def add(self) -> ReplicaHandle:
        """Start another pipeline of the same kind, which takes requests at once."""
        replica = self._start()
        self._source.join(replica)
        handle = self._add(replica)
        self._log("add", f"replica {len(self) - 1} takes requests")
        added, self.added = self.added, self._env.event()
        added.succeed()
        return handle

    def drain(self, number: int) -> None:
        """Let no more requests into a pipeline, which serves what it has."""
        self._close(number)
        self._log("drain", f"replica {number} takes no more requests")

    def remove(self, number: int) -> None:
        """Take a pipeline away at once; its requests are computed again by the others."""
        replica = self._close(number)
        lost = replica.fail(0.0)
        for seq in lost:
            emptiest = min(self._open.values(), key=lambda other: other.outstanding)
            take_again(emptiest.engines, seq)
        for other in self._open.values():
            other.wake(other.now)
        self._log("remove", f"replica {number} is gone, {len(lost)} requests move")

    def _close(self, number: int) -> Replica:
        if number not in self._open:
            raise ValueError(f"replica {number} takes no requests; these do: {self.open}")
        if len(self._open) == 1:
            raise ValueError(f"replica {number} is the only one that takes requests")
        replica = self._open.pop(number)
        self._source.leave(replica)
        return replica


@dataclass
class ProcessWorld:
    """Handle of a process: the run as it is now, and what may be done to it.

    `env`: the SimPy environment, in seconds of the run. `rng`: a random stream that is the
    process's own, from the seed of the run. `replicas`: the pipelines.
    """

    env: Environment
    rng: np.random.Generator
    replicas: Fleet
    log: Callable[[str, str], None]
    """`log(kind, text)` puts a mark in the timeline and the report, at this time."""

    @property
    def stages(self) -> Sequence[Part]:
        """The stages of the first pipeline."""
        first: ReplicaHandle = self.replicas[0]
        return first.stages

    @property
    def links(self) -> Sequence[Part]:
        """The links between the stages of the first pipeline; none where they take no time."""
        first: ReplicaHandle = self.replicas[0]
        return first.links

    @property
    def queue(self) -> Queue:
        """Number of requests that wait and run, in all pipelines."""
        queues = [each.queue for each in self.replicas]
        return Queue(sum(q.waiting for q in queues), sum(q.running for q in queues))


class Processes:
    """The processes of one run, with its `replicas`; `start` makes another one.

    `marks` are what they did and logged.

    Raises UserProcessError, with file and line, for one that raises, yields no event or does not
    yield at all.
    """

    def __init__(
        self,
        env: Environment,
        source: ArrivalSource,
        replicas: Sequence[Replica],
        start: Callable[[], Replica],
        *,
        made: Sequence[UserProcess],
        seed: int,
    ) -> None:
        self._env = env
        self._source = source
        self._replicas = replicas
        self.marks: list[Mark] = []
        self._places: list[Callable[[], str]] = []
        handles = Fleet(replicas, start, env, source, self._log)
        for process, rng in zip(made, streams(seed, len(made)), strict=True):
            env.process(self._guarded(process, ProcessWorld(env, rng, handles, self._log)))

    def _log(self, kind: str, text: str) -> None:
        self.marks.append(Mark(self._env.now, str(kind), str(text)))

    def _guarded(self, process: UserProcess, world: ProcessWorld) -> Generator[Event, Any, None]:
        """Yield what a process yields, which must be events."""
        name, (file, line) = name_of(process), defined_at(process)
        made = self._made(process, world, f"({file}:{line})")
        self._places.append(lambda: f"{file}:{line_of(made) or line}")
        wakes, progress = 0, -1
        resume: Callable[[Any], Any] = made.send
        value: Any = None
        while True:
            before_s, is_over = self._env.now, False
            try:
                event = resume_process(name, resume, value)
            except StopIteration:
                event, is_over = None, True
            place = f"({file}:{line_of(made) or line}); {RIGHT}"
            if self._env.now != before_s:
                raise UserProcessError(f"process {name} moved the clock before it waits {place}")
            if is_over:
                return
            if not isinstance(event, Event):
                words = f"yields {shown(event)}, which is no event"
                raise UserProcessError(f"process {name} {words} {place}")
            if event.env is not self._env:
                raise UserProcessError(f"process {name} yields an event of another clock {place}")
            try:
                resume, value = made.send, (yield event)
            except (Interrupt, Exception) as error:  # what it waited for failed, or it is told so
                resume, value = made.throw, error
            now = self._num_sent
            wakes, progress = wakes + 1 if now == progress else 0, now
            if wakes > MOST_IDLE_WAKES:
                raise UserProcessError(
                    f"process {name} woke {wakes:,} times while nothing came or returned "
                    f"({file}:{line_of(made)}){self.held_up()}"
                )

    @property
    def _num_sent(self) -> int:
        return sum(replica.num_sent for replica in self._replicas)

    def _made(
        self, process: UserProcess, world: ProcessWorld, place: str
    ) -> Generator[Any, Any, Any]:
        """Return the generator of a process."""
        name = name_of(process)
        try:
            inspect.signature(process).bind(world)
        except (TypeError, ValueError):
            words = f"process {name} does not take a world alone {place}"
            raise UserProcessError(f"{words}; def {name}(world) is right") from None
        made = resume_process(name, process, world)
        if isinstance(made, Generator):
            return made
        if inspect.iscoroutine(made):
            made.close()
        raise UserProcessError(f"process {name} never yields {place}; {RIGHT}")

    def run(self) -> None:
        """Run until all requests have ended, whatever the processes still wait for."""
        env, before = self._env, -1
        try:
            for steps in itertools.count(1):
                if self._source.is_done and env.peek() > env.now:
                    return
                self.step()
                if steps % MOST_IDLE_WAKES == 0:
                    if self._num_sent == before:
                        words = f"{MOST_IDLE_WAKES:,} events while nothing came or returned"
                        raise UserProcessError(f"the run cannot end: {words}{self.held_up()}")
                    before = self._num_sent
        except EmptySchedule:
            raise UserProcessError(
                f"the run cannot end: no process goes on{self._where()}{self.held_up()}"
            ) from None

    def step(self) -> None:
        """Let the next event happen; UserProcessError for what a process's own process raises."""
        try:
            self._env.step()
        except (EmptySchedule, UsageError):
            raise
        except Exception as error:
            raised = error.__cause__ or error
            words = f"raised {words_of(raised)}{place_of(raised, SIMPY) or self._where()}"
            raise UserProcessError(f"a process of a process {words}") from error

    def _where(self) -> str:
        """Return in words the lines at which processes wait, or where finished ones begin."""
        return f" ({', '.join(place() for place in self._places)})"

    def held_up(self) -> str:
        """Return in words which stages are stopped, and which requests wait."""
        waiting = sum(replica.outstanding for replica in self._replicas)
        stopped = [
            f"stage {stage} of replica {number}"
            for number, replica in enumerate(self._replicas)
            for stage, machine in enumerate(replica.stages)
            if machine.is_stopped
        ]
        return f"; {waiting} requests wait" + (
            f", stopped: {', '.join(stopped)}" if stopped else ""
        )


def resume_process(name: str, call: Callable[..., Any], *given: Any) -> Any:
    """Call code of a process; UserProcessError for whatever it raises but Ctrl-C and refusals."""
    process = os.getpid()
    try:
        return call(*given)
    except (KeyboardInterrupt, StopIteration, UsageError):
        raise
    except BaseException as error:
        end_copy(process, name)
        raise UserProcessError(
            f"process {name} raised {words_of(error)}{place_of(error, SIMPY)}"
        ) from error


def streams(seed: int, count: int) -> Iterator[np.random.Generator]:
    """Return a random stream for each process, the same whatever the others draw."""
    for child in np.random.SeedSequence([seed, STREAM]).spawn(count):
        yield np.random.default_rng(child)


STREAM = 0x50524F43
"""What parts these streams from those of arrivals and lengths."""


def innermost(process: Any) -> Any:
    """Return the function in a partial one, or in what decorates it."""
    return inspect.unwrap(getattr(process, "func", process))


def name_of(process: object) -> str:
    """Return what a process is called."""
    inner = innermost(process)
    return str(getattr(inner, "__name__", type(inner).__name__))


def defined_at(process: Any) -> tuple[str, int]:
    """Return the file and the line of a process's code; its name where there is none."""
    inner = innermost(process)
    try:
        path, (_, line) = inspect.getfile(inner), inspect.getsourcelines(inner)
    except (OSError, TypeError):
        return name_of(process), 0
    return Path(path).name, line


def line_of(made: Generator[Any, Any, Any]) -> int:
    """Return the line at which a generator waits."""
    frame = getattr(made, "gi_frame", None)
    return 0 if frame is None else int(frame.f_lineno)
