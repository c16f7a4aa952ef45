"""Stages on other hosts: how their workers find a driver, and what both agree on.

A file with a key is on all hosts. Everything between them is encrypted by CurveZMQ with it, and
who does not have it gets no further than the handshake. Knows sockets and clocks; no stage's work.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from ipaddress import AddressValueError, IPv4Address
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from evenflow.errors import UsageError, WorkerError
from evenflow.runtime.emulated import EmulatedSettings, Faults
from evenflow.runtime.torch.settings import TorchSettings, cores_of
from evenflow.runtime.wire import Key, Net, driver_address, open_socket, secure
from evenflow.runtime.worker import Place, Settings, run_worker

if TYPE_CHECKING:
    from evenflow.runtime.wire import Context

TIMES = 16
"""So often a worker asks for the driver's clock; the fastest answer is the best."""

ASK_S = 0.05
LAST_WORDS_S = 2.0
"""How long a worker whose driver is gone may take to end as it was told."""


class Hosts(NamedTuple):
    """Where a driver waits for the workers of `stages`, which come from other hosts."""

    address: str
    port: int
    key: Key
    stages: tuple[int, ...]


class Guest(NamedTuple):
    """A worker on another host. Its clock plus `offset_s` is the driver's, within `error_s`."""

    stage: int
    address: str
    offset_s: float
    error_s: float


def read_key(path: Path) -> Key:
    """Read the key that hosts share: a secret key of CurveZMQ, 40 letters of Z85."""
    try:
        secret = path.read_bytes().strip()
        if path.stat().st_mode & 0o077:
            raise UsageError(f"{path}: others can read this key; chmod 600 is right")
        return Key(zmq.curve_public(secret), secret)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a file with a key is right") from None
    except (ValueError, zmq.ZMQError):
        raise UsageError(f"{path}: no key of CurveZMQ, which has 40 letters of Z85") from None


def read_place(where: str, key: str) -> tuple[str, int]:
    """Return the address and the port of `where`, as ADDRESS:PORT; UsageError names `key`."""
    address, _, port = where.rpartition(":")
    try:
        if IPv4Address(address).is_unspecified or not 0 < int(port) < 1 << 16:
            raise ValueError
    except (AddressValueError, ValueError):
        right = "an IPv4 address that the other hosts reach, and a port: 10.0.0.5:7000"
        raise UsageError(f"{key}: {where!r}; {right}") from None
    return address, int(port)


# -- the driver's side --------------------------------------------------------------------------


def gather(
    context: Context,
    hosts: Hosts,
    stage_of: Callable[[int, Net], tuple[Place, Settings]],
    limit_s: float,
) -> tuple[Net, list[Guest]]:
    """Wait until a worker has come for each stage, and knows what it is.

    WorkerError when one has not after `limit_s`.
    """
    guests: list[Guest] = []
    informed: set[int] = set()
    depth = stage_of(0, Net(hosts.port, (), hosts.key))[0].depth

    def answer(message: list[Any], heard_s: float) -> Any:
        match message:
            case ["time"]:
                return heard_s, time.monotonic()
            case ["join", address, offset_s, error_s] if len(guests) < len(hosts.stages):
                guests.append(Guest(hosts.stages[len(guests)], address, offset_s, error_s))
                return guests[-1].stage
            case ["what", stage] if len(guests) == len(hosts.stages):
                informed.add(stage)
                place, settings = stage_of(stage, net())
                return told(place, settings)
        return None

    def net() -> Net:
        where = {guest.stage: guest.address for guest in guests}
        addresses = [where.get(stage, hosts.address) for stage in range(depth)]
        return Net(hosts.port, (hosts.address, *addresses), hosts.key)

    door = secure(context.socket(zmq.REP), hosts.key, serves=True)
    address = f"tcp://{hosts.address}:{hosts.port}"
    try:
        door.bind(address)
    except zmq.ZMQError as error:
        raise WorkerError(f"no socket at {address}: {error.strerror}") from None
    until_s = time.monotonic() + limit_s
    while len(informed) < len(hosts.stages):
        if not door.poll(max(0, int(1000 * (until_s - time.monotonic())))):
            missing = sorted({*hosts.stages} - {guest.stage for guest in guests})
            raise WorkerError(
                f"stages {missing or sorted(hosts.stages)} of other hosts did not come within "
                f"{limit_s:g} s; there: evenflow worker --connect {hosts.address}:{hosts.port} "
                "--key FILE"
            )
        message = json.loads(door.recv())
        door.send(json.dumps(answer(message, time.monotonic())).encode())
    door.close(linger=1000)
    return net(), guests


def told(place: Place, settings: Settings) -> dict[str, Any]:
    """Return what a worker on another host is told of itself."""
    assert isinstance(settings, (EmulatedSettings, TorchSettings))
    net = place.net
    assert net is not None
    where = [place.stage, place.depth, place.page_tokens, place.total_pages]
    return {
        "place": where,
        "hosts": net.hosts,
        "kind": type(settings).__name__,
        "settings": asdict(settings),
    }


# -- the other host's side ----------------------------------------------------------------------


def join(where: str, key: Key, listen: str, patience_s: float) -> tuple[Place, Settings, Guest]:
    """Find a driver and become one of its workers; return what there is to do.

    UsageError when it does not answer within `patience_s`, or has another key.
    """
    host, port = read_place(where, "--connect")
    context: Context = zmq.Context()
    socket = secure(context.socket(zmq.REQ), key)

    def ask(question: list[Any]) -> Any:
        socket.send(json.dumps(question).encode())
        if not socket.poll(int(1000 * patience_s)):
            raise UsageError(f"--connect: {where} does not answer any more")
        return json.loads(socket.recv())

    try:
        _connect(socket, where, patience_s)
        offset_s, error_s = _clock(ask)
        stage = ask(["join", listen, offset_s, error_s])
        if stage is None:
            raise UsageError(f"--connect: {where} has workers for all of its stages")
        while (answer := ask(["what", stage])) is None:
            time.sleep(ASK_S)
    finally:
        context.destroy(linger=0)
    net = Net(port, tuple(answer["hosts"]), key)
    stage, depth, page_tokens, total_pages = answer["place"]
    place = Place(stage, depth, page_tokens, total_pages, "", net=net, offset_s=offset_s)
    return place, _settings(answer), Guest(stage, host, offset_s, error_s)


def _settings(answer: dict[str, Any]) -> Settings:
    values = answer["settings"]
    if answer["kind"] == EmulatedSettings.__name__:
        return EmulatedSettings(**values | {"faults": Faults(**values["faults"])})
    made = TorchSettings(**values | {"mailboxes": ()})
    return replace(made, cores=cores_of(0, len(made.cores)) if made.cores else ())


def _connect(socket: zmq.Socket[bytes], where: str, patience_s: float) -> None:
    """Connect to a driver that has the same key."""
    monitor = socket.get_monitor_socket(
        zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    )
    socket.connect(f"tcp://{where}")
    answers, until_s = False, time.monotonic() + patience_s
    try:
        while monitor.poll(max(0, int(1000 * (until_s - time.monotonic())))):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if answers and event == zmq.EVENT_DISCONNECTED:
                break
            answers = event == zmq.EVENT_CONNECTED
    finally:
        socket.disable_monitor()
        monitor.close()
    why = "has another key" if answers else f"does not answer within {patience_s:g} s"
    raise UsageError(f"--connect: {where} {why}")


def _clock(ask: Callable[[list[Any]], Any]) -> tuple[float, float]:
    """Return what to add to this clock to have the driver's, and at most how far that is off.

    Of four times, as in NTP (RFC 5905, section 8): sent and received here, received and sent there.
    Half of the time on the way, which may all have passed in one direction, is the error.
    """
    best_s, offset_s = inf, 0.0
    for _ in range(TIMES):
        sent_s = time.monotonic()
        there_s, back_s = ask(["time"])
        here_s = time.monotonic()
        travelled_s = (here_s - sent_s) - (back_s - there_s)
        if travelled_s < best_s:
            best_s, offset_s = travelled_s, (there_s - sent_s + back_s - here_s) / 2
    return offset_s, best_s / 2


def work(place: Place, settings: Settings) -> str | None:
    """Be a stage until the driver says stop, or is gone; return why it failed, if it did."""
    context: Context = zmq.Context()
    driver = open_socket(context, zmq.PUSH, driver_address(place.folder, place.net), place.net)
    monitor = driver.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def watch() -> None:
        recv_monitor_message(monitor)
        time.sleep(LAST_WORDS_S)
        os.write(2, b"error: the driver is gone\n")
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
    return run_worker(place, settings)
