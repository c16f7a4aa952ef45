"""Limits are read, checked and applied; attainment and any percentile follow from a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenflow.config.build import load_workload
from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.errors import UsageError
from evenflow.results.metrics import meets, request_metrics
from evenflow.results.outcome import Outcome
from evenflow.study.runs import Job, run_job
from evenflow.study.slo import Condition, check_slo, parse_slo, request_limits, service_levels
from tests.study.test_points import RUN


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    keys = ("workload.requests=200", "workload.arrivals={kind: poisson, rate: 30}")
    config = configured(Document("a.yaml", RUN, {}), keys)
    return run_job(Job(config, load_workload(config, Path()), Path()))


def test_conditions_are_at_most_or_at_least() -> None:
    most, least = parse_slo(["p99_itl_ms=200", "attainment = 0.9"])
    assert (str(most), str(least)) == ("p99_itl_ms <= 200", "attainment >= 0.9")
    assert most.holds({"p99_itl_ms": 200.0})
    assert not most.holds({"p99_itl_ms": 200.1})
    assert least.holds({"attainment": 0.9})
    assert not least.holds({"attainment": 0.89})
    assert not least.holds({"attainment": float("nan")})
    assert not least.holds({})
    assert parse_slo([], 2.0) == [Condition("median_queue_ms", 2000.0)]


REFUSED = """\
p99_itl_ms | should be METRIC=LIMIT
=5 | should be METRIC=LIMIT
p99_itl_ms= | should be METRIC=LIMIT
p99_itl_ms=0 | should be METRIC=LIMIT
p99_itl_ms=-1 | should be METRIC=LIMIT
p99_itl_ms=nan | should be METRIC=LIMIT
a=x | should be METRIC=LIMIT
a=1 a=2 | --slo a: limited twice
 | no limit is given
"""


@pytest.mark.parametrize(("given", "told"), [row.split(" | ") for row in REFUSED.splitlines()])
def test_what_is_no_limit_is_refused(given: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_slo(given.split())


def test_a_queue_has_one_limit_above_0_and_an_unknown_metric_its_nearest(outcome: Outcome) -> None:
    with pytest.raises(UsageError, match="limited twice"):
        parse_slo(["median_queue_ms=5"], 2.0)
    with pytest.raises(UsageError, match="above 0"):
        parse_slo([], -1.0)
    config = configured(Document("a.yaml", RUN, {}))
    with pytest.raises(UsageError, match=r'--slo p99_it1_ms: .* did you mean "p99_itl_ms"'):
        check_slo([Condition("p99_it1_ms", 1)], outcome, config)


def test_the_scheduling_delay_is_from_arrival_to_the_first_micro_batch(outcome: Outcome) -> None:
    result = outcome.result
    delay_s = request_metrics(result).queue_s
    assert (delay_s >= 0).all()
    assert np.isin(result.first_scheduled_s, result.scheduled_s).all()
    assert (result.first_scheduled_s < result.first_token_s).all()
    assert outcome.summary["median_queue_ms"] == pytest.approx(1e3 * np.median(delay_s))


def test_any_percentile_and_attainment(outcome: Outcome) -> None:
    slo = parse_slo(["p97.5_ttft_ms=300", "p20_itl_ms=15", "mean_ttft_ms=250"], 1.0)
    limits = request_limits(slo, None)
    assert limits == (("itl", 15.0), ("queue", 1000.0), ("ttft", 250.0))
    values = service_levels(outcome, metrics=[each.metric for each in slo], limits=limits)
    result = outcome.result
    ttft_ms = 1e3 * request_metrics(result).ttft_s
    assert values["p97.5_ttft_ms"] == pytest.approx(np.percentile(ttft_ms, 97.5))
    gaps_s = np.repeat(result.gap_s, result.gap_count)
    assert values["p20_itl_ms"] == pytest.approx(1e3 * np.percentile(gaps_s, 20))
    assert values["gap_attainment"] == pytest.approx((gaps_s <= 0.015).mean())
    good = meets(result, {"queue": 1000.0, "ttft": 250.0})
    assert 0 < values["attainment"] == good.mean() < 1
    assert values["request_goodput"] == good.sum() / values["duration"]
    with pytest.raises(UsageError, match="from 0 to 100"):
        service_levels(outcome, metrics=["p101_ttft_ms"], limits=())


def test_the_limits_of_the_run_come_before_those_of_the_slo() -> None:
    slo = parse_slo(["p99_ttft_ms=300", "p99_itl_ms=15"])
    assert request_limits(slo, {"e2el": 5000.0}) == (("e2el", 5000.0), ("itl", 15.0))
