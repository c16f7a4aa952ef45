"""Results that vLLM's own client wrote of vLLM itself, 0.32.0 on a CPU: read as they were meant.

Recorded with `vllm serve` and `vllm bench serve --save-detailed`, a random Llama of four layers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.reproduce.measured import read_results

FOLDER = Path(__file__).parent / "results"


@pytest.mark.parametrize("name", ["vllm-bench-rate2", "vllm-bench-burst"])
def test_what_is_read_has_the_means_that_the_client_printed(name: str) -> None:
    path = FOLDER / f"{name}.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    (run,) = read_results(path)
    assert len(run.requests) == told["completed"] == 60
    assert not run.doubts
    for key in ("mean_ttft_ms", "mean_tpot_ms", "p99_ttft_ms"):
        assert run.metrics[key] == pytest.approx(told[key], rel=1e-3)
