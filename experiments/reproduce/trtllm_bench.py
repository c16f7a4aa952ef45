"""Tables of TensorRT-LLM's offline runs: its performance overview, and static batches.

All requests come at once, with prompts and outputs of exact lengths. What `trtllm-bench throughput`
sets by itself follows from the model, the GPUs and the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

import pandas as pd

from evenflow.errors import UsageError, instead_of
from evenflow.experiments.reproduce.measured import MeasuredRun, layout_words
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec

COLUMNS = ("version", "model", "gpu", "dtype", "tp", "pp", "dep", "isl", "osl", "requests")
MEASURED = "output_tokens_per_s"

STATIC_COLUMNS = ("model", "tp", "pp", "ep", "tokens_in", "tokens_out", "batch")
STATIC_MEASURED = "latency_s"

WEIGHT_BYTES = {"nvfp4": 0.5, "mxfp4": 0.5, "fp8": 1.0, "bf16": 2.0, "fp16": 2.0}
"""Bytes of a parameter to the benchmark, which counts them all alike."""

FREE_FRACTION = 0.9
"""The share of what the weights leave that is for keys and values."""

MOST_ROWS = 4096


class BenchSettings(NamedTuple):
    """Settings of trtllm-bench: rows and tokens of a micro-batch."""

    max_batch_size: int
    max_num_tokens: int


def tuned(
    spec: ModelSpec,
    gpu_gib: float,
    weight_bytes: float,
    layout: tuple[int, int],
    lengths: tuple[int, int],
) -> BenchSettings:
    """Return what trtllm-bench sets without chunks, on GPUs of `gpu_gib` GiB.

    `layout`: tensor-parallel ranks and stages; `lengths` of prompt and output. Keys and values have
    8 bits. Source: tensorrt_llm/bench/build/tuning.py, commit 04cba88, read.
    """
    (ranks, stages), (isl, osl) = layout, lengths
    token_gib = 2 * spec.num_layers * max(ranks, spec.num_kv_heads) * spec.head_dim / 2**30
    weights_gib = spec.num_parameters * weight_bytes / 2**30
    room_gib = (gpu_gib * ranks * stages - weights_gib) * FREE_FRACTION
    rows = min(room_gib / (token_gib * (isl + osl)), MOST_ROWS) / stages
    tokens = min(rows * (1 + isl / osl), 32768)
    batch = max(_up(rows, 32 if rows < 256 else 128 if rows < 1024 else 256), 64)
    budget = max(_up(tokens, 256 if tokens < 4096 else 512 if tokens < 8192 else 1024), 2048)
    return BenchSettings(batch, max(budget, isl + batch))


def _up(value: float, unit: int) -> int:
    return unit * ceil(value / unit)


def of_perf_overview(table: pd.DataFrame) -> Iterator[MeasuredRun]:
    """Return the runs of the rows, with the benchmark's settings and the release's CPU time.

    `dep` replicas of attention share the experts; for mixtures `tp` means the same, as
    `enable_attention_dp` is set.
    """
    for row in table.to_dict("records"):
        ranks, stages, groups = (int(row[key]) for key in ("tp", "pp", "dep"))
        isl, osl, version = int(row["isl"]), int(row["osl"]), str(row["version"])
        spec = _known(str(row["model"]))
        if spec is not None and spec.num_experts:
            ranks, groups = 1, ranks * groups
        run: dict[str, Any] = {
            "model": row["model"],
            "gpu": row["gpu"],
            "dtype": row["dtype"],
            "stages": stages,
            "tensor_parallel": ranks,
            **({"data_parallel": groups, "expert_parallel": True} if groups > 1 else {}),
            "runtime": {"like": f"trtllm-{version}", "tokenize_s": 0.0},  # prompts are token ids
            "workload.arrivals": "offline",
            "scheduler.version": version,
        }
        if spec is not None:
            layout, lengths = (ranks * groups, stages), (isl, osl)
            dtype = str(row["dtype"])
            if dtype not in WEIGHT_BYTES:
                raise UsageError(f"dtype {dtype} of a row; {instead_of(dtype, WEIGHT_BYTES)}")
            memory_gb = gpu(str(row["gpu"])).memory_gb
            settings = tuned(spec, memory_gb, WEIGHT_BYTES[dtype], layout, lengths)
            run |= {f"scheduler.{key}": value for key, value in settings._asdict().items()}
        requests = pd.DataFrame({"arrival_s": [0.0] * int(row["requests"])})
        words = layout_words(ranks, groups, stages)
        yield MeasuredRun(
            f"{version}, {row['model']}, {row['gpu']}, {words}, {isl}/{osl}",
            {"output_throughput": float(row[MEASURED])},
            requests.assign(input_tokens=isl, output_tokens=osl),
            run=run,
            facts={"engine": f"TensorRT-LLM {version}", "groups": groups}
            | {str(name): value for name, value in row.items()},
        )


def of_static_batches(table: pd.DataFrame) -> Iterator[MeasuredRun]:
    """Return the runs of the rows, each of one batch; `ep` ranks share the experts of a mixture."""
    for row in table.to_dict("records"):
        ranks, stages, experts, isl, osl, batch = (int(row[key]) for key in STATIC_COLUMNS[1:])
        requests = pd.DataFrame({"arrival_s": [0.0] * batch})
        words = layout_words(ranks * experts, 1, stages)
        yield MeasuredRun(
            f"{row['model']}, {words}, {isl}/{osl}, {batch} rows",
            {"duration": float(row[STATIC_MEASURED])},
            requests.assign(input_tokens=isl, output_tokens=osl),
            run={
                "model": row["model"],
                "stages": stages,
                "tensor_parallel": ranks * experts,
                **({"expert_parallel": True} if experts > 1 else {}),
                "workload.arrivals": "offline",
                "max_model_len": isl + osl,
                "scheduler.max_num_seqs": max(batch, stages),
            },
            facts={str(name): value for name, value in row.items()},
        )


def _known(name: str) -> ModelSpec | None:
    """Return a model, None for one that is not known: no entry of the catalogue has it."""
    try:
        return model(name)
    except UsageError:
        return None
