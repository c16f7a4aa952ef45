"""What makes a comparison unfair is said, once, and nothing where it is fair."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.study.fair import Side, doubts


def side(
    completed: int = 500, busy: float = 0.8, share: float = 0.0, commit: str = "a", **config: Any
) -> Side:
    provenance = {
        "config": config,
        "cost_source": {"extrapolated_share": share},
        "evenflow_version": "0.1.0",
        "git_commit": commit,
    }
    return Side({"completed": completed, "busy_share": busy, "overloaded": 0}, provenance)


def test_of_like_runs_nothing_is_said() -> None:
    assert doubts({"a": side(), "b": side()}) == []
    assert doubts({"alone": side(3, 0.99, 0.9)}) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (side(499), "not as many requests were completed: 500 with a, 499 with b"),
        (side(kv={"prefix_cache": True}), "prefix caches are on with b, and not with a"),
        (side(workload={"after": [{"trace": "t"}]}), "prefix caches are warm with b, and not"),
        (side(busy=0.97), "within 5 % of saturation with b (stages compute 97% of the time)"),
        (side(share=0.3), "30% of the time predicted with b rests on no measurement"),
        (side(commit="b"), "made by other versions of evenflow: 0.1.0 (commit a) and 0.1.0 (co"),
    ],
)
def test_what_is_not_fair_is_said(other: Side, told: str) -> None:
    (line,) = doubts({"a": side(), "b": other})
    assert line.startswith(told)


def test_the_cpu_time_of_two_versions_of_an_engine() -> None:
    runs = {"a": side(runtime="vllm-0.8"), "b": side(runtime="vllm-0.19")}
    assert doubts(runs) == ["the CPU time of other versions of an engine: vllm-0.19 and vllm-0.8"]
    assert doubts({"a": side(runtime="vllm-0.8"), "b": side(runtime="gllm")}) == []


def test_few_requests_tell_nothing_of_others() -> None:
    assert doubts({"a": side(49), "b": side(49)}) == [
        "49 requests are few: others may tell otherwise"
    ]
