"""Real vLLM with our policies in it: the tokens are those of vLLM by itself, whoever decides.

Each run is a process of its own, as vLLM is one engine a process. `make test-vllm` has vLLM.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests import command_line
from tests.places import ROOT
from tests.runtime.test_runtime_cli import start
from tools.vllm_table import fitted

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

RUN = """\
model: model
stages: 1
costs: {kind: affine, base_s: 0.005, per_token_s: 1e-5}
kv: {pages: 200, page_tokens: 32}
workers: {kind: vllm, dtype: float32}
scheduler: {name: sarathi, token_budget: 64}
workload: {trace: trace.csv, arrivals: {kind: offline}}
"""
TIGHT = "kv.pages=14"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of a tiny random model; 12 requests, long enough to preempt."""
    path = tmp_path_factory.mktemp("run")
    save_tiny(path / "model")
    command_line.write_trace(
        path / "trace.csv", *(f"0,{20 + 29 * i % 150},{20 + 7 * i % 30}" for i in range(12))
    )
    (path / "RUN.yaml").write_text(RUN, encoding="utf-8")
    return path


def save_tiny(folder: Path) -> Any:
    """Save a random checkpoint that vLLM takes on a CPU; return transformers' model."""
    from tests.tiny_models import save_checkpoint

    return save_checkpoint(folder, "llama", hidden_size=64, num_attention_heads=2)


def python(folder: Path, module: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def stock(folder: Path) -> dict[int, list[int]]:
    """Return what vLLM writes by itself, on one stage with all the pages it wants."""
    python(folder, "tools.vllm_stock", "RUN.yaml", "--out", "stock.json")
    result = json.loads((folder / "stock.json").read_text())
    return {int(number): tokens for number, tokens in result["generated_ids"].items()}


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "preempts"),
    [
        ("sarathi, token_budget: 64", [], False),
        ("sarathi, token_budget: 64", ["stages=2", TIGHT], True),
        ("token_throttling, max_prefill: 64", ["stages=2"], False),
        ("vllm_v1, async_scheduling: false", [TIGHT], True),
        ("vllm_v1, async_scheduling: false", ["stages=2", TIGHT], True),
        ("tests.worlds:NamesDecodes, token_budget: 64", ["stages=2", TIGHT], True),
    ],
)
def test_tokens_are_those_of_vllm_by_itself_and_decisions_replay(
    folder: Path, stock: dict[int, list[int]], name: str, settings: list[str], preempts: bool
) -> None:
    sets = [
        each for value in [f"scheduler={{name: {name}}}", *settings] for each in ("--set", value)
    ]
    python(folder, "evenflow", "run", "RUN.yaml", "--out", "out", "--force", *sets)
    assert command_line.tokens_of(folder / "out") == stock
    assert (command_line.summary_of(folder / "out")["preemptions"] > 0) == preempts
    assert command_line.evenflow("replay", str(folder / "out"))[0] == 0


@needs_vllm
@pytest.mark.slow
def test_a_stage_that_is_stopped_ends_the_run_in_seconds_and_what_was_done_is_saved(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "RUN.yaml"
    run.write_text(
        RUN.replace("model: model", f"model: {folder / 'model'}")
        .replace("stages: 1", "stages: 2")
        .replace("float32", "float32, patience_s: 4")
        .replace("offline", "closed, concurrency: 2")
    )
    command_line.write_trace(tmp_path / "trace.csv", "0,20,2", *("0,40,200" for _ in range(60)))
    process = start(run)
    os.kill(max(command_line.group(process)), signal.SIGSTOP)
    stopped_s = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - stopped_s < 45
    assert process.returncode == 1
    found = re.search(
        r"ended early: vLLM: a stage has not answered for 4 s; (\d+) of 61 requests are done",
        errors,
    )
    assert found, errors[-3000:]
    statuses = [row["status"] for row in command_line.rows_of(tmp_path / "out" / "requests.csv")]
    assert statuses == ["completed"] * int(found[1]) != []
    assert command_line.evenflow("replay", str(tmp_path / "out"))[0] == 0
    assert command_line.gone(process)


@needs_vllm
@pytest.mark.slow
def test_a_server_answers_streams_stops_lets_go_and_says_that_a_worker_died(tmp_path: Path) -> None:
    from tests.serving import openai, serving
    from tests.tiny_models import continued

    model = save_tiny(tmp_path / "model")
    prompts = [[(3 + 5 * row + 7 * place) % 97 for place in range(20 + 9 * row)] for row in (0, 1)]
    expected = [continued(model, prompt, 12) for prompt in prompts]
    end = expected[1][4]
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [end]}))
    run = RUN.replace("model: model", f"model: {tmp_path}/model").replace("stages: 1", "stages: 2")
    with serving(run=run, tidy=False) as server, server.client() as client:

        def ask(prompt: list[int], tokens: int = 12, **more: Any) -> Any:
            return client.completions.create(
                model=server.model, prompt=prompt, max_tokens=tokens, temperature=0, **more
            )

        whole = {"extra_body": {"ignore_eos": True}}
        assert ask(prompts[0], **whole).choices[0].text == words(expected[0])
        stopped = ask(prompts[1]).choices[0]
        assert (stopped.finish_reason, stopped.text) == (
            "stop",
            words(expected[1][: expected[1].index(end)]),
        )
        streamed = [part.choices[0].text for part in ask(prompts[1], stream=True, **whole)]
        assert ("".join(streamed), len(streamed)) == (words(expected[1]), 12)
        left = ask(prompts[0], 200, stream=True, **whole)
        assert next(left).choices[0].text
        left.close()
        limit_s = time.monotonic() + 30
        while server.metrics()["evenflow:kv_pages_free"] < 200 and time.monotonic() < limit_s:
            time.sleep(0.05)
        assert server.metrics()["evenflow:kv_pages_free"] == 200
        cut = ask(prompts[0], 200, stream=True, **whole)
        assert next(cut).choices[0].text
        os.kill(max(set(command_line.group(server.process)) - {server.front}), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="vLLM: a worker died"):
            for _ in cut:
                pass
        client.close()
        status, errors = server.ends()
        assert (status, "ended early: vLLM: a worker died; 3 of 5 requests" in errors) == (1, True)
        assert server.statuses() == ["completed"] * 3 + ["aborted"] * 2
        assert command_line.evenflow("replay", str(server.out))[0] == 0


def words(tokens: list[int]) -> str:
    """Return what a server without a tokenizer writes for these tokens."""
    return "".join(f"{token} " for token in tokens)


@needs_vllm
@pytest.mark.slow
def test_validate_has_decisions_and_end_to_end(folder: Path) -> None:
    python(folder, "evenflow", "validate", "RUN.yaml", "--runs", "2", "--out", "validated")
    found = json.loads((folder / "validated" / "validation.json").read_text())
    assert len(found["decisions"]) == 2
    assert min(found["decisions"]) > 0
    assert found["end_to_end"]["mean_ttft_ms"]["measured"] > 0
    assert not {"structure", "costs", "bubbles"} & set(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("__version__ = '0.31.0'", "workers: vllm is 0.31.0, whose scheduler is not known"),
        ("raise ImportError('no libcuda')", "workers: vllm cannot be imported (no libcuda)"),
        (None, "workers: vllm needs vLLM 0.32.0: pip install vllm==0.32.0"),
    ],
)
def test_another_vllm_or_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, expected: str
) -> None:
    from evenflow.runtime import vllm as adapter

    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(adapter.os, "environ", {})
    if source is None:
        monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    else:
        (tmp_path / "vllm.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(adapter.UsageError) as caught:
        adapter.require_vllm()
    assert str(caught.value).startswith(expected)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--engine", "sglang"], "--engine sglang: vllm is the only engine that serves here"),
        (["--set", "max_in_flight=3"], "max_in_flight: vLLM has a micro-batch for each of its 1"),
        (["--set", "kv.prefix_cache=true"], "kv.prefix_cache: can only be simulated"),
        (["--set", "model=Qwen2.5-32B"], "model: Qwen2.5-32B is no folder with weights"),
    ],
)
def test_what_vllm_cannot_serve_is_one_line(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**shape, **sizes, "vocab_size": 97, "max_position_embeddings": 512})
    )
    command_line.write_trace(tmp_path / "trace.csv", "0,20,5")
    (tmp_path / "RUN.yaml").write_text(RUN)
    assert expected in command_line.complaint("run", tmp_path / "RUN.yaml", *arguments)


def test_costs_of_a_stage_are_found_where_the_pipeline_was_full() -> None:
    tokens = [10, 200, 40, 7, 90, 30, 60, 20]
    stage_s = [0.02 + 0.001 * each for each in tokens]
    scheduled_s, left_s, returned_s = [], 0.0, [0.0, 0.0]
    for took_s in stage_s:  # each of two stages as soon as it is free, two micro-batches in flight
        scheduled_s.append(returned_s[-2])
        left_s = max(left_s, scheduled_s[-1]) + took_s
        returned_s.append(max(left_s, returned_s[-1]) + took_s)
    batches = pd.DataFrame({"scheduled_s": scheduled_s, "returned_s": returned_s[2:]})
    base_s, per_token_s, off, count = fitted(batches.assign(prefill_tokens=tokens, decode_tokens=0))
    assert (base_s, per_token_s) == (pytest.approx(0.02), pytest.approx(0.001))
    assert off == pytest.approx(0)
    assert count == 4
