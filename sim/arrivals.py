"""Arrivals: at their times, or in a closed loop, each at one of several pipelines.

Knows when a request enters and, by the router, where; nothing of what happens to it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from evenflow.core.request import Request
from evenflow.core.routing import Router, router_of
from evenflow.core.world import World
from evenflow.errors import StallError, within_a_run
from evenflow.runtimes import RuntimeOverheads
from evenflow.sim.clock import SimClock

if TYPE_CHECKING:
    from evenflow.engines.pools import PooledWorld


class Entrance(Protocol):
    """A pipeline, as the arrival of requests uses it.

    `admit` takes an arrival and returns whether it is served (or else rejected). `changed` is
    called when all arrivals of an instant are admitted. `when_done` has `call` called with how many
    requests are done, whenever some are.
    """

    @property
    def outstanding(self) -> int: ...
    def admit(self, request: Request) -> bool: ...
    def changed(self, now_s: float) -> None: ...
    def when_done(self, call: Callable[[int], None]) -> None: ...


def serve(
    clock: SimClock,
    world: World | PooledWorld,
    pipelines: Sequence[Entrance],
    overheads: RuntimeOverheads,
    router: Router = "round_robin",
) -> None:
    """Let a world's requests in, by front ends if there are any, and run until nothing is left.

    StallError where requests are left, and nothing is to happen any more.
    """
    ArrivalSource(clock, world, pipelines, overheads, router)
    clock.env.run()
    if left := sum(pipeline.outstanding for pipeline in pipelines):
        raise StallError(f"{left} requests wait for ever: nothing is in flight, and nothing comes")


class ArrivalSource:
    """Source of a world's requests, each let in at its time, to `pipelines` and others that `join`.

    They come by front ends if there are any. In a closed loop each finished one lets in the next.
    UsageError for an arrival after LATEST_S.
    """

    def __init__(
        self,
        clock: SimClock,
        world: World | PooledWorld,
        pipelines: Sequence[Entrance],
        overheads: RuntimeOverheads,
        router: Router,
    ) -> None:
        if world.requests:
            within_a_run(world.requests[-1].arrival_s, "workload")
        self._clock = clock
        self._backlog = deque(world.requests)  # not yet arrived
        self._concurrency = concurrency = world.concurrency
        self._overheads = overheads
        self._router: Router = router
        self._entrances: dict[Entrance, Entrance] = {}  # by pipeline
        self._open: list[Entrance] = []
        if concurrency is None:
            clock.at(clock.now, self._come)
        else:
            clock.at(clock.now, lambda _: self._tell(self._let_in(concurrency)))
        for pipeline in pipelines:
            self.join(pipeline)

    def join(self, pipeline: Entrance) -> None:
        """Let requests into another pipeline, too; a new router without memory takes over."""
        entrance = pipeline
        if self._overheads.has_front_end:
            entrance = FrontEnd(self._clock, pipeline, self._overheads)
        if self._concurrency is not None:
            entrance.when_done(self._replacer(entrance))
        self._entrances[pipeline] = entrance
        self._open.append(entrance)
        self._choose = router_of(self._router, list(self._open))

    def leave(self, pipeline: Entrance) -> None:
        """Let no more requests into a pipeline; a new router without memory takes over."""
        self._open.remove(self._entrances[pipeline])
        self._choose = router_of(self._router, list(self._open))

    @property
    def is_done(self) -> bool:
        """Whether all requests have come and ended."""
        return not self._backlog and not any(each.outstanding for each in self._entrances.values())

    def _come(self, now_s: float) -> None:
        """Let in all requests of this instant, and come again with the next one."""
        backlog = self._backlog
        entered: dict[Entrance, None] = {}
        while backlog and backlog[0].arrival_s <= now_s:
            request = backlog.popleft()
            pipeline = self._choose(request)
            pipeline.admit(request)
            entered[pipeline] = None
        if backlog:  # before a pipeline may go on to what comes next
            self._clock.at(backlog[0].arrival_s, self._come)
        self._tell(entered)

    def _let_in(self, count: int) -> dict[Entrance, None]:
        """Let in up to `count` requests that can be served; return where they entered, in order."""
        entered: dict[Entrance, None] = {}
        while count > 0 and self._backlog:
            request = replace(self._backlog.popleft(), arrival_s=self._clock.now)
            pipeline = self._choose(request)
            count -= pipeline.admit(request)
            entered[pipeline] = None
        return entered

    def _tell(self, entered: Iterable[Entrance]) -> None:
        for pipeline in entered:
            pipeline.changed(self._clock.now)

    def _replacer(self, left: Entrance) -> Callable[[int], None]:
        # The pipeline that a request leaves asks its policy anyway, and must ask only once. Others
        # are told when it has: what it sends then may let in the next.
        def replace_done(count: int) -> None:
            for entrance in self._let_in(count):
                if entrance is not left:
                    self._clock.at(self._clock.now, entrance.changed)

        return replace_done


class FrontEnd:
    """The front end of a pipeline: serves a request for `front_end_s`, half in turns with others.

    First an event loop reads it, a small step of each request after a small step of the next. Then
    one thread tokenises and admits it, one request after the other: the other half, and
    `tokenize_s` a prompt token. So of n that come at once without tokens, the first is done after
    half of n x `front_end_s`. The last is done after all of it. Then `front_end_latency_s` passes,
    in which they delay no other (network, threads). Half is a convention: bursts on vLLM 0.8 fit
    it.
    """

    def __init__(self, clock: SimClock, pipeline: Entrance, overheads: RuntimeOverheads) -> None:
        self._clock = clock
        self._pipeline = pipeline
        self._half_s = overheads.front_end_s / 2
        self._token_s = overheads.tokenize_s
        self._latency_s = overheads.front_end_latency_s
        self._thread_free_s = 0.0
        self._served: deque[tuple[float, Request]] = deque()  # what each will have got when read
        self._got_s = 0.0  # by each of those that are served, since the beginning
        self._seen_s = 0.0
        self._inside = 0
        self._next = 0  # number of the event that is waited for; later arrivals make it stale
        self._on_done: list[Callable[[int], None]] = []

    @property
    def outstanding(self) -> int:
        """Requests that are here or in the pipeline."""
        return self._inside + self._pipeline.outstanding

    def admit(self, request: Request) -> bool:
        """Take an arrival; whether it can be served is known when the pipeline sees it."""
        self._inside += 1
        self._share(self._clock.now)
        self._served.append((self._got_s + self._half_s, request))
        self._await_first()
        return True

    def changed(self, now_s: float) -> None:
        """Do nothing: the pipeline receives a request when it gets there."""

    def when_done(self, call: Callable[[int], None]) -> None:
        """Have `call` called with how many requests are done, whenever some are."""
        self._on_done.append(call)
        self._pipeline.when_done(call)

    def _share(self, now_s: float) -> None:
        """Divide the time since the last event among the requests that were served."""
        if self._served:
            self._got_s += (now_s - self._seen_s) / len(self._served)
        self._seen_s = now_s

    def _await_first(self) -> None:
        """Schedule the end of the oldest request, which ends first because shares are equal."""
        self._next += 1
        if self._served:
            left_s = max(self._served[0][0] - self._got_s, 0.0) * len(self._served)
            call = partial(self._first_done, self._next)
            self._clock.at(self._clock.now + left_s, call)

    def _first_done(self, number: int, now_s: float) -> None:
        if number != self._next:
            return
        self._share(now_s)
        self._got_s, request = self._served.popleft()
        self._await_first()
        busy_s = self._half_s + self._token_s * request.prompt_tokens
        self._thread_free_s = max(self._thread_free_s, now_s) + busy_s
        call = partial(self._enter, request)
        self._clock.at(self._thread_free_s + self._latency_s, call)

    def _enter(self, request: Request, now_s: float) -> None:
        self._inside -= 1
        if not self._pipeline.admit(request):
            for call in self._on_done:
                call(1)
        self._pipeline.changed(now_s)
