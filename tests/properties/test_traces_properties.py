"""Invariants of arrivals, samples and readers, over random rates, sizes and rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenflow.traces import (
    SAMPLE_NAMES,
    Arrivals,
    Closed,
    Gamma,
    Offline,
    Poisson,
    load_trace,
    make_requests,
    sample_trace,
)

rates = st.floats(0.01, 1000)
seeds = st.integers(0, 2**32)
processes: st.SearchStrategy[Arrivals] = st.one_of(
    st.builds(Poisson, rate=rates, rescale=st.booleans()),
    st.builds(Gamma, rate=rates, burstiness=st.floats(0.05, 20), rescale=st.booleans()),
    st.just(Offline()),
    st.builds(Closed, concurrency=st.integers(1, 99)),
)


@given(processes, st.integers(1, 300), seeds)
def test_arrivals_are_sorted_finite_and_as_many_as_asked(
    arrivals: Arrivals, n: int, seed: int
) -> None:
    times = arrivals.times(n, seed, None)
    again = arrivals.times(n, seed, None)
    assert times.shape == (n,)
    assert np.all(np.isfinite(times))
    assert times[0] >= 0
    assert np.all(np.diff(times) >= 0)
    assert times.tolist() == again.tolist()


@given(rates, st.floats(0.1, 10), seeds)
def test_the_mean_rate_is_within_the_bounds_of_the_central_limit(
    rate: float, burstiness: float, seed: int
) -> None:
    n = 4000
    span = Gamma(rate=rate, burstiness=burstiness).times(n, seed, None)[-1]
    spread = (n / burstiness) ** 0.5 / rate  # standard deviation of the sum of n gamma gaps
    assert abs(span - n / rate) < 6 * spread


@given(st.sampled_from(SAMPLE_NAMES), st.integers(1, 200), st.integers(0, 200), seeds)
def test_samples_extend_and_make_valid_requests(name: str, n: int, more: int, seed: int) -> None:
    short, long = sample_trace(name, n, seed), sample_trace(name, n + more, seed)
    assert short.prompt_tokens.tolist() == long.prompt_tokens[:n].tolist()
    requests = make_requests(short, Poisson(rate=1.0), n + more, seed)
    assert [r.request_id for r in requests] == list(range(n + more))
    assert [r.output_tokens for r in requests] == long.output_tokens.tolist()
    assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in requests)
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)


rows = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(0, 5000), st.integers(0, 5000)), min_size=1
)


times = st.lists(st.integers(0, 10**12).map(lambda time_ms: time_ms / 1e3), min_size=1)


@given(times, st.randoms(use_true_random=False))
def test_rows_in_any_order_arrive_at_the_same_times(at_s: list[float], order: Random) -> None:
    def arrivals(of: list[float]) -> list[float]:
        table = ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{s!r},1,1" for s in of)]
        path = Path(folder) / "t.csv"
        path.write_text("\n".join(table) + "\n")
        times_s = load_trace(path).arrival_s
        assert times_s is not None
        return times_s.tolist()

    with tempfile.TemporaryDirectory() as folder:
        in_order = arrivals(sorted(at_s))
        order.shuffle(at_s)
        assert arrivals(at_s) == in_order


@given(rows)
def test_every_row_is_kept_or_counted(table: list[tuple[float, int, int]]) -> None:
    kept = [row for row in table if row[1] and row[2]]
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", "0,1,1"]
    lines += [",".join(map(repr, row)) for row in table]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.csv"
        path.write_text("\n".join(lines))
        trace = load_trace(path)
    assert trace.rows_read == len(table) + 1 == len(trace) + sum(trace.dropped.values())
    assert trace.prompt_tokens.sum() == 1 + sum(row[1] for row in kept)
    assert trace.arrival_s.tolist() == sorted([0.0, *(row[0] for row in kept)])
