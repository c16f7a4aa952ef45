"""Pools served for real: tokens, decisions, pages, what crosses the link; a worker that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install 'evenflow[runtime]'")

from evenflow.batcher import Batcher
from evenflow.pools import PooledWorld, TransferLink
from evenflow.replay import Entry, replay
from evenflow.results.run import RunResult
from evenflow.types import Request
from experiments.real import job_of
from experiments.validation.validate import validate
from runtime import Served, Workers
from runtime.emulated import EmulatedSettings, emulated_token
from runtime.pipeline import Pipeline
from runtime.pools import serve_pools
from sim import World
from tests.command_line import complaint, evenflow
from tests.worlds import small_world

REQUESTS = [Request(i, 0.02 * (i // 3), 20 + 23 * i % 90, 1 + 5 * i % 17) for i in range(15)]
"""The third has one output token; the decode pool holds fewer than there are, so some wait."""
LINK = TransferLink(per_token_s=2e-5, latency_s=0.003, bytes_per_token=64.0)


@pytest.fixture(autouse=True)
def _nothing_stays_behind(tmp_path: Path, sockets: Path) -> None: ...


def pool(name: str, depth: int, total_pages: int, **sizes: Any) -> World:
    sizes = {"total_pages": total_pages, "max_model_len": 16 * total_pages, **sizes}
    return small_world((), name, depth=depth, times_s=(0.002, 1e-6), **sizes)


def emulated(world: PooledWorld) -> dict[str, Workers]:
    parts = {"prefill": world.prefill, "mixed": world.mixed, "decode": world.decode}
    return {
        name: Workers([EmulatedSettings()] * part.depth, name=name)
        for name, part in parts.items()
        if part is not None
    }


def serve(
    world: PooledWorld, workers: dict[str, Workers], **more: Any
) -> tuple[Served, dict[int, list[int]]]:
    """Serve a world; return what came of it, and the tokens. Each pool's decisions must replay."""
    journals: defaultdict[str, list[Entry]] = defaultdict(list)
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    served = serve_pools(
        world,
        workers,
        record=lambda name: journals[name].append,
        on_token=lambda request_id, token: tokens[request_id].append(token),
        **more,
    )
    for name, journal in journals.items():
        kind: Any = lambda *args, keeps=name != "decode", **options: Batcher(  # noqa: E731
            *args, keeps_pages=keeps, **options
        )
        assert replay(journal, getattr(world, name).batcher(kind)) is None
    return served, tokens


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


@pytest.mark.parametrize("mixed", [None, pool("sarathi", 1, 12)], ids=["two pools", "three"])
def test_emulated_pools_serve_as_policies_say(mixed: World | None) -> None:
    decode = pool("token_throttling", 2, 14)
    world = PooledWorld(REQUESTS, pool("sarathi", 1, 24), decode, mixed, LINK, borrow_tokens=64)
    served, tokens = serve(world, emulated(world))
    assert (served.failure, served.unfinished) == (None, 0)
    assert served.result.status == ["completed"] * len(REQUESTS)
    for request in REQUESTS:
        positions = range(request.prompt_tokens, request.prompt_tokens + request.output_tokens)
        assert tokens[request.request_id] == [
            emulated_token(request.request_id, position) for position in positions
        ]
    assert served.free_pages == sum(part.total_pages for part in world.pools)
    if mixed is None:
        check_transfers(served.result, LINK)


def test_a_worker_that_is_killed_is_named_with_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    world = PooledWorld(REQUESTS, pool("sarathi", 1, 24), pool("token_throttling", 2, 24))
    started: list[Pipeline] = []
    enter = Pipeline.__enter__
    monkeypatch.setattr(Pipeline, "__enter__", lambda self: started.append(self) or enter(self))

    def kill(count: int) -> None:
        if count >= 2:  # several may be done at once
            with contextlib.suppress(ProcessLookupError):
                os.kill(started[1].process_ids[1], signal.SIGKILL)

    served, _ = serve(world, emulated(world), on_done=kill)
    assert served.failure is not None
    assert "decode pool, stage 1 (process " in served.failure
    assert served.failure.endswith("was killed by signal 9")
    assert served.result.status == ["completed"] * len(served.result.status)
    assert served.unfinished == len(REQUESTS) - len(served.result.status) > 0


def test_pools_simulated_from_their_own_times_are_themselves(run: Path) -> None:
    found = validate(job_of(run, [POOLS, "workload.requests=8"]), runs=1, calibration=2).found
    (layer,) = found["structure"]
    assert (layer["same_micro_batches"], layer["parted_at"]) == (1.0, None)
    assert abs(layer["metrics"]["mean_e2el_ms"]) < 1e-6
    assert len(found["costs"]) == 2
    assert found["end_to_end"]["mean_e2el_ms"]["calibrated"] > 0


@pytest.mark.long
def test_keys_and_values_move_between_the_processes_of_torch_pools(tmp_path: Path) -> None:
    """A prompt is computed by one process and goes on in two others, each with its layers."""
    pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")
    from tests.tiny_models import PAGE_TOKENS, save_checkpoint
    from tests.torch_pipeline import TEXTS, generated, settings_of

    expected = generated(save_checkpoint(tmp_path, "qwen2"), REQUESTS[:8])
    sizes = {"page_tokens": PAGE_TOKENS}
    parts = pool("sarathi", 1, 96, **sizes), pool("token_throttling", 2, 56, **sizes)
    world = PooledWorld(REQUESTS[:8], *(replace(part, max_model_len=224) for part in parts))
    settings = {"prefill": settings_of(tmp_path, 1), "decode": settings_of(tmp_path, 2)}
    workers = {name: Workers(some, False, TEXTS, name=name) for name, some in settings.items()}
    served, tokens = serve(world, workers)
    assert served.failure is None
    assert tokens == expected
    assert served.free_pages == 96 + 56
    check_transfers(served.result)


POOLS = "scheduler={name: distserve, kv_bytes_per_token: 1000}"


def test_the_command_serves_pools_and_replays_them(run: Path) -> None:
    out = run.parent / "out"
    status, _, errors = evenflow("run", str(run), "--out", str(out), "--set", POOLS)
    assert status == 0, errors
    assert json.loads((out / "summary.json").read_text())["num_transfers"] == 16
    assert {path.name for path in out.glob("*/decisions.jsonl.gz")} == {"decisions.jsonl.gz"}
    assert evenflow("replay", str(out))[:2] == (0, "identical: every decision is as recorded\n")


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("run", ["workers={kind: torch, device: cuda}", "model=Llama-3.1-8B"], "workers.device: w"),
        ("serve", [], "scheduler distserve: for clients, one policy is right"),
    ],
)
def test_what_pools_cannot_do_yet_is_one_line(
    command: str, settings: list[str], message: str, run: Path
) -> None:
    arguments = [part for each in (POOLS, *settings) for part in ("--set", each)]
    assert message in complaint(command, run, *arguments)
