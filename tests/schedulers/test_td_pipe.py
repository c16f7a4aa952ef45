"""TD-Pipe: the paper's worked example and equations, and its single decisions.

That it prefills, splits, steals, switches and evicts as the paper says, with each ablation, is what
tests/oracle/test_plain.py finds out; here is what random worlds do not meet or show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.config.build import build
from evenflow.config.run import load_config
from evenflow.costs import AffineCost, estimates
from evenflow.engines.handover import Handover, PoolBatcher
from evenflow.schedulers import create
from evenflow.schedulers.td_pipe import (
    FutureUsage,
    TDPipe,
    saturating_rows,
    spatial_intensity,
    stealing_share,
    temporal_intensity,
)
from evenflow.sim import simulate
from evenflow.types import Request
from tests.amounts import many
from tests.worlds import engine_of, send, small_world

COSTS = AffineCost(0.005, 0.0001, 4)
NO_SWITCH = {"request_finish_ratio": 1.0}


def td_pipe(**params: object) -> Any:
    return create("td_pipe", params, max_model_len=4096, **estimates(COSTS))


def batcher_of(policy: Any, asked: Any = (), depth: int = 4, pages: int = 10**6) -> Any:
    return engine_of(policy, pages, asked, PoolBatcher, depth=depth, max_in_flight=None)


def test_the_example_of_figure_9() -> None:
    """512 live requests; of the first 128, 48 end with their next token, of the next 128, 8."""
    asked = [(8, 2 if n < 48 or 128 <= n < 136 else 50) for n in range(512)]
    batcher = batcher_of(td_pipe(max_num_batched_tokens=10**4, **NO_SWITCH), asked)
    batcher.complete(send(batcher, 0.0), 1.0)
    batches = [send(batcher, 1.0) for _ in range(4)]
    assert [batch.decode_tokens for batch in batches] == [128, 128, 128, 128]
    assert batcher.next(1.0) is None, "a fifth batch in decode"
    log = []
    for number in range(8):
        batcher.complete(batches[number], 2.0 + number)
        returned = len(batcher.queues.ready.groups[-1])
        average = batcher.queues.running_decodes / 4
        members = set(batches[number].decodes.members)
        batches.append(send(batcher, 2.0 + number))
        assert set(batches[-1].decodes.members) <= members or number == 4, "batches mix"
        assert batcher.next(2.0 + number) is None, "a fifth batch in decode"
        log.append(
            (returned, average, batches[-1].decode_tokens, batcher.queues.ready.num_sequences)
        )
    assert log == [  # returned, average, submitted, withheld
        (80, 116, 80, 0),
        (120, 114, 114, 6),
        (128, 114, 114, 20),
        (128, 114, 114, 34),
        (80, 114, 114, 0),
        (114, 114, 114, 0),
        (114, 114, 114, 0),
        (114, 114, 114, 0),
    ]


@settings(max_examples=many(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=20),
    st.sampled_from([14, 20, 400]),
    st.sampled_from([0.0, 0.001, 0.02, 0.3]),
    st.sampled_from(["paper", "reading", "code"]),
    st.sampled_from([None, 0.05]),
)
def test_all_are_served_also_where_the_public_code_dies(
    drawn: list[tuple[int, int]], pages: int, gap_s: float, variant: str, ratio: float | None
) -> None:
    """Fewer live requests than stages, and prompts that fit only when the others have gone."""
    requests = [Request(i, i * gap_s, *lengths, lengths[1]) for i, lengths in enumerate(drawn)]
    policy = td_pipe(variant=variant, request_finish_ratio=ratio)
    sizes = {"depth": 4, "total_pages": pages, "max_in_flight": None}
    world = small_world(requests, make_scheduler=lambda: policy, costs=COSTS, **sizes)
    assert simulate(world).status == ["completed"] * len(requests)


@pytest.mark.parametrize(("name", "cap"), [("td_pipe", None), ("vllm", 3)])
def test_a_run_of_it_has_no_cap_on_what_is_in_flight(
    folder: Path, name: str, cap: int | None
) -> None:
    """Others have one micro-batch a stage; in decode it keeps to that itself."""
    config = load_config(folder / "RUN.yaml", [f"scheduler={name}", "stages=3"])
    assert build(config, folder).world.max_in_flight == cap


def test_what_came_with_its_kv_decodes_in_even_batches() -> None:
    """No prefill phase went before: the first question finds decodes, and nothing that waits."""
    batcher = batcher_of(td_pipe(), depth=4)
    for number in range(8):
        batcher.reserve(Handover(Request(number, 0.0, 16, 9, 9), 1, 0.0, 0.0, 0))
        batcher.adopt(number)
    assert [send(batcher, 0.0).decode_tokens for _ in range(4)] == [2, 2, 2, 2]


# -- decisions ------------------------------------------------------------------------------------


def deciding(
    policy: Any,
    outputs: list[int],
    *,
    predicted: int | None = 90,
    pages: int = 1000,
    depth: int = 2,
) -> Any:
    """Prompts of 16 tokens have decoded one round, and the first batch has returned."""
    asked = [(16, output, predicted) for output in outputs]
    batcher = batcher_of(policy, asked, depth=depth, pages=pages)
    prefills = []
    while (batch := batcher.next(0.0)) is not None and batch.chunks:
        prefills.append(batch)
    assert batch is None
    for prefill in prefills:
        batcher.complete(prefill, 1.0)
    first, *_ = [send(batcher, 1.0) for _ in range(depth)]
    batcher.complete(first, 2.0)
    return batcher


def after_an_arrival(batcher: Any) -> str:
    """Let a prompt of 16 tokens come; return P if the policy then prefills, else D."""
    batcher.add(Request(1000, 2.0, 16, 90, 90))
    return "P" if send(batcher, 3.0).chunks else "D"


def flat(rows: int, context_tokens: int) -> float:
    return 1.0


def linear(rows: int, context_tokens: int) -> float:
    return float(rows)


def odd_peak(rows: int, context_tokens: int) -> float:
    """Saturates at 64 rows, and is 100 times slower at the public code's 256."""
    return 100.0 if rows == 256 else max(1.0, rows / 64)


def flat_until_4(rows: int, context_tokens: int) -> float:
    return max(1.0, rows / 4)


@pytest.mark.parametrize(
    ("variant", "decode_s", "depth", "prefill_s", "answer"),
    [
        ("paper", flat, 2, 1.0, "P"),  # far from saturated, and no bubble
        ("paper", linear, 2, 1.0, "D"),  # every batch is saturated
        ("paper", odd_peak, 2, 10.0, "P"),  # 2 / 64 < 1 - 9 / 21
        ("code", odd_peak, 2, 10.0, "D"),  # 2 * 100 / 256 > 1 - 9 / 21
        ("paper", flat_until_4, 3, 10.0, "P"),  # 2 / 4 < 1 - 9 / 22
        ("reading", flat_until_4, 3, 10.0, "D"),  # 2 / 4 > 1 - 18 / 31
    ],
)
def test_decode_ends_when_spatial_is_below_temporal_intensity(
    variant: str, decode_s: Any, depth: int, prefill_s: float, answer: str
) -> None:
    policy = TDPipe(variant=variant, decode_s=decode_s, prefill_s=lambda tokens: prefill_s)
    assert after_an_arrival(deciding(policy, [90] * 2 * depth, depth=depth)) == answer


def test_the_prefills_that_pend_are_as_full_as_a_micro_batch_may_be() -> None:
    """Of at most 64 tokens: 64 at once, 65 not, and a prompt that is longer alone."""
    asked: list[int] = []

    def prefill_s(tokens: int) -> float:
        asked.append(tokens)
        return 1.0

    policy = TDPipe(max_num_batched_tokens=64, decode_s=linear, prefill_s=prefill_s)
    batcher = deciding(policy, [90] * 4)
    for number, prompt in enumerate((40, 24, 60, 5, 80, 3)):
        batcher.add(Request(1000 + number, 2.0, prompt, 90, 90))
    assert not send(batcher, 3.0).chunks, "saturated, so it decodes"
    assert asked == [64, 60, 5, 80, 3]


def test_future_points_are_those_of_the_paper_or_of_the_code() -> None:
    code = (5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    assert td_pipe(variant="code").points == code
    assert td_pipe().points == tuple(32 * number for number in range(1, 33))
    assert td_pipe(variant="code", future_points=[1, 2]).points == (1, 2)


@pytest.mark.parametrize(("pages", "ratio", "full"), [(20, 0.2, 4), (10, 0.7, 7), (20, 0.95, 19)])
def test_an_occupancy_is_reached_at_exactly_its_share_of_the_pages(
    pages: int, ratio: float, full: int
) -> None:
    policy = td_pipe(max_num_batched_tokens=16, kv_occupancy_ratio=ratio)
    batcher = batcher_of(policy, [(16, 3, 3)] * pages, pages=pages)
    assert all(send(batcher, 0.0).chunks for _ in range(full))
    assert batcher.next(0.0) is None


@pytest.mark.parametrize(("variant", "prompts"), [("paper", 62), ("code", 56)])
def test_prefill_ends_above_the_pool_or_in_the_code_at_nine_tenths_of_it(
    variant: str, prompts: int
) -> None:
    """Each holds 26 tokens in ten steps: 62 of them exceed 1600 tokens, 56 have 1440."""
    points = {"variant": variant, "future_points": [10], "max_num_batched_tokens": 16}
    batcher = batcher_of(td_pipe(**points), [(16, 20, 20)] * 100, pages=100)
    assert all(send(batcher, 0.0).chunks for _ in range(prompts))
    assert batcher.next(0.0) is None


@pytest.mark.parametrize(("pages", "answer"), [(25, "D"), (26, "P")])
@pytest.mark.parametrize(("points", "predicted"), [([64], 90), ([16, 64], None)])
def test_decode_goes_on_if_the_use_at_a_point_leaves_no_prefill_room(
    points: list[int], predicted: int | None, pages: int, answer: str
) -> None:
    """In 64 steps the first four hold 81 tokens each, a fifth 80: 404 are more than 25 pages.

    Without a prediction a request is there until the last point, which alone decides.
    """
    policy = TDPipe(future_points=points, decode_s=flat, prefill_s=lambda tokens: 1.0)
    batcher = deciding(policy, [90] * 4, predicted=predicted, pages=pages)
    assert after_an_arrival(batcher) == answer


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6, 0.8])
def test_a_finish_ratio_is_reached_at_exactly_its_share_of_the_requests(ratio: float) -> None:
    ends = round(10 * ratio)
    for early, answer in ((ends, "P"), (ends - 1, "D")):
        outputs = [2] * early + [90] * (10 - early)
        batcher = deciding(TDPipe(request_finish_ratio=ratio), outputs)
        batcher.complete(next(iter(batcher.queues.in_flight.values())), 2.0)
        assert after_an_arrival(batcher) == answer


def test_of_a_decode_phase_that_began_with_nobody_a_share_ends() -> None:
    """KV on its way held all pages when the prompt came; then one decodes, the other leaves."""
    batcher = batcher_of(TDPipe(request_finish_ratio=0.5), depth=2, pages=4)
    for number in (0, 1):
        batcher.reserve(Handover(Request(number, 0.0, 30, 20, 20), 1, 0.0, 0.0, 0))
    batcher.add(Request(2, 0.0, 8, 9, 9))
    assert batcher.next(0.0) is None
    batcher.adopt(0)
    batcher.release(1)
    for now_s in (1.0, 2.0, 3.0):
        batch = send(batcher, now_s)
        assert batch.decodes is not None
        batcher.complete(batch, now_s)


@pytest.mark.parametrize(("live", "answer"), [(380, "P"), (384, "D")])
def test_from_192_rows_a_batch_the_public_code_counts_as_saturated(live: int, answer: str) -> None:
    """Its peak is that of 256 rows: 190 / 256 < 1 by the intensities, and 192 are enough."""
    many = {"variant": "code", "max_num_batched_tokens": 10**4}
    policy = TDPipe(**many, decode_s=flat, prefill_s=lambda tokens: 1.0)
    assert after_an_arrival(deciding(policy, [90] * live, pages=10**6)) == answer


def test_the_lengths_of_running_decodes() -> None:
    batcher = deciding(TDPipe(request_finish_ratio=1.0), [90, 90, 90, 90], predicted=70)
    # The first two have returned with their second token; the others are in flight for theirs.
    view = batcher.view
    assert [one[1:4] for one in view.decode_lengths] == [(17, 2, 70)] * 2 + [(16, 1, 70)] * 2
    assert view.decode_context_tokens == 2 * 17 + 2 * 16


# -- equations ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(-10, 1500))),
    st.lists(st.integers(1, 1200), min_size=1, max_size=9, unique=True),
)
def test_future_usage_is_that_of_algorithm_1(
    rows: list[tuple[int, int]], points: list[int]
) -> None:
    points.sort()
    usage = FutureUsage(points)
    for context, remaining in rows:
        usage.add(context, remaining)
    expected = [sum(c + m for c, remaining in rows if m <= remaining) for m in points]
    assert usage.at_points() == expected
    assert usage.peak() == max(expected)


@given(st.integers(0, 5000), st.integers(1, 16), st.integers(0, 1000))
def test_the_shares_of_a_round_are_even_and_add_up(live: int, depth: int, turn: int) -> None:
    shares = [stealing_share(live, depth, turn + k) for k in range(depth)]
    assert sum(shares) == live
    assert max(shares) - min(shares) <= 1


def flat_until_256(rows: int, context_tokens: int) -> float:
    return max(rows, 256) * 1e-3 + context_tokens * 1e-6


def test_spatial_intensity_is_achieved_over_peak() -> None:
    assert saturating_rows(flat_until_256) == 256
    assert saturating_rows(lambda rows, context: max(rows, 100)) == 128
    assert saturating_rows(lambda rows, context: max(rows, 64) + 64 * context) == 64
    assert spatial_intensity(256, 100, 256, flat_until_256) == 1
    # 64 rows: 64 / (0.256 + 0.0064) against 256 / (0.256 + 0.0256).
    value = spatial_intensity(64, 100, 256, flat_until_256)
    assert value == pytest.approx((64 / 0.2624) / (256 / 0.2816))
    assert spatial_intensity(1, 10, 8, lambda rows, context: 0.0) == 1, "what costs nothing"


def test_temporal_intensity_counts_the_bubble_of_the_longest_prefill() -> None:
    # Prefills of 3, 5, 4 s after steps of 1 s on 4 stages: bubble 5 - 1, total 12 + 4 + 4; or on
    # each of the three stages that wait.
    assert temporal_intensity([3.0, 5.0, 4.0], 1.0, 4) == pytest.approx(1 - 4 / 20)
    assert temporal_intensity([3.0, 5.0, 4.0], 1.0, 4, waits=3) == pytest.approx(1 - 12 / 28)
    assert temporal_intensity([0.5], 1.0, 4) == 1
    assert temporal_intensity([0.0], 0.0, 4) == 1, "what costs nothing"


def test_one_decode_on_two_stages_is_as_good_as_many_where_rows_take_the_time() -> None:
    """Its row keeps both stages as busy as any number would, so no prompt comes before its end."""
    asked = [Request(0, 0.0, 1, 20), Request(1, 9.0, 100, 1)]
    sizes: dict[str, Any] = {"depth": 2, "times_s": (0.01, 1.0), "total_pages": 1000}
    result = simulate(small_world(asked, "td_pipe", {}, **sizes))
    assert result.completion_s[0] == pytest.approx(20 * 2 * 1.01)
    assert result.first_scheduled_s[1] == result.completion_s[0]
