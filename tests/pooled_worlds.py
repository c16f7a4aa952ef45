"""Random small systems of pools for property tests: policies, links, pools that force waiting."""

from __future__ import annotations

from hypothesis import strategies as st

from evenflow.costs import AffineCost, estimates
from evenflow.decodes import Speculation
from evenflow.schedulers import create
from sim import RUNTIMES, Link, PooledWorld, TransferLink, World
from tests.worlds import MAX_MODEL_LEN, POLICIES, requests


@st.composite
def pools(draw: st.DrawFn) -> World:
    """A pool of any policy, with pages from scarcely enough to plenty."""
    name, params = draw(st.sampled_from(POLICIES))
    depth = draw(st.integers(1, 3))
    costs = AffineCost(draw(st.sampled_from([0.002, 0.005])), 0.0001, depth)
    return World(
        requests=(),
        make_scheduler=lambda: create(
            name, params, max_model_len=MAX_MODEL_LEN, **estimates(costs)
        ),
        costs=costs,
        depth=depth,
        total_pages=draw(st.sampled_from([9, 16, 20, 32, 400])),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight=draw(st.sampled_from([depth, depth, 1, None])),
        dispatch=draw(st.sampled_from(["stage0", "eager"])),
        overheads=RUNTIMES[draw(st.sampled_from(sorted(RUNTIMES)))],
        link=draw(st.sampled_from([None, Link(per_token_s=1e-5, latency_s=1e-4)])),
        speculation=draw(st.sampled_from([None, None, Speculation(3, 0.7)])),
    )


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
