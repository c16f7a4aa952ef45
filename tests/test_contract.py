"""The names that others build on are where the architecture says they are."""

from __future__ import annotations

import importlib

import pytest

HOUSE = {
    "evenflow.types": {"Request", "Chunk", "MicroBatch", "View", "Plan", "Scheduler"},
    "evenflow.specs": {"ModelSpec", "GpuSpec", "LinkSpec", "Deployment"},
    "evenflow.kv": {"PagePool"},
    "evenflow.batcher": {"Batcher"},
    "evenflow.costs": {"StageCost"},
    "evenflow.results.run": {"RunResult"},
    "evenflow.results.metrics": {"summarize"},
    "evenflow.results.bubbles": {"attribute"},
    "experiments.run_file.run": {"load_config"},
}


@pytest.mark.parametrize("module", HOUSE)
def test_a_name_is_imported_from_its_module(module: str) -> None:
    assert HOUSE[module] <= set(dir(importlib.import_module(module)))
