"""Journals of SGLang's scheduler: what it was asked and answered, replayed through a Batcher.

A line is an event, and docs/engines.md says what is in it. Requests arrive, SGLang is asked for a
batch, its results are processed. Knows the format, and which settings of SGLang are which of ours;
the rules are the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.core.batcher import Batcher
from evenflow.core.decodes import ONE_TOKEN, Decoding
from evenflow.core.scheduling import Scheduler
from evenflow.engines.consensus import DecodeLoop, PrefillLoop
from evenflow.engines.loop import EngineLoop
from evenflow.engines.queues import EngineQueues
from evenflow.engines.receiving import ReceivingQueues
from evenflow.engines.speculation import Speculation
from evenflow.experiments.recordings import journal
from evenflow.schedulers.sglang import SHARED

FACTS = journal.facts_of("sglang")


def scheduler_of(config: journal.Event, name: str) -> Scheduler:
    """Return the policy of a journal's settings; `name` gets the settings that it has."""
    chunks = config.get("dynamic_chunking")
    facts: dict[str, Any] = {
        "max_model_len": config.get("context"),
        "depth": config["pp"],
        "page_tokens": config["page_size"],
    }
    if chunks is not None:
        facts["prefill_s"] = partial(np.polyval, chunks)
    more = {"dynamic_chunking": chunks is not None}
    return journal.policy_of(FACTS, config, name, more, **facts)


def _loop(config: journal.Event) -> dict[str, Any]:
    """Return the fields of a world that set the loop of a journal's engine."""
    if config.get("disaggregation_mode") is None:
        return {"loop": EngineLoop}
    loop = DecodeLoop if config["disaggregation_mode"] == "decode" else PrefillLoop
    return {"loop": loop, "loop_options": {"transfer_s": config["transfer_s"]}}


@dataclass(frozen=True)
class Accepted(Speculation):
    """Speculation with the tokens that were accepted, by request and the tokens it had."""

    gains: Mapping[tuple[int, int], int]

    def gain(self, request_id: int, generated: int, first: int = 1) -> int:
        return self.gains[request_id, generated]


def _decoding(events: Sequence[journal.Event]) -> Decoding:
    """Return the tokens of a journal's decodes: one a step, or what its `done` lines say."""
    spec = events[0].get("speculative")
    if spec is None:
        return ONE_TOKEN
    gains = {
        (int(number), known): gain
        for event in events
        for number, (known, gain) in event.get("accepted", {}).items()
    }
    return Accepted((spec["acceptance"],) * spec["k"], gains)


def deployment(path: Path, events: Sequence[journal.Event]) -> dict[str, Any]:
    config = events[0]
    pairs = bool(config.get("speculative"))  # with which pages end
    block_tokens = 1 if pairs else gcd(config["page_size"], SHARED)
    in_flight = config["pp"] + config.get("pp_async_batch_depth", 0) + config["overlap"]
    return {
        "contents": journal.Contents(path, block_tokens, generated) if config["radix"] else None,
        "depth": config["pp"],
        "total_pages": config["tokens"] // config["page_size"],
        "max_model_len": config.get("context", journal.NO_LIMIT),
        "page_tokens": config["page_size"],
        "max_in_flight": in_flight,
        **_loop(config),
        "decoding": _decoding(events),
    }


def generated(known: int, stop: int) -> list[int]:
    """Return the tokens that follow `known` ones: without a model, 7 and at the end 2."""
    return [7] * (stop - known - 1) + [2]


def answers(batcher: Batcher, event: journal.Event, ask: journal.Ask) -> journal.Answers:
    queues = batcher.queues
    assert isinstance(queues, EngineQueues)
    line = queues.arrived if isinstance(queues, ReceivingQueues) else queues.waiting
    waiting = [seq.request.request_id for seq in line]
    yield "waiting", waiting, event["waiting"]
    yield "free tokens before", _room(batcher), [event["free_before"], event["evictable_before"]]
    admitted = list(queues.admitted)
    batch = ask()
    yield "slot", queues.slot, event["mb"]
    if isinstance(queues, ReceivingQueues):
        left = {seq.request.request_id for seq in queues.arrived}
        yield "joined", [number for number in waiting if number not in left], event["joined"]
        admitted = [number for number in admitted if number not in event["ended"]]
    gone = [number for number in admitted if number not in queues.admitted]
    yield "aborted", [number for number in gone if number not in queues.live], event["aborted"]
    order = [seq.request.request_id for seq in queues.waiting]
    yield "retracted", [number for number in order if number in gone], event["retracted"]
    started = sorted(number for number in queues.admitted if number not in admitted)
    yield "admitted", started, sorted([*event["new"], *event["resumed"]])
    yield "tokens", journal.tokens_of(batch), {int(key): n for key, n in event["tokens"].items()}
    recorded = {int(key): n for key, n in event.get("cached", {}).items()}
    cached = {number: queues.live[number].kept_tokens for number in started}
    yield "cached tokens", cached, recorded or dict.fromkeys(started, 0)
    yield "free tokens", _room(batcher), [event["free_after"], event["evictable"]]
    ratio = getattr(batcher.scheduler, "new_token_ratio", event["ratio_after"])
    yield "new_token_ratio", ratio, event["ratio_after"]


def _room(batcher: Batcher) -> list[int]:
    """Return the free tokens, and the tokens of unpinned cache entries."""
    pool = batcher.pool
    idle_pages = pool.free_pages - pool.empty_pages
    return [pool.empty_pages * pool.page_tokens, idle_pages * pool.page_tokens]
