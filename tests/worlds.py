"""Small worlds for tests: as plain as can be, or random ones of every policy that force preemption,
and systems of them that move KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import ONE_TOKEN
from evenflow.core.kv import KvCache, PagePool
from evenflow.costs import AffineCost, SwapCost, estimates
from evenflow.engines.handover import Handover, RecordingPoolBatcher
from evenflow.engines.lock_step import LockStep, PromptWait
from evenflow.engines.loop import EngineLoop
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.engines.speculation import Speculation
from evenflow.engines.swap import SwapCache
from evenflow.experiments.recordings.journal import tokens_of
from evenflow.schedulers import create
from evenflow.schedulers.sarathi import Sarathi
from evenflow.sim import Link, World, runtimes
from evenflow.types import MicroBatch, Plan, Prefix, Request, View

MAX_MODEL_LEN = 256

SHORT_CHUNKS = {"long_prefill_token_threshold": 20, "scheduler_reserve_full_isl": False}
POLICIES: list[tuple[str, dict[str, object]]] = [
    ("static", {"max_num_seqs": 4}),
    ("static", {"max_num_seqs": 4, "padded": True}),
    ("orca", {"max_num_seqs": 5}),
    ("vllm", {"max_num_seqs": 6}),
    ("vllm", {"max_num_batched_tokens": 150, "max_batch_rows": 3}),
    *(
        (name, {"async_scheduling": False, "max_num_batched_tokens": tokens, **params})
        for name, tokens, params in (
            ("vllm_v1", 48, {"max_num_seqs": 40}),
            ("vllm_v1", 64, {"max_num_seqs": 5, "watermark": 0.05}),
            ("vllm_v1", 64, {"max_num_seqs": 9, **SHORT_CHUNKS}),
            ("vllm_balanced", 48, {"max_num_seqs": 40}),
            ("vllm_balanced", 64, {"share": "decodes", "max_num_seqs": 7}),
            ("vllm_balanced", 64, {"share": "tokens", "max_num_seqs": 16}),
        )
    ),
    ("sarathi", {"token_budget": 48}),
    ("sarathi", {"token_budget": 64, "max_batch_rows": 3, "max_num_seqs": 7}),
    ("sarathi", {"token_budget": 32, "mode": "chunked_only"}),
    ("sarathi", {"token_budget": 64, "mode": "hybrid_only"}),
    ("token_throttling", {"max_prefill": 64, "min_prefill": 8}),
    ("token_throttling", {"max_prefill": 64, "kv_thresh": 0.0, "victim": "most_pages"}),
    ("token_throttling", {"max_prefill": 64, "use_wt": False, "max_batch_rows": 3}),
    ("token_throttling", {"max_prefill": 64, "use_ut": False, "reserve": "adaptive"}),
    ("token_throttling", {"max_prefill": 64, "coupled": True}),
    ("token_throttling", {"max_prefill": 64, "variant": "paper"}),
    ("token_throttling", {"max_prefill": 64, "min_prefill": 8, "variant": "code"}),
    ("td_pipe", {"max_num_batched_tokens": 200}),
    ("td_pipe", {"max_num_batched_tokens": 64, "future_points": [8, 16, 32, 64]}),
    ("td_pipe", {"work_stealing": False, "kv_occupancy_ratio": 0.5, "max_batch_rows": 3}),
    ("td_pipe", {"request_finish_ratio": 0.3}),
    ("td_pipe", {"variant": "code", "max_batch_rows": 2}),
    ("tests.worlds:NamesDecodes", {"token_budget": 48}),
]

SGLANG: list[dict[str, object]] = [
    {"chunked_prefill_size": 48, "max_running_requests": 5},
    {"chunked_prefill_size": 208, "schedule_conservativeness": 0.1, "schedule_policy": "lpm"},
    {"chunked_prefill_size": 64, "max_running_requests": 12, "mixed_chunk": True},
    {"chunked_prefill_size": 96, "scheduler_recv_interval": 4},
    {"chunked_prefill_size": None, "prefill_max_requests": 2, "scheduler_recv_interval": 9},
    {"chunked_prefill_size": 64, "dynamic_chunking": True, "prefill_decode_interval": 2},
]


class NamesDecodes(Sarathi):
    """Sarathi's prompts, and by name every other decode that is ready, the last first."""

    def schedule(self, view: View) -> Plan:
        plan = super().schedule(view)
        if not plan.decodes:
            return plan
        ready = [one.request_id for one in view.decodes]
        return plan._replace(decodes=ready[view.slot % 2 :: 2][::-1] or ready)


def engine_of(
    policy: object,
    pages: int | KvCache | PagePool,
    asked: Iterable[tuple[int, ...]] = (),
    kind: Callable[..., Batcher] = Batcher,
    **options: Any,
) -> Any:
    """Return an engine that is asked for prompts and outputs of so many tokens, request 0 first."""
    pool = PagePool(pages) if isinstance(pages, int) else pages
    sizes = {"depth": 2, "max_in_flight": 2, "max_model_len": 1000}
    engine = kind(policy, pool, **(sizes | options))
    for number, lengths in enumerate(asked):
        engine.add(Request(number, 0.0, *lengths))
    return engine


def send(engine: Batcher, now_s: float) -> MicroBatch:
    """Return the micro-batch that an engine sends now, which it must."""
    batch = engine.next(now_s)
    assert batch is not None
    return batch


def steps_of(engine: Batcher) -> str:
    """Serve all with one micro-batch at a time; return the tokens of each: "0:20 1:10|0:1"."""
    steps = []
    while engine.queues.live:
        batch = send(engine, 0.0)
        steps.append(" ".join(f"{number}:{n}" for number, n in sorted(tokens_of(batch).items())))
        engine.complete(batch, 1.0)
    return "|".join(steps)


def small_world(
    requests: Sequence[Request],
    policy: str = "sarathi",
    params: Mapping[str, object] | None = None,
    *,
    depth: int = 1,
    times_s: tuple[float, float] = (1.0, 0.0),
    max_model_len: int = 1000,
    **changes: Any,
) -> World:
    """Return a world with pages for all and a micro-batch in flight for each stage.

    `times_s`: what one takes on each stage, and what each of its tokens adds.
    """
    costs = changes.pop("costs", AffineCost(*times_s, depth))
    facts: dict[str, Any] = {
        "max_model_len": max_model_len,
        "depth": depth,
        "page_tokens": changes.get("page_tokens", 16),
        **estimates(costs),
    }
    plain = World(
        requests,
        make_scheduler=lambda: create(policy, params or {}, **facts),
        costs=costs,
        depth=depth,
        total_pages=100,
        max_model_len=max_model_len,
        max_in_flight=depth,
    )
    return replace(plain, **changes)


def check_integrity(pool: Any, held: list[int]) -> None:
    """Fail unless every page is empty, idle or held, and counts its holders.

    `held` are the ids of all requests; a page that n of them share is there n times.
    """
    published, idle = getattr(pool, "_published", {}), getattr(pool, "_idle", {})
    for page, node in published.items():
        assert node.page == page, f"page {page} is published as {node.page}"
        counts = f"page {page}: {node.holders} holders counted, {held.count(page)} hold it"
        assert node.holders == held.count(page), counts
        assert (page in idle) == (not node.holders), counts
    distinct = list(dict.fromkeys(held))
    shared = [page for page in held if page in published]
    assert pool.saved_pages == len(shared) - len(set(shared)), f"{pool.saved_pages} saved"
    assert len(held) - pool.saved_pages == len(distinct), "an unpublished page is held twice"
    free = [*pool._free_ids, *range(pool._unused, pool.total_pages), *idle]
    counts = f"{pool.free_pages} free, {len(distinct)} held, {pool.total_pages} in all"
    assert len(free) == pool.free_pages, counts
    assert len(free) + len(distinct) == pool.total_pages, counts
    assert len(set(free).union(distinct)) == pool.total_pages, counts


class AuditedBatcher(RecordingPoolBatcher):
    """Counts its pages and waiting tokens anew after all that may move one."""

    def audit(self) -> None:
        queues = self.queues
        held = {id(seq): seq for seq in (*queues.live.values(), *self.moving.values())}
        check_integrity(self.pool, [page for seq in held.values() for page in seq.pages])
        remaining = [seq.remaining for seq in queues.live.values() if not seq.decoding]
        assert queues.waiting_tokens == sum(remaining)
        slots = [batch.slot for batch in queues.in_flight.values()]
        assert len({*slots}) == len(slots) or self.max_in_flight > queues.num_slots

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        self.audit()
        return batch

    def complete(self, *args: Any, **options: Any) -> Any:
        finished = super().complete(*args, **options)
        self.audit()
        return finished

    def release(self, request_id: int) -> None:
        assert self.moving[request_id].pages, "KV left from nowhere"
        super().release(request_id)
        self.audit()

    def reserve(self, handover: Handover) -> None:
        super().reserve(handover)
        held = self.moving[handover.request.request_id].pages
        assert len(held) * self.pool.page_tokens >= handover.context_tokens
        self.audit()

    def adopt(self, request_id: int) -> None:
        assert self.moving[request_id].pages, "KV arrived nowhere"
        super().adopt(request_id)
        self.audit()


def require_idle(engine: Batcher) -> None:
    """Fail unless nothing is left in an engine: no request, no token, no page."""
    queues = engine.queues
    check_integrity(engine.pool, [])
    assert not [*queues.live, *getattr(engine, "moving", ()), *queues.aborted]
    assert (len(queues.admitted), queues.running_decodes, queues.ready.num_sequences) == (0, 0, 0)
    assert (queues.waiting_tokens, len(queues.in_flight)) == (0, 0)
    assert (engine.kv.tokens, engine.view.expected_output_tokens) == (0, 0)


@st.composite
def requests(draw: st.DrawFn, *, max_requests: int = 12) -> list[Request]:
    """Requests in order of arrival; some arrive together, some never fit, some begin alike.

    A predictor may have said nothing of an output, the truth, too little, too much.
    """
    gaps_s = st.sampled_from([0.0, 0.0, 0.003, 0.02, 0.5])
    asked = st.tuples(gaps_s, st.integers(1, 150), st.integers(1, 60))
    block_tokens = draw(st.sampled_from([8, 16, 24, 64]))
    priorities = draw(st.sampled_from([st.just(0), st.integers(-1, 1)]))
    arrival_s = 0.0
    found = []
    for gap_s, prompt, output in draw(st.lists(asked, min_size=1, max_size=max_requests)):
        arrival_s += gap_s
        prefix = draw(prefixes(prompt + output, block_tokens))
        predicted = draw(st.sampled_from([None, output, 1, 2 * output]))
        request = Request(len(found), arrival_s, prompt, output, predicted, prefix)
        found.append(replace(request, priority=draw(priorities)))
    return found


@st.composite
def prefixes(draw: st.DrawFn, tokens: int, block_tokens: int) -> Prefix | None:
    """A chain of blocks from a small alphabet, over a part of `tokens` tokens; or none."""
    blocks = draw(st.lists(st.integers(0, 1), max_size=8))
    known = min(tokens, len(blocks) * block_tokens)
    return Prefix(tuple(blocks), block_tokens, known) if blocks else None


DISPATCH: list[dict[str, Any]] = [
    {"dispatch": "stage0"},
    {"dispatch": "eager"},
    {"loop": EngineLoop},
]
SPECULATIONS = st.sampled_from([ONE_TOKEN, ONE_TOKEN, Speculation((0.7,) * 3)])
LINKS = (None, Link(per_token_s=1e-5, latency_s=1e-4))


def drawn_world(
    draw: st.DrawFn,
    pages: list[int],
    *,
    most_stages: int = 4,
    costs_s: tuple[float, float] = (0.005, 0.0001),
    **fields: object,
) -> World:
    """Draw a policy and its deployment without requests; `fields` of a world are as they are."""
    depth = draw(st.integers(1, most_stages))
    plain: dict[str, Any] = {
        "max_in_flight": draw(st.sampled_from([depth, depth, 1, None])),
        **draw(st.sampled_from(DISPATCH)),
        "total_pages": draw(st.sampled_from(pages)),
    }
    sizes = {"depth": depth, "times_s": costs_s, "max_model_len": MAX_MODEL_LEN}
    return small_world([], *draw(st.sampled_from(POLICIES)), **sizes, **(plain | fields))


@st.composite
def running_ahead(draw: st.DrawFn) -> World:
    """Worlds without requests in which decodes go again before their last token is there."""
    depth = draw(st.integers(1, 4))
    mode = draw(st.sampled_from(["v2", "v1" if depth == 1 else "v2"]))
    params = {"max_num_batched_tokens": draw(st.sampled_from([24, 64])), "max_num_seqs": 12}
    chunk = draw(st.sampled_from([0, 0, 10]))
    return small_world(
        [],
        "vllm_v1",
        {**params, "async_scheduling": mode, "long_prefill_token_threshold": chunk},
        depth=depth,
        times_s=(0.005, 0.0001),
        total_pages=draw(st.sampled_from([16, 20, 60])),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=depth + 1,
        loop=EngineLoop,
        concurrency=draw(st.sampled_from([None, None, 4])),
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def sglang_worlds(draw: st.DrawFn, depths: st.SearchStrategy[int], *, overlap: bool) -> World:
    """Worlds as SGLang serves them, with clients that allow more than they get."""
    depth = draw(depths)
    params = draw(st.sampled_from(SGLANG)) | {"overlap": overlap}
    more = st.sampled_from([None, 0, 10, 80])
    asked = [(request, draw(more)) for request in draw(requests())]
    return small_world(
        [
            request
            if spare is None
            else replace(request, max_new_tokens=request.output_tokens + spare)
            for request, spare in asked
        ],
        "sglang",
        params,
        depth=depth,
        times_s=(0.005, 0.0001),
        total_pages=draw(st.sampled_from([17, 20, 32, 400])),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=depth + (overlap or draw(st.integers(0, int(depth > 1)))),
        loop=EngineLoop,
        link=draw(st.sampled_from(LINKS)),
        prefix_cache=draw(st.booleans()),
        concurrency=draw(st.sampled_from([None, None, 1, 4])),
    )


def cut_short(chunk: int) -> World:
    """Return a world in which SGLang leaves out most of a prompt of 96: two are cut at once."""
    lengths = [(1, 1), (1, 1), (1, 2), (96, 60), (16, 1)]
    asked = [Request(number, 0.0, *each) for number, each in enumerate(lengths)]
    asked[3] = replace(asked[3], max_new_tokens=60)
    params = {"mixed_chunk": True, "chunked_prefill_size": chunk}
    sizes = {"times_s": (0.005, 1e-4), "max_model_len": MAX_MODEL_LEN, "total_pages": 17}
    return small_world(asked, "sglang", params, loop=EngineLoop, max_in_flight=1, **sizes)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Worlds of every policy, with pools from scarcely enough to plenty.

    Every key is crossed with every other with which it goes.
    """
    kind = draw(st.integers(0, 7))
    if kind == 0:
        world = replace(draw(running_ahead()), requests=draw(requests()))
    elif kind == 1:
        world = draw(sglang_worlds(st.integers(1, 4), overlap=False))
    else:
        world = replace(drawn_world(draw, [16, 17, 20, 32, 400]), requests=draw(requests()))
    world = replace(
        world,
        overheads=runtimes()[draw(st.sampled_from(sorted(runtimes())))].stages,
        link=draw(st.sampled_from(LINKS)),
        prefix_cache=draw(st.integers(0, 2)) == 0,
        concurrency=draw(st.sampled_from([None, None, None, 1, 3, 5])),
    )
    if kind > 1:
        world = replace(world, pipelined_chunks=draw(st.sampled_from([None, None, True, False])))
    if world.loop is not EngineLoop:
        world = replace(world, **draw(st.sampled_from([{}, {}, *engines(world)])))
    return world if kind == 0 else draw(speculating_or_swapping(world))


def engines(world: World) -> list[dict[str, Any]]:
    """Return what a world may have of several engines: one a stage, or two that step together."""
    together: dict[str, Any] = {"virtual_engines": 2, "loop": LockStep}
    wait = PromptWait(timeout_iters=3, batching_iters=1)
    return [{"virtual_engines": world.depth}, together, together | {"loop_options": {"wait": wait}}]


@st.composite
def speculating_or_swapping(draw: st.DrawFn, world: World) -> World:
    """The world, or the world where decodes yield several tokens, or pages go to the host."""
    rules = getattr(world.make_scheduler(), "rules", None)
    if draw(st.integers(0, 3)) == 0 and not getattr(rules, "unspeculative", ""):
        acceptance = draw(st.sampled_from([0.0, 0.7, 1.0])), draw(st.integers(1, 5))
        world = replace(world, decoding=Speculation(acceptance[:1] * acceptance[1]))
    if draw(st.integers(0, 2)) == 0:
        costs = SwapCost(world.costs, [1_000] * world.depth, 1e6, 0.0005)
        world = replace(world, costs=costs, kv=SwapCache)
    return world


@st.composite
def served_worlds(
    draw: st.DrawFn,
    arrivals_s: st.SearchStrategy[float],
    base_s: float,
    per_token_s: float,
    links: tuple[Link | None, ...] = (None,),
) -> World:
    """Worlds that a real driver serves too, of every policy.

    In a closed loop of clients, what a real engine loop asks next it asks before they answer.
    """
    world = drawn_world(
        draw, [16, 20, 400], costs_s=(base_s, per_token_s), link=draw(st.sampled_from(links))
    )
    lengths = draw(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1))
    times_s = sorted(draw(arrivals_s) for _ in lengths)
    asked = [Request(i, times_s[i], *pair) for i, pair in enumerate(lengths)]
    cap = draw(st.sampled_from([world.depth, None]))
    clients = draw(st.sampled_from([None, None, 3])) if world.loop is not EngineLoop else None
    return replace(world, requests=asked, max_in_flight=cap, concurrency=clients)


@st.composite
def pools(draw: st.DrawFn) -> World:
    """A pool of any policy, with pages from scarcely enough to plenty."""
    world = drawn_world(
        draw,
        [9, 16, 20, 32, 400],
        most_stages=3,
        costs_s=(draw(st.sampled_from([0.002, 0.005])), 0.0001),
        overheads=runtimes()[draw(st.sampled_from(sorted(runtimes())))].stages,
        link=draw(st.sampled_from(LINKS)),
        pipelined_chunks=draw(st.sampled_from([None, None, True, False])),
        prefix_cache=draw(st.integers(0, 2)) == 0,
    )
    return draw(speculating_or_swapping(world))


@st.composite
def pooled_worlds(draw: st.DrawFn) -> PooledWorld:
    """Systems of two or three pools, with links from ideal to slower than the prefill."""
    links = [TransferLink(), TransferLink(1e-6, 1e-5, 8.0), TransferLink(5e-4, 0.002, 8.0)]
    return PooledWorld(
        requests=draw(requests()),
        prefill=draw(pools()),
        decode=draw(pools()),
        mixed=draw(st.none() | pools()),
        link=draw(st.sampled_from(links)),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
        borrow_tokens=draw(st.sampled_from([0, 60, 2048])),
        concurrency=draw(st.sampled_from([None, None, None, 1, 4])),
    )


def assert_same(one: Any, other: Any) -> None:
    """Fail unless two results hold the same bytes, those of their pools and transfers too."""
    assert type(one) is type(other)
    for name in type(one).__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert left.tobytes() == right.tobytes(), name
        elif name in ("transfers", "disturbed") and None not in (left, right):
            assert_same(left, right)
        elif name == "pools":
            assert left.keys() == right.keys()
            for pool in left:
                assert_same(left[pool], right[pool])
        else:
            assert left == right, name
