"""Random worlds for `tools.fuzz`, and what of a run's tables no pipeline could have written.

Knows RUN.yaml's keys and the rules of a pipeline; nothing of the simulator.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from evenflow.core.routing import Router
from evenflow.schedulers import POLICIES, POOLED
from tests.worlds import POLICIES as SMALL_POLICIES
from tests.worlds import SGLANG

LINK = {"bandwidth_gb_s": 1.0, "latency_us": 500.0}
SLOW_LINK = {"bandwidth_gb_s": 0.05, "latency_us": 0.0}
POOL = {"stages": 1, "pages": 24}
IN_STEP = {"name": "vllm_v1", "async_scheduling": False}
TURNS = {"name": "vllm_v1", "max_num_batched_tokens": 64, "max_num_seqs": 12}
SCHEDULERS: list[dict[str, Any]] = [
    *({"name": name} for name in sorted(POLICIES)),
    *({"name": name, **params} for name, params in SMALL_POLICIES),
    *(
        {"name": "sglang", **params, **more}
        for params in SGLANG
        for more in ({}, {"overlap": False})
    ),
    *({**TURNS, "async_scheduling": mode} for mode in (False, "v1")),
    {**TURNS, "scheduling_policy": "priority"},
    {**TURNS, "long_prefill_token_threshold": 9, "scheduler_reserve_full_isl": False},
    *({"name": name, "transfer_link": SLOW_LINK} for name in POOLED),
    {"name": "distserve", "prefill": POOL, "decode": {"stages": 1, "pages": 40}},
    {"name": "splitwise", "mixed": {"borrow_tokens": 60}, "prefill": {"scheduler": IN_STEP}},
    *({"name": "distserve", "decode": {"scheduler": name}} for name in ("td_pipe", "sglang")),
]
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "model": ("Qwen2.5-0.5B",),
    "dtype": ("fp8",),
    "kv_dtype": ("fp8",),
    "gpu": ("L20",),
    "stages": (3, 4, 8, [20, 28]),
    "split": ("balanced",),
    "tensor_parallel": (2, 4),
    "data_parallel": (2, 4),
    "attention_dp_config": ({"enable_balance": True, "timeout_iters": 3},),
    "expert_parallel": (True,),
    "link": ("pcie-gen4", LINK, {**LINK, "latency_us": 5000.0}),
    "nodes": ({"gpus": 2, "link": "ethernet-100g"},),
    "machine": ("gllm-sockets", {"name": "hgx-h100", "gpus": 2}),
    "costs": (
        {"kind": "roofline"},
        {"kind": "silicon"},
        {"kind": "affine", "base_s": 0.001, "per_token_s": 0.0},
    ),
    "kv.pages": (22, 30, 1000),
    "kv.page_tokens": (1, 8, 64),
    "kv.prefix_cache": (True,),
    "kv.swap": (True,),
    "runtime": ("gllm", "vllm", "sglang", {"per_row_s": 0.001, "holds": "stage0"}),
    "scale": ({"costs": 1.5}, {"host": 2.0}),
    "dispatch": ("eager", "engine_loop"),
    "max_in_flight": (1, 2, 9, "unlimited"),
    "virtual_engines": (True, 2),
    "pipelined_chunks": (True, False),
    "max_model_len": (256, 2000),
    "goodput": ({"ttft": 2000.0},),
    "speculative": tuple(
        {"k": k, "acceptance": p, "draft_cost_share": 0.1}
        for k, p in ((1, 0.0), (3, 0.7), (5, 1.0))
    ),
    "replicas": tuple({"count": 2, "router": name} for name in get_args(Router)),
    "workload.arrivals": (
        "offline",
        {"kind": "poisson", "rate": 5.0},
        {"kind": "closed", "concurrency": 3},
    ),
    "workload.trace": ("prefixes.jsonl",),
    "workload.max_new": (60,),
    "workload.after": ([{"trace": "t.csv"}],),
    "scheduler": tuple(SCHEDULERS),
}
"""What keys of a run may be instead of what PLAIN has; `workers` are no simulation's."""
NEEDED: dict[str, dict[str, Any]] = {
    "attention_dp_config": {"data_parallel": 2},
    "kv.swap": {"kv.host_link": LINK},
    "nodes": {"link": "nvlink-h100"},
    "tensor_parallel": {"link": "nvlink-h100"},
    "turns": {"dispatch": "engine_loop"},
    "workload.after": {"kv.prefix_cache": True},
}
"""What else a key needs, unless that is drawn too."""
PLAIN: dict[str, Any] = {
    "model": "Qwen3-30B-A3B",
    "gpu": "H100",
    "stages": 2,
    "costs": {"kind": "affine", "base_s": 0.02, "per_token_s": 1e-5},
    "kv": {"pages": 100},
    "scheduler": {"name": "sarathi"},
    "workload": {"trace": "t.csv", "arrivals": "replay"},
}
SLOWER = {"scale", "speculative", "runtime", "data_parallel", "kv.swap", "expert_parallel"}
"""Keys by which a micro-batch may take longer than its tokens do."""
Drawn = dict[str, int]
"""The keys of a world that are not plain, with the number of the choice."""


def drawn_world(rng: random.Random, tried: Counter[Any]) -> Drawn:
    """Draw keys that are not plain; of several draws, that with the most pairs not tried yet."""
    draws = []
    for _ in range(12):
        keys = {"scheduler", *rng.sample(sorted(CHOICES), rng.randint(0, 7))}
        draws.append({key: rng.randrange(len(CHOICES[key])) for key in sorted(keys)})
    drawn = max(draws, key=lambda each: sum(1 / (1 + tried[pair]) for pair in pairs_of(each)))
    tried.update(pairs_of(drawn))
    return drawn


def pairs_of(drawn: Drawn) -> set[Any]:
    return set(itertools.combinations(sorted(drawn.items()), 2))


def world_of(drawn: Drawn) -> dict[str, Any]:
    values = {key: CHOICES[key][number] for key, number in drawn.items()}
    policy = values["scheduler"]
    in_turns = policy["name"] in ("sglang", "vllm_v1", "vllm_balanced")
    for key in [*values, *(["turns"] if in_turns else [])]:
        values = NEEDED.get(key, {}) | values
    world = copy.deepcopy(PLAIN)
    for key, value in values.items():
        inner, _, last = key.rpartition(".")
        (world[inner] if inner else world)[last] = value
    if values.get("kv.page_tokens") == 1:
        world["kv"]["pages"] *= 16
    return world


def write_trace(rng: random.Random, place: Path) -> list[tuple[float, int, int]]:
    """Write a trace, as a table and with the prefixes that its prompts share; return its rows."""
    rows = [(round(rng.expovariate(1), 3), rng.randint(1, 300), rng.randint(1, 40))]
    for _ in range(rng.randint(0, 25)):
        gap_s = rng.choice((0.0, rng.expovariate(5)))
        rows.append((rows[-1][0] + gap_s, rng.randint(1, 300), rng.randint(1, 40)))
    table = ["arrived_at,num_prefill_tokens,num_decode_tokens,max_new,priority"]
    lines = []
    for at_s, prompt, output in rows:
        table.append(f"{at_s:.3f},{prompt},{output},{rng.choice(('', 80))},{rng.randint(-1, 1)}")
        sizes = {"input_length": prompt, "output_length": output, "hash_ids": [rng.randint(0, 1)]}
        lines.append(json.dumps({"timestamp": round(at_s * 1e3), **sizes}))
    (place / "t.csv").write_text("\n".join(table) + "\n")
    (place / "prefixes.jsonl").write_text("\n".join(lines) + "\n")
    return rows


def wrong_tables(out: Path, world: Mapping[str, Any], asked: list[Any]) -> str | None:
    """Return what of a run's tables cannot be, by the rules of a pipeline and nothing else."""
    requests = _rows(out / "requests.csv")
    done = [row for row in requests if row["status"] == "completed"]
    ended = len(done) + _count(requests, "rejected") + _count(requests, "aborted")
    if len(requests) != len(asked) or ended != len(asked):
        return f"{len(requests)} of {len(asked)} requests, {len(done)} completed"
    for row in done:
        _, prompt, output = asked[int(row["request_id"])]
        if (row["prompt_tokens"], row["output_tokens"]) != (prompt, output):
            return f"request {row['request_id']:.0f}: {row['output_tokens']:.0f} of {output} tokens"
        if not row["arrival_s"] < row["first_token_s"] <= row["completion_s"]:
            return f"request {row['request_id']:.0f}: times in disorder"
    pipes = [path.parent for path in sorted(out.rglob("batches.csv"))]
    batches = [row for pipe in pipes for row in _rows(pipe / "batches.csv")]
    wrong = None if _count(requests, "aborted") else _wrong_tokens(batches, done, world)
    for pipe in [] if wrong else pipes:
        wrong = wrong or _wrong_pages(_rows(pipe / "batches.csv"), world)
        wrong = wrong or _wrong_times(
            _rows(pipe / "stages.csv"), _rows(pipe / "batches.csv"), world
        )
    return wrong


def _rows(path: Path) -> list[Any]:
    return pd.read_csv(path).to_dict("records")


def _wrong_tokens(batches: list[Any], done: list[Any], world: Mapping[str, Any]) -> str | None:
    """Compare what was computed with what was asked for, where each token is computed once."""
    prefills, decodes = (sum(row[f"{n}_tokens"] for row in batches) for n in ("prefill", "decode"))
    least = sum(row["prompt_tokens"] for row in done), sum(row["output_tokens"] - 1 for row in done)
    calm = not any(row["preemptions"] for row in done)
    scheduler, kv = world.get("scheduler", {}), world["kv"]
    leaves_out = scheduler.get("mixed_chunk") or scheduler.get("dynamic_chunking")
    fewer = leaves_out or kv.get("prefix_cache") or (kv.get("swap") and not calm)
    name = scheduler.get("name", "")
    ahead = name == "sglang" or scheduler.get("async_scheduling", name.startswith("vllm_"))
    if prefills < least[0] and not fewer:
        return f"{(prefills, decodes)} tokens computed, {least} asked for"
    if "speculative" in world or ahead or (fewer and calm and decodes == least[1]):
        return None
    if decodes > least[1] or (calm and (prefills, decodes) != least):
        return f"{(prefills, decodes)} tokens computed, {least} asked for"
    return None


def _wrong_pages(batches: list[Any], world: Mapping[str, Any]) -> str | None:
    given = world.get("scheduler")
    parts = given.values() if isinstance(given, dict) else ()
    pools = [pool["pages"] for pool in parts if isinstance(pool, dict) and "pages" in pool]
    total = max(world["kv"]["pages"], *pools, 0) * world.get("data_parallel", 1)
    there = all(0 <= row["free_pages"] <= total for row in batches)
    return None if there else "pages that are not there"


def _wrong_times(stages: Any, batches: Any, world: Mapping[str, Any]) -> str | None:
    tokens = [row["prefill_tokens"] + row["decode_tokens"] for row in batches]
    depth = 1 + max((row["stage"] for row in stages), default=-1)
    by_stage = [[row for row in stages if row["stage"] == stage] for stage in range(depth)]
    for stage, rows in enumerate(by_stage):
        for before, row in itertools.pairwise(rows):
            if row["start_s"] < before["end_s"] - 1e-9:
                return f"stage {stage}: micro-batches {before['batch_id']} and the next overlap"
        for index, row in enumerate(rows):
            if _wrong_duration(row["end_s"] - row["start_s"], tokens[index], world):
                return f"stage {stage}, micro-batch {index}: {row['end_s'] - row['start_s']} s"
            above_s = (
                by_stage[stage - 1][index]["end_s"] if stage else batches[index]["scheduled_s"]
            )
            if row["start_s"] < above_s - 1e-9:
                return f"stage {stage}, micro-batch {index}: before it was there"
    return None


def _wrong_duration(seconds: float, tokens: int, world: Mapping[str, Any]) -> bool:
    """Say whether a stage cannot have taken that long for that many tokens."""
    costs, scheduler = world["costs"], world.get("scheduler", {})
    slower = SLOWER & {*world, *(f"kv.{key}" for key in world["kv"])}
    if costs["kind"] != "affine" or slower or scheduler.get("name") in POOLED:
        return seconds <= 0
    off_s = seconds - (costs["base_s"] + costs["per_token_s"] * tokens)
    return off_s < -1e-9 or (off_s > 1e-9 and not scheduler.get("padded"))


def _count(rows: list[Any], status: str) -> int:
    return sum(row["status"] == status for row in rows)
