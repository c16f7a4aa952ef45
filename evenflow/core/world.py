"""What a simulation needs to know: requests, deployment and policy, all of them resolved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Speculation
from evenflow.core.kv import KvCache, PagePool, PrefixCache, RadixCache
from evenflow.core.request import LATEST_S, Request
from evenflow.core.routing import Router
from evenflow.core.scheduling import Scheduler
from evenflow.costs import StageCost
from evenflow.errors import UsageError
from evenflow.runtimes import RuntimeOverheads

Dispatch = Literal["stage0", "eager", "engine_loop"]


class Link(NamedTuple):
    """The link between neighbouring stages: it is busy for `per_token_s` seconds a token, and the
    activations arrive `latency_s` later. `shared`: all hops queue for one link, else each has its
    own.
    """

    per_token_s: float
    latency_s: float
    shared: bool = False


class PromptWait(NamedTuple):
    """How long prompts wait, in steps, until all of the engines that step together have one.

    Once all have, and decodes, `batching_iters` steps more for further ones; without, at most
    `timeout_iters`. Source: TensorRT-LLM's `attention_dp_config` with `enable_balance`.
    """

    timeout_iters: int
    batching_iters: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class World:
    """One simulation. Arrivals must be in order of time.

    `concurrency`: a closed loop, in which that many requests are in the system and each completion
    lets the next one arrive (arrival times of `requests` are then ignored). `virtual_engines` > 1
    gives each engine its own policy, one micro-batch in flight and an equal part of the pages (vLLM
    V0); with `lock_step` they step together instead, so that a micro-batch of each is one of
    all (data parallelism), and prompts wait for those of the others as `prompt_wait` says
    (None: they do not). `dispatch`: the driver asks for a micro-batch when stage 0 can take
    one (`stage0`) or whenever the cap allows (`eager`), or in turns with waiting for one
    (`engine_loop`, see `evenflow.core.loop.EngineLoop`). `max_in_flight` None: no cap. `hop_links`
    gives each hop between stages a link of its own kind, in place of `link`. `replicas` > 1: as
    many pipelines of this kind, each with its own pages and policy, among which `router`
    divides the requests. `prefix_cache`: requests share the pages of common prefixes. `swap`:
    preempted requests are copied to the host and back; what the copies cost is up to `costs`
    (SwapCost). `before`: what the same engines served earlier, one set of requests when the one
    before is done; of it only their prefix caches are left. Raises UsageError for more engines
    than pages, and for an arrival after LATEST_S.
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
    lock_step: bool = False
    prompt_wait: PromptWait | None = None
    dispatch: Dispatch = "stage0"
    pipelined_chunks: bool | None = None
    overheads: RuntimeOverheads = field(default_factory=RuntimeOverheads)
    link: Link | None = None
    hop_links: tuple[Link, ...] | None = None
    concurrency: int | None = None
    speculation: Speculation | None = None
    replicas: int = 1
    router: Router = "round_robin"
    prefix_cache: bool = False
    swap: bool = False
    before: tuple[Sequence[Request], ...] = ()

    def __post_init__(self) -> None:
        if self.virtual_engines > 1 and self.total_pages < self.virtual_engines:
            raise UsageError(
                f"virtual_engines: {self.virtual_engines} engines share {self.total_pages} KV "
                "pages; at least one page each is right"
            )
        if self.virtual_engines > 1 and self.dispatch == "engine_loop":
            key = "data_parallel" if self.lock_step else "virtual_engines"
            raise UsageError(f"dispatch: engine_loop is the loop of one engine; {key}: 1")
        if self.requests and not self.requests[-1].arrival_s <= LATEST_S:
            raise UsageError(
                f"workload: the last request would arrive after {self.requests[-1].arrival_s:g} s; "
                f"at most {LATEST_S:g} s is right"
            )

    def batcher(
        self, made_by: Callable[..., Batcher] = Batcher, pages: PagePool | None = None
    ) -> Batcher:
        """Return a fresh engine, one of `virtual_engines`, of the kind that `made_by` makes.

        `pages`: those of an engine of this world that has served its requests, caches and all.
        """
        scheduler = self.make_scheduler()
        return made_by(
            scheduler,
            KvCache(self._pages(scheduler) if pages is None else pages, swap=self.swap),
            depth=self.depth,
            max_in_flight=self.max_in_flight if self.virtual_engines == 1 or self.lock_step else 1,
            max_model_len=self.max_model_len,
            pipelined_chunks=self.pipelined_chunks,
            speculation=self.speculation,
            asks_again=self.dispatch != "engine_loop",
        )

    def _pages(self, scheduler: Scheduler) -> PagePool:
        total_pages = self.total_pages // self.virtual_engines
        if not self.prefix_cache:
            return PagePool(total_pages, self.page_tokens)
        append_only = getattr(scheduler, "append_only_pages", False)
        if getattr(scheduler, "radix_cache", False):
            return RadixCache(total_pages, self.page_tokens)
        return PrefixCache(total_pages, self.page_tokens, append_only=append_only)

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
