"""KV tokens that vLLM logged as it started, beside what fits by `evenflow.specs.memory`.

`experiments/validation/startup.csv` has the facts of the logs (llm-d-incubation/llm-d-planner and
its author's fork, `accuracy/results/v0.19.0`: vLLM 0.19.0 on H100, 8,192 tokens and 1,024 rows a
step).
Constants are fitted on its odd rows, and judged on the even ones. `python -m tools.startup_memory`
prints both, and the table of docs/costs-errors.md.
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
from evenflow.specs.gpu import GIB, gpu
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
    def error(self) -> float:
        """Relative difference of the tokens that fit to those logged."""
        return self.kv_tokens / int(self.facts["kv_tokens"]) - 1


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
    """Return all logs, with what an engine takes as given."""
    with (FOLDER / "startup.csv").open(encoding="utf-8", newline="") as file:
        return [Log(row, _placed(row, memory)) for row in csv.DictReader(file)]


def _placed(row: dict[str, str], memory: EngineMemory) -> Deployment:
    spec = specs().get(row["model"]) or model(row["model"])
    dtype, kv_dtype = row["dtype"] or None, row["kv_dtype"] or None
    spec = in_precision(spec, dtype, kv_dtype)
    return Deployment(
        spec,
        replace(gpu("H100"), visible_gb=float(row["visible_gib"])),
        split_layers(spec.num_layers, int(row["stages"])),
        int(row["tensor_parallel"]),
        memory_utilization=float(row["memory_utilization"]),
        activation_tokens=TOKENS,
        logits_rows=ROWS,
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


def _kv(log: Log) -> str:
    return f"KV {log.facts['kv_dtype']}" if log.facts["kv_dtype"] else ""


def lines() -> Iterator[str]:
    """Yield the constants, the errors and the table."""
    found = logs(memories()["vllm-0.19"])
    yield f"odd rows give {fitted(odd(found))}"
    for name, part in (("odd", odd(found)), ("even", even(found))):
        off = [abs(log.error) for log in part]
        yield f"{name}: {len(off)} rows, median {median(off):.1%}, most {max(off):.1%}"
    yield table(found)


if __name__ == "__main__":
    print("\n".join(lines()))
