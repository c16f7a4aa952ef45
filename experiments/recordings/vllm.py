"""Journals of vLLM V1's scheduler: what it was asked and answered, replayed through a Batcher.

A line is an event, and docs/engines.md says what is in it. Requests arrive, vLLM is asked for a
step, a micro-batch returns. Knows the format, and which settings of vLLM are which of ours; the
rules are the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenflow.core.batcher import Batcher
from evenflow.core.scheduling import Scheduler
from evenflow.engines.loop import EngineLoop
from evenflow.errors import UsageError
from evenflow.experiments.recordings import journal

FACTS = journal.facts_of("vllm")

GENERATED = 500
"""Without a model, the token after n known ones is 3 + n mod 500."""


def scheduler_of(config: journal.Event, name: str) -> Scheduler:
    """Return the policy of a journal's settings; `name` gets the settings that it has."""
    runner = "v2" if config.get("v2_runner") else "v1"
    more = {
        "watermark": float(config.get("watermark", 0.0)),
        "async_scheduling": runner if config.get("async_scheduling") else False,
        "version": config["version"].removesuffix(".0"),
    }
    if more["version"] == "0.32":
        more["prefill_schedule_interval"] = 1
    return journal.policy_of(FACTS, config, name, more, max_model_len=config.get("max_model_len"))


def generated(known: int, stop: int) -> list[int]:
    """Return the tokens that follow `known` ones."""
    return [3 + position % GENERATED for position in range(known, stop)]


def deployment(path: Path, events: Sequence[journal.Event]) -> dict[str, Any]:
    """Return the deployment; one of vLLM's blocks is its null block."""
    config = events[0]
    if config.get("async_scheduling") and config["pp"] > 1 and not config.get("v2_runner"):
        what = "async_scheduling with runner V1 and stages, which vLLM does not support,"
        raise UsageError(f"{path}: {what} is not modelled")
    known = config.get("prefix_caching")
    return {
        "contents": journal.Contents(path, config["block_size"], generated) if known else None,
        "depth": config["pp"],
        "total_pages": config["blocks"] - 1,
        "max_model_len": config.get("max_model_len", journal.NO_LIMIT),
        "page_tokens": config["block_size"],
        "max_in_flight": config["max_concurrent_batches"],
        "loop": EngineLoop,
    }


def answers(batcher: Batcher, event: journal.Event, ask: journal.Ask) -> journal.Answers:
    queues = batcher.queues
    before = list(queues.admitted)
    yield "running", before, [row[0] for row in event["running"]]
    waiting = [seq.request.request_id for seq in queues.waiting]
    batch = ask()
    after = queues.admitted
    started = [number for number in after if number not in before]
    kept = {str(number): queues.live[number].kept_tokens for number in started}
    new = {number: tokens for number, tokens in kept.items() if int(number) in event["new"]}
    yield "preempted", [one for one in reversed(before) if one not in after], event["preempted"]
    yield "admitted", sorted(started), sorted([*event["new"], *event["resumed"]])
    yield "tokens", journal.tokens_of(batch), {int(key): n for key, n in event["tokens"].items()}
    cached = {number: tokens for number, tokens in new.items() if tokens}
    yield "cached tokens", cached, event.get("cached", {})
    held = {str(number): len(seq.pages) for number, seq in after.items()}
    yield "pages held", held, event["held"]
    yield "free pages", batcher.pool.free_pages, event["free_after"]
    yield "waiting", waiting, event["waiting"]
