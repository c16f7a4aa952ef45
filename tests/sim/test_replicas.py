"""Several pipelines on one clock: what comes out together.

Who gets which request, also in a closed loop, is checked by tests/oracle/test_plain.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenflow.results.bubbles import attribute
from evenflow.results.metrics import summarize
from evenflow.results.run import WAIT_REASONS, RunResult, merged
from evenflow.sim import World, simulate, simulate_replicas
from evenflow.types import Plan, Prefill, Request, View
from tests.amounts import many
from tests.command_line import evenflow, refused, write_inputs
from tests.worlds import assert_same, small_world, worlds


def world(requests: list[Request], **more: object) -> World:
    return small_world(requests, **({"replicas": 2} | more))


def one_every(seconds: float, outputs: list[int]) -> list[Request]:
    return [Request(i, i * seconds, 10, output) for i, output in enumerate(outputs)]


def test_merged_replicas_are_all_their_requests_and_micro_batches() -> None:
    results = simulate_replicas(world(one_every(0.5, [9, 1, 1, 1, 1])))
    whole = merged(results)
    assert whole.request_id.tolist() == [0, 1, 2, 3, 4]
    assert (np.diff(whole.returned_s) >= 0).all()
    summary = summarize(whole)
    assert summary["completed"] == 5
    assert summary["total_output_tokens"] == 13
    busy_s = sum((result.end_s - result.start_s).sum() for result in results)
    assert summary["busy_share"] == pytest.approx(busy_s / (2 * summary["duration"]))


@pytest.mark.parametrize("late_s", [1e13, float("nan")])
def test_an_arrival_beyond_all_runs_is_refused_in_a_world_of_one_s_own(late_s: float) -> None:
    with refused(f"workload: the last request would arrive after {late_s:g} s"):
        simulate(small_world([Request(0, 0.0, 8, 2), Request(1, late_s, 8, 2)]))


def test_bubbles_of_merged_pipelines_are_refused() -> None:
    whole = merged(simulate_replicas(world(one_every(0.5, [2, 2]))))
    with pytest.raises(ValueError, match=re.escape("bubbles need one pipeline, not 2 merged")):
        attribute(whole)


class Patient:
    """Sends nothing before 5 s."""

    def schedule(self, view: View) -> Plan:
        if view.now_s < 5:
            return Plan(wake_at_s=5.0)
        return Plan([Prefill(prompt.request_id, 10) for prompt in view.waiting])


def test_of_two_engines_that_wait_the_one_that_has_work_says_why() -> None:
    alone = small_world([Request(0, 0.0, 10, 1)], make_scheduler=Patient)
    for engines in (1, 2):
        result = simulate(replace(alone, virtual_engines=engines))
        assert [WAIT_REASONS[code] for code in result.wait_reason] == ["policy", "work"]


@settings(max_examples=many(60), deadline=None)
@given(worlds(), st.integers(1, 3))
def test_round_robin_is_as_many_runs_of_a_part_each(drawn: World, count: int) -> None:
    open_loop = replace(drawn, concurrency=None)
    together = simulate_replicas(replace(open_loop, replicas=count))
    for index, result in enumerate(together):
        assert_same(result, simulate(replace(open_loop, requests=open_loop.requests[index::count])))


@settings(max_examples=many(60), deadline=None)
@given(
    worlds(),
    st.integers(1, 3),
    st.sampled_from(["round_robin", "least_outstanding", "prefix_affinity"]),
)
def test_no_request_is_lost_between_replicas(drawn: World, count: int, router: str) -> None:
    results = simulate_replicas(replace(drawn, replicas=count, router=router))
    whole = merged(results)
    assert whole.request_id.tolist() == [request.request_id for request in drawn.requests]
    served = np.array([status != "rejected" for status in whole.status])
    assert whole.sampled_rows.sum() == whole.output_tokens[served].sum()
    for result in results:
        bubbles = attribute(result)
        assert bubbles.idle_s == pytest.approx(sum(bubbles.totals().values()))


def test_on_done_counts_all_replicas() -> None:
    seen: list[int] = []
    simulate_replicas(world(one_every(0.5, [3, 2, 1])), seen.append)
    assert seen[-1] == 3
    assert seen == sorted(seen)


@pytest.mark.long
@pytest.mark.parametrize(("command", "count"), [("simulate", 21), ("compare", 2)])
def test_replicas_through_the_command_line(command: str, count: int, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    out = tmp_path / "out"
    more = ["--schedulers", "sarathi,vllm"] if command == "compare" else []
    set_ = f"replicas={{count: {count}, router: least_outstanding}}"
    run = str(tmp_path / "RUN.yaml")
    status, _, errors = evenflow(command, run, *more, "--set", set_, "--out", str(out))
    assert status == 0, errors
    folder = out / "sarathi" if command == "compare" else out
    assert len((folder / "requests.csv").read_text().splitlines()) == 21
    for index in range(count):
        names = {file.name for file in (folder / f"replica-{index}").iterdir()}
        assert names == {"batches.csv", "stages.csv", "bubbles.csv", "timeline.json.gz"}
    assert f"sarathi, replica {count - 1}" in (out / "report.html").read_text()


def test_more_engines_than_pages_is_a_mistake_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    settings = ["--set", "virtual_engines=3", "--set", "kv.pages=2"]
    assert evenflow("simulate", "RUN.yaml", "--out", "out", *settings) == (
        2,
        "",
        "error: virtual_engines: 3 engines share 2 KV pages; at least one page each is right\n",
    )


@settings(max_examples=many(60), deadline=None)
@given(worlds(), st.integers(1, 2))
@example(small_world([Request(0, 0.0, 32, 1), Request(1, 0.003, 1, 1)], times_s=(0.005, 1e-4)), 2)
@example(small_world([Request(0, 0.0, 1, 1100)], depth=2, max_model_len=1200), 1)  # two arrays
def test_micro_batches_that_are_not_kept_leave_the_summary_that_they_would_have_given(
    world: World, count: int
) -> None:
    world = replace(world, replicas=count)
    expected = simulate_replicas(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenflow.sim.driver.BLOCK_BYTES", 0)  # a block whenever a request ends
        by_blocks = simulate_replicas(world)
        tallies = simulate_replicas(world, whole=False)
    for one, other in zip(by_blocks, expected, strict=True):
        assert_same(_with_sorted_gaps(one), _with_sorted_gaps(other))
    assert not any(len(result.end_s) for result in tallies)
    found, known = summarize(merged(tallies)), summarize(merged(expected))
    for name in ("busy_share", "mean_itl_ms", "std_itl_ms"):  # sums in another order
        one, other = found.pop(name), known.pop(name)
        assert one == (None if other is None else pytest.approx(other, rel=1e-12, abs=1e-9))
    assert found == known


def _with_sorted_gaps(result: RunResult) -> RunResult:
    """Several engines' gaps come by engine, and so do those of each block."""
    order = np.lexsort((result.gap_count, result.gap_s))
    return replace(result, gap_s=result.gap_s[order], gap_count=result.gap_count[order])
