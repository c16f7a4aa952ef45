"""Journals of SGLang's scheduler: what it was asked and answered, replayed through a Batcher.

A line is an event (docs/engines.md says what is in it): requests arrive, SGLang is asked for a
batch, its results are processed. Knows the format, and which settings of SGLang are which of ours;
the rules are the policy's.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.batch import MicroBatch
from evenflow.batcher import Batcher
from evenflow.kv import PagePool
from evenflow.request import Request
from evenflow.schedulers import create, parameters, policy
from evenflow.scheduling import Scheduler
from experiments.engines.journal import (
    Event,
    Outcome,
    differ,
    read,
    refuse,
    replayed,
    tokens_of,
)

MARK = "chunked_prefill_size"

FIELDS = {
    "config": ("tokens", "page_size", MARK, "pp", "overlap", "radix"),
    "add": ("id", "prompt", "output", "max_new", "ignore_eos"),
    "ask": ("mb", "tokens", "new", "resumed", "retracted", "aborted", "free_before", "free_after"),
    "done": ("ids", "finished"),
    "idle": (),
}
"""What each kind of event has to hold."""

RULES = {
    "slot": "the slots of a pipeline are asked in turn",
    "waiting": "who is retracted waits last",
    "free tokens before": "the pages of who ends are free when the result is processed",
    "retracted": "fewest generated first, then the longest prompt, then the last, while the next "
    "decode step of the slot does not fit",
    "aborted": "who is alone in its slot and does not fit is aborted",
    "admitted": "prompts first, in order, while the rest of the prompt, the output allowed and a "
    "page fit beside what the slot's decodes may still need",
    "tokens": "chunks share one budget, charged whole pages; prompts and decodes are only mixed "
    "where chunks are",
    "free tokens": "pages come with the chunk and with the decode step",
    "new_token_ratio": "it falls with each decode step, and is estimated anew after a retraction",
    "finished": "the result of who was retracted is dropped",
}
"""What decides each part of an answer."""

MODELLED = {
    "radix": False,
    "prefill_decode_interval_min_bs": 0,
    "schedule_policy": "fcfs",
}
"""Settings that are modelled with one value only."""


def scheduler_of(config: Event, name: str = "sglang") -> Scheduler:
    """Return the policy that a journal's settings stand for; `name` takes those that it has."""
    known = parameters(policy(name))
    settings = {**config, "dynamic_chunking": config.get("dynamic_chunking") is not None}
    params = {key: settings[key] for key in known if key in settings}
    if "token_budget" in known:
        params["token_budget"] = config["chunked_prefill_size"]
    facts: dict[str, Any] = {"max_model_len": config.get("context"), "depth": config["pp"]}
    if settings["dynamic_chunking"]:
        facts["prefill_s"] = partial(np.polyval, config["dynamic_chunking"])
    return create(name, params, **facts)


def batcher_of(config: Event, scheduler: Scheduler) -> Batcher:
    """Return a Batcher with a journal's settings."""
    return Batcher(
        scheduler,
        PagePool(config["tokens"] // config["page_size"], config["page_size"]),
        depth=config["pp"],
        max_in_flight=places(config),
        max_model_len=config.get("context", 1 << 30),
        asks_again=False,
    )


def places(config: Event) -> int:
    """Return how many answers SGLang waits for at most before it takes the oldest."""
    return int(config["pp"]) + int(config.get("pp_async_batch_depth", 0)) + bool(config["overlap"])


class Replayer:
    """Feeds the events of a journal to a Batcher and compares what it answers."""

    def __init__(self, path: Path, config: Event, scheduler: str | None) -> None:
        refuse(path, config, MODELLED)
        self._batcher = batcher_of(config, scheduler_of(config, scheduler or "sglang"))
        self._page_tokens: int = config["page_size"]
        self._travelling: deque[MicroBatch] = deque()

    def feed(self, event: Event, now_s: float) -> str | None:
        """Hand on an event; return what is not as recorded, or None."""
        if event["kind"] == "add":
            return self._batcher.add(request_of(event, now_s))
        if event["kind"] == "ask":
            return self._ask(event, now_s)
        if event["kind"] == "done":
            return self._complete(event, now_s)
        return None

    def _ask(self, event: Event, now_s: float) -> str | None:
        queues, pool = self._batcher.queues, self._batcher.pool
        waiting = [seq.request.request_id for seq in queues.waiting]
        free = pool.free_pages * self._page_tokens
        admitted = dict(queues.admitted)
        batch = self._batcher.next(now_s)
        if batch is not None:
            self._travelling.append(batch)
        gone = [number for number in admitted if number not in queues.admitted]
        aborted = [number for number in gone if number not in queues.live]
        order = [seq.request.request_id for seq in queues.waiting]
        retracted = [number for number in order if number in gone]
        started = sorted(number for number in queues.admitted if number not in admitted)
        ratio = getattr(self._batcher.scheduler, "new_token_ratio", None)
        answers = (
            ("slot", queues.slot, event["mb"]),
            ("waiting", waiting, event["waiting"]),
            ("free tokens before", free, event["free_before"]),
            ("aborted", aborted, event["aborted"]),
            ("retracted", retracted, event["retracted"]),
            ("admitted", started, sorted([*event["new"], *event["resumed"]])),
            ("tokens", tokens_of(batch), {int(key): n for key, n in event["tokens"].items()}),
            ("free tokens", pool.free_pages * self._page_tokens, event["free_after"]),
            ("new_token_ratio", ratio, event["ratio_after"] if ratio is not None else None),
        )
        return next((_differ(*each) for each in answers if each[1] != each[2]), None)

    def _complete(self, event: Event, now_s: float) -> str | None:
        ended = self._batcher.complete(self._travelling.popleft(), now_s)
        finished = sorted(seq.request.request_id for seq in ended)
        if finished != sorted(event["finished"]):
            return _differ("finished", finished, sorted(event["finished"]))
        return None


def _differ(name: str, ours: object, theirs: object) -> str:
    return f"{differ(name, ours, theirs)} ({RULES[name]})"


def request_of(event: Event, now_s: float) -> Request:
    """Return the request that arrives in an event."""
    return Request(
        event["id"],
        event.get("at", now_s),
        event["prompt"],
        event["output"],
        max_new_tokens=None if event["ignore_eos"] else event["max_new"],
    )


def replay(path: Path, scheduler: str | None = None) -> Outcome:
    """Replay a journal of SGLang through the policy `scheduler`, or that which its settings mean.

    UsageError for a file that cannot be read, or settings that are not modelled.
    """
    events = read(path, FIELDS)
    return replayed(events, Replayer(path, events[0], scheduler))
