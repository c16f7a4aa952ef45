"""Real vLLM with our policies in it: the tokens are those of vLLM by itself, whoever decides.

Each run is a process of its own, as vLLM is one engine a process. `make test-vllm` has vLLM.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_line import evenflow, write_trace

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
    from tests.tiny_models import save_checkpoint

    path = tmp_path_factory.mktemp("run")
    save_checkpoint(path / "model", "llama", hidden_size=64, num_attention_heads=2)
    write_trace(
        path / "trace.csv", *(f"0,{20 + 29 * i % 150},{20 + 7 * i % 30}" for i in range(12))
    )
    (path / "RUN.yaml").write_text(RUN, encoding="utf-8")
    return path


def python(folder: Path, module: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
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
        ("vllm_v1", [TIGHT], True),
        ("vllm_v1", ["stages=2", TIGHT], True),
    ],
)
def test_tokens_are_those_of_vllm_by_itself_and_decisions_replay(
    folder: Path, stock: dict[int, list[int]], name: str, settings: list[str], preempts: bool
) -> None:
    sets = [
        each for value in [f"scheduler={{name: {name}}}", *settings] for each in ("--set", value)
    ]
    python(folder, "experiments.cli", "run", "RUN.yaml", "--out", "out", "--force", *sets)
    with gzip.open(folder / "out" / "tokens.jsonl.gz", "rt") as lines:
        tokens = {row["request_id"]: row["tokens"] for row in map(json.loads, lines)}
    assert tokens == stock
    assert (
        json.loads((folder / "out" / "summary.json").read_text())["preemptions"] > 0
    ) == preempts
    assert evenflow("replay", str(folder / "out"))[0] == 0


@needs_vllm
@pytest.mark.slow
def test_validate_has_decisions_and_end_to_end(folder: Path) -> None:
    python(folder, "experiments.cli", "validate", "RUN.yaml", "--runs", "2", "--out", "validated")
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
        (None, "workers: vllm needs vLLM 0.32.0: pip install 'evenflow[vllm]'"),
    ],
)
def test_another_vllm_or_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, expected: str
) -> None:
    from runtime.vllm import settings

    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(settings.os, "environ", {})
    if source is None:
        monkeypatch.setattr(settings, "find_spec", lambda name: None)
    else:
        (tmp_path / "vllm.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(settings.UsageError) as caught:
        settings.require_vllm()
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
    write_trace(tmp_path / "trace.csv", "0,20,5")
    (tmp_path / "RUN.yaml").write_text(RUN)
    status, _, errors = evenflow("run", str(tmp_path / "RUN.yaml"), *arguments)
    assert (status, errors.count("\n")) == (2, 1)
    assert expected in errors
