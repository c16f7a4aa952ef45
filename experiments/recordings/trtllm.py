"""Journals of TensorRT-LLM's schedulers: what they were asked and answered, replayed.

A line is an event, and docs/engines.md says what is in it. Requests arrive, the executor asks for a
micro-batch, its results are processed. Knows the format, and which settings of TensorRT-LLM are
which of ours; the rules are the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenflow.core.batch import Chunk
from evenflow.core.batcher import Batcher
from evenflow.core.scheduling import Scheduler
from evenflow.engines.loop import EngineLoop
from evenflow.engines.queues import EngineQueues
from evenflow.errors import DryPoolError
from evenflow.experiments.recordings import journal

FACTS = journal.facts_of("trtllm")


def scheduler_of(config: journal.Event, name: str) -> Scheduler:
    """Return the policy of a journal's settings; `name` gets the settings that it has."""
    chunking = config.get("chunking")
    more = {
        **({"context_chunking_policy": chunking} if chunking else {}),
        "enable_chunked_prefill": bool(chunking),
        "disable_overlap_scheduler": config["loop"] == "simple",
        "version": "1.0" if config.get("waits_first") is False else "1.2",
    }
    facts = {"depth": config["pp"], "page_tokens": config["block_size"]}
    return journal.policy_of(FACTS, config, name, more, **facts)


def deployment(path: Path, events: Sequence[journal.Event]) -> dict[str, Any]:
    config = events[0]
    return {
        "depth": config["pp"],
        "total_pages": config["blocks"],
        "max_model_len": journal.NO_LIMIT,
        "page_tokens": config["block_size"],
        "max_in_flight": config["pp"] + (config["loop"] == "overlap"),
        "loop": EngineLoop,
    }


def answers(batcher: Batcher, event: journal.Event, ask: journal.Ask) -> journal.Answers:
    queues = batcher.queues
    assert isinstance(queues, EngineQueues)
    seats = len(event["active"])
    live = list(queues.live)
    yield "active", live[:seats], [row[0] for row in event["active"]]
    yield "queued", len(live) - seats, event["queued"]
    yield "free pages before", batcher.pool.free_pages, event["free_before"]
    running = list(queues.admitted)
    if event["free_after"] is None:
        yield "dies", _dies(ask), True
        return
    batch = ask()
    yield "slot", (queues.asked - 1) % batcher.depth, event["mb"]
    if batcher.depth == 1:
        gone = [number for number in running if number not in queues.admitted]
        yield "paused", sorted(gone), sorted(event["paused"])
    chunks = batch.chunks if batch is not None else ()
    last = [chunk for chunk in chunks if chunk.last]
    yield "context", [*map(_number, chunks)], event["context"]
    yield "tokens", journal.tokens_of(batch), {int(key): n for key, n in event["tokens"].items()}
    started = [number for number in queues.admitted if number not in running]
    yield "new", sorted(started), sorted(event["new"])
    yield "last", [*map(_number, last)], event["last"]
    yield "free pages", batcher.pool.free_pages, event["free_after"]


def _number(chunk: Chunk) -> int:
    return chunk.sequence.request.request_id


def _dies(ask: journal.Ask) -> bool:
    try:
        ask()
    except DryPoolError:
        return True
    return False
