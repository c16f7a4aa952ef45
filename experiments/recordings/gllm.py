"""Journals of gLLM's scheduler (tools/gllm_package.py), replayed through a Batcher.

An `ask` has the rows that decode and the tokens of prompts, in the package's order. It has the
requests preempted and the number of free pages, too. `fails` is the last event where the package
finds no page for a prefill, or would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.scheduling import Scheduler
from evenflow.experiments.recordings import journal

FACTS = journal.facts_of("gllm")


def scheduler_of(config: journal.Event, name: str) -> Scheduler:
    limit = config["pages"] * config["page_tokens"]
    config = {"variant": "code", **config}
    return journal.policy_of(FACTS, config, name, {}, max_model_len=limit)


def deployment(path: Path, events: Sequence[journal.Event]) -> dict[str, Any]:
    config = events[0]
    return {
        "depth": config["depth"],
        "total_pages": config["pages"],
        "max_model_len": config["pages"] * config["page_tokens"],
        "page_tokens": config["page_tokens"],
        "max_in_flight": config["depth"],
    }


def answers(batcher: Batcher, event: journal.Event, ask: journal.Ask) -> journal.Answers:
    before = {seq: seq.epoch for seq in batcher.queues.live.values()}
    batch = ask()
    preempted = [seq.request.request_id for seq in before if seq.epoch > before[seq]]
    yield "preempted", sorted(preempted), event["preempted"]
    ours = rows_of(batch)
    yield "decodes", ours["decodes"], event["decodes"]
    for name, kind in (("prefills", list), ("tokens", dict)):
        yield name, kind(dict(ours["prefills"])), kind(dict(event["prefills"]))
    yield "free pages", batcher.pool.free_pages, event["free"]


def rows_of(batch: MicroBatch | None) -> journal.Event:
    """Return a micro-batch's decoding requests and prompt tokens, as a journal has them."""
    group = batch.decodes if batch is not None else None
    chunks = batch.chunks if batch is not None else ()
    return {
        "decodes": list(group.members) if group is not None else [],
        "prefills": [[c.sequence.request.request_id, c.stop - c.start] for c in chunks],
    }
