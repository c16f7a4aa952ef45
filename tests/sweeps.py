"""A small sweep, written to files, and who simulates, for the tests of studies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from evenflow.study.points import Store
from evenflow.study.sweep_file import Sweep, load_sweep
from evenflow.study.trials import Simulator
from tests.command_line import write_trace

RUN: dict[str, Any] = {
    "stages": 2,
    "costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 1e-5},
    "kv": {"pages": 1000},
    "max_in_flight": 2,
    "scheduler": {"name": "sarathi", "token_budget": 128},
    "workload": {
        "trace": "azure-conv-sample",
        "requests": 6,
        "arrivals": {"kind": "poisson", "rate": 5.0},
    },
}
GRID: dict[str, Any] = {
    "run": RUN,
    "parameters": {"scheduler.token_budget": [64, 128], "max_in_flight": [1, 2, "unlimited"]},
    "replications": 2,
}


def write(folder: Path, name: str = "SWEEP.yaml", **changes: Any) -> Path:
    """Write GRID with some keys changed, and return its path."""
    path = folder / name
    path.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False), encoding="utf-8")
    return path


def one_by_one(folder: Path, *rows: str) -> dict[str, Any]:
    """Return a run that serves the rows of a trace in turn, one step of 1 s after the other."""
    write_trace(folder / "trace.csv", *rows)
    return {
        "stages": 1,
        "max_model_len": 64,
        "kv": {"pages": 64},
        "costs": {"kind": "affine", "base_s": 1.0, "per_token_s": 0.0},
        "scheduler": {"name": "vllm", "max_num_seqs": 1},
        "workload": {"trace": str(folder / "trace.csv")},
    }


def sweep(folder: Path, *overrides: str, **changes: Any) -> Sweep:
    """Return GRID, with some keys changed, as it is read from a file."""
    return load_sweep(write(folder, **changes), overrides)


@contextmanager
def simulator(folder: Path, workers: int = 1, **more: Any) -> Iterator[Simulator]:
    """Give who simulates in this process, and keeps records in a folder."""
    with ThreadPoolExecutor(workers) as executor:
        yield Simulator(Store(folder), executor, **more)
