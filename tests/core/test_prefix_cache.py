"""Prefix caching: scenarios on the Batcher with literal logs, and hit rates counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from evenflow.core.kv import CachedPage, Holder, PrefixCache
from evenflow.core.replay import decision_of
from evenflow.engines.append_only import AppendOnlyCache
from evenflow.results.metrics import summarize
from evenflow.schedulers import create
from evenflow.sim import simulate
from evenflow.traces import Offline, Replay, load_trace, make_requests, with_conversations
from evenflow.types import Prefix, Request
from tests.command_line import RUN, done, evenflow, refused, summary_of
from tests.worlds import engine_of, send, small_world

PAGE = 16


def batcher(policy: str = "sarathi", pages: int = 64, **params: object) -> Any:
    scheduler = create(policy, params, max_model_len=2_000)
    return engine_of(scheduler, PrefixCache(pages, PAGE), max_in_flight=1, max_model_len=2_000)


def asking(request_id: int, prompt: int, *blocks: int, output: int = 1) -> Request:
    """Return a request whose prompt consists of blocks of 32 tokens."""
    return Request(request_id, 0.0, prompt, output, prefix=Prefix(blocks, 32, prompt))


def serve(serving: Any, *requests: Request) -> list[tuple[tuple[int, int, int], ...]]:
    """Serve requests until all are done; return the chunks of each micro-batch."""
    for request in requests:
        assert serving.add(request) is None
    log = []
    while serving.queues.live:
        batch = send(serving, 0.0)
        decision = decision_of(batch)
        if decision.chunks:
            log.append(decision.chunks)
        serving.complete(batch, float(batch.batch_id))
    return log


@pytest.mark.parametrize(
    ("prompt", "blocks", "start"),
    [
        (90, (1, 2, 4), 64),  # what begins alike is not computed again
        (70, (1, 5, 3), 32),
        (70, (2, 1, 3), 0),
        (64, (1, 2, 3), 48),  # the last page would leave nothing to compute
        (65, (1, 2, 3), 64),
        (63, (1, 2, 3), 48),
        (17, (1, 2, 3), 16),
        (16, (1, 2, 3), 0),
    ],
)
def test_common_full_pages_are_not_computed_again_but_one_token_at_least_is(
    prompt: int, blocks: tuple[int, ...], start: int
) -> None:
    serving = batcher()
    assert serve(serving, asking(0, 80, 1, 2, 3)) == [((0, 0, 80),)]
    assert serve(serving, asking(1, prompt, *blocks)) == [((1, start, prompt),)]
    assert serving.pool.free_pages == 64


def test_prompts_that_start_together_share_pages_once_they_are_computed() -> None:
    """Neither finds the other, so both compute all 64 tokens, into the same four pages."""
    serving = batcher(token_budget=256)
    for request_id in (0, 1):
        serving.add(asking(request_id, 64, 1, 2, output=2))
    batch = send(serving, 0.0)
    assert decision_of(batch) == (((0, 0, 64), (1, 0, 64)), ())
    assert [row.pages for row in serving.queues.live.values()] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert (batch.free_pages, batch.kv_tokens) == (60, 64)


def test_the_longest_idle_prefix_is_evicted_first_and_from_its_end() -> None:
    """A pool of 8 pages holds 1 2 and 3 4; the next six pages push out 1 2, then the end of 3 4."""
    serving = batcher(pages=8, watermark=0.0)
    serve(serving, asking(0, 64, 1, 2), asking(1, 64, 3, 4))
    serve(serving, Request(2, 0.0, 95, 1))
    assert serve(serving, asking(3, 64, 3, 4)) == [((3, 32, 64),)]
    assert serve(serving, asking(4, 64, 1, 2)) == [((4, 0, 64),)]


def test_of_pages_with_the_same_content_the_oldest_left_is_found() -> None:
    pool = AppendOnlyCache(3, PAGE)
    prefix = Prefix((1,), PAGE, PAGE)
    holders = [Holder(asking(number, PAGE, 1)) for number in range(3)]
    for holder in holders:
        holder.pages = pool.allocate(1)
    pages = [holder.pages[0] for holder in holders]
    for holder in holders:
        pool.publish(holder, prefix, PAGE)
    for holder in holders:
        pool.free(holder.pages)
    for left in (1, 2):
        pool.allocate(1)
        chain: list[CachedPage] = []
        assert pool.find(chain, prefix, PAGE) == 1
        assert chain[0].page == pages[left]


def test_a_policy_sees_what_is_left() -> None:
    """25 tokens remain of 89; the four shared pages are free to hold while they are in use."""
    serving = batcher()
    serve(serving, asking(0, 80, 1, 2, 3))
    serving.add(asking(1, 89, 1, 2, 4))
    (prompt,) = serving.view.waiting
    assert (prompt.tokens, prompt.computed, prompt.remaining, prompt.pages) == (89, 64, 25, 0)
    assert serving.queues.waiting_tokens == 25
    serving.next(0.0)
    serving.add(asking(2, 89, 1, 2, 5))
    (prompt,) = serving.view.waiting
    assert (prompt.remaining, prompt.pages) == (25, 4)


def test_the_output_of_a_turn_is_found_by_the_next() -> None:
    """Turn 1: 40 + 30 tokens, of which 69 are in the cache when it ends: 4 pages of turn 2."""
    serving = batcher()
    turns = [
        Request(number, 0.0, prompt, output, prefix=Prefix((7,), prompt + output, prompt + output))
        for number, (prompt, output) in enumerate([(40, 30), (100, 5), (105, 1)])
    ]
    assert [serve(serving, turn) for turn in turns] == [
        [((0, 0, 40),)],
        [((1, 64, 100),)],
        [((2, 96, 105),)],
    ]


def test_preempted_requests_find_their_own_pages() -> None:
    """Five pages: at 33 tokens both need a third, one is left. Request 1 gives way, and when 0 has
    ended it has to compute only the token it had generated."""
    serving = batcher(pages=5, watermark=0.0)
    log = serve(serving, asking(0, 32, 1, output=8), asking(1, 32, 2, output=8))
    assert serving.queues.preemptions == 1
    assert log == [((0, 0, 32), (1, 0, 32)), ((1, 32, 33),)]


# -- hit rates ----------------------------------------------------------------------------------


def mooncake_line(prompt: int, *blocks: int) -> str:
    row = {"timestamp": 0, "input_length": prompt, "output_length": 2, "hash_ids": blocks}
    return json.dumps(row) + "\n"


def sequential_hit_rate(requests: list[Request]) -> float:
    """Serve one request after the other with pages for all."""
    world = small_world(
        requests,
        "vllm",
        {"max_num_batched_tokens": 1 << 30},
        total_pages=1 << 40,
        max_model_len=1 << 30,
        max_in_flight=None,
        concurrency=1,
        prefix_cache=True,
    )
    result = simulate(world)
    rate = float(summarize(result)["prefix_hit_rate"])
    assert rate == result.cached_tokens.sum() / result.prompt_tokens.sum()
    return rate


def test_hits_of_a_mooncake_trace_by_hand(tmp_path: Path) -> None:
    """Two rows share 512 tokens of 600; the third is the first again: 592 of its 600 tokens."""
    path = tmp_path / "trace.jsonl"
    lines = mooncake_line(600, 0, 1), mooncake_line(600, 0, 2), mooncake_line(600, 0, 1)
    path.write_text("".join(lines))
    requests = make_requests(load_trace(path), Replay())
    assert requests[0].prefix == Prefix((0, 1), 512, 600)
    assert sequential_hit_rate(requests) == (0 + 512 + 592) / 1800


@pytest.mark.long
def test_mooncake_hits_equal_an_independent_count_over_hash_ids(shared: Path) -> None:
    path = shared / "traces" / "mooncake_conversation_trace_head4000.jsonl.gz"
    requests = make_requests(load_trace(path, limit=1000), Replay())
    requests = [replace(request, output_tokens=1) for request in requests]  # for speed
    lasting: set[tuple[int, int]] = set()  # (block, tokens of it that were there)
    hit_tokens = 0
    for request in requests:
        blocks, prompt = request.prefix.blocks, request.prompt_tokens
        sizes = [min(512, prompt - 512 * index) for index in range(len(blocks))]
        known = list(takewhile(lasting.__contains__, zip(blocks, sizes, strict=True)))
        common = sum(size for _, size in known)
        hit_tokens += min(common, prompt - 1) // PAGE * PAGE
        lasting.update(zip(blocks, sizes, strict=True))
    rate = sequential_hit_rate(requests)
    assert rate == hit_tokens / sum(request.prompt_tokens for request in requests)
    assert 0.2 < rate < 0.6


def test_conversations_are_told_apart_by_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,20\n30,5\n34,9\n50,1\n2,2\n")
    trace = with_conversations(load_trace(path))
    assert [prefix.blocks for prefix in trace.prefixes] == [(0,), (0,), (1,), (1,), (2,)]
    requests = make_requests(trace, Offline())
    assert requests[3].prefix == Prefix((1,), 51, 51)


def test_conversations_need_a_trace_of_turns(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake_line(600, 0, 1))
    for trace in ("azure-conv-sample", path):
        with refused("conversations: true does not apply"):
            with_conversations(load_trace(trace))


def test_multi_turn_sharegpt_finds_its_history(shared: Path) -> None:
    """Every turn but the first finds the history's full pages, but for the last token of it."""
    path = shared / "traces" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"
    requests = make_requests(with_conversations(load_trace(path, limit=120)), Offline())
    hit_tokens = total = 0
    for request in requests:
        history = total if request.prompt_tokens >= total else 0
        hit_tokens += min(max(history - 1, 0), request.prompt_tokens - 1) // PAGE * PAGE
        total = request.prompt_tokens + request.output_tokens
    rate = hit_tokens / sum(request.prompt_tokens for request in requests)
    assert sequential_hit_rate(requests) == rate
    assert rate > 0.7


@pytest.mark.parametrize(
    ("engines", "first", "cached"),
    [
        # Row 0 has 40 tokens, two full pages; row 1 has 33, and its last token is computed anyway.
        (1, "40,1\n33,1\n", [32, 32]),
        (1, "40,1\n", [32, 0]),
        # Each row has an engine of its own, the same both times.
        (2, "40,1\n33,1\n", [32, 32]),
        (2, "1,1\n33,1\n", [0, 32]),
    ],
)
def test_a_server_that_served_the_same_prompts_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: int, first: str, cached: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    head = "num_prefill_tokens,num_decode_tokens\n"
    Path("trace.csv").write_text(head + "40,1\n33,1\n")
    Path("first.csv").write_text(head + first)
    Path("RUN.yaml").write_text(RUN)
    after = "[{trace: first.csv, arrivals: offline}]"
    settings = (
        "kv.prefix_cache=true",
        f"virtual_engines={engines}",
        f"workload.after={after}",
        "workload.arrivals=offline",
    )
    chosen = [word for setting in settings for word in ("--set", setting)]
    done("simulate", "RUN.yaml", *chosen, "--save", "requests", "--out", "out")
    _, *rows = Path("out", "requests.csv").read_text().splitlines()
    assert [int(row.split(",")[-1]) for row in rows] == cached
    trace = summary_of("out")["provenance"]["trace"]
    assert [part["path"] for part in trace["after"]] == ["first.csv"]


def test_each_engine_has_a_cache_of_its_own() -> None:
    """Alone, request 0 goes to the first of two engines; behind another one, to the second."""
    world = small_world([], virtual_engines=2, prefix_cache=True)
    again = asking(1, 64, 7)
    other = asking(0, 64, 8)
    before = (asking(0, 64, 7),)
    for requests, cached in (([again], 48), ([other, again], 0)):
        result = simulate(replace(world, requests=requests, before=(before,)))
        assert result.cached_tokens[-1] == cached


def test_the_files_of_a_run_say_what_was_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(mooncake_line(600, 0, 1) + mooncake_line(600, 0, 2))
    Path("RUN.yaml").write_text(RUN.replace("trace.csv", "trace.jsonl"))
    one_by_one = ("--set", "workload.arrivals={kind: closed, concurrency: 1}", "--save", "requests")
    done("simulate", "RUN.yaml", *one_by_one, "--set", "kv.prefix_cache=true", "--out", "on")
    status, _, note = evenflow("simulate", "RUN.yaml", *one_by_one, "--out", "off")
    assert status == 0
    assert "kv.prefix_cache" in note
    off, on = map(summary_of, ("off", "on"))
    assert "prefix_hit_rate" not in off
    assert on["prefix_hit_rate"] == 512 / 1200
    header, first, second = Path("on", "requests.csv").read_text().splitlines()
    assert header.endswith(",cached_tokens")
    assert (first.split(",")[-1], second.split(",")[-1]) == ("0", "512")
    assert "cached_tokens" not in Path("off", "requests.csv").read_text()
