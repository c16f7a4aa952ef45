"""Rows of AIConfigurator's accuracy set: means of a closed loop each."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from evenflow.costs.silicon.cost import GPUS as SILICON
from evenflow.experiments.reproduce.measured import MeasuredRun, closed_loop, layout_words

GPUS = {"a100_pcie": "A100-80G-PCIe"} | {each.system: each.on for each in SILICON.values()}
"""AIConfigurator's names of systems, and the GPUs that they are here; others keep their name."""

SETUP = (
    *("backend", "backend_version", "model_path", "system", "precision", "mode", "concurrency"),
    *("isl", "osl", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
)
"""What AIConfigurator's rows say of a set-up."""

WARMED = "2026-01-27"
"""The day on which InferenceX's client began to warm up: its pull request 480, of ten days before.

Rows of before hold what an engine compiles and chooses at its first steps. The mean TTFT of ten
requests of DeepSeek-R1 on TensorRT-LLM was 1,285 and 1,313 ms without a warm-up. With one it was
716 and 735 ms (TensorRT-LLM's pull request 18432).
"""
COLD = "measured before the client warmed up, so its TTFT holds what the first steps compile"

ENGINES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}


def of_aiconfigurator(table: pd.DataFrame) -> Iterator[MeasuredRun]:
    """Return the runs of the rows.

    An empty precision is bf16. Rows that are measured twice count once. `slower` are those with the
    same set-up as one that is more than 5 % faster. A file without the number of clients, as the
    package's own, is not read: part of it is kept back.
    """
    precision = table["dtype"] if "dtype" in table else table["precision"]
    table = table.assign(precision=precision.astype(object).fillna("bf16"))
    table = table.drop_duplicates(["silicon_ttft_ms", "silicon_tpot_ms"])
    alike = table.groupby([name for name in SETUP if name in table], dropna=False)
    fastest_ms = alike["silicon_tpot_ms"].transform("min")
    table = table.assign(slower=table["silicon_tpot_ms"] > 1.05 * fastest_ms)
    for row in table[table["tp_size"].notna()].to_dict("records"):
        model = str(row["model_path"]).rpartition("/")[2]
        model = model.removesuffix("-Instruct").removesuffix("-FP8")
        ranks, stages, clients = (int(row[k]) for k in ("tp_size", "pp_size", "concurrency"))
        known = row.get("attention_dp_size", 1)
        groups = 1 if pd.isna(known) else int(known)
        whole = row.get("moe_ep_size") == ranks * groups > 1
        lengths = int(row["isl"]), int(row["osl"])
        layout = layout_words(ranks, groups, stages)
        version = "" if pd.isna(row["backend_version"]) else f" {row['backend_version']}"
        yield MeasuredRun(
            f"{model}, {layout}, {lengths[0]}/{lengths[1]}, {clients} clients",
            {"mean_ttft_ms": row["silicon_ttft_ms"], "mean_tpot_ms": row["silicon_tpot_ms"]},
            pd.DataFrame([lengths], columns=["input_tokens", "output_tokens"]),
            run={
                "model": model,
                "gpu": GPUS.get(row["system"], row["system"]),
                "stages": stages,
                "tensor_parallel": ranks,
                **({"data_parallel": groups} if groups > 1 else {}),
                **({"expert_parallel": True} if whole else {}),
                "workload.arrivals": closed_loop(clients),
            },
            facts={
                "engine": f"{ENGINES.get(row['backend'], row['backend'])}{version}",
                "mode": "agg",
                **{str(name): value for name, value in row.items() if not pd.isna(value)},
            },
            doubts=[COLD] if str(row.get("measured")) < WARMED else [],
        )
