"""Recorded decisions of real engines, replayed: every step is equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.engines import vllm

SHARED = Path(os.environ.get("EVENFLOW_SHARED", "../shared")) / "engines"
VLLM = sorted((SHARED / "vllm-0.32.0").glob("*.jsonl.gz"))
JOURNALS = [path for path in VLLM if vllm.is_journal(path)]
SYNCHRONOUS = [path for path in JOURNALS if not path.name.startswith(("async", "prefix"))]

needs_shared = pytest.mark.skipif(
    not JOURNALS, reason=f"no recordings of vLLM in {SHARED} (EVENFLOW_SHARED)"
)


@needs_shared
@pytest.mark.parametrize("path", SYNCHRONOUS, ids=lambda path: path.name.split(".")[0])
def test_vllm_decides_as_recorded(path: Path) -> None:
    outcome = vllm.replay(path)
    assert outcome.difference is None
    assert outcome.equal == outcome.steps > 100
