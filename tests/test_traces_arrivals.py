"""Arrival processes against their definitions, and requests made from a trace."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from evenflow.types import Request
from experiments.run_file.workload import WorkloadConfig
from experiments.run_file.yaml_file import Document, checked
from tests.command_line import refused
from traces import (
    Arrivals,
    Closed,
    Gamma,
    Offline,
    OnOff,
    Poisson,
    Replay,
    Trace,
    make_requests,
    sample_trace,
)


def a_trace(arrival_s: list[float] | None) -> Trace:
    lengths = np.array([10, 20, 30]), np.array([1, 2, 3])
    times = None if arrival_s is None else np.array(arrival_s)
    return Trace("t", "vidur", times, *lengths, {}, None, None, 3)


def times(arrivals: Arrivals, n: int = 1000) -> Any:
    return arrivals.times(n, 0, None)


def test_replay_keeps_the_times_and_scale_divides_them() -> None:
    requests = make_requests(a_trace([0.0, 1.0, 4.0]), Replay(scale=2))
    assert requests == [Request(0, 0.0, 10, 1), Request(1, 0.5, 20, 2), Request(2, 2.0, 30, 3)]


def test_a_scale_alone_is_that_of_a_replay() -> None:
    given = {"trace": "azure-conv-sample", "arrivals": {"scale": 2}}
    assert checked(WorkloadConfig, Document("w", given, {})).arrivals == Replay(scale=2)


def test_offline_and_closed_are_all_at_zero() -> None:
    for arrivals in (Offline(), Closed(concurrency=4)):
        assert [r.arrival_s for r in make_requests(a_trace(None), arrivals)] == [0.0] * 3


def test_two_poisson_rates_see_one_pattern_which_gamma_has_at_burstiness_one() -> None:
    np.testing.assert_allclose(times(Poisson(rate=2)) * 2, times(Poisson(rate=7)) * 7)
    np.testing.assert_allclose(times(Gamma(rate=3)), times(Poisson(rate=3)))
    constant = times(Gamma(rate=2, burstiness=math.inf), 4)
    assert constant.tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_the_gaps_of_gamma_vary_by_one_over_root_burstiness(burstiness: float) -> None:
    gaps = np.diff(times(Gamma(rate=3, burstiness=burstiness), 20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize("kind", [Poisson, Gamma])
def test_rescale_puts_the_last_arrival_at_n_over_the_rate(kind: type[Poisson | Gamma]) -> None:
    assert times(kind(rate=4, rescale=True))[-1] == pytest.approx(250)
    assert times(kind(rate=4))[-1] != pytest.approx(250)


def test_onoff_is_silent_when_off_and_has_the_mean_rate() -> None:
    arrivals = times(OnOff(rate=5, on_s=2, off_s=8), 20_000)
    assert np.all(np.mod(arrivals, 10) < 2)
    assert 20_000 / arrivals[-1] == pytest.approx(5, rel=0.05)


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    processes = Poisson(rate=2), Gamma(rate=2, burstiness=0.3), OnOff(rate=2, on_s=1, off_s=1)
    for arrivals in processes:
        assert times(arrivals, 50).tolist() == times(arrivals, 100)[:50].tolist()


def test_rate_and_seed_of_the_arrivals_leave_the_lengths_alone() -> None:
    trace = sample_trace("azure-conv-sample", 200, seed=1)
    rates_and_seeds = (1, 0), (9, 0), (1, 5)
    runs = [make_requests(trace, Poisson(rate=rate), seed=seed) for rate, seed in rates_and_seeds]
    lengths = [[(r.prompt_tokens, r.output_tokens) for r in run] for run in runs]
    assert lengths[0] == lengths[1] == lengths[2]
    assert runs[0][7].arrival_s != runs[2][7].arrival_s


def test_a_sample_is_drawn_on() -> None:
    short, long = (sample_trace("azure-conv-sample", n, seed=3) for n in (10, 40))
    assert make_requests(short, Replay(), 40) == make_requests(long, Replay(), 40)


def test_requests_are_plain_numbers() -> None:
    request = make_requests(sample_trace("sharegpt-sample", 3), Poisson(rate=2), 1)[0]
    assert [type(v) for v in (request.arrival_s, request.prompt_tokens)] == [float, int]
    json.dumps([request.request_id, request.arrival_s, request.output_tokens])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "poison"}, 'arrivals.kind: unknown "poison"; did you mean "poisson"'),
        ({}, 'the key "arrivals.kind" is missing'),
        ("poisson", 'the key "arrivals.rate" is missing'),
        ({"kind": "poisson", "rat": 2}, 'unknown key "arrivals.rat"; did you mean "rate"'),
        ({"kind": "offline", "rate": 2}, 'unknown key "arrivals.rate"; known: kind'),
        ({"kind": "poisson", "rate": "2"}, 'arrivals.rate: should be a number, not "2"'),
        ({"kind": "poisson", "rate": 0}, "arrivals.rate: should be greater than 0.0, not 0"),
        ({"kind": "poisson", "rate": math.nan}, "should be a finite number, not nan"),
        ({"kind": "gamma", "rate": 1, "burstiness": 0}, "arrivals.burstiness: should be greater"),
        ({"kind": "onoff", "rate": 1, "on_s": 1, "off_s": -1}, "arrivals.off_s: should be greater"),
        ({"kind": "replay", "scale": math.inf}, "arrivals.scale: should be a finite number"),
        ({"kind": "closed", "concurrency": 0}, "arrivals.concurrency: should be at least 1, not 0"),
    ],
)
def test_bad_arrivals(keys: Any, says: str) -> None:
    with refused(says):
        checked(WorkloadConfig, Document("RUN.yaml", {"trace": "t", "arrivals": keys}, {}))


def test_requests_that_a_trace_does_not_have() -> None:
    with refused("has no arrival times to replay; give arrivals of another"):
        make_requests(a_trace(None), Replay())
    with refused("4 requests asked of trace t, which has 3"):
        make_requests(a_trace([0.0, 1.0, 2.0]), Replay(), 4)
    with refused("0 requests asked; expected at least 1"):
        make_requests(a_trace(None), Offline(), 0)
    with refused("5 requests asked of a trace with 2 arrivals to replay"):
        Replay().times(5, 0, np.zeros(2))
