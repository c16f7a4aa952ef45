"""`evenflow run` with torch workers: real tokens in the folder that a simulation writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")
pytest.importorskip("zmq", reason="needs pyzmq: pip install 'evenflow[runtime]'")

from evenflow.types import Request
from experiments.real import servable
from experiments.run_file.build import build
from experiments.run_file.run import load_config
from sim import driver
from sim.tandem import Tandem
from tests.command_line import evenflow, write_inputs
from tests.tiny_models import save_checkpoint
from tests.torch_pipeline import generated

RUN = """\
model: model
stages: [1, 2]
costs: {kind: affine, base_s: 0.001, per_token_s: 2.0e-5}
kv: {pages: 20}
workers: {kind: torch, transport: one_process}
scheduler: {name: sarathi, token_budget: 48}
workload: {trace: trace.csv, arrivals: {kind: replay, scale: 20}}
"""


def test_a_real_run_has_the_scheduler_of_the_simulation(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "llama")
    write_inputs(tmp_path)
    (tmp_path / "RUN.yaml").write_text(RUN)
    for name in ("static", "orca", "vllm", "sarathi", "token_throttling", "td_pipe"):
        config = load_config(tmp_path / "RUN.yaml", [f"scheduler={name}"])
        world = servable(build(config, [Request(0, 0.0, 8, 2)], tmp_path))
        simulated = driver.Driver(world, Tandem).engines[0].scheduler
        real = world.batcher().scheduler
        assert type(real) is type(simulated)
        assert type(real).__module__ == f"evenflow.schedulers.{name}"


def test_run_writes_the_tokens_of_transformers(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "RUN.yaml").write_text(RUN)
    model = save_checkpoint(tmp_path / "model", "llama")
    out = tmp_path / "out"
    status, _, errors = evenflow("run", str(tmp_path / "RUN.yaml"), "--out", str(out))
    assert status == 0, errors
    lines = gzip.decompress((out / "tokens.jsonl.gz").read_bytes()).decode().splitlines()
    tokens = {line["request_id"]: line["tokens"] for line in map(json.loads, lines)}
    requests = [Request(i, 0.0, 20 + 7 * i % 50, 1 + i % 5) for i in range(20)]
    assert tokens == generated(model, requests)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == 20
    workers = summary["provenance"]["workers"]
    assert workers["layers_per_stage"] == [1, 2]
    assert workers["transport"] == "one_process"
    assert all(len(cores) == 1 for cores in workers["cores"])
    assert workers["torch"]
    assert evenflow("replay", str(out))[0] == 0
