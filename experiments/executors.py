"""Who simulates many points: processes of this machine, or a Dask cluster. One seam for both."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from evenflow.errors import UsageError

CONNECT_LIMIT_S = 10.0


@contextmanager
def executor_of(name: str = "process", workers: int | None = None) -> Iterator[Executor]:
    """Give an executor: `process`, `dask` (a cluster inside this process) or `dask:ADDRESS`.

    `workers` defaults to the number of cores. UsageError for another name, for a scheduler that
    does not answer, and without the extra `cluster`. Leaves no process behind when interrupted.
    """
    kind, _, address = name.partition(":")
    if kind == "process" and not address:
        with _processes(workers or os.cpu_count() or 1) as pool:
            yield pool
    elif kind == "dask":
        with _dask_client(address, workers or os.cpu_count() or 1) as client:
            yield client.get_executor(pure=False)
    else:
        raise UsageError(f"--executor {name}: should be process, dask or dask:ADDRESS")


@contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _end_quietly)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown()


def _end_quietly() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent tells the user; a worker just ends


@contextmanager
def _dask_client(address: str, workers: int) -> Iterator[Any]:
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise UsageError("--executor dask: needs dask; pip install 'evenflow[cluster]'") from None
    if not address:
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=workers, processes=False, dashboard_address=None
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
        yield client
