"""Who simulates many runs: processes of this machine that end with it, or a Dask cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any

from evenflow.errors import UsageError, require_package
from experiments.study.points import code_digest

CONNECT_LIMIT_S = 10.0


@contextmanager
def executor_of(name: str = "process", workers: int | None = None) -> Iterator[Executor]:
    """Give an executor: `process`, `dask` (a cluster inside this process) or `dask:ADDRESS`.

    `workers` defaults to the number of cores; a cluster at an address has its own. UsageError for
    another name, for a cluster that does not answer, has no workers or runs other code, and without
    the extra `cluster`. Leaves no process behind, however this one ends.
    """
    kind, _, address = name.partition(":")
    if kind == "process" and not address:
        with processes(workers or os.cpu_count() or 1) as pool:
            yield pool
    elif kind == "dask":
        with _dask_client(address, workers or os.cpu_count() or 1) as client:
            yield client.get_executor(pure=False)
    else:
        raise UsageError(f"--executor {name}: should be process, dask or dask:ADDRESS")


@contextmanager
def processes(
    workers: int, start: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[Executor]:
    """Give a pool of processes of this machine, none of which outlives this one or the block.

    Each calls `start` with the arguments first; they may be shared memory, as a task's may not.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (start, arguments))
    try:
        with _without_main():
            yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown()


@contextmanager
def _without_main() -> Iterator[None]:
    """Let workers start without running the user's script again, of which they need nothing."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent tells the user; a worker just ends
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with_parent() -> None:
    """End this worker when its parent is killed: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _dask_client(address: str, workers: int) -> Iterator[Any]:
    require_package("distributed", "--executor dask:", "cluster", "dask")
    from distributed import Client, LocalCluster

    # A cluster that goes away is told in one line; the client would log its attempts to reconnect.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    if not address:
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=workers, processes=False, dashboard_address=":0"
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client
        return
    try:
        client = Client(address, timeout=CONNECT_LIMIT_S)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--executor dask:{address}: no Dask scheduler answers there "
            f"({type(error).__name__}); start one, or use --executor process"
        ) from None
    with client:
        _check_workers(client, f"--executor dask:{address}")
        yield client


def _check_workers(client: Any, name: str) -> None:
    """Raise UsageError unless there are workers, and all run the code that this process runs."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_LIMIT_S)
        digests = client.run(code_digest)
    except TimeoutError:
        raise UsageError(f"{name}: the scheduler has no workers; start some") from None
    except Exception as error:  # whatever a worker raises where evenflow is missing
        raise UsageError(f"{name}: its workers cannot import evenflow ({error})") from None
    others = sorted(worker for worker, digest in digests.items() if digest != code_digest())
    if others:
        raise UsageError(f"{name}: worker {others[0]} runs another version of evenflow")
