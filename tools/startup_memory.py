"""KV tokens that vLLM logged as it started, beside what fits by `evenflow.specs.memory`.

`experiments/validation/startup.csv` has the facts of the logs (llm-d-incubation/llm-d-planner and
its author's fork, `accuracy/results/v0.19.0`: vLLM 0.19.0 on H100, 8,192 tokens and 1,024 rows a
step).
Constants are fitted on its odd rows, and judged on the even ones. On `startup_others.csv`, logs of
other cards, versions and limits, nothing is fitted. `python -m tools.startup_memory` prints the
errors, and the tables of docs/costs-errors.md.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from evenflow.report.tables import markdown_table
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import GIB, GpuSpec, gpu
from evenflow.specs.memory import EngineMemory, memories
from evenflow.specs.model import model, of_shape
from evenflow.specs.modelspec import ModelSpec, in_precision

FOLDER = Path(__file__).parent.parent / "experiments" / "validation"
TOKENS, ROWS = 8192, 1024
"""What vLLM 0.19 takes by itself on H100 for a server: max_num_batched_tokens, max_num_seqs."""


class Log(NamedTuple):
    """The facts of a start-up log, GiB of one GPU, and the deployment that it is of."""

    facts: dict[str, Any]
    deployment: Deployment

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit, were every layer to keep all of them."""
        placed = self.deployment
        pages = min(
            placed.free_bytes(stage) // (placed.page_tokens * placed.pool_bytes_per_token(stage))
            for stage in range(placed.depth)
        )
        return int(pages) * placed.page_tokens

    @property
    def kv_gib(self) -> float:
        """GiB that are left for KV on the fullest GPU."""
        return min(map(self.deployment.free_bytes, range(self.deployment.depth))) / GIB

    @property
    def error(self) -> float:
        """Relative difference of the tokens that fit to those logged, of GiB where none are."""
        logged = self.facts["kv_tokens"]
        return self.kv_tokens / int(logged) - 1 if logged else self.kv_gib / _gib(self, "kv") - 1


@cache
def specs() -> dict[str, ModelSpec]:
    """Return the models of the logs that `evenflow models` does not have."""
    kinds = get_type_hints(ModelSpec)
    with (FOLDER / "startup_models.csv").open(encoding="utf-8", newline="") as file:
        rows = [{key: cell for key, cell in row.items() if cell} for row in csv.DictReader(file)]
    texts = {key for key, kind in kinds.items() if kind is str}
    read: list[dict[str, Any]]
    read = [{k: v if k in texts else json.loads(v) for k, v in row.items()} for row in rows]
    return {row["name"]: of_shape(**row) for row in read}


def logs(memory: EngineMemory) -> list[Log]:
    """Return all logs of vLLM 0.19 on H100, with what an engine takes as given."""
    return [
        Log(row, _placed(row, memory, replace(gpu("H100"), visible_gb=float(row["visible_gib"]))))
        for row in _rows("startup")
    ]


def others() -> list[Log]:
    """Return the logs of other cards, versions and limits, each as its version counts."""
    found = []
    for row in _rows("startup_others"):
        memory, limits = memories()[row["like"]], (int(row["tokens"]), int(row["rows"]))
        found.append(Log(row, _placed(row, memory, gpu(row["gpu"]), *limits)))
    return found


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _placed(
    row: dict[str, str], memory: EngineMemory, card: GpuSpec, tokens: int = TOKENS, rows: int = ROWS
) -> Deployment:
    spec = specs().get(row["model"]) or model(row["model"])
    spec = in_precision(spec, row["dtype"] or None, row.get("kv_dtype") or None)
    return Deployment(
        spec,
        card,
        split_layers(spec.num_layers, int(row["stages"])),
        int(row["tensor_parallel"]),
        memory_utilization=float(row["memory_utilization"]),
        activation_tokens=tokens,
        logits_rows=rows,
        memory=memory,
    )


def odd(logs: Sequence[Log]) -> Sequence[Log]:
    """Return the logs that constants are fitted on."""
    return logs[0::2]


def even(logs: Sequence[Log]) -> Sequence[Log]:
    """Return the logs that constants are judged on."""
    return logs[1::2]


def fitted(found: Iterable[Log]) -> dict[str, float]:
    """Return the constants of `EngineMemory` that logs give: medians, and a line for graphs."""
    found = list(found)
    alone = [log for log in found if log.deployment.depth * log.deployment.tensor_parallel == 1]
    staged = [log for log in found if log.deployment.depth > 1]
    ranked = [log for log in found if log.deployment.tensor_parallel > 1]
    layers = [log.deployment.layers_per_stage[0] for log in found]
    slope, base = np.polyfit(layers, [_gib(log, "graphs_estimated") for log in found], 1)
    return {
        "hidden_states": round(median(map(_hidden_states, found)), 1),
        "one_gpu_gib": round(median(_gib(log, "non_torch") for log in alone), 2),
        "stages_gib": round(median(_gib(log, "non_torch") for log in staged), 2),
        "ranks_gib": round(median(_gib(log, "non_torch") for log in ranked), 2),
        "graph_gib": round(float(base), 2),
        "graph_layer_gib": round(float(slope), 4),
    }


def _gib(log: Log, what: str) -> float:
    return float(log.facts[f"{what}_gib"])


def _hidden_states(log: Log) -> float:
    """Return the hidden states a token that the rest of a step does not explain; of stage 0."""
    bare = replace(log.deployment, memory=replace(memories()["vllm-0.19"], hidden_states=0.0))
    left = _gib(log, "activation") * GIB - bare.activation_bytes(0)
    return left / (TOKENS * bare.model.hidden_size * bare.model.dtype_bytes)


def table(found: Sequence[Log]) -> str:
    """Return the rows of docs/costs-errors.md."""
    return markdown_table(
        ["", "model", "layout", "KV tokens logged", "fit", "off by"],
        [
            [
                "odd" if number % 2 == 0 else "even",
                " ".join(filter(None, (log.facts["model"], log.facts["dtype"], _kv(log)))),
                f"TP{log.deployment.tensor_parallel}, PP{log.deployment.depth}",
                f"{int(log.facts['kv_tokens']):,}",
                f"{log.kv_tokens:,}",
                f"{100 * log.error:+.1f} %",
            ]
            for number, log in enumerate(found)
        ],
    )


def table_of_others(found: Sequence[Log]) -> str:
    """Return the rows of docs/costs-errors.md on logs that nothing is fitted to."""
    return markdown_table(
        ["model", "GPUs", "vLLM", "share", "tokens, rows a step", "logged", "counted", "off by"],
        [
            [
                " ".join(filter(None, (log.facts["model"], log.facts["dtype"]))),
                f"{log.facts['gpu']}, TP{log.facts['tensor_parallel']}, PP{log.facts['stages']}",
                log.facts["vllm"],
                log.facts["memory_utilization"],
                f"{int(log.facts['tokens']):,}, {log.facts['rows']}",
                *_logged(log),
                f"{100 * log.error:+.1f} %",
            ]
            for log in found
        ],
    )


def _logged(log: Log) -> tuple[str, str]:
    logged = log.facts["kv_tokens"]
    if logged:
        return f"{int(logged):,}", f"{log.kv_tokens:,}"
    return f"{log.facts['kv_gib']} GiB", f"{log.kv_gib:.2f} GiB"


def _kv(log: Log) -> str:
    return f"KV {log.facts['kv_dtype']}" if log.facts["kv_dtype"] else ""


def lines() -> Iterator[str]:
    """Yield the constants, the errors and the table."""
    found = logs(memories()["vllm-0.19"])
    yield f"odd rows give {fitted(odd(found))}"
    parts = {"odd": odd(found), "even": even(found)}
    for like in ("vllm", "vllm-0.19", "vllm-0.16"):
        parts[f"others, as {like}"] = [log for log in others() if log.facts["like"] == like]
    for name, part in parts.items():
        off = [abs(log.error) for log in part]
        yield f"{name}: {len(off)} rows, median {median(off):.1%}, most {max(off):.1%}"
    yield table(found)
    yield table_of_others(others())


if __name__ == "__main__":
    print("\n".join(lines()))
