"""A policy's parameters: what a constructor declares is checked, whoever makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenflow.core.scheduling import View
from evenflow.errors import UsageError
from evenflow.keys import Count
from evenflow.schedulers import POLICIES, create, parameters, policy
from evenflow.schedulers.limits import Range, refuse
from evenflow.schedulers.sarathi import Sarathi
from evenflow.types import Plan


class Mine:
    """A user's policy: nothing of ours but the annotations."""

    def __init__(
        self,
        rows: Count = 1,
        names: list[str] | None = None,
        folder: Path | None = None,
        max_model_len: int = 9,
    ):
        self.rows, self.max_model_len = rows, max_model_len

    def schedule(self, view: View) -> Plan:
        return Plan(decodes=self.rows)


class Untyped(Mine):
    def __init__(self, rows: Unknown = 1):  # noqa: F821
        super().__init__()
        self.rows = rows


def test_a_policy_of_ours_checks_itself() -> None:
    automatic = {"token_budget": "auto", "tbt_slo_s": 0.5}
    made = create("sarathi", automatic, token_budget_for=lambda slo_s: int(slo_s * 100))
    assert made.budget == 50
    with pytest.raises(ValueError, match=r"^token_budget should be at least 1 or 'auto', not 0"):
        Sarathi(token_budget=0)
    with pytest.raises(ValueError, match=r"^mode should be 'hybrid', 'chunked_only' or"):
        Sarathi(mode="both")


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("static", {"max_model_len": 0}, "max_model_len should be at least 1, not 0"),
        ("orca", {"max_model_len": 0}, "max_model_len should be at least 1, not 0"),
        ("orca", {}, "max_model_len has to be given"),
        ("vllm", {"max_num_batched_tokens": 0, "max_model_len": 64}, "at least 1, not 0"),
        ("vllm", {}, "max_num_batched_tokens or max_model_len has to be given"),
        ("token_throttling", {"iterations": 0}, "iterations should be at least 1, not 0"),
        ("token_throttling", {"max_prefill": 0}, "max_prefill should be at least 1, not 0"),
        ("token_throttling", {"min_prefill": -1}, "min_prefill should be at least 0, not -1"),
        ("token_throttling", {"kv_thresh": 1.0}, "kv_thresh should be less than 1.0, not 1.0"),
        ("token_throttling", {"victim": "oldest"}, "victim should be 'latest' or 'most_pages', "),
        ("token_throttling", {"reserve": "none"}, "reserve should be 'threshold' or 'adaptive', "),
        ("token_throttling", {"max_batch_rows": 0}, "max_batch_rows should be at least 1, not 0"),
        *(
            (
                "token_throttling",
                {"variant": variant, key: value},
                f"variant {variant} has no parameter {key}$",
            )
            for variant, key, value in [
                ("code", "use_wt", False),
                ("code", "use_ut", False),
                ("code", "coupled", True),
                ("code", "victim", "most_pages"),
                ("code", "reserve", "adaptive"),
                ("code", "max_batch_rows", 8),
                ("paper", "reserve", "adaptive"),
            ]
        ),
        (
            "vllm_v1",
            {"max_num_batched_tokens": 8, "max_num_seqs": 9},
            "max_num_batched_tokens 8 is less than max_num_seqs 9",
        ),
        (
            "td_pipe",
            {"variant": "fast"},
            "variant should be 'paper', 'reading' or 'code', not \"fast\"",
        ),
        ("td_pipe", {"future_points": [64, 32]}, "future_points .* in rising order"),
        ("td_pipe", {"future_points": [32, 32]}, "future_points .* in rising order"),
        ("td_pipe", {"kv_occupancy_ratio": 1.5}, "ratio should be at most 1.0, not 1.5"),
        ("td_pipe", {"request_finish_ratio": 0.0}, "ratio should be greater than 0.0, not 0"),
        ("td_pipe", {"max_num_batched_tokens": 0}, "at least 1"),
        ("td_pipe", {"decode_s": 1}, "no parameter 'decode_s'"),
        ("td_pipe", {}, "needs prefill_s and decode_s"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    name: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=f"scheduler {name}: .*{message}|{name} has {message}"):
        create(name, params)


def test_a_class_is_made_with_parameters_and_facts() -> None:
    mine = create(Mine, {"rows": 3}, max_model_len=64, decode_s=None)
    assert isinstance(mine, Mine)
    assert (mine.rows, mine.max_model_len) == (3, 64)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"rows": 0}, "Mine: rows should be at least 1, not 0"),
        ({"rows": float("inf")}, "Mine: rows should be a whole number, not inf"),
        ({"names": 3}, "Mine: names should be a list, not 3"),
        ({"folder": 3}, "Mine: folder should be an instance of Path, not 3"),
        ({"row": 3}, "Mine has no parameter 'row'; did you mean \"rows\""),
    ],
)
def test_a_users_class_is_held_to_its_annotations(params: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=f"^scheduler {Mine.__module__}:{told}"):
        create(Mine, params)


def test_a_parameter_that_is_needed_is_named_with_its_type() -> None:
    class Needs(Mine):
        def __init__(self, rows: Count, page_tokens: int):
            super().__init__(rows)

    assert create(Needs, {"rows": 3}, page_tokens=16).rows == 3
    with pytest.raises(UsageError, match=r"Needs needs a value of 'rows', a whole number$"):
        create(Needs, {}, page_tokens=16)


def test_a_type_that_cannot_be_looked_up_is_left_to_the_constructor() -> None:
    untyped = create(Untyped, {"rows": "many"})
    assert isinstance(untyped, Untyped)
    assert untyped.rows == "many"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_takes_all_values_worth_trying_and_its_default_is_among_them(name: str) -> None:
    cls: Any = policy(name)
    assert cls.search_space
    for key, values in cls.search_space.items():
        default = parameters(cls)[key].default
        low, *_, high = values[:2] if isinstance(values, Range) else sorted(values)
        assert default is None or low <= default <= high
        if isinstance(values, Range):
            assert values.log == isinstance(low, int), "counts by their ratio, shares evenly"
        if isinstance(values, Range) and values.log:
            assert low.bit_count() == high.bit_count() == 1, "steps of equal ratios double"
        for each in (low, high) if isinstance(values, Range) else values:
            refuse(cls, {key: each})
