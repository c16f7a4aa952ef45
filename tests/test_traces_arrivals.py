"""Arrival processes against their definitions, and requests made from a trace."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from evenflow.errors import UsageError
from evenflow.types import Request
from traces import (
    ARRIVALS,
    Closed,
    Gamma,
    Offline,
    OnOff,
    Poisson,
    Replay,
    Trace,
    arrival_times,
    make_arrivals,
    make_requests,
    sample_trace,
)
from traces.samples import random_stream


def a_trace(arrival_s: list[float] | None) -> Trace:
    lengths = np.array([10, 20, 30]), np.array([1, 2, 3])
    times = None if arrival_s is None else np.array(arrival_s)
    return Trace("t", "vidur", times, *lengths, {}, None, None, 3)


def times(kind: str, n: int = 1000, **options: Any) -> Any:
    return arrival_times(kind, n, random_stream(0, "arrivals"), **options)


def test_replay_keeps_the_times_and_scale_divides_them() -> None:
    requests = make_requests(a_trace([0.0, 1.0, 4.0]), {"kind": "replay", "scale": 2})
    assert requests == [
        Request(0, 0.0, 10, 1),
        Request(1, 0.5, 20, 2),
        Request(2, 2.0, 30, 3),
    ]


def test_offline_and_closed_are_all_at_zero() -> None:
    for arrivals in (Offline(), Closed(4)):
        assert [r.arrival_s for r in make_requests(a_trace(None), arrivals)] == [0.0] * 3


def test_two_poisson_rates_see_one_pattern() -> None:
    np.testing.assert_allclose(times("poisson", rate=2) * 2, times("poisson", rate=7) * 7)


def test_gamma_of_burstiness_one_is_poisson_and_infinite_is_constant() -> None:
    np.testing.assert_allclose(times("gamma", rate=3, burstiness=1), times("poisson", rate=3))
    constant = times("gamma", n=4, rate=2, burstiness=math.inf)
    assert constant.tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_the_gaps_of_gamma_vary_by_one_over_root_burstiness(burstiness: float) -> None:
    gaps = np.diff(times("gamma", n=20_000, rate=3, burstiness=burstiness))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_rescale_puts_the_last_arrival_at_n_over_the_rate(kind: str) -> None:
    assert times(kind, rate=4, rescale=True)[-1] == pytest.approx(250)
    assert times(kind, rate=4)[-1] != pytest.approx(250)


def test_onoff_is_silent_when_off_and_has_the_mean_rate() -> None:
    arrivals = times("onoff", n=20_000, rate=5, on_s=2, off_s=8)
    assert np.all(np.mod(arrivals, 10) < 2)
    assert 20_000 / arrivals[-1] == pytest.approx(5, rel=0.05)


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    processes: dict[str, dict[str, Any]] = {
        "poisson": {"rate": 2},
        "gamma": {"rate": 2, "burstiness": 0.3},
        "onoff": {"rate": 2, "on_s": 1, "off_s": 1},
    }
    for kind, options in processes.items():
        assert times(kind, 50, **options).tolist() == times(kind, 100, **options)[:50].tolist()


def test_rate_and_seed_of_the_arrivals_leave_the_lengths_alone() -> None:
    trace = sample_trace("azure-conv-sample", 200, seed=1)
    runs = [
        make_requests(trace, Poisson(rate), seed=seed) for rate, seed in ((1, 0), (9, 0), (1, 5))
    ]
    lengths = [[(r.prompt_tokens, r.output_tokens) for r in run] for run in runs]
    assert lengths[0] == lengths[1] == lengths[2]
    assert runs[0][7].arrival_s != runs[2][7].arrival_s


def test_a_sample_is_drawn_on_and_a_file_is_not() -> None:
    short, long = (sample_trace("azure-conv-sample", n, seed=3) for n in (10, 40))
    assert make_requests(short, Replay(), 40) == make_requests(long, Replay(), 40)
    with pytest.raises(UsageError, match="4 requests asked of trace t, which has 3"):
        make_requests(a_trace([0.0, 1.0, 2.0]), Replay(), 4)


def test_requests_are_plain_numbers() -> None:
    request = make_requests(sample_trace("sharegpt-sample", 3), Poisson(2), 1)[0]
    assert [type(v) for v in (request.arrival_s, request.prompt_tokens)] == [float, int]
    json.dumps([request.request_id, request.arrival_s, request.output_tokens])


def test_none_counts_as_not_given() -> None:
    assert make_arrivals("replay", scale=None, rate=None) == Replay()
    assert make_arrivals("gamma", rate=2.0, burstiness=None) == Gamma(2.0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"kind": "poison"}, 'arrivals kind "poison" is unknown; did you mean "poisson"'),
        ({}, "arrivals kind"),
        ({"kind": "poisson"}, "poisson arrivals: no options; expected rate, rescale"),
        ({"kind": "poisson", "rat": 2}, 'option "rat" is unknown; did you mean "rate"'),
        ({"kind": "offline", "rate": 2}, 'offline arrivals: option "rate" is unknown; it has none'),
        ({"kind": "poisson", "rate": "2"}, "poisson arrivals: {'rate': '2'}; expected"),
        ({"kind": "poisson", "rate": 0}, "poisson arrivals: rate is 0; expected a number above 0"),
        ({"kind": "poisson", "rate": math.nan}, "rate is nan; expected a number above 0"),
        ({"kind": "gamma", "rate": 1, "burstiness": 0}, "burstiness is 0; expected a number above"),
        ({"kind": "onoff", "rate": 1, "on_s": 1, "off_s": -1}, "onoff arrivals: off_s is -1"),
        ({"kind": "replay", "scale": math.inf}, "replay arrivals: scale is inf"),
        ({"kind": "closed", "concurrency": 0}, "concurrency is 0; expected at least 1"),
        ({"kind": "replay"}, "the trace has no arrival times to replay; give arrivals of another"),
    ],
)
def test_bad_arrivals(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_requests(a_trace(None), spec)
    assert says in str(caught.value)


def test_bad_numbers_of_requests() -> None:
    with pytest.raises(UsageError, match="0 requests asked; expected at least 1"):
        make_requests(a_trace(None), Offline(), 0)
    with pytest.raises(UsageError, match="5 requests asked of a trace with 2 arrivals to replay"):
        Replay().times(5, random_stream(0, "x"), np.zeros(2))


def test_the_kinds_of_the_configuration() -> None:
    assert set(ARRIVALS) == {"replay", "poisson", "gamma", "onoff", "offline", "closed"}
    assert make_arrivals("onoff", rate=1, on_s=2, off_s=3) == OnOff(1, 2, 3)
