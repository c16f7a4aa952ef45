"""What holds for every policy: its defaults, and how it is found."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evenflow.core.batcher import Batcher
from evenflow.core.kv import PagePool
from evenflow.core.replay import decision_of
from evenflow.core.scheduling import View
from evenflow.costs import AffineCost, estimates
from evenflow.engines.padding import PaddedRules
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError
from evenflow.schedulers import GIVEN, OLD_ATTRIBUTES, catalogue, create, policy
from evenflow.sim import simulate
from evenflow.study.runs import GivenPolicy
from evenflow.types import MicroBatch, Plan, Prefill, Prompt, Request, Rules
from tests.places import ROOT
from tests.worlds import engine_of, small_world

FACTS = {"max_model_len": 4096, **estimates(AffineCost(0.005, 0.0001, 4))}
DEFAULTS = {
    "static": "max_num_seqs=128 max_model_len=None max_batch_rows=None padded=False",
    "orca": "max_num_seqs=128 max_model_len=None max_batch_rows=None",
    "vllm": "max_num_batched_tokens=None max_num_seqs=256 watermark=0.01 max_batch_rows=None "
    "max_model_len=None",
    "vllm_v1": "max_num_batched_tokens=2048 max_num_seqs=256 watermark=0.0 async_scheduling=None "
    "scheduling_policy='fcfs' prefill_schedule_interval=1 long_prefill_token_threshold=0 "
    "enable_chunked_prefill=True scheduler_reserve_full_isl=True version='0.33'",
    "vllm_balanced": "max_num_batched_tokens=2048 max_num_seqs=256 watermark=0.0 "
    "async_scheduling=None scheduling_policy='fcfs' prefill_schedule_interval=1 "
    "long_prefill_token_threshold=0 enable_chunked_prefill=True scheduler_reserve_full_isl=True "
    "version='0.33' share='seats'",
    "sarathi": "token_budget=512 max_num_seqs=256 watermark=0.01 mode='hybrid' "
    "max_batch_rows=None tbt_slo_s=None",
    "sglang": "chunked_prefill_size=8192 max_prefill_tokens=16384 prefill_max_requests=None "
    "max_running_requests=None pp_max_micro_batch_size=None schedule_conservativeness=1.0 "
    "schedule_policy='fcfs' "
    "mixed_chunk=False dynamic_chunking=False prefill_decode_interval=0 "
    "scheduler_recv_interval=1 overlap=None disaggregation_mode=None "
    "num_reserved_decode_tokens=512 version='0.5.23' "
    "max_model_len=None",
    "trtllm": "max_batch_size=2048 max_num_tokens=8192 "
    "capacity_scheduler_policy='GUARANTEED_NO_EVICT' enable_chunked_prefill=False "
    "context_chunking_policy='FIRST_COME_FIRST_SERVED' chunk_unit=None "
    "batch_wait_timeout_iters=0 batch_wait_max_tokens_ratio=0.0 "
    "disable_overlap_scheduler=False version='1.2'",
    "token_throttling": "iterations=8 max_prefill=2048 min_prefill=32 kv_thresh=0.05 use_wt=True "
    "use_ut=True coupled=False victim='latest' reserve='threshold' max_batch_rows=None "
    "variant='reading'",
    "td_pipe": "predictor='oracle' future_points=None work_stealing=True kv_occupancy_ratio=None "
    "request_finish_ratio=None variant='paper' max_num_batched_tokens=2048 max_batch_rows=None",
}
"""What each policy is made with unless it is told, in the order in which it is listed."""


def test_every_result_with_defaults_depends_on_them() -> None:
    listed = {
        entry.name: " ".join(f"{key}={default!r}" for key, default in entry.parameters)
        for entry in catalogue()
    }
    assert listed == DEFAULTS


def test_every_policy_says_in_a_line_what_it_does_and_where_it_is_from() -> None:
    for entry in catalogue():
        assert entry.summary.endswith(".")
        assert "\n" not in entry.summary + entry.source
        assert entry.source
        assert not entry.source.startswith("Source")
    static = next(entry for entry in catalogue() if entry.name == "static")
    assert static.summary == "Decode a batch until its last request ends, then admit the next one."
    assert static.source.startswith("FasterTransformer, as described by Orca (OSDI'22, section 2)")
    assert static.source.endswith('section 2.4, "decode-prioritising")')


class NoPolicy:
    """A class without `schedule`."""


def schedule(view: View) -> Plan:
    return Plan()


schedule.schedule = schedule


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sarathy", "unknown scheduler 'sarathy'; did you mean \"sarathi\"? known: distserve, "),
        ("zzz", "unknown scheduler 'zzz'; known: distserve, orca, sarathi"),
        (f"{__name__}:NoPolicy", "has no class 'NoPolicy' with a method schedule(view)"),
        (f"{__name__}:schedule", "has no class 'schedule' with a method schedule(view)"),
        (f"{__name__}:Nobody", "has no class 'Nobody' with a method schedule(view)"),
        ("exits:Policy", "cannot import 'exits' (SystemExit: 3)"),
    ],
)
def test_what_is_no_policy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as error:
        policy(name)
    assert told in str(error.value)


@pytest.mark.parametrize("name", DEFAULTS)
def test_two_policies_of_the_same_settings_are_two(name: str) -> None:
    """Each has the state of its own run, and a set holds both."""
    assert len({create(name, {}, **FACTS), create(name, {}, **FACTS)}) == 2


def test_a_policy_without_a_constructor_takes_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = type("Plain", (), {"schedule": schedule, "__module__": "mine"})
    monkeypatch.setitem(sys.modules, "mine", module := ModuleType("mine"))
    module.Plain = plain
    assert isinstance(create("mine:Plain", {}, **FACTS), plain)
    with pytest.raises(UsageError, match="mine:Plain has no parameter 'rows'; it has none"):
        create("mine:Plain", {"rows": 3})


def test_a_batch_has_a_seat_where_there_are_fewer_than_stages() -> None:
    """Two stages of a second each: a prompt and a decode, and then the other request's."""
    asked = [Request(number, 0.0, 8, 2) for number in range(2)]
    result = simulate(small_world(asked, "static", {"max_num_seqs": 1}, depth=2))
    assert result.completion_s.tolist() == [4.0, 8.0]


def micro_batches(serving: Batcher, requests: list[Request]) -> Iterator[tuple[int, int]]:
    """Serve all, one more before each question; return the prompts and decodes of micro-batches."""
    sent: deque[MicroBatch] = deque()
    while requests or serving.queues.live:
        if requests:
            serving.add(requests.pop(0))
        batch = serving.next(0.0)
        if batch is None:
            serving.complete(sent.popleft(), 0.0)
        else:
            sent.append(batch)
            chunks, decodes = decision_of(batch)
            yield len(chunks), len(decodes)


@pytest.mark.parametrize(
    ("name", "params", "mixes"),
    [
        ("static", {}, False),
        ("orca", {}, True),
        ("vllm", {}, False),
        ("sarathi", {}, True),
        ("sarathi", {"mode": "hybrid_only"}, True),
        ("sarathi", {"mode": "chunked_only"}, False),
        ("token_throttling", {}, True),
        ("token_throttling", {"variant": "paper"}, True),
        ("token_throttling", {"coupled": True}, True),
        ("td_pipe", {}, False),
    ],
)
def test_a_micro_batch_has_at_most_max_batch_rows_prompts_and_decodes(
    name: str, params: dict[str, object], mixes: bool
) -> None:
    """Those that mix fill micro-batches up with both, the others never do."""
    policy = create(name, {"max_batch_rows": 3, **params}, **FACTS)
    serving = engine_of(policy, 4000, max_in_flight=4)
    requests = [Request(number, 0.0, 20, 4 + number % 3, 5) for number in range(12)]
    sent = list(micro_batches(serving, requests))
    assert max(prompts + decodes for prompts, decodes in sent) == 3
    mixed = {prompts + decodes for prompts, decodes in sent if prompts and decodes}
    assert (max(mixed) == 3) if mixes else not mixed


@pytest.mark.parametrize(
    ("name", "params", "lengths", "pages", "served"),
    [
        ("static", {"max_model_len": 64}, (40, 24), 4, True),
        ("static", {"max_model_len": 64}, (40, 25), 9, False),
        ("orca", {"max_model_len": 64}, (1, 1), 4, True),
        ("orca", {"max_model_len": 65}, (1, 1), 4, False),
        ("vllm", {"max_num_batched_tokens": 40}, (40, 99), 99, True),
        ("vllm", {"max_num_batched_tokens": 40}, (41, 1), 99, False),
        ("vllm_v1", {}, (4000, 99), 99, True),
        ("vllm_v1", {"enable_chunked_prefill": False}, (2000, 48), 999, True),
        ("vllm_v1", {"enable_chunked_prefill": False}, (2000, 49), 999, False),
        ("sglang", {}, (32, 15), 4, True),
        ("sglang", {}, (32, 16), 4, False),
    ],
)
def test_what_a_policy_can_just_serve_and_what_it_refuses(
    name: str, params: dict[str, object], lengths: tuple[int, int], pages: int, served: bool
) -> None:
    made: Any = create(name, params, **{} if "max_model_len" in params else FACTS)
    assert (made.refuse(*lengths, PagePool(pages)) is None) == served


def test_the_page_on_policies_names_all_that_a_policy_sees_and_says() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    page = re.sub("```.*?```", "", page, flags=re.DOTALL)
    members = [name for kind in (View, Prompt) for name in dir(kind) if not name.startswith("_")]
    told = {*re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page)))}
    assert set(members) - {"begins_with", "exact"} <= told
    assert {*Prefill._fields, *Plan._fields} <= told | {"ends"}
    assert {"max_model_len", *GIVEN} <= told
    assert {field.name for field in fields(EngineRules)} <= told


def test_a_policy_that_another_thread_is_importing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_policy.py").write_text(
        "import time\ntime.sleep(0.2)\nclass Slow:\n    def schedule(self, view): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(policy, "slow_policy:Slow")
        while "slow_policy" not in sys.modules:
            time.sleep(0.001)
        assert policy("slow_policy:Slow") is first.result()


# -- the rules that a policy declares -------------------------------------------------------------


class Waits:
    """A policy that declares nothing and sends nothing."""

    def schedule(self, view: View) -> Plan:
        return Plan()


@pytest.mark.parametrize(
    "make", [lambda cls: create(cls, {}), lambda cls: GivenPolicy(cls()).make()]
)
@pytest.mark.parametrize("old", OLD_ATTRIBUTES)
def test_an_attribute_that_rules_have_replaced_is_told_in_one_line(old: str, make: Any) -> None:
    policy = type("Old", (Waits,), {old: "round"})
    for declared in ({}, {"rules": Rules()}):
        with pytest.raises(UsageError) as error:
            make(type("Old", (policy,), declared))
        assert str(error.value) == (
            f"policy Old: the attribute {old} is gone; say it in rules = Rules(...), see "
            "docs/policies.md"
        )


def test_a_parameter_may_have_the_name_of_an_old_attribute_where_rules_are_declared() -> None:
    assert isinstance(engine_of(create("static", {"padded": True}, **FACTS), 10).rules, PaddedRules)
    assert engine_of(create("td_pipe", {"predictor": "mean"}, **FACTS), 10).rules.uncapped


def test_a_policy_without_rules_has_the_plain_ones_and_no_others_will_do() -> None:
    assert engine_of(Waits(), 10).rules == Rules()
    with pytest.raises(UsageError, match=r"policy Odd: rules = 'fast'; rules = Rules\(...\) is ri"):
        engine_of(type("Odd", (Waits,), {"rules": "fast"})(), 10)
