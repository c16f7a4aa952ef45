"""Stretches of decodes: a run that coasts says what one says that asks about every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenflow.costs.base import BatchShape
from evenflow.engines.loop import EngineLoop
from evenflow.engines.view import EngineView
from evenflow.results.run import TALLY, RunResult
from evenflow.schedulers.sarathi import Sarathi
from evenflow.schedulers.vllm import VLLMV1
from evenflow.sim import World, runtimes, simulate_replicas
from evenflow.types import Plan, Request, View
from tests.amounts import many
from tests.worlds import LINKS, MAX_MODEL_LEN, assert_same, requests, small_world, worlds

POLICIES: list[tuple[str, dict[str, object]]] = [
    ("sarathi", {"token_budget": 48}),
    ("sarathi", {"token_budget": 32, "mode": "chunked_only"}),
    ("token_throttling", {"max_prefill": 64, "min_prefill": 8}),
    ("token_throttling", {"max_prefill": 64, "use_ut": False, "reserve": "adaptive"}),
    ("token_throttling", {"max_prefill": 64, "coupled": True, "max_batch_rows": 3}),
    ("vllm", {"max_num_seqs": 6}),
    ("vllm", {"max_num_batched_tokens": 150, "max_batch_rows": 3}),
    ("vllm_v1", {"max_num_batched_tokens": 64, "async_scheduling": False, "max_num_seqs": 16}),
    ("vllm_balanced", {"share": "decodes", "async_scheduling": False, "max_num_seqs": 7}),
]
AHEAD: list[tuple[str, dict[str, object]]] = [
    ("vllm_v1", {"max_num_batched_tokens": 64, "async_scheduling": "v2", "max_num_seqs": 16}),
    ("vllm_v1", {"max_num_batched_tokens": 24, "async_scheduling": "v2", "max_num_seqs": 12}),
]
ROUTERS = st.sampled_from(["round_robin", "least_outstanding", "prefix_affinity"])
IN_TURNS: dict[str, Any] = {"loop": EngineLoop}


@st.composite
def coasting(draw: st.DrawFn) -> World:
    """Worlds that coast, of all such policies: with few pages, and returns at one instant."""
    depth = draw(st.integers(1, 5))
    ahead = draw(st.integers(0, 2)) == 0
    asked = draw(requests())
    most: list[int | None] = [depth, depth, None]
    ways: list[dict[str, Any]] = [{"dispatch": "stage0"}, {"dispatch": "eager"}, IN_TURNS]
    if ahead:
        most, ways = [depth + 1, depth + 1, depth + 2], [IN_TURNS]
        asked = [replace(one, max_new_tokens=draw(limits(one))) for one in asked]
    times_s = st.sampled_from([(0.005, 0.0001), (0.005, 0.0), (0.0, 0.001), (0.0, 0.001)])
    world = small_world(
        asked,
        *draw(st.sampled_from(AHEAD if ahead else POLICIES)),
        depth=depth,
        times_s=draw(times_s),
        max_model_len=MAX_MODEL_LEN,
        total_pages=draw(st.sampled_from([16, 20, 32, 400])),
        max_in_flight=draw(st.sampled_from(most)),
        overheads=runtimes()[draw(st.sampled_from(["ideal", "ideal", "vllm", "gllm"]))].stages,
        link=draw(st.sampled_from(LINKS)),
        prefix_cache=draw(st.booleans()),
        concurrency=draw(st.sampled_from([None, None, 3])),
    )
    return replace(world, **draw(st.sampled_from(ways)))


def limits(request: Request) -> st.SearchStrategy[int | None]:
    """Limits of a client: exactly its output, or a little more."""
    return st.sampled_from([None, None, None, request.output_tokens + 5])


def run(world: World, **options: Any) -> tuple[list[RunResult], list[tuple[float, list[int]]]]:
    """Return what happened, and which requests finished when, as a watch of the run sees it."""
    seen: list[tuple[float, list[int]]] = []

    def watch(finished: list[Any], _: object, now_s: float) -> None:
        seen.append((now_s, [seq.request.request_id for seq in finished]))

    return simulate_replicas(world, watch=watch, **options), seen


def light(result: RunResult) -> RunResult:
    """Return what is left of a result of which the micro-batches are not kept."""
    columns = ["scheduled_s", "prefill_tokens", "decode_tokens", "sampled_rows", "free_pages"]
    columns += ["kv_tokens", "available_s", "start_s", "end_s", "wait_s", "wait_reason"]
    none: Any = {name: getattr(result, name)[:0] for name in columns}
    return replace(result, kept_tally=result.tally, **none)


EARLY = small_world(  # the group that the first leaves is empty, and rests
    [Request(0, 0.0, 1, 52, max_new_tokens=57), Request(1, 0.5, 1, 4)],
    *AHEAD[0],
    depth=2,
    times_s=(0.005, 0.0),
    max_in_flight=3,
    **IN_TURNS,
)

REFUSED = small_world(  # between the refused one and the next, nothing else happens
    [Request(0, 0.0, 10, 100), Request(1, 0.5, 5000, 1), Request(2, 0.7, 10, 5)],
    times_s=(0.02, 0.0),
)
LENGTHS = [(10, 10), (77, 100), (5000, 1), (5000, 1), (10, 5), (10, 5), (10, 5)]
ELSEWHERE = small_world(  # the next is let in by a pipeline that sends only afterwards
    [Request(number, 0.0, *lengths) for number, lengths in enumerate(LENGTHS)],
    times_s=(0.02, 1e-4),
    concurrency=2,
)


@settings(max_examples=many(1000), deadline=None)
@example(EARLY, 1, "round_robin")
@example(REFUSED, 1, "round_robin")
@example(ELSEWHERE, 2, "round_robin")
@given(coasting() | worlds(), st.integers(1, 3), ROUTERS)
def test_a_run_that_coasts_is_the_run_in_which_each_micro_batch_is_asked_for(
    world: World, replicas: int, router: Any
) -> None:
    world = replace(world, replicas=replicas, router=router)
    results, seen = run(world, whole=False)
    wholes, seen_too = run(world)
    assert sorted(seen) == sorted(seen_too)  # of one instant, pipelines in any order
    assert [at_s for at_s, _ in seen] == [at_s for at_s, _ in seen_too]
    for result, whole in zip(results, map(light, wholes), strict=True):
        for name in TALLY:
            kept, made = getattr(result.kept_tally, name), getattr(whole.kept_tally, name)
            assert kept.tobytes() == made.tobytes(), name
        assert_same(replace(result, kept_tally=None), replace(whole, kept_tally=None))


class SlowPairs(NamedTuple):
    """A second on each stage, but ten on the first for two decodes or more."""

    depth: int

    def times(self, batch: BatchShape) -> list[float]:
        return [10.0 if batch.decode_tokens > 1 else 1.0, *[1.0] * (self.depth - 1)]

    def transfer_bytes(self, batch: BatchShape) -> float:
        return 0.0


def test_groups_that_are_back_once_stage_0_is_free_go_together() -> None:
    arrivals_s = [0.0, 1.0, 2.0, 2.0]
    asked = [Request(number, at_s, 10, 4) for number, at_s in enumerate(arrivals_s)]
    (result,) = simulate_replicas(small_world(asked, depth=3, costs=SlowPairs(3)), whole=False)
    # The pair holds stage 0 from 5 to 15 s; requests 0 and 1 are back at 6 and 7 s.
    assert result.completion_s.tolist() == [47.0, 47.0, 57.0, 57.0]


def test_a_prompt_that_comes_before_stage_0_is_free_goes_with_the_decode_that_waits() -> None:
    arrivals_s = [0.0, 1.0, 1.0, 10.0]
    asked = [Request(number, at_s, 10, 4) for number, at_s in enumerate(arrivals_s)]
    (result,) = simulate_replicas(small_world(asked, depth=2, costs=SlowPairs(2)), whole=False)
    # The pair holds stage 0 from 3 to 13 s; request 0 is back at 4 s.
    assert result.first_token_s.tolist() == [2.0, 3.0, 3.0, 15.0]


def test_a_prompt_finds_the_turn_without_a_decode_after_a_stretch() -> None:
    arrivals_s, outputs = [0.0, 0.5, 15.5], [30, 30, 2]
    asked = [Request(i, at_s, 10, outputs[i]) for i, at_s in enumerate(arrivals_s)]
    params = {"async_scheduling": "v2"}
    world = small_world(asked, "vllm_v1", params, depth=3, max_in_flight=4, **IN_TURNS)
    (result,) = simulate_replicas(world, whole=False)
    # Request 1 is back at 16 s; the turn after its is nobody's, and the next that of request 0.
    assert result.first_token_s.tolist() == [3.0, 7.0, 20.0]


asked: list[Any] = []


class Own(Sarathi):
    """Sarathi's policy of a user, which notes the decodes that it is asked about."""

    def schedule(self, view: View) -> Plan:
        asked.append(view.ready_decodes)
        return super().schedule(view)


class Coasting(Own):
    """The same of one who says when it sends a group as it is."""

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        return super().sends_whole(decodes, running, depth)


@pytest.mark.parametrize(
    ("policy", "ready"),
    [
        (Own, [0, 1, 1, 1, 1, 1, 1]),  # a subclass answers for itself
        (Coasting, [0, 1]),
    ],
)
def test_only_a_policy_that_says_so_itself_is_not_asked_about_a_stretch(
    policy: type[Own], ready: list[int]
) -> None:
    asked.clear()
    world = small_world([Request(0, 0.0, 10, 7)], make_scheduler=policy)
    (result,) = simulate_replicas(world, whole=False)
    assert (asked, result.completion_s.tolist()) == (ready, [7.0])


class AheadAndAsked(VLLMV1):
    """vLLM's policy, which notes the decodes that it is asked about, and in which question."""

    def sends_whole(self, decodes: int, running: int, depth: int) -> bool:
        return super().sends_whole(decodes, running, depth)

    def schedule(self, view: EngineView) -> Plan | Iterator[Plan]:
        asked.append((view.ready_decodes, view.asked))
        return super().schedule(view)


@pytest.mark.parametrize("depth", [1, 3])
def test_decodes_that_run_ahead_are_not_asked_about_up_to_the_last(depth: int) -> None:
    asked.clear()
    options: dict[str, Any] = {"depth": depth, "max_in_flight": depth + 1, **IN_TURNS}
    world = small_world(
        [Request(0, 0.0, 10, 50)], make_scheduler=lambda: AheadAndAsked(depth=depth), **options
    )
    (result,) = simulate_replicas(world, whole=False)
    assert result.completion_s.tolist() == [50.0 * depth]
    # The prompt, two until it is back, and the last, one in each round of the stages.
    assert asked == [(0, 1), (1, 1 + depth), (1, 1 + 2 * depth), (1, 1 + 49 * depth)]
