"""Random small worlds for property tests: traces, deployments, policies, pools that force
preemption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from evenflow.batcher import Batcher
from evenflow.costs import AffineCost, SwapCost, estimates
from evenflow.decodes import Speculation
from evenflow.schedulers import create
from evenflow.types import MicroBatch, Prefix, Request
from sim import RUNTIMES, Link, World

MAX_MODEL_LEN = 256

POLICIES: list[tuple[str, dict[str, object]]] = [
    ("static", {"max_num_seqs": 4}),
    ("static", {"max_num_seqs": 4, "padded": True}),
    ("orca", {"max_num_seqs": 5}),
    ("vllm", {"max_num_seqs": 6}),
    ("vllm", {"max_num_batched_tokens": 150, "max_batch_rows": 3}),
    ("vllm_v1", {"max_num_batched_tokens": 48, "max_num_seqs": 40}),
    ("vllm_v1", {"max_num_batched_tokens": 64, "max_num_seqs": 5, "watermark": 0.05}),
    ("sarathi", {"token_budget": 48}),
    ("sarathi", {"token_budget": 64, "max_batch_rows": 3, "max_num_seqs": 7}),
    ("sarathi", {"token_budget": 32, "mode": "chunked_only"}),
    ("sarathi", {"token_budget": 64, "mode": "hybrid_only"}),
    ("token_throttling", {"max_prefill": 64, "min_prefill": 8}),
    ("token_throttling", {"max_prefill": 64, "kv_thresh": 0.0, "victim": "most_pages"}),
    ("token_throttling", {"max_prefill": 64, "use_wt": False, "max_batch_rows": 3}),
    ("token_throttling", {"max_prefill": 64, "use_ut": False, "reserve": "adaptive"}),
    ("token_throttling", {"max_prefill": 64, "coupled": True}),
    ("td_pipe", {"max_num_batched_tokens": 200}),
    ("td_pipe", {"max_num_batched_tokens": 64, "future_points": [8, 16, 32, 64]}),
    ("td_pipe", {"work_stealing": False, "kv_occupancy_ratio": 0.5, "max_batch_rows": 3}),
    ("td_pipe", {"request_finish_ratio": 0.3}),
    ("td_pipe", {"variant": "code", "max_batch_rows": 2}),
]


def send(engine: Batcher, now_s: float) -> MicroBatch:
    """Return the micro-batch that an engine sends now, which it must."""
    batch = engine.next(now_s)
    assert batch is not None
    return batch


def small_world(requests: list[Request], **changes: object) -> World:
    """Return a world of one stage, a second a micro-batch and pages for all, with some changes."""
    plain = World(
        requests,
        make_scheduler=lambda: create("sarathi", {}),
        costs=AffineCost(1.0, 0.0, 1),
        depth=1,
        total_pages=100,
        max_model_len=1000,
        max_in_flight=1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def require_idle(engine: Batcher) -> None:
    """Fail unless nothing is left in an engine: no request, no token, no page."""
    queues = engine.queues
    engine.pool.check_integrity([])
    assert not queues.live
    assert not queues.moving
    assert (len(queues.admitted), queues.running_decodes, queues.ready.num_sequences) == (0, 0, 0)
    assert (queues.waiting_tokens, len(queues.in_flight)) == (0, 0)
    assert (engine.kv.tokens, engine.view.expected_output_tokens) == (0, 0)


@st.composite
def requests(draw: st.DrawFn, *, max_requests: int = 12) -> list[Request]:
    """Requests in order of arrival; some arrive together, some never fit, some begin alike."""
    lengths = st.tuples(st.integers(1, 150), st.integers(1, 60))
    drawn = draw(st.lists(lengths, min_size=1, max_size=max_requests))
    gaps = draw(
        st.lists(
            st.sampled_from([0.0, 0.0, 0.003, 0.02, 0.5]),
            min_size=len(drawn),
            max_size=len(drawn),
        )
    )
    block_tokens = draw(st.sampled_from([8, 16, 24, 64]))
    arrival_s = 0.0
    found = []
    for index, ((prompt, output), gap_s) in enumerate(zip(drawn, gaps, strict=True)):
        arrival_s += gap_s
        prefix = draw(prefixes(prompt + output, block_tokens))
        predicted = draw(predictions(output))
        found.append(Request(index, arrival_s, prompt, output, predicted, prefix))
    return found


def predictions(output: int) -> st.SearchStrategy[int | None]:
    """What a predictor may say of an output: nothing, the truth, too little, too much."""
    return st.sampled_from([None, output, 1, 2 * output])


@st.composite
def prefixes(draw: st.DrawFn, tokens: int, block_tokens: int) -> Prefix | None:
    """A chain of blocks from a small alphabet, over a part of `tokens` tokens; or none."""
    blocks = draw(st.lists(st.integers(0, 1), max_size=8))
    known = min(tokens, len(blocks) * block_tokens)
    return Prefix(tuple(blocks), block_tokens, known) if blocks else None


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Worlds of every policy, with pools from scarcely enough to plenty."""
    name, params = draw(st.sampled_from(POLICIES))
    depth = draw(st.integers(1, 4))
    costs = AffineCost(0.005, 0.0001, depth)
    links = [None, Link(per_token_s=1e-5, latency_s=1e-4)]
    world = World(
        requests=draw(requests()),
        make_scheduler=lambda: create(
            name, params, max_model_len=MAX_MODEL_LEN, **estimates(costs)
        ),
        costs=costs,
        depth=depth,
        total_pages=draw(st.sampled_from([16, 17, 20, 32, 400])),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=draw(st.sampled_from([depth, depth, 1, None])),
        dispatch=draw(st.sampled_from(["stage0", "eager"])),
        pipelined_chunks=draw(st.sampled_from([None, None, True, False])),
        overheads=RUNTIMES[draw(st.sampled_from(sorted(RUNTIMES)))],
        link=draw(st.sampled_from(links)),
    )
    if draw(st.integers(0, 5)) == 0:
        world = replace(world, concurrency=draw(st.integers(1, 5)))
    if draw(st.integers(0, 5)) == 0:
        world = replace(world, virtual_engines=depth)
    if draw(st.integers(0, 3)) == 0:
        speculation = Speculation(draw(st.integers(1, 5)), draw(st.sampled_from([0.0, 0.7, 1.0])))
        world = replace(world, speculation=speculation)
    if draw(st.integers(0, 2)) == 0:
        world = replace(world, prefix_cache=True)
    if draw(st.integers(0, 2)) == 0:
        costs = SwapCost(world.costs, [1_000] * depth, 1e6, 0.0005)
        world = replace(world, costs=costs, swap=True)
    return world


@st.composite
def served_worlds(
    draw: st.DrawFn,
    arrivals_s: st.SearchStrategy[float],
    base_s: float,
    per_token_s: float,
    links: tuple[Link | None, ...] = (None,),
) -> World:
    """Worlds that a real driver serves too, of every policy."""
    name, params = draw(st.sampled_from(POLICIES))
    depth = draw(st.integers(1, 4))
    costs = AffineCost(base_s, per_token_s, depth)
    lengths = draw(st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1))
    times_s = sorted(draw(arrivals_s) for _ in lengths)
    return World(
        [
            Request(i, at_s, *pair)
            for i, (at_s, pair) in enumerate(zip(times_s, lengths, strict=True))
        ],
        lambda: create(name, params, max_model_len=MAX_MODEL_LEN, **estimates(costs)),
        costs,
        depth=depth,
        total_pages=draw(st.sampled_from([16, 20, 400])),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=draw(st.sampled_from([depth, None])),
        dispatch=draw(st.sampled_from(["stage0", "eager"])),
        concurrency=draw(st.sampled_from([None, None, 3])),
        link=draw(st.sampled_from(links)),
    )


def assert_same(one: Any, other: Any) -> None:
    """Fail unless two results hold the same bytes, those of their pools and transfers too."""
    assert type(one) is type(other)
    for name in type(one).__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert left.tobytes() == right.tobytes(), name
        elif name == "transfers" and left is not None:
            assert_same(left, right)
        elif name == "pools":
            assert left.keys() == right.keys()
            for pool in left:
                assert_same(left[pool], right[pool])
        else:
            assert left == right, name
