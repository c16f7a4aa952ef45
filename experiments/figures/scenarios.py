"""Scenarios of single figures: a few requests that a figure's numbers describe, simulated.

Knows what is asked of a run's result there; no picture and no claim.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from evenflow.config.build import Workload, build
from evenflow.config.yaml_file import find
from evenflow.experiments.figures.schema import Layer
from evenflow.experiments.figures.study import FigureStudy
from evenflow.results.metrics import summarize
from evenflow.results.run import RunResult
from evenflow.sim import simulate
from evenflow.specs.gpu import link
from evenflow.specs.model import model
from evenflow.types import Request


def played(study: FigureStudy, requests: list[Request], *layers: Layer) -> RunResult:
    return simulate(build(study.config(*layers), study.plan.beside, Workload(requests, {})).world)


ENDS_AT_ONCE, LASTS = 2, 50
"""Output tokens: the first comes with the prefill, the second with the first decode step."""


def example(batch_rows: int, finished: list[int]) -> list[Request]:
    """Return `batch_rows` requests a batch; the first `finished` of it end in a decode step."""
    outputs = [
        ENDS_AT_ONCE if row < short else LASTS for short in finished for row in range(batch_rows)
    ]
    return [Request(number, 0.0, 8, tokens) for number, tokens in enumerate(outputs)]


def first_rounds(result: RunResult, rounds: int) -> pd.DataFrame:
    """Return a row for each decode batch that returns in the first `rounds` of them.

    `average`: live requests over the batches; `withheld`: how many requests are kept back.
    """
    shown, depth = rounds * result.depth, result.depth
    sent = result.decode_tokens[result.decode_tokens > 0]
    back_s = result.returned_s[result.decode_tokens > 0][:shown]
    ended = np.searchsorted(np.sort(result.completion_s), back_s, side="right")
    returned, submitted = sent[:shown] - np.diff(ended, prepend=0), sent[depth : depth + shown]
    return pd.DataFrame(
        {
            "round": np.arange(shown) // depth + 1,
            "batch": np.arange(shown) % depth,
            "returned": returned,
            "average": (len(result.completion_s) - ended) / depth,
            "submitted": submitted,
            "withheld": np.cumsum(returned - submitted),
        }
    )


USUAL_STEPS = 100
"""Output tokens that every decoding request has when the prompt arrives, about."""


def joined_by_prompt(study: FigureStudy, label: str, chunk: int | None) -> RunResult:
    """Run the decoding requests and the prompt; a budget has room for them beside a chunk."""
    numbers = study.numbers
    decodes = numbers["decodes"]
    budget = {} if chunk is None else {"scheduler": {"token_budget": chunk + decodes}}
    layers = study.system(label), budget
    short = numbers["decode_prompt_tokens"]
    many = [Request(number, 0.0, short, 4 * USUAL_STEPS) for number in range(decodes)]
    alone = played(study, many, *layers)
    arrival_s = float(alone.returned_s[alone.decode_tokens == decodes][USUAL_STEPS])
    prompt = Request(decodes, arrival_s, numbers["prompt_tokens"], 2)
    return played(study, [*many, prompt], *layers)


def steps_of_prompt(result: RunResult) -> slice:
    """Return which micro-batches compute the request that arrived last."""
    after = result.scheduled_s >= result.arrival_s.max()
    found = np.flatnonzero(after & (result.prefill_tokens > 0))
    return slice(int(found[0]), int(found[-1]) + 1)


def gaps(result: RunResult) -> dict[str, float]:
    """Return how the last prompt is computed, and the decoding requests' times between tokens."""
    part = steps_of_prompt(result)
    took_ms = 1e3 * (result.end_s - result.start_s)[part, 0]
    gaps_ms = 1e3 * np.diff(result.returned_s[result.decode_tokens > 0])
    return {
        "chunk_tokens": int(result.prefill_tokens[part].max()),
        "steps": part.stop - part.start,
        "chunk_ms": float(took_ms.mean()),
        "prompt_ms": float(took_ms.sum()),
        "longest_gap_ms": float(gaps_ms[USUAL_STEPS // 2 :].max()),
        "usual_gap_ms": float(np.median(gaps_ms)),
    }


MOVED = "mean_transfer_ms"
CONTEXTS = tuple(2**power for power in range(8, 16))


def transfers(study: FigureStudy) -> pd.DataFrame:
    """Return the time of a context's KV over each link."""
    spec = model(find(study.plan.run.data["model"], study.plan.beside))
    return pd.DataFrame(
        {"link": name, "context": tokens, "transfer_ms": 1e3 * link(name).transfer_s(size)}
        for name in study.numbers["links"]
        for tokens in CONTEXTS
        for size in [spec.kv_bytes_per_token() * tokens]
    )


def example_ms(study: FigureStudy) -> float:
    """Return the milliseconds that the example's KV crosses the link between two simulated pools.

    Each pool is one stage; nothing else is on the way.
    """
    given = study.numbers["example"]
    keys = {
        "model": None,
        "gpu": None,
        "link": None,
        "stages": 2,
        "costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 0.0},
        "kv": {"page_tokens": 16, "pages": 2 * given["tokens"]},
        "scheduler": {
            "name": "distserve",
            "kv_bytes_per_token": given["bytes_per_token"],
            "transfer_link": {"bandwidth_gb_s": given["bandwidth_gb_s"], "latency_us": 0},
        },
    }
    moved_ms = summarize(played(study, [Request(0, 0.0, given["tokens"], 2)], keys))[MOVED]
    assert moved_ms is not None  # the request is moved
    return float(moved_ms)
