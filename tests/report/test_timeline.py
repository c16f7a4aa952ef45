"""The Chrome trace of a run: valid, complete, without overlaps, and the same bytes each time."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenflow.report.timeline import PIPELINE, REQUESTS, write_timeline
from evenflow.results.bubbles import CAUSES, attribute
from tests.synthetic_run import nothing_ran, synthetic_run

Event = dict[str, Any]
DEPTH = 3


@pytest.fixture(scope="module")
def result():
    return synthetic_run(requests=30, depth=DEPTH)


@pytest.fixture(scope="module")
def events(result, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("timeline") / "timeline.json.gz"
    write_timeline(path, result, attribute(result))
    return read(path)


def read(path: Path) -> list[Event]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def slices(events: list[Event]) -> dict[int, list[Event]]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append(event)
    return threads


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def test_every_event_has_the_keys_of_the_format(events: list[Event]) -> None:
    assert {event["ph"] for event in events} == set("MXCben")
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0


def test_processes_and_threads_are_named(events: list[Event]) -> None:
    names = {
        (event["name"], event["pid"], event["args"]["name"])
        for event in events
        if event["name"] in {"process_name", "thread_name"}
    }
    processes = {("process_name", PIPELINE, "pipeline"), ("process_name", REQUESTS, "requests")}
    threads = [f"stage {stage}{idle}" for stage in range(DEPTH) for idle in ("", " idle")]
    assert names == processes | {("thread_name", PIPELINE, thread) for thread in threads}


def test_slices_of_a_thread_do_not_overlap(events: list[Event]) -> None:
    for own in slices(events).values():
        own.sort(key=lambda event: event["ts"])
        for before, after in pairwise(own):
            end = nanoseconds(before["ts"]) + nanoseconds(before["dur"])
            assert end <= nanoseconds(after["ts"])


def test_each_stage_has_a_slice_per_micro_batch_with_its_tokens(result, events) -> None:
    for stage in range(DEPTH):
        own = slices(events)[2 * stage + 1]
        assert [event["args"]["batch"] for event in own] == list(range(len(result.scheduled_s)))
        assert [event["args"]["prefill_tokens"] for event in own] == result.prefill_tokens.tolist()
        assert [event["args"]["decode_tokens"] for event in own] == result.decode_tokens.tolist()
        starts = np.array([event["ts"] for event in own]) / 1e6
        np.testing.assert_allclose(starts, result.start_s[:, stage], atol=1e-9)


def test_idle_slices_are_named_by_cause_and_fill_what_is_not_computing(result, events) -> None:
    threads = slices(events)
    for stage in range(DEPTH):
        idle = threads[2 * stage + 2]
        assert {event["name"] for event in idle} <= set(CAUSES)
        both = sum(event["dur"] for event in idle + threads[2 * stage + 1]) / 1e6
        bubbles = attribute(result)
        mine = bubbles.stage == stage
        expected = (bubbles.end_s - bubbles.start_s)[mine].sum()
        expected += (result.end_s - result.start_s)[:, stage].sum()
        assert both == pytest.approx(expected, abs=1e-6)


def test_flows_follow_each_micro_batch_through_the_stages(result, events) -> None:
    flows = defaultdict(list)
    for event in events:
        if "bind_id" in event:
            ends = event.get("flow_in", False), event.get("flow_out", False)
            flows[event["bind_id"]].append((event["args"]["batch"], event["tid"], *ends))
    assert len(flows) == len(result.scheduled_s)
    for batch, steps in flows.items():
        assert steps == [(batch, 1, False, True), (batch, 3, True, True), (batch, 5, True, False)]


def test_request_phases_open_and_close(result, events) -> None:
    phases = Counter()
    for event in events:
        if event["ph"] in "be":
            phases[event["id"], event["name"]] += 1 if event["ph"] == "b" else -1
    assert set(phases.values()) == {0}
    assert len(phases) == 2 * result.status.count("completed")
    (refused,) = [event for event in events if event["ph"] == "n"]
    assert refused["args"]["reason"] == result.reason[-1]


def test_counters_end_with_nothing_in_flight_and_nobody_waiting(result, events) -> None:
    levels = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            levels[event["name"]].append(event["args"])
    in_flight = [args["micro-batches"] for args in levels["in flight"]]
    assert max(in_flight) <= DEPTH
    assert in_flight[-1] == 0
    assert levels["waiting for the first token"][-1] == {"requests": 0}
    assert [args["pages"] for args in levels["free pages"]] == result.free_pages.tolist()
    assert levels["tokens per micro-batch"][0].keys() == {"prefill", "decode"}


def test_the_limit_holds_for_requests(
    result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.report.timeline.REQUESTS_SHOWN", 3)
    write_timeline(tmp_path / "few", result)
    mine = [event for event in read(tmp_path / "few") if event["pid"] == REQUESTS]
    assert {event["id"] for event in mine if "id" in event} == {0, 1, 2}


def test_a_window_shows_what_is_there_in_it(result, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    since_s, until_s = result.scheduled_s[20], result.returned_s[40]
    write_timeline(whole, result, attribute(result))
    write_timeline(cut, result, attribute(result), window=(since_s, until_s))

    def shown(events: list[Event]) -> list[Event]:
        times_s = ((event, event["ts"] / 1e6, event["dur"] / 1e6) for event in events)
        return [e for e, at, lasts in times_s if at <= until_s and at + lasts >= since_s]

    for thread, own in slices(read(whole)).items():
        mine = slices(read(cut))[thread]
        assert [event for event in mine if event in shown(own)] == shown(own)
        assert len(mine) <= len(shown(own)) + 2 * DEPTH  # on another stage at that time
    waiting = [e["args"] for e in read(cut) if e["name"] == "waiting for the first token"]
    assert all(args["requests"] >= 0 for args in waiting)
    assert any("pipeline, " in str(event["args"]) for event in read(cut) if event["ph"] == "M")


def test_one_stage_and_no_bubbles_need_neither_arrows_nor_idle_threads(tmp_path: Path) -> None:
    write_timeline(tmp_path / "one", synthetic_run(requests=5, depth=1))
    events = read(tmp_path / "one")
    assert not any("bind_id" in event for event in events)
    assert slices(events).keys() == {1}


def test_a_slice_costs_few_bytes(tmp_path: Path) -> None:
    result = synthetic_run(requests=200)
    write_timeline(tmp_path / "large", result, attribute(result))
    assert (tmp_path / "large").stat().st_size < 60 * result.start_s.size


def test_a_run_in_which_nothing_ran_is_still_a_trace(tmp_path: Path) -> None:
    write_timeline(tmp_path / "empty", nothing_ran())
    assert not slices(read(tmp_path / "empty"))
