"""What processes of one machine reach together over its network stack: plain TCP, and gloo's ring.

`python -m tools.network_stack` prints GB/s by message size. A link's `shared_by` rests on it: four
"nodes" that are GPUs of one machine share one stack (docs/reproduction/gllm.md). Needs torch.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import pandas as pd
import torch
from torch import distributed

SIZES = (2**16, 2**18, 2**20, 2**24)
BYTES = 2**26
"""What one process sends of each size, in all."""

LOCAL = "127.0.0.1"
PROCESSES = multiprocessing.get_context("fork")


def _receive(ports: Queue[int], size: int) -> None:
    with socket.create_server((LOCAL, 0)) as server:
        ports.put(server.getsockname()[1])
        connection, _ = server.accept()
        buffer = bytearray(size)
        for _ in range(BYTES // size):
            connection.recv_into(buffer, flags=socket.MSG_WAITALL)
            connection.send(b"!")


def _send(port: int, size: int, start: Barrier, took_s: Queue[float]) -> None:
    with socket.create_connection((LOCAL, port)) as connection:
        message = bytes(size)
        start.wait()
        begun = time.perf_counter()
        for _ in range(BYTES // size):
            connection.sendall(message)
            connection.recv(1)
        took_s.put(time.perf_counter() - begun)


def pairs(count: int, size: int) -> float:
    """Return the GB/s of `count` pairs together; each sends messages, and waits for an answer."""
    ports: Queue[int] = PROCESSES.Queue()
    receivers = [PROCESSES.Process(target=_receive, args=(ports, size)) for _ in range(count)]
    for one in receivers:
        one.start()
    listening = [ports.get() for _ in receivers]
    return count * BYTES / _slowest(_send, [(port, size) for port in listening]) / 1e9


def _all_reduce(group: dict[str, Any], size: int, start: Barrier, took_s: Queue[float]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", **group)
    tensor = torch.zeros(size // 4)
    distributed.all_reduce(tensor)
    start.wait()
    begun = time.perf_counter()
    for _ in range(BYTES // size):
        distributed.all_reduce(tensor)
    took_s.put(time.perf_counter() - begun)
    distributed.destroy_process_group()


def ring(count: int, size: int) -> float:
    """Return the GB/s that all ranks send together: each 2 (count - 1) / count of a tensor."""
    with socket.create_server((LOCAL, 0)) as server:
        where = f"tcp://{LOCAL}:{server.getsockname()[1]}"
    group = {"init_method": where, "world_size": count}
    ranks = [(group | {"rank": rank}, size) for rank in range(count)]
    return 2 * (count - 1) * BYTES / _slowest(_all_reduce, ranks) / 1e9


def _slowest(target: Callable[..., None], each: list[tuple[Any, ...]]) -> float:
    """Return the seconds of the slowest of processes that start together."""
    took_s: Queue[float] = PROCESSES.Queue()
    start = PROCESSES.Barrier(len(each))
    for args in each:
        PROCESSES.Process(target=target, args=(*args, start, took_s)).start()
    return max(took_s.get() for _ in each)


def main() -> None:
    rows = [
        {
            "KiB": size // 1024,
            **{f"{count} x a pair": pairs(count, size) for count in (1, 2, 4)},
            **{f"ring of {count}": ring(count, size) for count in (2, 4)},
        }
        for size in SIZES
    ]
    print(pd.DataFrame(rows).round(2).to_string(index=False))


if __name__ == "__main__":
    main()
