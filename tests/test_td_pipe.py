"""TD-Pipe: the paper's worked example, its equations, and what the public code dies of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.batcher import Batcher
from evenflow.costs import AffineCost, estimates
from evenflow.errors import UsageError
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Request
from sim import World, simulate
from tests.td_pipe_parts import COSTS, NO_SWITCH, batcher_of, offline, td_pipe
from tests.worlds import send


def run(requests: list[Request], *, pages: int = 10**4, depth: int = 4, **params: Any) -> RunResult:
    costs = AffineCost(COSTS.base_s, COSTS.per_token_s, depth)
    return simulate(
        World(
            requests=requests,
            make_scheduler=lambda: create("td_pipe", params, **estimates(costs)),
            costs=costs,
            depth=depth,
            total_pages=pages,
            max_model_len=4096,
        )
    )


# -- figure 9 -------------------------------------------------------------------------------------


def example_of_figure_9(**params: object) -> Batcher:
    """512 live requests; of the first 128, 48 end with their next token, of the next 128, 8."""
    batcher = batcher_of(td_pipe(max_num_batched_tokens=10**4, **NO_SWITCH, **params))
    for number in range(512):
        short = number < 48 or 128 <= number < 136
        batcher.add(Request(number, 0.0, 8, 2 if short else 50))
    prefill = batcher.next(0.0)
    assert prefill is not None
    assert len(prefill.chunks) == 512
    batcher.complete(prefill, 1.0)
    return batcher


def test_the_example_of_figure_9() -> None:
    batcher = example_of_figure_9()
    batches = [send(batcher, 1.0) for _ in range(4)]
    assert [batch.decode_tokens for batch in batches] == [128, 128, 128, 128]
    assert batcher.next(1.0) is None, "a fifth batch in decode"
    log = []
    for number in range(8):
        batcher.complete(batches[number], 2.0 + number)
        returned = batcher.queues.ready.group_sizes[-1]
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


def test_without_work_stealing_the_batches_stay_as_they_were_split() -> None:
    batcher = example_of_figure_9(work_stealing=False)
    batches = [send(batcher, 1.0) for _ in range(4)]
    for number in range(4):
        batcher.complete(batches[number], 2.0 + number)
        batches.append(send(batcher, 2.0 + number))
    assert [batch.decode_tokens for batch in batches[4:]] == [80, 120, 128, 128]
    for batch in batches[4:6]:
        batcher.complete(batch, 9.0)
    assert [send(batcher, 9.0).decode_tokens for _ in range(2)] == [80, 120]


# -- phases ---------------------------------------------------------------------------------------


def phases(result: RunResult) -> str:
    """The order of micro-batches as P and D, runs of one letter shortened to it."""
    assert not (result.prefill_tokens * result.decode_tokens).any(), "a mixed micro-batch"
    letters = ["P" if tokens else "D" for tokens in result.prefill_tokens]
    return "".join(a for a, b in zip(letters, [*letters[1:], ""], strict=True) if a != b)


def test_prefill_ends_when_the_predicted_use_exceeds_the_pool() -> None:
    # Each lives to point 96 with 100 + 96 tokens: the pool of 1600 holds 8 of them, and the ninth
    # is the first too many.
    result = run(
        offline(20, 100, 96), pages=100, max_num_batched_tokens=100, request_finish_ratio=1.0
    )
    prefills = (result.prefill_tokens > 0).tolist()
    assert prefills.index(False) == 9
    assert result.preemptions.sum() > 0, "nine do not fit to their end"


def test_prefill_ends_at_a_given_occupancy() -> None:
    result = run(
        offline(40, 160, 20),
        pages=100,
        max_num_batched_tokens=160,
        kv_occupancy_ratio=0.5,
        request_finish_ratio=0.8,
    )
    assert (result.prefill_tokens > 0).tolist().index(False) == 5
    assert phases(result).count("P") > 1


def test_prefill_is_not_capped_and_decode_is() -> None:
    batcher = batcher_of(td_pipe(max_num_batched_tokens=50))
    for request in offline(30, 50, 10):
        batcher.add(request)
    prefills = [send(batcher, 0.0) for _ in range(30)]
    assert batcher.next(0.0) is None
    for batch in prefills:
        batcher.complete(batch, 1.0)
    assert [send(batcher, 1.0).decode_tokens for _ in range(4)] == [8, 8, 7, 7]
    assert batcher.next(1.0) is None


def test_the_first_batch_waits_for_its_prefills() -> None:
    batcher = batcher_of(td_pipe(max_num_batched_tokens=50))
    for number, prompt in enumerate([50, 7, 7, 7, 7, 7, 7, 7]):
        batcher.add(Request(number, 0.0, prompt, 10, 10))
    first, second = send(batcher, 0.0), send(batcher, 0.0)
    batcher.complete(first, 0.5)
    assert batcher.next(0.5) is None, "one of two rows is ready"
    batcher.complete(second, 1.0)
    assert [send(batcher, 1.0).decode_tokens for _ in range(4)] == [2, 2, 2, 2]


def test_a_finish_ratio_ends_decode() -> None:
    requests = [Request(i, 0.0, 100, 20 + 20 * (i % 5), 20 + 20 * (i % 5)) for i in range(200)]
    often = run(requests, pages=600, request_finish_ratio=0.2)
    seldom = run(requests, pages=600, request_finish_ratio=0.8)
    assert phases(often).count("P") > phases(seldom).count("P") > 1


def test_the_intensities_switch_between_the_phases() -> None:
    requests = [Request(i, 0.0, 100, 20 + 20 * (i % 5), 20 + 20 * (i % 5)) for i in range(400)]
    for variant in ("paper", "code"):
        result = run(requests, pages=1000, variant=variant)
        assert phases(result).count("P") > 2, variant


def test_a_request_without_a_prediction_outlives_every_future_point() -> None:
    known = run([Request(i, 0.0, 100, 30, 30) for i in range(200)], pages=600)
    unknown = run([Request(i, 0.0, 100, 30) for i in range(200)], pages=600)
    assert phases(unknown).count("P") > phases(known).count("P")


def test_the_newest_is_evicted_and_recomputed() -> None:
    # Three of 32 + 64 tokens in 13 pages: they start with 2 pages each and want 6.
    result = run(offline(3, 32, 64, predicted=1), pages=13, depth=1)
    assert result.preemptions[0] == 0
    assert result.preemptions[2] > 0
    assert result.status == ["completed"] * 3


# -- where the public code dies -------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_live_requests_than_stages(count: int, variant: str) -> None:
    result = run(offline(count, 50, 10), variant=variant)
    assert result.status == ["completed"] * count
    assert result.decode_tokens.sum() == 9 * count


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("ratio", [None, 0.05])
def test_nothing_that_waits_fits(ratio: float | None, variant: str) -> None:
    requests = [*offline(4, 150, 10), Request(4, 0.0, 600, 20, 20), Request(5, 0.0, 10, 5, 5)]
    result = run(requests, pages=40, variant=variant, request_finish_ratio=ratio)
    assert result.status == ["completed"] * 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=20),
    st.sampled_from([14, 20, 400]),
    st.sampled_from([0.001, 0.02, 0.3]),
    st.sampled_from(["paper", "code"]),
)
def test_arrivals_at_any_time_are_served(
    drawn: list[tuple[int, int]], pages: int, gap_s: float, variant: str
) -> None:
    requests = [
        Request(i, i * gap_s, prompt, output, output) for i, (prompt, output) in enumerate(drawn)
    ]
    result = run(requests, pages=pages, variant=variant)
    assert result.status == ["completed"] * len(requests)


def test_a_decode_phase_goes_on_while_nothing_fits() -> None:
    # The long prompt fits only when the others are gone, whatever share of them has finished.
    requests = [Request(i, 0.0, 100, 10 + 30 * i, 10 + 30 * i) for i in range(3)]
    requests.append(Request(3, 0.0, 600, 20, 20))
    result = run(requests, pages=40, request_finish_ratio=0.3)
    assert result.status == ["completed"] * 4
    assert phases(result) == "PDPD"
    assert result.first_token_s[3] > result.completion_s[2]


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"variant": "fast"}, "variant should be 'paper' or 'code', not \"fast\""),
        ({"future_points": [64, 32]}, "rising order"),
        (
            {"kv_occupancy_ratio": 1.5},
            "kv_occupancy_ratio should be at most 1.0, not 1.5",
        ),
        ({"request_finish_ratio": 0.0}, "request_finish_ratio should be greater than 0.0, not 0"),
        ({"max_num_batched_tokens": 0}, "at least 1"),
        ({"decode_s": 1}, "no parameter 'decode_s'"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        td_pipe(**params)


def test_the_intensity_rule_needs_estimates() -> None:
    with pytest.raises(UsageError, match="needs prefill_s and decode_s"):
        create("td_pipe", {})
    assert create("td_pipe", NO_SWITCH)
