"""TensorRT-LLM: recorded journals, an executor restated, and what holds whatever it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenflow.config.build import build, load_workload
from evenflow.config.run import load_config
from evenflow.core.replay import replay
from evenflow.costs import AffineCost, RanksCost
from evenflow.engines.lock_step import EngineLockStep
from evenflow.engines.loop import EngineLoop
from evenflow.errors import DryPoolError
from evenflow.experiments.recordings import journal, trtllm
from evenflow.experiments.recordings.journal import Event, Replayer, replayed, simulated
from evenflow.experiments.recordings.journal import replay as replay_journal
from evenflow.results.bubbles import attribute
from evenflow.runtimes import RuntimeOverheads, runtimes
from evenflow.schedulers import create, policy
from evenflow.sim import World, simulate
from evenflow.sim.driver import SimDriver
from evenflow.sim.tandem import Tandem
from evenflow.types import Request
from tests.amounts import many
from tests.command_line import refused
from tests.experiments.test_engine_journals import stem
from tests.oracle.plain_trtllm import PlainExecutor, SpinError
from tests.places import ROOT, SHARED
from tests.worlds import AuditedBatcher, assert_same, engine_of, require_idle, small_world

JOURNALS = sorted((SHARED / "engines" / "trtllm-1.2").glob("*.jsonl.gz"))
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


@pytest.mark.skipif(not JOURNALS, reason=f"no recordings in {SHARED} (EVENFLOW_SHARED)")
@pytest.mark.parametrize("path", JOURNALS, ids=stem)
def test_tensorrt_llm_decides_as_recorded(path: Path) -> None:
    """Step for step and, from arrivals alone, each end in a simulation to 1 ns."""
    outcome = replay_journal(path, trtllm, "1.2")
    assert outcome.difference is None
    assert outcome.equal == outcome.steps > 150
    assert outcome.timed or "dies" in path.name


@st.composite
def loads(draw: st.DrawFn) -> list[Event]:
    """What the plain executor does with a small load; it may die."""
    stages = draw(st.sampled_from([1, 1, 2, 3, 4]))
    chunking = draw(st.sampled_from([None, "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]))
    block, rows = draw(st.sampled_from([1, 8, 16])), draw(st.sampled_from([1, 2, 4, 16]))
    tokens, first = draw(st.sampled_from([48, 100])), draw(st.booleans())
    lengths = st.tuples(
        st.integers(1, tokens if chunking is None else 150),
        st.integers(1, 40),
        st.sampled_from([0, 0, 5, 60]),
        st.sampled_from([0.0, 0.0, 0.004, 0.03, 0.5]),
    )
    loads, at_s = [], 0.0
    for prompt, output, spare, gap_s in draw(st.lists(lengths, min_size=1, max_size=12)):
        at_s = round(at_s + gap_s, 6)
        asked = {"prompt": prompt, "output": output, "max_new": output + spare}
        loads.append({"id": len(loads), "at": at_s, **asked})
    least = max(-(-(load["prompt"] + load["max_new"]) // block) for load in loads)
    config = {
        "kind": "config",
        "engine": "TensorRT-LLM",
        "pp": stages,
        "loop": "pp" if stages > 1 else draw(st.sampled_from(["simple", "overlap"])),
        "blocks": least + draw(st.sampled_from([0, 1, least // 2, 9 * least])),
        "block_size": block,
        "max_batch_size": rows,
        "max_num_tokens": tokens,
        "capacity_policy": draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])),
        "chunking": chunking,
        "chunk_unit": draw(st.sampled_from([block, 2 * block])),
        "batch_wait_timeout_iters": draw(st.sampled_from([0, 0, 1, 3, 20])),
        "batch_wait_max_tokens_ratio": draw(st.sampled_from([0.0, 0.5, 0.9])),
        "max_num_requests": rows * stages,
        "two_step_lookahead": stages > 1,
        "chunks_fly": first or stages == 1,
        "waits_first": first and stages > 1,
        "base_s": 0.005,
        "per_token_s": 1e-4,
    }
    try:
        return [*PlainExecutor(config, loads).run()]
    except SpinError:  # a paused prompt no longer fits into a micro-batch
        assume(False)
        raise


def world_of(events: list[Event]) -> World:
    return journal.world_of(trtllm, Path("load"), events)


def dies(events: list[Event]) -> bool:
    return events[-1]["kind"] == "dies"


@settings(max_examples=many(150), deadline=None)
@given(loads())
def test_each_turn_is_that_of_a_plain_executor(events: list[Event]) -> None:
    """In decisions, order, pages and, from arrivals alone, times."""
    replayer = Replayer(trtllm, world_of(events))
    outcome = replayed(events, replayer)
    assert outcome.difference is None
    if dies(events):
        with pytest.raises(DryPoolError, match="TensorRT-LLM dies here"):
            simulated(world_of(events))
    else:
        ours = simulated(world_of(events))
        assert ours.keys() == replayer.times.keys()
        for number, times in replayer.times.items():
            assert ours[number] == pytest.approx(times, abs=1e-9)


@settings(max_examples=many(150), deadline=None)
@given(loads())
def test_requests_tokens_and_pages_are_conserved(events: list[Event]) -> None:
    """Overlapped, a request that ends by itself computes once more, or all of it again."""
    assume(not dies(events))
    world = world_of(events)
    driver = SimDriver(world, Tandem, batcher=AuditedBatcher)
    result = driver.run()
    assert result.status == ["completed"] * len(world.requests)
    assert result.output_tokens.tolist() == [each.output_tokens for each in world.requests]
    assert result.gap_count.sum() == (result.output_tokens - 1).sum()
    assert result.sampled_rows.sum() >= result.output_tokens.sum()
    if events[0]["loop"] != "overlap":
        assert result.sampled_rows.sum() == result.output_tokens.sum()
    (engine,) = driver.engines
    require_idle(engine)
    assert engine.queues.promised_pages == 0
    assert replay(engine.journal, world.batcher()) is None
    assert_same(result, SimDriver(world, Tandem).run())
    bubbles = attribute(result)
    assert sum(bubbles.totals().values()) == pytest.approx(bubbles.idle_s, abs=1e-9)


def served(asked: list[Request], depth: int = 1, **params: Any) -> Any:
    """Return the result of steps of a second, with pages of 16 tokens for 160."""
    pages = params.pop("pages", 10)
    fields: dict[str, Any] = {"depth": depth, "total_pages": pages, "loop": EngineLoop}
    return simulate(small_world(asked, "trtllm", params, **fields))


def test_a_prompt_starts_once_all_that_runs_and_it_may_generate_fits() -> None:
    """Of 10 pages the first may need 6, so the second, of 5, waits for its end at 3 s."""
    asked = [Request(0, 0.0, 16, 3, max_new_tokens=80), Request(1, 0.0, 16, 3, max_new_tokens=64)]
    simple = {"disable_overlap_scheduler": True}
    assert served(asked, **simple).first_token_s.tolist() == [1.0, 4.0]
    assert served(asked, pages=11, **simple).first_token_s.tolist() == [1.0, 1.0]
    early = served(asked, capacity_scheduler_policy="MAX_UTILIZATION", **simple)
    assert early.first_token_s.tolist() == [1.0, 1.0]


def test_of_two_that_grow_into_the_last_page_the_younger_computes_all_again() -> None:
    """Both fill a page of three at 1 s; the older takes the third, and ends at 3 s."""
    asked = [Request(0, 0.0, 16, 3), Request(1, 0.0, 16, 3)]
    params = {"capacity_scheduler_policy": "MAX_UTILIZATION", "disable_overlap_scheduler": True}
    result = served(asked, pages=3, **params)
    assert result.preemptions.tolist() == [0, 1]
    assert result.completion_s.tolist() == [3.0, 5.0]
    assert result.prefill_tokens.tolist() == [32, 0, 0, 17, 0]


def test_the_rest_of_a_prompt_needs_no_page() -> None:
    """Of four pages its 60 tokens have all; the fourth token fills them."""
    params = {"capacity_scheduler_policy": "MAX_UTILIZATION", "disable_overlap_scheduler": True}
    params |= {"enable_chunked_prefill": True}
    result = served([Request(0, 0.0, 60, 4)], pages=4, max_num_tokens=32, **params)
    assert result.prefill_tokens.tolist() == [32, 28, 0, 0, 0]


def test_prompts_wait_twenty_steps_or_until_nine_tenths_of_the_tokens_are_there() -> None:
    """One decodes with steps of a second; who comes at 0.5 s is seen at 1 s, and starts at 21 s.
    Beside a decode 143 tokens of prompts are nine tenths of 160, so the third brings them along.
    """
    waiting = {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    params = {"disable_overlap_scheduler": True, "max_num_tokens": 160, "pages": 100} | waiting
    asked = [Request(0, 0.0, 16, 40), Request(1, 0.5, 100, 2), Request(2, 2.5, 42, 2)]
    assert served(asked[:2], **params).first_token_s.tolist() == [1.0, 22.0]
    assert served(asked, **params).first_token_s.tolist() == [1.0, 22.0, 22.0]
    more = [*asked[:2], Request(2, 2.5, 43, 2)]
    assert served(more, **params).first_token_s.tolist() == [1.0, 4.0, 4.0]
    alone = [Request(0, 0.0, 16, 3), Request(1, 0.5, 100, 2)]
    assert served(alone, **params).first_token_s.tolist() == [1.0, 4.0]


def test_a_pool_that_runs_dry_in_a_pipeline_ends_the_run_in_one_line() -> None:
    asked = [Request(number, 0.0, 16, 30) for number in range(3)]
    with refused("needs 1 KV pages and 0 are free: MAX_UTILIZATION in a pipeline frees nothing"):
        served(asked, 2, pages=4, capacity_scheduler_policy="MAX_UTILIZATION", max_num_tokens=16)


def test_a_paused_prompt_too_long_for_a_micro_batch_waits_for_ever_and_that_is_said() -> None:
    """Of 60 tokens, and with its output more than 64, chunked prefill off."""
    asked = [Request(number, 0.0, 60, 40) for number in range(2)]
    params = {"capacity_scheduler_policy": "MAX_UTILIZATION", "max_num_tokens": 64}
    with refused("policy TRTLLM stalls"):
        served(asked, disable_overlap_scheduler=True, **params)


@pytest.mark.parametrize(("version", "seen_s"), [("1.0", 3.0), ("1.2", 1.0)])
def test_rank_0_sees_what_came_after_its_own_gpu_or_the_oldest_result(
    version: str, seen_s: float
) -> None:
    """Three stages of a second: two turns are empty, and 1.2 waits in the first for stage 0."""
    asked = [Request(0, 0.0, 16, 1), Request(1, 0.5, 16, 1)]
    assert served(asked, 3, version=version).scheduled_s.tolist() == [0.0, seen_s]


def test_replicas_of_attention_step_together_in_its_loop() -> None:
    """One group is the plain loop; of two, a step is as slow as the busier: 1 + 30 x 0.1 s."""
    asked = [Request(number, 0.3 * number, 20, 4) for number in range(6)]
    loops = (EngineLoop, EngineLockStep)
    alone, grouped = (small_world(asked, "trtllm", {}, depth=2, loop=loop) for loop in loops)
    assert_same(simulate(alone), simulate(grouped))
    costs = RanksCost(AffineCost(1.0, 0.1, 1), 2, AffineCost(0.0, 0.01, 1))
    pair = [Request(0, 0.0, 30, 2), Request(1, 0.0, 10, 2)]
    two = {"virtual_engines": 2, "loop": EngineLockStep, "costs": costs, "max_in_flight": 2}
    result = simulate(small_world(pair, "trtllm", {}, **two))
    assert result.end_s[:, 0] == pytest.approx([4.4, 4.4 + 1.1 + 0.02])
    assert result.prefill_tokens.tolist() == [40, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["scheduler={name: trtllm}", "dispatch=stage0"], "which goes with dispatch: engine_loop"),
        (
            ["scheduler={name: trtllm}", "dispatch=engine_loop", "kv.prefix_cache=true"],
            "policy TRTLLM goes without kv.prefix_cache, kv.swap, speculative",
        ),
        (
            ["scheduler={name: trtllm, max_num_tokens: 8, enable_chunked_prefill: true}"],
            "max_num_tokens 8 is less than a unit of chunks, 16 tokens",
        ),
        (["scheduler={name: trtllm, version: 1.2}"], "version should be '1.0' or '1.2'"),
    ],
)
def test_what_does_not_go_with_it_is_said(changes: list[str], message: str) -> None:
    with refused(message):
        config = load_config(QUICKSTART, changes)
        build(config, QUICKSTART.parent).world.batcher()


def test_by_itself_it_is_of_one_stage() -> None:
    params = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert policy("trtllm")(**params).rules == create("trtllm", params, depth=1).rules


def test_a_request_that_could_never_be_served_is_refused() -> None:
    serving = engine_of(create("trtllm", {"max_num_tokens": 64}, depth=2), 10, asks_again=False)
    assert serving.add(Request(0, 0.0, 65, 1)) == (
        "a prompt of 65 tokens exceeds max_num_tokens 64, and chunked prefill is off"
    )
    assert serving.add(Request(0, 0.0, 64, 1, max_new_tokens=97)) == (
        "11 KV pages for all that it may generate exceed 10"
    )


def test_the_output_that_a_trace_allows_is_reserved(tmp_path: Path) -> None:
    """As `max_new` of a line, beside the output that comes."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens,max_new"]
    lines += [f"2023-11-16 18:00:0{number},16,3,{most}" for number, most in enumerate((80, 64))]
    (tmp_path / "trace.csv").write_text("\n".join(lines), encoding="utf-8")
    text = (
        "stages: 1\ncosts: {kind: affine, base_s: 1.0, per_token_s: 0.0}\ndispatch: engine_loop\n"
        "kv: {pages: 10, page_tokens: 16}\n"
        "scheduler: {name: trtllm, disable_overlap_scheduler: true}\n"
        "workload: {trace: trace.csv, requests: 2, arrivals: offline}\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    config = load_config(path)
    built = build(config, tmp_path, load_workload(config, tmp_path))
    assert np.asarray(simulate(built.world).first_token_s).tolist() == [1.0, 4.0]


def test_the_host_walks_all_admitted_requests_in_each_turn() -> None:
    """Two rows a micro-batch on two stages of a second: 0.5 s for two, then 1 s for all four."""
    overheads = RuntimeOverheads(per_active_s=0.25, holds="stage0")
    asked = [Request(number, 0.0, 16, 2) for number in range(4)]
    params = {"max_batch_size": 2}
    fields: dict[str, Any] = {"depth": 2, "loop": EngineLoop, "overheads": overheads}
    result = simulate(small_world(asked, "trtllm", params, **fields))
    assert result.start_s[:, 0].tolist() == [0.5, 2.5, 4.5, 6.5]
    assert runtimes()["trtllm-1.0"].on(8).per_active_s > runtimes()["trtllm-1.2"].on(8).per_active_s
