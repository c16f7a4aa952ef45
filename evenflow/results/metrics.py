"""Latency and throughput of a run, with the names and definitions of vLLM's `bench serve`.

Pure functions of a RunResult. TTFT = first token - arrival; TPOT = (E2EL - TTFT) / (output tokens -
1), without requests of one output token; ITL pools every gap between successive tokens; E2EL = last
token - arrival. Only completed requests count; a metric of no requests is None. The scheduling
delay ("queue") is what Sarathi-Serve limits: the first micro-batch with a part of the prompt -
arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from evenflow.results.load import growth
from evenflow.results.run import Floats, Ints, RunResult, Tally
from evenflow.sums import plain_sum

PERCENTILES = (50, 90, 95, 99)

AT_ONCE = 1 << 18
"""Rows, or gaps between tokens, that are processed at a time."""

SAMPLED = 1 << 12
"""Size of a sample whose values divide all others into ranges, to find the value at a rank."""

Summary = dict[str, float | int | None]
"""Numbers by vLLM's keys; None: of no requests, or not known."""

Limit = Literal["ttft", "tpot", "e2el", "queue"]
"""A latency of a request that may have a limit for goodput."""


class RequestMetrics(NamedTuple):
    """Latencies of each request in seconds, in the order of the result; NaN where undefined."""

    ttft_s: Floats
    tpot_s: Floats
    e2el_s: Floats
    queue_s: Floats


def request_metrics(result: RunResult) -> RequestMetrics:
    """Return the latencies of each request."""
    ttft_s = result.first_token_s - result.arrival_s
    e2el_s = result.completion_s - result.arrival_s
    gaps = np.where(result.output_tokens > 1, result.output_tokens - 1, 1)
    tpot_s = np.where(result.output_tokens > 1, (e2el_s - ttft_s) / gaps, np.nan)
    return RequestMetrics(ttft_s, tpot_s, e2el_s, result.first_scheduled_s - result.arrival_s)


def meets(result: RunResult, limits_ms: Mapping[Limit, float]) -> NDArray[np.bool_]:
    """Return for each request whether it was completed within all limits, in ms, [n].

    A request of one output token meets any limit on TPOT.
    """
    latency = request_metrics(result)
    good = np.array([status == "completed" for status in result.status], dtype=bool)
    for name, limit_ms in limits_ms.items():
        if name not in get_args(Limit):
            raise ValueError(f"goodput limits are {', '.join(get_args(Limit))}, not {name!r}")
        good &= ~(getattr(latency, f"{name}_s") * 1e3 > limit_ms)
    return good


def summarize(result: RunResult, goodput_ms: Mapping[Limit, float] | None = None) -> Summary:
    """Return the summary of a run under vLLM's keys.

    `duration` runs from the first arrival to the last completion, in seconds; throughputs are per
    second of that. `steady_*` are the same over the steady window. It begins when a tenth of the
    requests has arrived, and ends when a tenth is left to arrive. Where all arrive at once, it is
    from a tenth to nine tenths of the duration. `offline_*` run from the start of the first prefill
    to the last token, as TD-Pipe measures. TD-Pipe's throughput is `offline_output_throughput`, of
    output tokens only. `goodput_ms` sets limits such as {"ttft": 500} on requests.
    `kv_waste_share`: the share of the token slots in held pages without a token, over all
    micro-batches. `prefix_hit_rate`: of the prompt tokens, those found in the prefix cache. What
    arrives and whether it is served: `load`.
    """
    done = np.array([status == "completed" for status in result.status], dtype=bool)
    latency, tally = request_metrics(result), result.tally
    start_s, duration = _duration(result)
    input_tokens = int(result.prompt_tokens[done].sum())
    output_tokens = int(result.output_tokens[done].sum())
    per_s = 1 / duration if duration > 0 else 0.0

    def rate(count: int) -> float | None:
        return count * per_s if done.any() else None

    summary: Summary = {
        "duration": duration if done.any() else None,
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": rate(int(done.sum())),
        "output_throughput": rate(output_tokens),
        "total_token_throughput": rate(input_tokens + output_tokens),
        **load(result),
        **_peaks(result, tally),
    }
    if goodput_ms:
        summary["request_goodput"] = rate(int(meets(result, goodput_ms).sum()))
    pooled = {
        "ttft": (latency.ttft_s[done], None),
        "tpot": (latency.tpot_s[done & (result.output_tokens > 1)], None),
        "itl": (result.gap_s, result.gap_count),
        "e2el": (latency.e2el_s[done], None),
        "queue": (latency.queue_s[done], None),
    }
    for name, (values_s, counts) in pooled.items():
        summary |= statistics(name, values_s, counts)
    summary |= _steady(result, tally, start_s, duration)
    summary |= _offline(result, tally, input_tokens, output_tokens)
    # Aborted requests may run on after the last completion.
    span_s = max(duration, float(tally.returned_s.max(initial=start_s)) - start_s)
    busy_per_s = float(tally.busy_s.sum()) * (1 / span_s) if span_s > 0 else 0.0
    return (
        summary
        | _of_pools(result, duration)
        | {
            "preemptions": int(result.preemptions.sum()),
            "num_micro_batches": len(tally.returned_s),
            "busy_share": busy_per_s / (result.depth * result.replicas),
        }
        | _kv_memory(result, tally, done, input_tokens)
    )


def load(result: RunResult) -> Summary:
    """Return the load that arrives per second, how much is served, and whether it is `overloaded`.

    Served are the requests done per second while requests arrive. Of the offered ones, those never
    completed, which are in no queue, do not count. Nor does the growth of the number in the system,
    `queue_growth_per_s`. `overloaded` is 1, or 0; None where the run is too short to tell. It is 1
    there where, on average, all arrive before one is done, which mostly waits for its first token.
    Empty where all requests arrive at once; where all that are completed do, only what is offered.
    """
    offered = _offered(result)
    known = np.flatnonzero(np.isfinite(result.completion_s))
    order = known[np.argsort(result.arrival_s[known], kind="stable")]
    arrived_s, left_s = result.arrival_s[order], result.completion_s[order]
    if not len(order) or arrived_s[0] == arrived_s[-1]:
        return dict(offered)
    grown = growth(arrived_s, left_s)
    accepted = offered["offered_requests_per_s"] * (len(order) / len(result.arrival_s))
    verdict = grown.overloaded
    if verdict is None:
        took_s = float((left_s - arrived_s).mean())
        waited_s = float((result.first_token_s[order] - arrived_s).mean())
        span_s = len(order) / offered["offered_requests_per_s"]
        verdict = (took_s >= span_s and 2 * waited_s >= took_s) or None
    return offered | {
        "served_requests_per_s": accepted * (1 - grown.share),
        "queue_growth_per_s": accepted * grown.share,
        "overloaded": None if verdict is None else int(verdict),
    }


def _offered(result: RunResult) -> dict[str, float | int]:
    """Return the requests and the tokens that arrive a second; nothing where all come at once."""
    span_s = float(np.ptp(result.arrival_s)) if len(result.arrival_s) else 0.0
    if span_s <= 0:
        return {}
    per_s = (len(result.arrival_s) - 1) / span_s
    tokens = result.prompt_tokens + result.output_tokens
    return {"offered_requests_per_s": per_s, "offered_tokens_per_s": per_s * float(tokens.mean())}


def _duration(result: RunResult) -> tuple[float, float]:
    if not np.isfinite(result.completion_s).any():
        return 0.0, 0.0
    start_s = float(result.arrival_s.min())
    return start_s, float(np.nanmax(result.completion_s)) - start_s


def _peaks(result: RunResult, tally: Tally) -> dict[str, float | int]:
    """The most output tokens, and the most requests in the system, in any one second.

    As vLLM counts them: seconds begin with the first request that is completed, and a request is in
    the system in every second that it touches.
    """
    done = np.isfinite(result.completion_s)
    if not done.any():
        return {"max_output_tokens_per_s": 0, "max_concurrent_requests": 0}
    start_s = result.arrival_s[done].min()
    came, went = (
        np.floor(times_s - start_s)
        for times_s in (result.arrival_s[done], result.completion_s[done])
    )
    tokens = _by_second(tally, start_s)
    # Most are there in a second in which one came: all that came by then, less what went before.
    present = np.searchsorted(np.sort(came), came, "right") - np.searchsorted(np.sort(went), came)
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(present.max()),
    }


def _by_second(tally: Tally, start_s: float) -> Floats:
    """Return how many tokens came in each second since `start_s` in which any did."""
    parts = []
    for block in blocks(len(tally.returned_s)):
        returned = np.floor(tally.returned_s[block] - start_s)
        counted = returned >= 0  # before are tokens of requests that were aborted
        parts.append(_summed(returned[counted], tally.sampled_rows[block][counted]))
    return _summed(*map(np.concatenate, zip(*parts, strict=True)))[1]


def _summed(keys: Floats, values: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the distinct keys, and the sum of the values of each."""
    found, place = np.unique(keys, return_inverse=True)
    return found, np.bincount(place, weights=values).astype(np.float64)


def statistics(name: str, values_s: Floats, counts: Ints | None = None) -> Summary:
    """Return mean, median, deviation and percentiles of a latency under vLLM's keys, in ms.

    `counts`: how often each of the values in seconds is there; None: once. All are None of no
    values.
    """
    if counts is None:
        counts = np.ones(len(values_s), dtype=np.int64)
    if not counts.any():
        kinds = ("mean", "median", "std", *(f"p{each}" for each in PERCENTILES))
        return dict.fromkeys((f"{kind}_{name}_ms" for kind in kinds), None)
    stops = np.cumsum(counts)
    count = int(stops[-1])
    mean = _sum_ms(values_s, stops, 0, count) / count
    variance = _sum_ms(values_s, stops, 0, count, around=mean) / count
    places = (count - 1) * (np.array(PERCENTILES) / 100)
    middle = [(count - 1) // 2, count // 2]
    ranks = np.concatenate([np.floor(places), np.ceil(places), middle])
    low, high, medians = np.split(1e3 * _at_ranks(values_s, counts, ranks), [len(places), -2])
    share = places - np.floor(places)
    points = _between(low, high, share)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": float(medians.mean()),
        f"std_{name}_ms": math.sqrt(variance),
        **{f"p{p}_{name}_ms": float(v) for p, v in zip(PERCENTILES, points, strict=True)},
    }


def quantiles(values: Floats, shares: Floats) -> Floats:
    """Return np.quantile's values without its import of numpy.ma (2 % of a run of one request)."""
    places = (len(values) - 1) * shares
    low, high = (np.sort(values)[edge(places).astype(int)] for edge in (np.floor, np.ceil))
    return _between(low, high, places - np.floor(places))


def _between(low: Floats, high: Floats, share: Floats) -> Floats:
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))


def _at_ranks(values: Floats, counts: Ints, ranks: Floats) -> Floats:
    """Return the values at these ranks, from 0, of all in order, each repeated its count.

    Only values between two neighbours of a sample, where the rank is, are sorted.
    """
    edges = np.sort(values[:: 1 + len(values) // SAMPLED])
    held = np.zeros(len(edges) + 1)
    for block in blocks(len(values)):
        between = np.searchsorted(edges, values[block])
        held += np.bincount(between, weights=counts[block], minlength=len(held))
    bounds, stops = np.concatenate([[-np.inf], edges, [np.inf]]), np.cumsum(held)
    found = np.empty(len(ranks))
    wanted = np.searchsorted(stops, ranks, "right")
    for place in set(wanted.tolist()):
        near = np.flatnonzero((values > bounds[place]) & (values <= bounds[place + 1]))
        near = near[np.argsort(values[near])]
        here = wanted == place
        upto = stops[place] - held[place] + np.cumsum(counts[near])
        found[here] = values[near[np.searchsorted(upto, ranks[here], "right")]]
    return found


def blocks(count: int, size: int = AT_ONCE) -> Iterator[slice]:
    """Yield slices of at most `size` that cover range(count)."""
    return (slice(start, start + size) for start in range(0, count, size))


def _sum_ms(
    values_s: Floats, stops: Ints, start: int, stop: int, around: float | None = None
) -> float:
    """Return the sum of [start, stop) of the values, each repeated up to its place in `stops`.

    In milliseconds; or of their squared differences from `around`. To the last digit as numpy sums
    the repeated values, which are never there all at once: it halves what is more than 128 in the
    same way.
    """
    count = stop - start
    if count > AT_ONCE:
        half = start + count // 2 - count // 2 % 8
        parts = (start, half), (half, stop)
        return plain_sum(_sum_ms(values_s, stops, *part, around) for part in parts)
    first, last = np.searchsorted(stops, [start, stop], "right")
    counts = np.diff(np.clip(stops[first : last + 1], start, stop), prepend=start).astype(np.int64)
    part = np.repeat(values_s[first : last + 1] * 1e3, counts)
    return float((part if around is None else (part - around) ** 2).sum())


def _steady(
    result: RunResult, tally: Tally, start_s: float, duration: float
) -> dict[str, float | int]:
    """Throughput between warm-up and drain; a prompt counts when its first token comes."""
    if duration <= 0:
        return {}
    first, last = quantiles(result.arrival_s, np.array([10, 90]) / 100)
    if last - first < 0.1 * duration:
        first, last = start_s + 0.1 * duration, start_s + 0.9 * duration
    inside = (tally.returned_s >= first) & (tally.returned_s < last)
    output = int(tally.sampled_rows.sum(where=inside))
    prefilled = (result.first_token_s >= first) & (result.first_token_s < last)
    total = output + int(result.prompt_tokens[prefilled].sum())
    span = float(last - first)
    return {
        "steady_start_s": float(first),
        "steady_stop_s": float(last),
        "steady_output_throughput": output / span,
        "steady_total_token_throughput": total / span,
    }


def _offline(
    result: RunResult, tally: Tally, input_tokens: int, output_tokens: int
) -> dict[str, float | int]:
    """Throughput of completed requests, from the start of the first prefill to the last token."""
    if not len(tally.start_s) or not np.isfinite(result.completion_s).any():
        return {}
    duration = float(np.nanmax(result.completion_s)) - float(tally.start_s[0])
    per_s = 1 / duration if duration > 0 else 0.0
    return {
        "offline_duration": duration,
        "offline_output_throughput": output_tokens * per_s,
        "offline_total_throughput": (input_tokens + output_tokens) * per_s,
    }


def _kv_memory(result: RunResult, tally: Tally, done: np.ndarray, input_tokens: int) -> Summary:
    found: Summary = {}
    count = len(tally.returned_s)
    if result.kv_tokens is not None and count:
        pages = count * (result.total_pages // result.engines)
        slots = (pages - int(tally.free_pages.sum())) * result.page_tokens
        found["kv_waste_share"] = 1 - int(tally.kv_tokens.sum()) / slots
    if result.cached_tokens is not None:
        cached_tokens = int(result.cached_tokens[done].sum())
        found["prefix_hit_rate"] = cached_tokens / input_tokens if input_tokens else None
    return found


def _of_pools(result: RunResult, duration: float) -> Summary:
    """Return what a system of pools adds to the summary; nothing for one that has none.

    `transfer_wait` is from the first token to the start of the transfer, `transfer` from start to
    end, both per transfer. `backpressure_s` is how long KV stayed on the prefill side with the link
    free, because no pool had room. `duration` in seconds.
    """
    moved = result.transfers
    if moved is None:
        return {}
    per_s = 1 / duration if duration > 0 else 0.0
    summary: Summary = {
        f"{name}_busy_share": float((part.end_s - part.start_s).sum()) * per_s / part.depth
        for name, part in result.pools.items()
    }
    waits_ms, travels_ms = (
        1e3 * (moved.start_s - moved.ready_s),
        1e3 * (moved.end_s - moved.start_s),
    )
    if moved.bytes is not None:
        summary["transferred_bytes"] = float(moved.bytes.sum())
    return summary | {
        "num_transfers": len(moved.tokens),
        "mean_transfer_wait_ms": _mean(waits_ms),
        "p99_transfer_wait_ms": float(np.percentile(waits_ms, 99)) if len(waits_ms) else None,
        "mean_transfer_ms": _mean(travels_ms),
        "transfer_link_busy_share": float(moved.link_busy_s.sum()) * per_s,
        "backpressure_s": float(moved.blocked_s.sum()),
    }


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None
