"""vLLM, V0 and V1: what recordings (test_engine_journals) and tests/oracle do not show."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.config.build import build
from evenflow.config.run import load_config
from evenflow.core.decodes import Sequence
from evenflow.core.kv import KvCache, PagePool
from evenflow.core.replay import RecordingBatcher, decision_of, replay
from evenflow.core.scheduling import View
from evenflow.engines.ahead import AheadGroup
from evenflow.engines.append_only import AppendOnlyCache
from evenflow.engines.loop import EngineLoop
from evenflow.engines.rules import EngineRules
from evenflow.engines.speculation import Speculation
from evenflow.engines.swap import SwapCache
from evenflow.errors import PolicyError, StallError, UsageError
from evenflow.runtimes import RuntimeOverheads
from evenflow.schedulers import create
from evenflow.sim import simulate
from evenflow.types import Plan, Prefill, Prefix, Request, Rules
from tests.places import ROOT
from tests.worlds import engine_of, send, small_world, steps_of


def test_a_share_of_the_pages_is_left_free_but_not_by_what_runs_alone() -> None:
    policy = create("vllm", {"max_num_batched_tokens": 64, "watermark": 0.25})
    chunks = [
        send(engine_of(policy, 4, asked), 0.0).chunks for asked in ([(62, 2)], [(48, 2), (16, 2)])
    ]
    assert [[chunk.stop for chunk in each] for each in chunks] == [[62], [48]]


def test_the_latest_to_arrive_is_preempted_and_comes_back_before_others() -> None:
    """Two prompts of a page each fill two pages; the first of them to grow takes the other's."""
    policy = create("vllm", {"max_num_batched_tokens": 64, "watermark": 0.0})
    serving = engine_of(policy, 2, [(16, 3)] * 3, max_in_flight=8)
    serving.complete(send(serving, 0.0), 1.0)
    assert serving.next(1.0) is not None
    assert serving.queues.preemptions == 1
    assert [seq.request.request_id for seq in serving.queues.waiting] == [1, 2]
    assert serving.next(1.0) is None, "nothing is free for them yet"
    assert serving.wait_reason == "kv"


@pytest.mark.parametrize(
    ("pages", "prompts", "steps"),
    [
        (3, [(20, 4), (10, 3)], "0:20 1:10|0:1|1:11|0:1|1:12|0:1"),
        (2, [(20, 3)], "0:20|0:21|0:22"),
    ],
)
def test_a_decode_asks_for_a_free_page_even_where_it_needs_none(
    pages: int, prompts: list[tuple[int, int]], steps: str
) -> None:
    """As the scheduler of vLLM 0.6.6 decided, but for steps of nothing."""
    policy = create("vllm", {"max_num_batched_tokens": 64, "watermark": 0.0})
    assert steps_of(engine_of(policy, pages, prompts)) == steps


@pytest.mark.parametrize(
    ("budget", "refused"),
    [(64, "a prompt of 65 tokens exceeds max_num_batched_tokens 64"), (65, None)],
)
def test_a_prompt_that_never_fits_into_a_micro_batch_is_refused(
    budget: int, refused: str | None
) -> None:
    serving = engine_of(create("vllm", {"max_num_batched_tokens": budget}), 100)
    assert serving.add(Request(0, 0.0, 65, 9)) == refused


IN_STEP = {"async_scheduling": False}


# -- V1 ------------------------------------------------------------------------------------------


def test_a_prompt_under_way_preempts_itself_and_nothing_is_sent() -> None:
    """A step that is empty for want of pages is an answer: the next one admits again."""
    policy = create("vllm_v1", {**IN_STEP, "max_num_batched_tokens": 16, "max_num_seqs": 8})
    batcher = engine_of(policy, 3, [(16, 2)], asks_again=False)
    batcher.complete(send(batcher, 0.0), 1.0)
    decode = send(batcher, 1.0)
    batcher.add(Request(1, 1.0, 20, 2))
    batcher.pool.allocate(1)
    assert batcher.next(1.5) is None, "not all of it fits"
    batcher.complete(decode, 2.0)
    chunk = send(batcher, 2.0)
    assert decision_of(chunk) == (((1, 0, 16),), ())
    batcher.pool.allocate(1)
    assert batcher.next(3.0) is None
    assert (batcher.view.preemptions, batcher.queues.owed.total()) == (1, 1)
    assert batcher.complete(chunk, 4.0) == []
    assert [prompt.request_id for prompt in batcher.view.waiting] == [1]


def test_without_chunks_a_request_that_a_micro_batch_could_not_recompute_is_refused() -> None:
    """As vLLM does not start with a max_model_len above max_num_batched_tokens then."""
    params = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "enable_chunked_prefill": False}
    asked = [Request(0, 0.0, 32, 8), Request(1, 0.0, 32, 9)]
    result = simulate(small_world(asked, "vllm_v1", {**IN_STEP, **params}))
    told = "41 tokens exceed max_num_batched_tokens 40, and chunked prefill is off"
    assert list(result.reason) == ["", told]


@pytest.mark.parametrize(
    ("mode", "stages", "places"), [("off", 4, 4), ("v2", 4, 5), ("v2", 1, 2), ("v1", 1, 2)]
)
def test_as_many_are_in_flight_as_in_vllm(mode: str, stages: int, places: int) -> None:
    system = ROOT / "examples" / "systems" / "vllm_v1.yaml"
    changes = [f"stages={stages}", f"scheduler.async_scheduling={mode}", "gpu=H100"]
    world = build(load_config(system, changes), system.parent).world
    assert world.max_in_flight == places


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_request_alone_gets_a_token_when_the_last_one_crossed_all_stages(stages: int) -> None:
    """Ahead or not: stage 0 needs the token before the next; the host works meanwhile."""
    hidden = RuntimeOverheads(schedule_s=0.008, holds="nothing")
    world = small_world(
        [Request(0, 0.0, 16, 9)],
        "vllm_v1",
        depth=stages,
        times_s=(0.01, 0.0),
        max_in_flight=stages + 1,
        loop=EngineLoop,
        overheads=hidden,
    )
    ends_s = [simulate(world, pipeline=how).completion_s for how in ("recurrence", "processes")]
    assert ends_s == [pytest.approx(0.008 + 9 * stages * 0.01)] * 2


def test_a_loop_of_one_place_sends_what_it_chose() -> None:
    """A second a stage: the prompt's token is back at 2 s, the others each 2 s later."""
    one = {"depth": 2, "max_in_flight": 1, "loop": EngineLoop}
    world = small_world([Request(0, 0.0, 16, 3)], "vllm_v1", **one)
    assert simulate(world).returned_s.tolist() == [2.0, 4.0, 6.0]


class NeverSends(EngineLoop):
    """A loop that waits for the return of what it has not sent."""

    @property
    def _is_late(self) -> bool:
        return True


def test_a_run_that_leaves_requests_behind_is_a_stall() -> None:
    world = small_world([Request(0, 0.0, 16, 3)], max_in_flight=1, loop=NeverSends)
    with pytest.raises(StallError, match="1 requests wait for ever: nothing is in flight"):
        simulate(world)


def test_what_decodes_that_run_ahead_do_not_go_with() -> None:
    policy = create("vllm_v1", {})
    for kv, asks_again in ((KvCache(PagePool(8)), True), (SwapCache(PagePool(8)), False)):
        with pytest.raises(UsageError, match="run ahead, which goes with dispatch: engine_loop"):
            engine_of(policy, kv, depth=1, asks_again=asks_again)


def test_runner_v1_runs_ahead_on_one_stage_only() -> None:
    with pytest.raises(UsageError, match="async_scheduling v1 is for one stage, not 2"):
        create("vllm_v1", {"async_scheduling": "v1"}, depth=2)


def test_a_policy_of_0_32_has_no_prefill_cadence() -> None:
    with pytest.raises(UsageError, match="prefill_schedule_interval 2 does nothing in version"):
        create("vllm_v1", {"version": "0.32", "prefill_schedule_interval": 2})


def test_a_share_of_the_tokens_cuts_prompts() -> None:
    with pytest.raises(UsageError, match="share tokens cuts prompts; enable_chunked_prefill"):
        create("vllm_balanced", {"share": "tokens", "enable_chunked_prefill": False})


@pytest.mark.parametrize(("budget", "chunk"), [(64, 20), (16, 16)])
def test_a_share_of_the_tokens_is_that_of_a_stage_up_to_the_budget(budget: int, chunk: int) -> None:
    """Of 40 tokens that wait for two stages."""
    params = {**IN_STEP, "share": "tokens", "max_num_batched_tokens": budget, "max_num_seqs": 8}
    policy = create("vllm_balanced", params, depth=2)
    assert send(engine_of(policy, 100, [(40, 9)], asks_again=False), 0.0).prefill_tokens == chunk


@pytest.mark.parametrize(("prompts", "tokens"), [(1, 40), (2, 16 + 16)])
def test_a_prompt_that_is_there_alone_is_not_cut_at_the_threshold(
    prompts: int, tokens: int
) -> None:
    params = {**IN_STEP, "long_prefill_token_threshold": 16, "max_num_batched_tokens": 64}
    params |= {"max_num_seqs": 8}
    engine = engine_of(create("vllm_v1", params), 100, [(40, 9)] * prompts, asks_again=False)
    assert send(engine, 0.0).prefill_tokens == tokens


def test_a_decode_without_a_page_due_takes_none_while_another_is_preempted() -> None:
    """Of three pages the first holds two for 20 tokens; the other fills its own."""
    asked = [(20, 9), (16, 9)]
    engine = engine_of(create("vllm_v1", IN_STEP, depth=1), 3, asked, depth=1, asks_again=False)
    engine.complete(send(engine, 0.0), 1.0)
    assert decision_of(send(engine, 1.0)) == ((), (0,))
    assert (engine.view.preemptions, engine.pool.free_pages) == (1, 1)


@pytest.mark.parametrize(("version", "decodes"), [("0.32", ()), ("0.33", (1,))])
def test_who_preempts_itself_ends_the_decodes_in_0_32_only(
    version: str, decodes: tuple[int, ...]
) -> None:
    """Two prompts fill two pages; the less urgent, which started first, lacks the next one."""
    policy = create("vllm_v1", {**IN_STEP, "scheduling_policy": "priority", "version": version})
    batcher = engine_of(policy, 2, depth=2, asks_again=False)
    prompts = []
    for number, priority in enumerate((5, 0)):
        batcher.add(Request(number, 0.0, 16, 2, priority=priority))
        prompts.append(send(batcher, 0.0))
    for batch in prompts:
        batcher.complete(batch, 1.0)
    batch = batcher.next(1.0)
    assert ((), decodes) == (((), ()) if batch is None else decision_of(batch))
    assert batcher.view.preemptions == 1


@pytest.mark.parametrize(
    ("groups", "stops"),
    [
        (1, [[16], [], [], [16], [], [], [15], [16, 14], [], [], [16]]),
        (2, [[16], [], [], [16], [], [], [15], [16, 14], [], [16], []]),
    ],
)
def test_prompts_go_every_third_micro_batch_unless_some_are_left_over(
    groups: int, stops: list[list[int]]
) -> None:
    """Since the last that had any; with data parallelism one micro-batch in three."""
    params = {"prefill_schedule_interval": 3, "max_num_batched_tokens": 17, "max_num_seqs": 8}
    policy = create("vllm_v1", {**IN_STEP, **params}, data_parallel=groups)
    batcher = engine_of(policy, 100, [(16, 99)], asks_again=False)
    arrivals, found = {1: [1], 4: [2, 3]}, []
    for step in range(11):
        for number in arrivals.get(step, ()):
            batcher.add(Request(number, 0.0, 16, 99))
        batch = send(batcher, float(step))
        found.append([chunk.stop for chunk in batch.chunks])
        batcher.complete(batch, step + 0.5)
    assert found == stops


def test_a_prompt_that_was_left_over_and_is_gone_lets_no_later_one_go_early() -> None:
    params = {"prefill_schedule_interval": 3, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    policy = create("vllm_v1", {**IN_STEP, **params})
    batcher = engine_of(policy, 100, [(16, 99), (16, 99)], asks_again=False)
    found = []
    for step in range(4):
        if step == 2:
            batcher.add(Request(2, 2.0, 8, 99))
        batch = send(batcher, float(step))
        found.append([chunk.stop for chunk in batch.chunks])
        batcher.complete(batch, step + 0.5)
        if step == 0:
            batcher.abort(1)
    assert found == [[16], [], [], [8]]


def test_who_was_passed_over_for_an_output_in_flight_is_not_left_over() -> None:
    """Request 1 is preempted in flight; request 2 goes past it, and its rest is held back."""
    params = {"prefill_schedule_interval": 2, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    policy, sizes = create("vllm_v1", {**IN_STEP, **params}), [(16, 99), (16, 99)]
    batcher = engine_of(policy, 9, sizes, max_in_flight=4, asks_again=False)
    prompt, _ = send(batcher, 0.0), send(batcher, 0.0)
    others = batcher.pool.allocate(7)
    batcher.complete(prompt, 1.0)
    decode = send(batcher, 1.0)
    assert (batcher.view.preemptions, batcher.view.lined_up) == (1, [(1, True)])
    batcher.pool.free(others)
    batcher.add(Request(2, 1.0, 64, 9))
    assert decision_of(send(batcher, 1.0)) == (((2, 0, 16),), ())
    batcher.complete(decode, 2.0)
    assert decision_of(send(batcher, 2.0)) == ((), (0,))


class InParts:
    """Yields the plans it was given, each in answer to one question."""

    rules: Rules = EngineRules(delivers=True)

    def __init__(self, *answers: list[Plan]) -> None:
        self.answers = list(answers)

    def schedule(self, view: View) -> object:
        yield from self.answers.pop(0)


def in_parts(*answers: list[Plan], asked: int = 2, **options: Any) -> Any:
    """Return an engine that is asked that many times for 16 tokens and three of output."""
    plans = InParts(*answers)
    return engine_of(plans, 4, [(16, 3)] * asked, RecordingBatcher, max_in_flight=4, **options)


def test_parts_of_an_answer_are_one_micro_batch() -> None:
    answers = [[Plan([Prefill(0, 16)]), Plan([Prefill(1, 16)])], [Plan(decodes=1)]]
    batcher = in_parts(*answers)
    batch = send(batcher, 0.0)
    assert decision_of(batch) == (((0, 0, 16), (1, 0, 16)), ())
    batcher.complete(batch, 1.0)
    assert decision_of(send(batcher, 1.0)) == ((), (0,))
    assert replay(batcher.journal, in_parts(*answers, asked=0)) is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Plan(decodes=1), Plan(decodes=1)], "takes decodes in two parts"),
        ([Plan([Prefill(2, 8)]), Plan(preempt=[2])], "after it was aborted or planned"),
        ([Plan(decodes=2), Plan(preempt=[1])], "after it was aborted or planned"),
        ([Plan(decodes=1), "more"], "returned 'more', not a Plan"),
    ],
)
def test_parts_that_cannot_be_carried_out(parts: list[Plan], message: str) -> None:
    batcher = in_parts([Plan([Prefill(0, 16), Prefill(1, 16)])], parts, asked=3)
    batcher.complete(send(batcher, 0.0), 1.0)
    with pytest.raises(PolicyError, match=message):
        batcher.next(1.0)


def test_who_waits_for_an_output_cannot_be_planned() -> None:
    batcher = in_parts([Plan([Prefill(0, 16)])], [Plan(preempt=[0]), Plan([Prefill(0, 16)])])
    send(batcher, 0.0)
    with pytest.raises(PolicyError, match="while an output of it is in flight"):
        batcher.next(1.0)


def test_a_decode_in_flight_is_preempted_and_waits_for_its_token() -> None:
    batcher = in_parts([Plan([Prefill(0, 16)])], [Plan(decodes=1)], [Plan(preempt=[0])], [Plan()])
    batcher.complete(send(batcher, 0.0), 0.5)
    decode = send(batcher, 1.0)
    assert batcher.next(1.5) is None
    assert [batcher.queues.owed[seq] for seq in batcher.queues.waiting] == [1, 0]
    batcher.complete(decode, 2.0)
    assert [seq.generated for seq in batcher.queues.waiting] == [2, 0]


def test_a_speculative_decode_in_flight_yields_no_more_than_its_rest() -> None:
    """A step yields four tokens; the request wants three, and one came with its prompt."""
    answers = [Plan([Prefill(0, 16)])], [Plan(decodes=1)], [Plan(preempt=[0])], [Plan()]
    batcher = in_parts(*answers, decoding=Speculation((1.0,) * 3))
    batcher.complete(send(batcher, 0.0), 0.5)
    decode = send(batcher, 1.0)
    assert batcher.next(1.5) is None
    (ended,) = batcher.complete(decode, 2.0)
    assert (ended.generated, batcher.queues.gap_s) == (3, [1.5, 0.0])


def test_a_decode_taken_while_another_is_in_flight_is_not_preempted() -> None:
    one = Plan(decodes=1)
    batcher = in_parts([Plan([Prefill(0, 16), Prefill(1, 16)])], [one], [one, Plan(preempt=[1])])
    batcher.complete(send(batcher, 0.0), 0.5)
    assert decision_of(send(batcher, 1.0)) == ((), (0,))
    with pytest.raises(PolicyError, match="preempts request 1, after it was aborted or planned"):
        batcher.next(1.5)


def test_a_request_that_waits_holds_nothing_to_preempt() -> None:
    batcher = in_parts([Plan(preempt=[1])])
    with pytest.raises(PolicyError, match="preempts request 1, which holds no pages or is in fl"):
        batcher.next(0.0)


def test_a_request_that_left_in_flight_is_no_victim() -> None:
    """Request 1, the last to run, computes on until its micro-batch is back."""
    batcher = in_parts([Plan([Prefill(0, 16), Prefill(1, 16)])], [Plan(decodes=2)])
    batcher.complete(send(batcher, 0.0), 0.5)
    assert batcher.view.victim("latest_admitted") == 1
    send(batcher, 1.0)
    batcher.abort(1)
    assert batcher.view.victim("latest_admitted") == 0


def test_decodes_that_run_ahead_are_seen_as_they_were_sent() -> None:
    batcher = engine_of(create("vllm_v1", {}), 9, [(16, 9), (8, 9)], depth=1, asks_again=False)
    batcher.complete(send(batcher, 0.0), 0.5)
    batch = send(batcher, 1.0)
    assert (batcher.view.decode_context_tokens, batch.decodes.slot) == (24, 1)


def test_of_decodes_that_run_ahead_the_last_token_is_one_that_is_there() -> None:
    """Before its first token, when it was sent."""
    group, seq = AheadGroup(), Sequence(Request(0, 0.0, 16, 9), 16)
    group.last_s = 5.0
    found = []
    for seq.last_token_s in (3.0, float("nan")):
        found.append(group.last_token_of(seq))
    assert found == [3.0, 5.0]


def test_a_page_that_the_last_token_would_fill_is_not_found() -> None:
    """14 tokens and two of output: the KV of the last one, the 16th, was never computed."""
    policy = create("vllm_v1", {}, depth=1)
    batcher = engine_of(policy, AppendOnlyCache(9, 16), depth=1, asks_again=False)
    batcher.add(Request(0, 0.0, 14, 2, prefix=Prefix((1,), 16, 16)))
    for step in range(2):
        batcher.complete(send(batcher, float(step)), step + 0.5)
    batcher.add(Request(1, 2.0, 20, 2, prefix=Prefix((1,), 16, 16)))
    assert decision_of(send(batcher, 2.0)) == (((1, 0, 20),), ())


def test_a_client_leaves_while_its_preempted_request_is_in_flight() -> None:
    batcher = in_parts([Plan([Prefill(0, 16)])], [Plan(preempt=[0])], [Plan()])
    batch = send(batcher, 0.0)
    assert batcher.next(0.5) is None
    assert batcher.abort(0).aborted
    batcher.abort(1)
    assert (len(batcher.queues.live), batcher.queues.waiting_tokens, batcher.kv.tokens) == (0, 0, 0)
    assert batcher.complete(batch, 1.0) == []
    assert not batcher.queues.owed


def test_only_policies_that_say_so_preempt_in_flight() -> None:
    class Quiet(InParts):
        rules = Rules()

    policy = Quiet([Plan([Prefill(0, 16)])], [Plan(decodes=1, victims="latest_admitted")])
    batcher = engine_of(policy, 2, [(16, 3)])
    batcher.complete(send(batcher, 0.0), 1.0)
    batcher.pool.allocate(1)
    with pytest.raises(
        PolicyError, match="asks for the victims 'latest_admitted'; its rules lack them"
    ):
        batcher.next(1.0)
