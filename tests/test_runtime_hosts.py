"""Stages on other hosts: several processes here, which know each other by TCP and a key alone."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install 'evenflow[runtime]'")

from evenflow.report.folder import RECORDS  # noqa: E402
from evenflow.results.recorder import read_blocks  # noqa: E402
from evenflow.runtime import Workers  # noqa: E402
from evenflow.runtime import serve as serve_world  # noqa: E402
from evenflow.runtime.hosts import Hosts, _clock, join, read_key  # noqa: E402
from evenflow.runtime.worker import run_worker  # noqa: E402
from tests.command_line import complaint, evenflow, spawn  # noqa: E402

LIMIT_S = 12.0
"""Silence is noticed after 5 s; the machine may be busy."""


@pytest.fixture
def port() -> int:
    """Return the first of some ports that are free."""
    for first in range(21_000, 32_000, 16):
        try:
            for each in range(first, first + 8):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", each))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def new_key(path: Path, mode: int = 0o600) -> Path:
    path.write_bytes(zmq.curve_keypair()[1])
    path.chmod(mode)
    return path


@pytest.fixture(params=["ahead", "with_activations"])
def shared(run: Path, port: int, request: Any) -> tuple[Path, list[str], list[str]]:
    """Return the folder of a run with stage 1 elsewhere, its words, and those of its worker."""
    key = new_key(run.parent / "key")
    hosts = f"hosts: {{listen: '127.0.0.1:{port}', key: {key}, stages: [1]}}"
    kind = f"kind: emulated, start_limit_s: 30, metadata: {request.param}"
    setting = f"workers={{{kind}, {hosts}}}"
    out = str(run.parent / "out")
    words = ["run", str(run), "--out", out, "--set", setting]
    return run.parent, words, ["worker", "--connect", f"127.0.0.1:{port}", "--key", str(key)]


def test_a_stage_of_another_host_serves_as_one_of_this(
    shared: tuple[Path, list[str], list[str]],
) -> None:
    folder, run, worker = shared
    guest = spawn(*worker)
    status, _, errors = evenflow(*run)
    assert status == 0, errors
    said, _ = guest.communicate(timeout=LIMIT_S)
    assert guest.returncode == 0
    assert said.startswith("stage 1 of 2; this clock plus ")
    assert evenflow("replay", str(folder / "out"))[0] == 0
    (host,) = json.loads((folder / "out" / "summary.json").read_text())["real_run"]["hosts"]
    assert (host["stage"], host["address"]) == (1, "127.0.0.1")
    assert abs(host["offset_s"]) <= host["error_s"] < 0.1  # it is the same clock


@pytest.mark.long
@pytest.mark.parametrize("killed", ["the worker", "the driver"])
def test_who_is_left_ends_with_a_line(
    killed: str, shared: tuple[Path, list[str], list[str]]
) -> None:
    folder, run, worker = shared
    guest, driver = spawn(*worker), spawn(*run, "--set", "workload.arrivals.scale=0.05")
    begun_s = time.monotonic()
    while not any(list(read_blocks(path)[1]) for path in folder.glob(f"out/.partial-*/{RECORDS}")):
        assert time.monotonic() - begun_s < 60, "the run does not start"
        time.sleep(0.05)
    dead, left = (guest, driver) if killed == "the worker" else (driver, guest)
    dead.send_signal(signal.SIGKILL)
    dead.communicate(timeout=LIMIT_S)
    _, errors = left.communicate(timeout=LIMIT_S)
    assert left.returncode == 1
    line = {
        "the worker": "ended early: stage 1 (on 127.0.0.1) says nothing for 5.",
        "the driver": "error: the driver is gone",
    }
    assert line[killed] in errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--connect": "127.0.0.1:9"}, "--connect: 127.0.0.1:9 does not answer within 0.5 s"),
        ({"--connect": "here"}, "--connect: 'here'; an IPv4 address that the other hosts reach"),
        ({"--connect": "192.0.2.1:7000"}, "--listen: left out, and the driver is elsewhere"),
        ({"--key": "none"}, "none: No such file or directory; a file with a key is right"),
        ({"--key": "short"}, "short: no key of CurveZMQ, which has 40 letters of Z85"),
        ({"--key": "open"}, "open: others can read this key; chmod 600 is right"),
        ({"--key": "other"}, "has another key"),
    ],
)
def test_a_worker_that_cannot_join_says_why_in_a_line(
    change: dict[str, str], message: str, port: int, tmp_path: Path
) -> None:
    keys = {name: new_key(tmp_path / name) for name in ("key", "other")}
    keys |= {"open": new_key(tmp_path / "open", 0o644), "none": tmp_path / "none"}
    (tmp_path / "short").write_text("letters")
    (tmp_path / "short").chmod(0o600)
    words = {"--connect": f"127.0.0.1:{port}", "--key": "key", "--patience-s": "0.5"} | change
    words["--key"] = str(keys.get(words["--key"], tmp_path / words["--key"]))
    context = zmq.Context()
    door = context.socket(zmq.REP)
    door.curve_publickey, door.curve_secretkey = read_key(keys["key"])
    door.curve_server = True
    door.bind(f"tcp://127.0.0.1:{port}")
    began_s = time.monotonic()
    assert message in complaint("worker", *(part for pair in words.items() for part in pair))
    assert time.monotonic() - began_s < 15
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("workers.hosts.stages=[2]", "workers.hosts.stages: 2; the stages are 0 to 1"),
        ("workers.hosts.listen=0.0.0.0:7000", "an IPv4 address that the other hosts reach"),
        ("workers.start_limit_s=0.2", "stages [1] of other hosts did not come within 0.2 s; there"),
        ("scheduler={name: distserve, kv_bytes_per_token: 1}", "workers.hosts: with pools, null"),
    ],
)
def test_a_run_that_no_host_can_join_says_why_in_a_line(
    setting: str, message: str, shared: tuple[Path, list[str], list[str]]
) -> None:
    assert message in complaint(*shared[1], "--set", setting)


def test_the_clock_of_another_host_is_known_within_half_of_the_way() -> None:
    """The way back takes 3 ms of 4; the fastest of all answers counts."""
    behind_s, ways_s = 5000.0, iter([0.01, 0.001] + [0.02] * 20)

    def ask(question: list[Any]) -> tuple[float, float]:
        way_s = next(ways_s)
        time.sleep(way_s)
        there_s = time.monotonic() + behind_s
        time.sleep(3 * way_s)
        return there_s, there_s

    offset_s, error_s = _clock(ask)
    assert 0.002 <= error_s < 0.04, "half of the way of the others"
    assert abs(offset_s - behind_s) <= error_s


def test_a_model_over_two_hosts_writes_the_tokens_of_transformers(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's clock is another: its times come back in the driver's."""
    pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")
    from evenflow.runtime import hosts
    from tests.tiny_models import save_checkpoint
    from tests.torch_pipeline import (
        REQUESTS,
        TEXTS,
        generated,
        settings_of,
        threads_for_processes,
        world_of,
    )

    expected = generated(save_checkpoint(tmp_path, "llama"), REQUESTS[:4])
    threads_for_processes(monkeypatch)
    measured: Callable[[Any], tuple[float, float]] = hosts._clock
    monkeypatch.setattr(hosts, "_clock", lambda ask: (measured(ask)[0] + 50.0, 0.0))
    key = read_key(new_key(tmp_path / "key"))

    def be_guest() -> None:
        place, settings, _ = join(f"127.0.0.1:{port}", key, "127.0.0.1", 10.0)
        run_worker(place, settings)

    guest = threading.Thread(target=be_guest, daemon=True)
    guest.start()
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    settings = settings_of(tmp_path, 2, transport="message")
    workers = Workers(settings, text_of=TEXTS, hosts=Hosts("127.0.0.1", port, key, (1,)))
    world = world_of("sarathi", 2, {"token_budget": 12}, requests=REQUESTS[:4])
    served = serve_world(
        world, workers, on_token=lambda number, token: tokens[number].append(token)
    )
    guest.join(5)
    assert served.failure is None
    assert tokens == expected
    ahead_s = served.result.start_s[:, 1] - served.result.end_s[:, 0]
    assert (abs(ahead_s - 50.0) < 5.0).all()  # as the clock that it was said to have is
