"""A world: the resolved requests, deployment and policy of one run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import ONE_TOKEN, Decoding
from evenflow.core.kv import KvCache, PagePool
from evenflow.core.loop import Loop, Owner, Pipeline
from evenflow.core.request import Request
from evenflow.core.routing import Router
from evenflow.core.rules import rules_of
from evenflow.core.scheduling import Scheduler
from evenflow.costs import StageCost
from evenflow.errors import UsageError
from evenflow.results.recorder import Recorder
from evenflow.runtimes import RuntimeOverheads


class Link(NamedTuple):
    """The link between neighbouring stages: busy for `per_token_s` seconds a token, and the
    activations arrive `latency_s` later. `shared`: all hops queue for one link.
    """

    per_token_s: float
    latency_s: float
    shared: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class World:
    """One simulation or real run. Arrivals must be in order of time.

    `concurrency`: a closed loop, in which that many requests are in the system and each completion
    lets the next one arrive (arrival times are then ignored). `virtual_engines` > 1 divides the
    pages evenly among engines with a policy and one micro-batch in flight each. `dispatch`: the
    driver asks for a micro-batch when stage 0 can take one (`stage0`) or whenever the cap allows
    (`eager`). `max_in_flight` None: no cap. `hop_links` gives each hop between stages another link
    than `link`. `replicas` > 1: as many pipelines, among which `router` divides the requests.
    `prefix_cache`: requests share the pages of common prefixes. `before`: sets of requests that the
    same engines served earlier, of which only the prefix caches are left. `loop`, with its
    `loop_options`, `decoding` and `kv` name other kinds than the plain ones. Raises UsageError for
    more engines than pages.
    """

    requests: Sequence[Request]
    make_scheduler: Callable[[], Scheduler]
    costs: StageCost
    depth: int
    total_pages: int
    max_model_len: int
    page_tokens: int = 16
    max_in_flight: int | None = None
    virtual_engines: int = 1
    dispatch: Literal["stage0", "eager"] = "stage0"
    pipelined_chunks: bool | None = None
    overheads: RuntimeOverheads = field(default_factory=RuntimeOverheads)
    link: Link | None = None
    hop_links: tuple[Link, ...] | None = None
    concurrency: int | None = None
    replicas: int = 1
    router: Router = "round_robin"
    prefix_cache: bool = False
    before: tuple[Sequence[Request], ...] = ()
    loop: type[Loop] = Loop
    loop_options: Mapping[str, Any] = field(default_factory=dict)
    decoding: Decoding = ONE_TOKEN
    kv: type[KvCache] = KvCache

    def __post_init__(self) -> None:
        if self.virtual_engines > 1 and self.total_pages < self.virtual_engines:
            raise UsageError(
                f"virtual_engines: {self.virtual_engines} engines share {self.total_pages} KV "
                "pages; at least one page each is right"
            )

    def batcher(
        self, made_by: Callable[..., Batcher] = Batcher, pages: PagePool | None = None
    ) -> Batcher:
        """Return one of the `virtual_engines`, made by `made_by`, a Batcher class.

        `pages`: the pool of an engine that has served requests, with its prefix cache.
        """
        scheduler = self.make_scheduler()
        if pages is None:
            sizes = self.total_pages // self.virtual_engines, self.page_tokens
            make = rules_of(scheduler).prefix_cache if self.prefix_cache else PagePool
            pages = make(*sizes)
        alone = self.virtual_engines == 1 or self.loop.steps_together
        return made_by(
            scheduler,
            self.kv(pages),
            depth=self.depth,
            max_in_flight=self.max_in_flight if alone else 1,
            max_model_len=self.max_model_len,
            pipelined_chunks=self.pipelined_chunks,
            decoding=self.decoding,
            asks_again=self.loop.asks_again,
        )

    def start(
        self, engines: Collection[Batcher], pipeline: Pipeline, owner: Owner, recorder: Recorder
    ) -> Loop:
        """Return the loop that serves the requests with these engines."""
        eager, options = self.dispatch == "eager", self.loop_options
        return self.loop(engines, pipeline, owner, recorder, eager=eager, **options)

    @property
    def facts(self) -> dict[str, Any]:
        """Description of the deployment in a RunResult."""
        return {
            "max_in_flight": self.max_in_flight,
            "page_tokens": self.page_tokens,
            "engines": 1 if self.loop.steps_together else self.virtual_engines,
            "prefix_cache": self.prefix_cache,
        }

    @property
    def hops(self) -> tuple[Link, ...]:
        """The link of each hop between neighbouring stages; empty if links cost nothing."""
        if self.hop_links is not None:
            return self.hop_links
        return () if self.link is None else (self.link,) * (self.depth - 1)

    @property
    def shares_link(self) -> bool:
        """Whether all hops queue for one link."""
        return any(link.shared for link in self.hops)
