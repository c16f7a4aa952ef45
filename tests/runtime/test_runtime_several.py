"""Several pipelines served for real, replicas or pools: tokens, decisions, who gets what, what
crosses the link; a worker that dies; validation.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install -e '.[runtime]'")

from evenflow.core.replay import Entry, replay
from evenflow.core.routing import Router
from evenflow.engines.handover import PoolBatcher
from evenflow.engines.pools import PooledWorld, TransferLink
from evenflow.experiments.validation import validate
from evenflow.results.run import RunResult
from evenflow.runtime.driver import Driver, Replicas
from evenflow.runtime.emulated import EmulatedSettings
from evenflow.runtime.pipeline import WorkerPipeline
from evenflow.runtime.real import job_of
from evenflow.runtime.serve import ServedRun, ServeOptions, Workers
from evenflow.runtime.serve import serve as serve_world
from evenflow.sim import World, simulate_replicas
from evenflow.types import Prefix, Request
from tests.command_line import SOON, complaint, evenflow, summary_of
from tests.runtime.test_runtime_run import made_up
from tests.virtual_run import VirtualPipeline
from tests.worlds import small_world

REQUESTS = [
    Request(i, 0.0131 * i, 30 + 11 * i % 80, 1 + 7 * i % 40, prefix=Prefix((i % 4, i), 16, 30))
    for i in range(48)
]
FEW = [Request(i, 0.02 * (i // 3), 20 + 23 * i % 90, 1 + 5 * i % 17) for i in range(15)]
"""The third has one output token; the decode pool holds fewer than there are, so some wait."""
LINK = TransferLink(per_token_s=2e-5, latency_s=0.003, bytes_per_token=64.0)


def replicas_of(router: Router, requests: list[Request], **more: Any) -> World:
    sizes = {"depth": 2, "times_s": (0.01, 1e-5), "total_pages": 60, "replicas": 3}
    policy = "token_throttling", {"max_prefill": 64, "min_prefill": 8}
    return small_world(requests, *policy, router=router, **{**sizes, **more})


def pool(name: str, depth: int, total_pages: int, **sizes: Any) -> World:
    sizes = {"total_pages": total_pages, "max_model_len": 16 * total_pages, **sizes}
    return small_world((), name, depth=depth, times_s=(0.002, 1e-6), **sizes)


def named(world: World | PooledWorld) -> dict[str, World]:
    """Return the worlds of a world's pipelines."""
    if isinstance(world, World):
        return {f"replica-{index}": world for index in range(world.replicas)}
    pools = {"prefill": world.prefill, "mixed": world.mixed, "decode": world.decode}
    return {name: part for name, part in pools.items() if part is not None}


def serve(
    world: World | PooledWorld,
    workers: dict[str, Workers] | None = None,
    on_done: Callable[[int], None] | None = None,
) -> tuple[ServedRun, dict[int, list[int]], set[str]]:
    """Serve a world, by emulated workers unless there are others; decisions must replay.

    Return what came of it, the tokens, and what the engines are called.
    """
    journals: defaultdict[str, list[Entry]] = defaultdict(list)
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    parts = named(world)
    served = serve_world(
        world,
        workers or {name: Workers([EmulatedSettings()] * parts[name].depth) for name in parts},
        on_done,
        ServeOptions(
            record=lambda name: journals[str(name)].append,
            on_token=lambda request_id, token: tokens[request_id].append(token),
        ),
    )
    for name, journal in journals.items():
        keeps = isinstance(world, PooledWorld) and name != "decode"
        kind: Any = partial(PoolBatcher, keeps_pages=keeps)
        assert replay(journal, parts[name.split("/")[0]].batcher(kind)) is None
    return served, tokens, {*journals}


@pytest.mark.parametrize("concurrency", [None, 7])
@pytest.mark.parametrize("router", ["round_robin", "least_outstanding", "prefix_affinity"])
def test_real_replicas_do_what_simulated_ones_do(router: Router, concurrency: int | None) -> None:
    world = replicas_of(router, REQUESTS, concurrency=concurrency)
    sides: list[VirtualPipeline] = []
    drives = [
        partial(Driver, world, [world.batcher()], side, clock=side.clock)
        for side in [VirtualPipeline(world.depth, sides) for _ in range(world.replicas)]
    ]
    replicas = Replicas(world, drives)
    replicas.run()
    for driver, expected in zip(replicas.drivers, simulate_replicas(world), strict=True):
        result = driver.result()
        np.testing.assert_array_equal(result.request_id, expected.request_id)
        np.testing.assert_allclose(result.completion_s, expected.completion_s)
        np.testing.assert_array_equal(result.prefill_tokens, expected.prefill_tokens)


@pytest.fixture
def started(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> list[WorkerPipeline]:
    """Return where the pipelines that are started will be; nothing stays behind."""
    pipelines: list[WorkerPipeline] = []
    enter = WorkerPipeline.__enter__
    monkeypatch.setattr(
        WorkerPipeline, "__enter__", lambda self: pipelines.append(self) or enter(self)
    )
    return pipelines


def test_emulated_replicas_serve_as_the_router_says(started: list[WorkerPipeline]) -> None:
    world = replicas_of("round_robin", REQUESTS[:12], replicas=2, virtual_engines=2)
    served, tokens, names = serve(world)
    assert names == {f"replica-{part}/engine-{engine}" for part in (0, 1) for engine in (0, 1)}
    assert (served.failure, served.unfinished, served.free_pages) == (None, 0, 120)
    assert served.result.status == ["completed"] * 12
    assert [part.result.request_id.tolist() for part in served.pipelines] == [
        [*range(0, 12, 2)],
        [*range(1, 12, 2)],
    ]
    assert tokens == made_up(world.requests)


@pytest.mark.parametrize("mixed", [None, pool("sarathi", 1, 12)], ids=["two pools", "three"])
def test_emulated_pools_serve_as_policies_say(
    mixed: World | None, started: list[WorkerPipeline]
) -> None:
    decode = pool("token_throttling", 2, 14)
    world = PooledWorld(FEW, pool("sarathi", 1, 24), decode, mixed, LINK, borrow_tokens=64)
    served, tokens, _ = serve(world)
    assert (served.failure, served.unfinished) == (None, 0)
    assert served.result.status == ["completed"] * len(FEW)
    assert tokens == made_up(world.requests)
    assert served.free_pages == sum(part.total_pages for part in world.pools)
    if mixed is None:
        check_transfers(served.result, LINK)


def check_transfers(result: RunResult, link: TransferLink | None = None) -> None:
    """Every request of several tokens crosses once, first come first served, one at a time."""
    assert result.transfers is not None
    took_s = result.transfers.end_s - result.transfers.start_s
    assert (result.transfers.start_s >= result.transfers.ready_s).all()
    assert sorted(result.transfers.request_id) == [
        request_id
        for request_id, count in zip(result.request_id, result.output_tokens, strict=True)
        if count > 1
    ]
    if link is not None:
        assert (took_s >= link.latency_s + link.per_token_s * result.transfers.tokens).all()


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (replicas_of("least_outstanding", REQUESTS, replicas=2), "replica-1, stage 1"),
        (
            PooledWorld(FEW, pool("sarathi", 1, 24), pool("token_throttling", 2, 24)),
            "decode pool, stage 1",
        ),
    ],
    ids=["replicas", "pools"],
)
def test_a_worker_that_is_killed_is_named_and_ends_all_pipelines(
    world: World | PooledWorld, name: str, started: list[WorkerPipeline]
) -> None:
    def kill(count: int) -> None:
        if count >= 2:  # several may be done at once
            with contextlib.suppress(ProcessLookupError):
                os.kill(started[1].process_ids[1], signal.SIGKILL)

    served, _, _ = serve(world, on_done=kill)
    assert served.failure is not None
    assert served.failure.startswith(f"{name} (process ")
    assert served.failure.endswith("was killed by signal 9")
    assert served.result.status == ["completed"] * len(served.result.status)
    assert served.unfinished == len(world.requests) - len(served.result.status) > 0


@pytest.mark.long
@pytest.mark.parametrize(("family", "pools"), [("llama", False), ("qwen2", True)])
def test_torch_replicas_and_pools_write_what_transformers_does(
    family: str, pools: bool, tmp_path: Path, sockets: Path
) -> None:
    """In pools a prompt is computed by one process, and goes on in two, each with its layers."""
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
    from tests.tiny_models import PAGE_TOKENS, save_checkpoint
    from tests.torch_pipeline import TEXTS, generated, settings_of

    requests = FEW[:8] if pools else [replace(each, prefix=None) for each in REQUESTS[:10]]
    expected = generated(save_checkpoint(tmp_path, family), requests)
    sizes = {"page_tokens": PAGE_TOKENS}
    world: World | PooledWorld = replicas_of("round_robin", requests, replicas=2, **sizes)
    if pools:
        parts = pool("sarathi", 1, 96, **sizes), pool("token_throttling", 2, 56, **sizes)
        world = PooledWorld(requests, *(replace(part, max_model_len=224) for part in parts))
    workers = {
        name: Workers(settings_of(tmp_path, part.depth), text_of=TEXTS)
        for name, part in named(world).items()
    }
    served, tokens, _ = serve(world, workers)
    assert served.failure is None
    assert tokens == expected
    if pools:
        assert served.free_pages == 96 + 56
        check_transfers(served.result)


TWO = "replicas={count: 2, router: least_outstanding}"
POOLS = "scheduler={name: distserve, kv_bytes_per_token: 1000}"


@pytest.mark.parametrize(
    ("setting", "names", "key", "value"),
    [
        (TWO, ["replica-0", "replica-1"], "completed", 20),
        (POOLS, ["decode", "prefill"], "num_transfers", 16),
    ],
)
def test_the_command_serves_several_pipelines_and_replays_them(
    setting: str, names: list[str], key: str, value: int, run: Path
) -> None:
    out = run.parent / "out"
    status, _, errors = evenflow("run", str(run), *SOON, "--out", str(out), "--set", setting)
    assert status == 0, errors
    assert summary_of(out)[key] == value
    for name in ("stages.csv", "decisions.jsonl.gz"):
        assert [path.parent.name for path in sorted(out.glob(f"*/{name}"))] == names
    assert evenflow("replay", str(out))[:2] == (0, "identical: every decision is as recorded\n")


@pytest.mark.long
@pytest.mark.parametrize(("setting", "layers"), [(TWO, 2), (POOLS, 1)])
def test_what_is_simulated_from_its_own_times_is_itself(
    setting: str, layers: int, run: Path
) -> None:
    found = validate(job_of(run, [setting, "workload.requests=8"]), runs=1, calibration=2).found
    same = [(each["same_micro_batches"], each["parted_at"]) for each in found["structure"]]
    assert same == [(1.0, None)] * layers
    errors = [each["metrics"].get("mean_e2el_ms", 0.0) for each in found["structure"]]
    assert max(map(abs, errors)) < 1e-6
    assert len(found["costs"]) == 2
    assert found["end_to_end"]["mean_e2el_ms"]["calibrated"] > 0


CUDA = ["workers={kind: torch, device: cuda}", "model=Llama-3.1-8B"]


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("validate", [TWO, *CUDA], "workers.device: with replicas, cpu is right"),
        ("serve", [TWO], "replicas: for clients, null is right"),
        ("run", [POOLS, *CUDA], "workers.device: with pools, cpu is right"),
        ("serve", [POOLS], "scheduler distserve: for clients, one policy is right"),
    ],
)
def test_what_several_pipelines_cannot_do_yet_is_one_line(
    command: str, settings: list[str], message: str, run: Path
) -> None:
    arguments = [part for each in settings for part in ("--set", each)]
    assert message in complaint(command, run, *arguments)
