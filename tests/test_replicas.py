"""Several pipelines on one clock: who gets which request, and what comes out together."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.results.bubbles import attribute
from evenflow.results.combine import merged
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.schedulers import create
from evenflow.types import Prefix, Request
from sim import World, simulate, simulate_replicas
from tests.command_line import evenflow, write_inputs
from tests.worlds import assert_same, small_world, worlds


def world(requests: list[Request], **more: object) -> World:
    return small_world(requests, **({"replicas": 2} | more))


def shares(results: list[RunResult]) -> list[list[int]]:
    return [result.request_id.tolist() for result in results]


def one_every(seconds: float, outputs: list[int]) -> list[Request]:
    return [Request(i, i * seconds, 10, output) for i, output in enumerate(outputs)]


def test_round_robin_deals_in_turn() -> None:
    results = simulate_replicas(world(one_every(0.5, [9, 1, 1, 1, 1])))
    assert shares(results) == [[0, 2, 4], [1, 3]]


def test_least_outstanding_avoids_who_is_busy() -> None:
    requests = one_every(1.5, [9, 1, 1, 1, 9, 1])
    results = simulate_replicas(world(requests, router="least_outstanding"))
    # 0 stays on the first; 1, 2, 3 each find the second one free, 4 too; then both have one.
    assert shares(results) == [[0, 5], [1, 2, 3, 4]]


def test_prefix_affinity_keeps_conversations_together() -> None:
    """Two conversations in turns, with block 0 before them both: the first messages go where there
    is least to do, the rest follow; a request without a prefix goes where there is least to do."""
    turns = [(0, 7, 6), (0, 8, 5), (0, 7, 6, 1), (0, 7, 6, 1, 2), (0, 8, 5, 3), (0, 7, 6, 1, 2, 4)]
    requests = [
        replace(request, prompt_tokens=10 * len(blocks), prefix=Prefix(blocks, 10, 1_000))
        for request, blocks in zip(one_every(0.5, [9, 1, 1, 1, 1, 1]), turns, strict=True)
    ]
    requests.append(Request(6, 10.0, 10, 1))
    results = simulate_replicas(world(requests, router="prefix_affinity"))
    assert shares(results) == [[0, 2, 3, 5, 6], [1, 4]]


def test_a_closed_loop_keeps_its_clients_over_all_replicas() -> None:
    requests = [Request(i, 0.0, 10, 1 + i % 3) for i in range(20)]
    for router in ("round_robin", "least_outstanding"):
        results = simulate_replicas(world(requests, concurrency=3, router=router))
        whole = merged(results)
        assert whole.request_id.tolist() == list(range(20))
        for at_s in whole.arrival_s:
            inside = (whole.arrival_s <= at_s) & (whole.completion_s > at_s)
            assert inside.sum() <= 3


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


def test_bubbles_of_merged_pipelines_are_refused() -> None:
    whole = merged(simulate_replicas(world(one_every(0.5, [2, 2]))))
    with pytest.raises(ValueError, match=re.escape("bubbles need one pipeline, not 2 merged")):
        attribute(whole)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(1, 3))
def test_round_robin_is_as_many_runs_of_a_part_each(drawn: World, count: int) -> None:
    open_loop = replace(drawn, concurrency=None)
    together = simulate_replicas(replace(open_loop, replicas=count))
    for index, result in enumerate(together):
        assert_same(result, simulate(replace(open_loop, requests=open_loop.requests[index::count])))


@settings(max_examples=60, deadline=None)
@given(
    worlds(),
    st.integers(1, 3),
    st.sampled_from(["round_robin", "least_outstanding", "prefix_affinity"]),
)
def test_no_request_is_lost_between_replicas(drawn: World, count: int, router: str) -> None:
    results = simulate_replicas(replace(drawn, replicas=count, router=router))  # type: ignore[arg-type]
    whole = merged(results)
    assert whole.request_id.tolist() == [request.request_id for request in drawn.requests]
    done = np.array([status == "completed" for status in whole.status])
    assert whole.sampled_rows.sum() == whole.output_tokens[done].sum()
    for result in results:
        bubbles = attribute(result)
        assert bubbles.idle_s == pytest.approx(sum(bubbles.totals().values()))


def test_one_replica_is_one_run() -> None:
    drawn = world(one_every(0.5, [3, 2, 1]), replicas=1)
    assert_same(simulate_replicas(drawn)[0], simulate(drawn))


def test_two_replicas_halve_the_load_of_each() -> None:
    requests = [Request(i, 0.0, 10, 5) for i in range(40)]
    crowded = world(requests, make_scheduler=lambda: create("sarathi", {"max_num_seqs": 4}))
    alone = simulate(crowded).completion_s.max()
    both = merged(simulate_replicas(crowded)).completion_s.max()
    assert both == pytest.approx(alone / 2)


def test_on_done_counts_all_replicas() -> None:
    seen: list[int] = []
    simulate_replicas(world(one_every(0.5, [3, 2, 1])), seen.append)
    assert seen[-1] == 3
    assert seen == sorted(seen)


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize("count", [2, 21])
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
