"""Tokens of torch pipelines: those of transformers' `generate`, whatever the policy does."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
pytest.importorskip("zmq", reason="needs pyzmq: pip install -e '.[runtime]'")

from evenflow.core.loop import Loop
from evenflow.core.replay import RecordingBatcher, replay
from evenflow.engines.loop import EngineLoop
from evenflow.runtime.pipeline import WorkerPipeline
from evenflow.runtime.tokens import UNKNOWN, RandomTexts, Text, TokenBook
from evenflow.types import Prefix, Request
from tests.command_line import complaint, evenflow, summary_of, tokens_of, write_inputs
from tests.tiny_models import PAGE_TOKENS, continued, save_checkpoint
from tests.torch_pipeline import (
    REQUESTS,
    TEXTS,
    VOCABULARY,
    generated,
    pipeline_of,
    serve,
    settings_of,
    threads_for_processes,
    world_of,
)
from tests.worlds import check_integrity

LONG = pytest.mark.long
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("static", {"max_num_seqs": 4}),
    ("orca", {"max_num_seqs": 4}),
    ("vllm", {}),
    ("sarathi", {"token_budget": 12}),
    ("token_throttling", {"max_prefill": 16, "min_prefill": 4, "kv_thresh": 0.0}),
    ("td_pipe", {"max_num_batched_tokens": 64}),
    ("tests.worlds:NamesDecodes", {"token_budget": 12}),
]
"""Each with limits so small that prompts are cut, queues form and pages run out."""

FEW_PAGES = 13
"""Enough for each request alone, and for few at a time."""


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_checkpoint(folder, request.param)
    return folder, generated(model)


def soon(family: str, stages: int, name: str) -> bool:
    """Say whether `make test` has a case: all policies in two stages, one in one and in three."""
    return (family, stages) == ("llama", 2) or (name == "sarathi" and family == "qwen2")


GRID = [
    pytest.param(family, stages, name, params, marks=[] if soon(family, stages, name) else LONG)
    for family, stages, (name, params) in product(("llama", "qwen2"), (1, 2, 3), POLICIES)
]


@pytest.mark.parametrize(("checkpoint", "stages", "name", "params"), GRID, indirect=["checkpoint"])
def test_greedy_tokens_are_those_of_transformers(
    stages: int,
    name: str,
    params: dict[str, Any],
    checkpoint: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads_for_processes(monkeypatch)
    folder, expected = checkpoint
    world = world_of(name, stages, params)
    batcher = world.batcher()
    with pipeline_of(settings_of(folder, stages, transport="one_process")) as pipeline:
        tokens = serve(pipeline, world, batcher)
    assert tokens == expected
    check_integrity(batcher.pool, [])
    if name not in ("static", "orca"):  # they reserve all pages beforehand
        assert batcher.queues.preemptions


IN_STEP = {"async_scheduling": False}
SHARING: list[tuple[str, dict[str, Any], int | None, type[Loop]]] = [
    ("sarathi", {"token_budget": 6}, None, Loop),
    ("token_throttling", {"max_prefill": 16, "min_prefill": 4, "kv_thresh": 0.0}, None, Loop),
    ("vllm_v1", {**IN_STEP, "max_num_batched_tokens": 12, "max_num_seqs": 8}, None, EngineLoop),
    ("sglang", {"overlap": False, "chunked_prefill_size": 12}, None, EngineLoop),
    ("sglang", {"chunked_prefill_size": 12}, 2, EngineLoop),
]
"""A cache that replaces pages, one that keeps twins, and one that learns what is computed late; in
the last two micro-batches are in flight on one stage, so decodes run ahead of their last token."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[LONG] * (row in (1, 3))) for row, case in enumerate(SHARING)]
)
def test_a_prefix_that_is_cached_changes_no_token(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_for_processes(monkeypatch)
    name, params, ahead, loop = case
    inputs, unknown = TokenBook.inputs, []

    def watched(*given: Any) -> list[int]:
        ids = inputs(*given)
        unknown.append(UNKNOWN in ids)
        return ids

    monkeypatch.setattr(TokenBook, "inputs", watched)
    requests = [
        replace(each, prefix=Prefix((100 + each.request_id % 2,), 21, min(21, each.prompt_tokens)))
        for each in REQUESTS
    ]
    expected = generated(save_checkpoint(tmp_path, "llama"), requests)
    for cache in (True, False):
        sizes = {"requests": requests, "loop": loop, "prefix_cache": cache, "max_in_flight": ahead}
        stages = 2 if ahead is None else 1
        world = world_of(name, stages, params, **sizes)
        batcher: Any = world.batcher(RecordingBatcher)
        cached: list[int] = []
        with pipeline_of(settings_of(tmp_path, stages, transport="one_process")) as pipeline:
            assert serve(pipeline, world, batcher, cached=cached) == expected
        assert (sum(cached) > 0) == cache
        assert any(unknown) == (ahead is not None)
        assert replay(batcher.journal, world.batcher()) is None


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    threads_for_processes(monkeypatch)
    return tmp_path, generated(save_checkpoint(tmp_path, "llama"))


def test_what_a_request_draws_does_not_depend_on_its_company(llama: tuple[Path, Any]) -> None:
    folder, greedy = llama
    texts = RandomTexts(VOCABULARY, 0, (1.0, 50, 0.95), sampling_seed=3)
    found = []
    for stages, (name, params) in ((1, POLICIES[2]), (2, POLICIES[3]), (2, POLICIES[5])):
        settings = settings_of(folder, stages, transport="one_process")
        with pipeline_of(settings) as pipeline:
            found.append(serve(pipeline, world_of(name, stages, params), text_of=texts))
    assert found[0] == found[1] == found[2]
    assert sum(found[0][i] != greedy[i] for i in greedy) >= 8
    with pipeline_of(settings_of(folder, 1, transport="one_process")) as pipeline:
        other = RandomTexts(VOCABULARY, 0, (1.0, 50, 0.95), sampling_seed=4)
        assert serve(pipeline, world_of("vllm", 1), text_of=other) != found[0]


def test_a_stop_token_ends_a_request_and_frees_its_pages(llama: tuple[Path, Any]) -> None:
    folder, greedy = llama
    ends = {request.request_id: greedy[request.request_id][2:3] for request in REQUESTS[3:]}

    def text_of(request: Request) -> Text:
        stop_ids = frozenset(ends.get(request.request_id, []))
        return Text(TEXTS(request).prompt_ids, stop_ids=stop_ids)

    world = world_of("sarathi", 2, {"token_budget": 12})
    batcher = world.batcher()
    with pipeline_of(settings_of(folder, 2, transport="one_process")) as pipeline:
        tokens = serve(pipeline, world, batcher, text_of=text_of)
    for number, full in greedy.items():
        stop = ends.get(number)
        assert tokens[number] == (full[: full.index(stop[0]) + 1] if stop else full)
    assert any(len(tokens[number]) < len(full) for number, full in greedy.items())
    check_integrity(batcher.pool, [])
    assert batcher.pool.free_pages == batcher.pool.total_pages


@pytest.mark.parametrize(
    ("transport", "stages", "policies", "coupled"),
    [
        ("gloo", 2, POLICIES[3:5], False),
        pytest.param("gloo", 3, POLICIES, False, marks=LONG),
        pytest.param("gloo", 3, POLICIES[3:5], True, marks=LONG),
        ("gloo", 2, POLICIES[3:4], True),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_real_processes_serve_one_policy_after_the_other(
    transport: str, stages: int, policies: Any, coupled: bool, tmp_path: Path
) -> None:
    """The scheduler is the simulation's, and replaying the record gives the same decisions."""
    expected = generated(save_checkpoint(tmp_path, "qwen2"))
    settings = settings_of(tmp_path, stages, transport=transport)
    with pipeline_of(settings, coupled=coupled) as pipeline:
        for name, params in policies:
            world = world_of(name, stages, params)
            batcher: Any = world.batcher(RecordingBatcher)
            assert serve(pipeline, world, batcher) == expected
            assert replay(batcher.journal, world.batcher()) is None


@pytest.mark.parametrize(
    ("family", "ranks", "stages"),
    [
        pytest.param("qwen3", 2, 2, id="TP2 x PP2, norms of heads"),
        pytest.param("mixtral", 2, 2, id="TP2 x PP2, coupled", marks=LONG),
        pytest.param("llama", 4, 1, id="TP4, a KV head for two ranks", marks=LONG),
    ],
)
def test_ranks_of_a_stage_write_what_one_writes(
    family: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    """Tied embeddings and biases too, with chunks, mixed micro-batches and preemption."""
    changes = {"vocab_size": 100, "tie_word_embeddings": ranks == 4}
    changes |= {"attention_bias": True} if family != "mixtral" else {"num_local_experts": 4}
    changes |= {"head_dim": 16} if family == "qwen3" else {}
    expected = generated(save_checkpoint(tmp_path, family, **changes))
    settings = settings_of(tmp_path, stages, ranks)
    with pipeline_of(settings, ranks=ranks, coupled=family == "mixtral") as pipeline:
        for name, params in POLICIES[3:5]:
            world = world_of(name, stages, params)
            batcher: Any = world.batcher(RecordingBatcher)
            assert serve(pipeline, world, batcher) == expected
            assert batcher.queues.preemptions
            assert replay(batcher.journal, world.batcher()) is None


def test_virtual_engines_write_what_one_writes(llama: tuple[Path, Any]) -> None:
    """Each has pages of its own, too few for all: none is another's, and decisions replay."""
    folder, expected = llama
    for name, params in POLICIES[2:4]:
        world = replace(world_of(name, 2, params, virtual_engines=2), total_pages=2 * FEW_PAGES)
        engines: list[Any] = [world.batcher(RecordingBatcher) for _ in range(2)]
        settings = settings_of(folder, 2, transport="one_process")
        with WorkerPipeline(settings, PAGE_TOKENS, world.total_pages, together=True) as pipeline:
            assert serve(pipeline, world, *engines) == expected
        assert any(engine.queues.preemptions for engine in engines)
        for engine in engines:
            check_integrity(engine.pool, [])
            assert engine.pool.free_pages == engine.pool.total_pages == FEW_PAGES
            assert replay(engine.journal, world.batcher()) is None


# -- the command ----------------------------------------------------------------------------------

RUN = """\
model: model
stages: [1, 2]
costs: {kind: affine, base_s: 0.001, per_token_s: 2.0e-5}
kv: {pages: 20}
workers: {kind: torch, transport: one_process}
scheduler: {name: sarathi, token_budget: 48}
workload: {trace: trace.csv, arrivals: {kind: replay, scale: 20}}
"""


def served_and_replayed(folder: Path) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """Serve the run of a folder, and replay its decisions; return its tokens and its summary."""
    out = folder / "out"
    status, _, errors = evenflow("run", str(folder / "RUN.yaml"), "--out", str(out))
    assert status == 0, errors
    assert evenflow("replay", str(out))[0] == 0
    return tokens_of(out), summary_of(out)


def test_run_writes_the_tokens_of_transformers(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "RUN.yaml").write_text(RUN)
    model = save_checkpoint(tmp_path / "model", "llama")
    tokens, summary = served_and_replayed(tmp_path)
    requests = [Request(i, 0.0, 20 + 7 * i % 50, 1 + i % 5) for i in range(20)]
    assert tokens == generated(model, requests)
    assert summary["completed"] == 20
    workers = summary["provenance"]["workers"]
    assert workers["layers_per_stage"] == [1, 2]
    assert workers["transport"] == "one_process"
    assert all(len(cores) == 1 for cores in workers["cores"])
    assert workers["torch"]


@pytest.mark.parametrize("caches", [False, True])
def test_the_model_reads_the_prompts_of_a_trace(tmp_path: Path, caches: bool) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    model = save_checkpoint(tmp_path / "model", "llama")
    words = {f"w{number}": number for number in range(VOCABULARY + 1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    prompts = [[*range(5, 5 + 4 * PAGE_TOKENS), 90 - number] for number in range(3)]
    entries = [
        {"conversations": [{"value": " ".join(f"w{i}" for i in prompt)}, {"value": "w1 w2 w3"}]}
        for prompt in prompts
    ]
    (tmp_path / "shared.json").write_text(json.dumps(entries))
    cache = f"kv: {{pages: 60, page_tokens: {PAGE_TOKENS}, prefix_cache: {str(caches).lower()}}}"
    workload = "{trace: shared.json, tokenizer: model, arrivals: {kind: closed, concurrency: 1}}"
    run = RUN.replace("kv: {pages: 20}", cache).split("workload")[0] + f"workload: {workload}\n"
    (tmp_path / "RUN.yaml").write_text(run)
    tokens, summary = served_and_replayed(tmp_path)
    assert tokens == {i: continued(model, prompt, 3) for i, prompt in enumerate(prompts)}
    assert bool(summary.get("prefix_hit_rate", 0)) == caches

    entries[1]["conversations"][0]["value"] = f"w{VOCABULARY} w1"
    (tmp_path / "shared.json").write_text(json.dumps(entries))
    line = complaint("run", tmp_path / "RUN.yaml", "--out", tmp_path / "no")
    assert f"model makes token {VOCABULARY} of request 1, and the model knows 97;" in line
