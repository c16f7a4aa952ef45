"""The search finds the largest rate that passes, whatever the run, and knows when it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.study.rates import Probe, RateFound, next_rates, rate_found

SERVICE_S = 2.0
TOLERANCES = st.sampled_from([0.002, 0.02, 0.1, 0.5])
WIDTHS = st.integers(1, 4)
RATES = st.floats(1e-3, 1e3)


def ended(
    passes: Callable[[float], bool],
    start: float,
    tolerance: float,
    width: int = 1,
    requests: int = 10**9,
) -> tuple[RateFound, list[Probe]]:
    """Search with a run in which every request takes SERVICE_S seconds."""
    probes: list[Probe] = []
    while rates := next_rates(probes, start, tolerance, width):
        assert len(rates) <= width
        for rate in rates:
            failed = () if passes(rate) else ("p99_itl_ms",)
            probes.append(Probe(rate, failed, rate * SERVICE_S, requests))
    return rate_found(probes), probes


NOISE = st.tuples(st.integers(0, 2**32 - 1), st.just(0.0) | st.floats(0.01, 0.3))


@given(RATES, RATES, TOLERANCES, WIDTHS, NOISE)
def test_a_threshold_is_found_within_the_tolerance_and_its_noise(
    threshold: float, start: float, tolerance: float, width: int, seed_noise: tuple[int, float]
) -> None:
    threshold = max(threshold, 0.2)  # below it, a request has the system to itself
    seed, noise = seed_noise
    low, high = threshold * (1 - noise), threshold * (1 + noise)

    def passes(rate: float) -> bool:
        if low < rate < high:
            return hash((seed, rate)) % 2 == 0
        return rate <= low

    end, probes = ended(passes, start, tolerance, width)
    assert (end.status, end.failed) == ("found", ("p99_itl_ms",))
    assert passes(end.rate)
    assert not passes(end.fails_at)
    assert end.rate <= high
    assert end.fails_at > low
    # Rates have four digits: no nearer than a thousandth.
    assert end.fails_at <= end.rate * (1 + max(tolerance, 1e-3 + 1e-9))
    assert len({probe.rate for probe in probes}) == len(probes) < 200


@given(RATES, TOLERANCES, WIDTHS)
def test_what_fails_at_any_rate_is_given_up_where_requests_do_not_meet(
    start: float, tolerance: float, width: int
) -> None:
    end, probes = ended(lambda rate: False, start, tolerance, width)
    assert (end.status, end.rate, end.failed) == ("never", None, ("p99_itl_ms",))
    assert end.fails_at == min(probe.rate for probe in probes)
    assert end.fails_at * SERVICE_S < 0.1


@given(RATES, TOLERANCES, WIDTHS, st.integers(2, 10**5))
def test_what_passes_until_all_arrive_before_one_is_served_says_nothing(
    start: float, tolerance: float, width: int, requests: int
) -> None:
    end, probes = ended(lambda rate: True, start, tolerance, width, requests)
    assert (end.status, end.rate, end.fails_at) == ("too_short", None, None)
    assert max(probe.rate for probe in probes) * SERVICE_S >= requests
    assert end.enough_requests > requests


def test_a_rate_found_among_crowded_runs_is_not_given() -> None:
    short, _ = ended(lambda rate: rate <= 100, 1.0, 0.02, requests=150)
    long, _ = ended(lambda rate: rate <= 100, 1.0, 0.02, requests=250)
    assert (short.status, short.rate) == ("too_short", None)
    assert long.status == "found"
    assert long.enough_requests > 250  # so that a report can say that the run is short


@pytest.mark.parametrize(
    ("width", "rates"),
    [
        (1, [2.0, 4.0, 8.0, 5.657, 4.757, 5.188, 5.417]),
        (2, [2.0, 4.0, 8.0, 16.0, 5.04, 6.35, 5.444, 5.879, 5.171, 5.306]),
    ],
)
def test_the_probes_of_a_small_search(width: int, rates: list[float]) -> None:
    _, probes = ended(lambda rate: rate <= 5.2, 2.0, 0.05, width)
    assert [probe.rate for probe in probes] == rates
