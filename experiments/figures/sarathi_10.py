"""Sarathi-Serve's figure 10: capacity of models on one GPU or one tensor-parallel stage."""

from __future__ import annotations

from experiments.figures.capacity_bars import SHOWN, bars, best_ratio, measured
from experiments.figures.study import Drawing, Study


def make(study: Study) -> Drawing:
    """Search the capacity of every deployment, data set, SLO and system."""
    table = measured(study)
    yi = {"deployment": "Yi-34B TP2", "dataset": "sharegpt4", "slo": "strict"}
    claims = {
        "sarathi-mistral": best_ratio(table, "vLLM", deployment="Mistral-7B"),
        "sarathi-yi": {
            "over_vllm": best_ratio(table, "vLLM", **yi),
            "over_orca": best_ratio(table, "Orca", **yi),
        },
    }
    return Drawing(bars(table), table, SHOWN, claims)
