"""Replicas served for real: who gets what, tokens, decisions; a worker that dies; validation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'evenflow[runtime]'")

from evenflow.replay import Entry, replay
from evenflow.routing import Router
from evenflow.types import Prefix, Request
from experiments.real import job_of
from experiments.validation.validate import validate
from runtime import Served, Workers
from runtime.driver import Driver
from runtime.emulated import EmulatedSettings, emulated_token
from runtime.front import TraceReplay
from runtime.pipeline import Pipeline
from runtime.replicas import Replicas, serve_replicas
from sim import World, simulate_replicas
from tests.command_line import complaint, evenflow
from tests.virtual_run import VirtualPipeline
from tests.worlds import small_world

REQUESTS = [
    Request(i, 0.0131 * i, 30 + 11 * i % 80, 1 + 7 * i % 40, prefix=Prefix((i % 4, i), 16, 30))
    for i in range(48)
]
ROUTERS: list[Router] = ["round_robin", "least_outstanding", "prefix_affinity"]


def world_of(router: Router, requests: list[Request], **more: Any) -> World:
    sizes = {"depth": 2, "times_s": (0.01, 1e-5), "total_pages": 60, "replicas": 3}
    policy = "token_throttling", {"max_prefill": 64, "min_prefill": 8}
    return small_world(requests, *policy, router=router, **{**sizes, **more})


@pytest.mark.parametrize("concurrency", [None, 7])
@pytest.mark.parametrize("router", ROUTERS)
def test_real_replicas_do_what_simulated_ones_do(router: Router, concurrency: int | None) -> None:
    world = world_of(router, REQUESTS, concurrency=concurrency)
    sides: list[VirtualPipeline] = []
    front = TraceReplay(world.requests, concurrency)
    drivers = [
        Driver(world, [world.batcher()], side, front=front, clock=side.clock)  # type: ignore[arg-type]
        for side in [VirtualPipeline(world.depth, sides) for _ in range(world.replicas)]
    ]
    Replicas(drivers, front, router).run()
    for driver, expected in zip(drivers, simulate_replicas(world), strict=True):
        result = driver.result()
        np.testing.assert_array_equal(result.request_id, expected.request_id)
        np.testing.assert_allclose(result.completion_s, expected.completion_s)
        np.testing.assert_array_equal(result.prefill_tokens, expected.prefill_tokens)


@pytest.fixture
def started(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Return where the pipelines that are started will be; nothing stays behind."""
    pipelines: list[Pipeline] = []
    enter = Pipeline.__enter__
    monkeypatch.setattr(Pipeline, "__enter__", lambda self: pipelines.append(self) or enter(self))
    return pipelines


def serve(
    world: World, workers: Workers, *engines: str, **more: Any
) -> tuple[Served, dict[int, list[int]]]:
    """Serve a world; return what came of it, and the tokens. Journals have to replay."""
    journals: defaultdict[str | None, list[Entry]] = defaultdict(list)
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    served = serve_replicas(
        world,
        [workers] * world.replicas,
        record=lambda name: journals[name].append,
        on_token=lambda request_id, token: tokens[request_id].append(token),
        **more,
    )
    assert sorted(map(str, journals)) == list(engines)
    for journal in journals.values():
        assert replay(journal, world.batcher()) is None
    return served, tokens


def test_emulated_replicas_serve_as_the_router_says(started: list[Pipeline]) -> None:
    world = world_of("round_robin", REQUESTS[:12], replicas=2, virtual_engines=2)
    workers = Workers([EmulatedSettings()] * 2)
    names = [f"replica-{part}/engine-{engine}" for part in (0, 1) for engine in (0, 1)]
    served, tokens = serve(world, workers, *names)
    assert (served.failure, served.unfinished, served.free_pages) == (None, 0, 120)
    assert served.result.status == ["completed"] * 12
    assert [part.result.request_id.tolist() for part in served.pipelines] == [
        [*range(0, 12, 2)],
        [*range(1, 12, 2)],
    ]
    for request in world.requests:
        positions = range(request.prompt_tokens, request.prompt_tokens + request.output_tokens)
        expected = [emulated_token(request.request_id, position) for position in positions]
        assert tokens[request.request_id] == expected


def test_a_worker_that_is_killed_ends_all_replicas(started: list[Pipeline]) -> None:
    world = world_of("least_outstanding", REQUESTS, replicas=2)

    def kill(count: int) -> None:
        if count >= 2:  # several may be done at once
            with contextlib.suppress(ProcessLookupError):
                os.kill(started[1].process_ids[1], signal.SIGKILL)

    names = "replica-0", "replica-1"
    served, _ = serve(world, Workers([EmulatedSettings()] * 2), *names, on_done=kill)
    assert served.failure is not None
    assert served.failure.startswith("replica-1, stage 1 (process ")
    assert served.failure.endswith("was killed by signal 9")
    status = served.result.status
    assert status == ["completed"] * len(status)
    assert served.unfinished == len(REQUESTS) - len(status) > 0


@pytest.mark.long
def test_torch_replicas_write_what_transformers_does(tmp_path: Path, sockets: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")
    from tests.tiny_models import PAGE_TOKENS, save_checkpoint
    from tests.torch_pipeline import TEXTS, generated, settings_of

    requests = [replace(request, prefix=None) for request in REQUESTS[:10]]
    expected = generated(save_checkpoint(tmp_path, "llama"), requests)
    world = world_of("round_robin", requests, replicas=2, page_tokens=PAGE_TOKENS)
    workers = Workers(settings_of(tmp_path, 2), text_of=TEXTS)
    served, tokens = serve(world, workers, "replica-0", "replica-1")
    assert served.failure is None
    assert tokens == expected


TWO = "replicas={count: 2, router: least_outstanding}"


def test_the_command_serves_replicas_and_replays_them(run: Path) -> None:
    out = run.parent / "out"
    status, _, errors = evenflow("run", str(run), "--out", str(out), "--set", TWO)
    assert status == 0, errors
    assert json.loads((out / "summary.json").read_text())["completed"] == 20
    for name in ("stages.csv", "decisions.jsonl.gz"):
        assert [path.parent.name for path in sorted(out.glob(f"*/{name}"))] == [
            "replica-0",
            "replica-1",
        ]
    assert evenflow("replay", str(out))[:2] == (0, "identical: every decision is as recorded\n")


def test_each_replica_simulated_from_its_own_times_is_itself(run: Path) -> None:
    found = validate(job_of(run, [TWO, "workload.requests=8"]), runs=1, calibration=2).found
    assert [layer["same_micro_batches"] for layer in found["structure"]] == [1.0, 1.0]
    errors = [layer["metrics"].get("mean_e2el_ms", 0.0) for layer in found["structure"]]
    assert max(map(abs, errors)) < 1e-6
    assert found["end_to_end"]["mean_e2el_ms"]["calibrated"] > 0


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        (
            "run",
            ["workers={kind: emulated, faults: [{stage: 0}]}"],
            "workers.faults: with replicas",
        ),
        (
            "validate",
            ["workers={kind: torch, device: cuda}", "model=Llama-3.1-8B"],
            "workers.devic",
        ),
        ("serve", [], "replicas: for clients, null is right"),
    ],
)
def test_what_replicas_cannot_do_yet_is_one_line(
    command: str, settings: list[str], message: str, run: Path
) -> None:
    arguments = [part for each in (TWO, *settings) for part in ("--set", each)]
    assert message in complaint(command, run, *arguments)
