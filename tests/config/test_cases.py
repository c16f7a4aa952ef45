"""Small inputs of people who do this job, with the right value of each (EVENFLOW_SHARED/cases)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import evenflow as ef

CASES = Path(os.environ.get("EVENFLOW_SHARED", "../shared")) / "cases"
pytestmark = pytest.mark.skipif(
    not CASES.is_dir(), reason="needs the folder cases of EVENFLOW_SHARED"
)


def summary(case: str, file: str, **keys: Any) -> dict[str, float]:
    """Return the summary of a case's run, with some keys set."""
    return ef.simulate(CASES / case / file, set=keys).summary


def test_four_a100_of_one_machine_are_best_as_tp4_and_worst_as_pp4() -> None:
    """TensorRT-LLM #1144: TP4 has P90 6.4 s, PP2 x TP2 10.2 s, PP4 does not keep up."""
    case = "k2a-a100-40g-tp4-or-pp"
    fewer = {"workload.requests": 80}
    tp4, pp2 = (summary(case, file, **fewer) for file in ("tp4.yaml", "pp2tp2.yaml"))
    pp4 = summary(case, "tp4.yaml", stages=4, tensor_parallel=1, **fewer)
    latencies = [one["mean_e2el_ms"] for one in (tp4, pp2, pp4)]
    assert latencies == sorted(latencies)


def test_more_gpus_behind_nvswitch_make_one_request_faster() -> None:
    """vLLM #16300, QwQ-32B on A100: TP2 5.50, TP4 3.91, TP8 3.15 s."""
    case = "k2b-a100-80g-tp8"
    runs = [summary(case, "tp4.yaml", tensor_parallel=ranks) for ranks in (2, 4, 8)]
    seconds = [one["duration"] for one in runs]
    assert seconds == sorted(seconds, reverse=True)


def test_nodes_without_a_link_have_that_of_the_gpus_machine() -> None:
    assert summary("k11-nodes-link", "run.yaml")["completed"] == 5


def test_mi300x_is_known() -> None:
    assert summary("k15a-unknown-gpu", "run.yaml")["completed"] == 5
