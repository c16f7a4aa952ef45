"""Sarathi-Serve's figure 11: capacity of pipelines of tensor-parallel stages."""

from __future__ import annotations

from experiments.figures.capacity_bars import SHOWN, bars, best_ratio, measured
from experiments.figures.study import Drawing, Study


def make(study: Study) -> Drawing:
    """Search the capacity of every deployment, data set, SLO and system."""
    table = measured(study)
    llama = {"deployment": "LLaMA2-70B TP4-PP2", "dataset": "sharegpt4"}
    claims = {
        "sarathi-llama70b": {
            "over_orca": best_ratio(table, "Orca", **llama),
            "over_vllm": best_ratio(table, "vLLM", **llama),
        }
    }
    return Drawing(bars(table), table, SHOWN, claims)
