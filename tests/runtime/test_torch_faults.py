"""What goes wrong with torch workers: they or their driver die, weights are damaged, too big."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.places import ROOT

pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
pytest.importorskip("zmq", reason="needs pyzmq: pip install -e '.[runtime]'")

from evenflow.errors import WorkerError
from evenflow.runtime.driver import Driver
from evenflow.runtime.pipeline import WorkerPipeline
from evenflow.runtime.torch import TorchSettings
from evenflow.runtime.worker import Place
from tests.command_line import START_S, complaint, gone, group, spawn
from tests.tiny_models import save_checkpoint
from tests.torch_pipeline import TEXTS, pipeline_of, settings_of, world_of

LIMIT_S = 10.0
TORCH = """\
model: model
stages: 2
costs: {kind: affine, base_s: 0.005, per_token_s: 2e-5}
kv: {pages: 200}
workers: torch
scheduler: {name: sarathi, token_budget: 64}
workload: {trace: trace.csv, arrivals: replay}
"""


@pytest.fixture
def torch_run(run: Path) -> Path:
    run.write_text(TORCH)
    save_checkpoint(run.parent / "model", "llama")
    return run


def kill(workers: WorkerPipeline) -> None:
    os.kill(workers.process_ids[1], signal.SIGKILL)


def stop_and_kill(workers: WorkerPipeline) -> None:
    """Let stage 0 send to a stage that takes nothing and then dies."""
    os.kill(workers.process_ids[1], signal.SIGSTOP)
    time.sleep(0.2)
    kill(workers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "ranks", "name"),
    [("gloo", 1, "stage 1"), ("gloo", 2, "stage 0, rank 1")],
)
def test_a_worker_that_is_killed_is_named_and_the_rest_is_saved(
    transport: str, ranks: int, name: str, tmp_path: Path, sockets: Path
) -> None:
    save_checkpoint(tmp_path, "llama", vocab_size=98)
    for break_it in (kill, stop_and_kill) if (transport, ranks) == ("gloo", 1) else (kill,):
        settings = settings_of(tmp_path, 2 // ranks, ranks, transport=transport)
        driver, seconds, error = broken_run(settings, ranks, break_it)
        assert f"{name} (process " in error
        assert error.endswith("was killed by signal 9")
        assert seconds < LIMIT_S
        assert 0 < driver.num_done < 10
        assert driver.result().status == ["completed"] * driver.num_done


def broken_run(
    settings: Sequence[TorchSettings], ranks: int, break_it: Callable[[WorkerPipeline], None]
) -> tuple[Driver, float, str]:
    """Serve until two requests are done, break it; return what it took until the error, and it."""
    broken_s: list[float] = []

    def on_done(count: int) -> None:
        if count >= 2 and not broken_s:
            broken_s.append(time.monotonic())
            break_it(workers)

    with pipeline_of(settings, ranks=ranks) as workers:
        world = world_of("sarathi", len(settings) // ranks, {"token_budget": 12})
        driver = Driver(world, [world.batcher()], workers, text_of=TEXTS, on_done=on_done)
        with pytest.raises(WorkerError) as caught:
            driver.run()
    return driver, time.monotonic() - broken_s[0], str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("when", ["torch is loaded", "it serves"])
def test_workers_outlive_no_driver(when: str, torch_run: Path, sockets: Path) -> None:
    faster = ("--set", "workload.arrivals.scale=0.1")
    process = spawn("run", torch_run, "--out", torch_run.parent / "out", *faster)
    limit_s = time.monotonic() + 60
    pattern = "evenflow-*" if when == "torch is loaded" else "evenflow-*/meeting"
    while not (list(sockets.glob(pattern)) and len(group(process)) == 4):
        assert time.monotonic() < limit_s, "the run does not start"
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert gone(process, LIMIT_S)


@pytest.mark.long
def test_who_comes_when_the_driver_has_left_waits_for_nobody(tmp_path: Path) -> None:
    place = Place(0, 2, 16, 100, str(tmp_path / "left"))
    imports = (
        "from evenflow.runtime.torch.carriers import meet\n"
        "from evenflow.runtime.worker import Place"
    )
    come = [sys.executable, "-c", f"{imports}; meet({place}, 'gloo', 60)"]
    here = {"cwd": ROOT, "timeout": START_S}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run(come, check=True, capture_output=True, text=True, **here)
    assert "FileNotFoundError" in caught.value.stderr


def test_a_damaged_file_is_one_line_of_the_command(torch_run: Path) -> None:
    weights = torch_run.parent / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    out = torch_run.parent / "out"
    setting = "workers={kind: torch, transport: one_process}"
    line = complaint("run", torch_run, "--out", out, "--set", setting)
    assert line.startswith("the workers do not start: stage ")
    assert "model.safetensors: truncated or not a safetensors file" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kv.pages=1000000000", "of KV pages, "),
        ("model=Llama-3.1-8B", "model: Llama-3.1-8B is no folder with weights; such a folder, or"),
        ("workers={kind: torch, start_limit_s: 0.01}", "within 0.01 s (workers.start_limit_s)"),
        ("workers={kind: torch, threads: 4096}", "workers.threads: 4096, and there are "),
        (
            "workers={kind: torch, transport: nccl}",
            "nccl is for GPUs; gloo or one_process is right",
        ),
        ("workers={kind: torch, device: cuda}", "torch finds no CUDA device here; cpu is right"),
        ("workers={kind: torch, dtype: int8}", "workers.dtype: "),
        ("workers={kind: torch, sampling: {top_p: 0}}", "workers.sampling.top_p: "),
        ("tensor_parallel=2", "2 ranks cannot share model's vocab_size of 97 evenly; a divisor of"),
        (
            "tensor_parallel=3",
            "3 ranks cannot share the 4 heads and 2 KV heads of model evenly; use",
        ),
        (
            "tensor_parallel=2; workers={kind: torch, transport: one_process}",
            "workers.transport: the ranks of tensor_parallel are processes; gloo is right",
        ),
        ("scheduler={name: token_throttling, variant: code}", "scheduler: it may leave out"),
    ],
)
def test_what_cannot_be_served_is_one_line(setting: str, message: str, torch_run: Path) -> None:
    import torch

    if "cuda" in setting and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    began_s = time.monotonic()
    settings = (arg for each in setting.split("; ") for arg in ("--set", each))
    assert message in complaint("run", torch_run, *settings)
    assert time.monotonic() - began_s < LIMIT_S
