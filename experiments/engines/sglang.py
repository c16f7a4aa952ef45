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
from evenflow.radix import RadixCache
from evenflow.request import Request
from evenflow.schedulers import create, parameters, policy
from evenflow.scheduling import Scheduler
from experiments.engines.journal import (
    Contents,
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
    "ask": (
        "mb",
        "tokens",
        "new",
        "resumed",
        "retracted",
        "aborted",
        "free_before",
        "free_after",
        "evictable_before",
        "evictable",
    ),
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
    "cached tokens": "whole pages are found as far as they are in the tree, least recently used "
    "leaves leave it as a whole",
    "free tokens": "pages come with the chunk and with the decode step",
    "new_token_ratio": "it falls with each decode step, and is estimated anew after a retraction",
    "finished": "the result of who was retracted is dropped",
}
"""What decides each part of an answer."""

MODELLED = {"prefill_decode_interval_min_bs": 0}
"""Settings that are modelled with one value only."""


NOT_COVERED = (
    "priorities, `prefill_delayer`, DP attention, LoRA, grammars, speculation, "
    "sliding windows, Mamba, hierarchical cache, disaggregation, sessions, beams, "
    "`prefill_decode_interval_min_bs`, policies other than `fcfs` and `lpm`"
)


def mode(config: Event) -> str:
    """Return how a journal's engine ran."""
    words = ["overlapped" if config["overlap"] else "not overlapped"]
    words += ["mixed chunks"] * bool(config.get("mixed_chunk"))
    return ", ".join([*words, *["radix cache"] * bool(config["radix"])])


def scheduler_of(config: Event, name: str = "sglang") -> Scheduler:
    """Return the policy that a journal's settings stand for; `name` takes those that it has."""
    known = parameters(policy(name))
    settings = {**config, "dynamic_chunking": config.get("dynamic_chunking") is not None}
    params = {key: settings[key] for key in known if key in settings}
    if "token_budget" in known:
        params["token_budget"] = config["chunked_prefill_size"]
    facts: dict[str, Any] = {
        "max_model_len": config.get("context"),
        "depth": config["pp"],
        "page_tokens": config["page_size"],
    }
    if settings["dynamic_chunking"]:
        facts["prefill_s"] = partial(np.polyval, config["dynamic_chunking"])
    return create(name, params, **facts)


def batcher_of(config: Event, scheduler: Scheduler) -> Batcher:
    """Return a Batcher with a journal's settings."""
    kind = RadixCache if config["radix"] else PagePool
    return Batcher(
        scheduler,
        kind(config["tokens"] // config["page_size"], config["page_size"]),
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
        self._contents = contents_of(path, config)

    def feed(self, event: Event, now_s: float) -> str | None:
        """Hand on an event; return what is not as recorded, or None."""
        if event["kind"] == "add":
            return self._batcher.add(request_of(event, now_s, self._contents))
        if event["kind"] == "ask":
            return self._ask(event, now_s)
        if event["kind"] == "done":
            return self._complete(event, now_s)
        return None

    def _ask(self, event: Event, now_s: float) -> str | None:
        queues = self._batcher.queues
        waiting = [seq.request.request_id for seq in queues.waiting]
        before = self._pages()
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
        cached = {number: queues.live[number].kept_tokens for number in started}
        recorded = {int(key): n for key, n in event.get("cached", {}).items()}
        answers = (
            ("slot", queues.slot, event["mb"]),
            ("waiting", waiting, event["waiting"]),
            ("free tokens before", before, [event["free_before"], event["evictable_before"]]),
            ("aborted", aborted, event["aborted"]),
            ("retracted", retracted, event["retracted"]),
            ("admitted", started, sorted([*event["new"], *event["resumed"]])),
            ("tokens", tokens_of(batch), {int(key): n for key, n in event["tokens"].items()}),
            ("cached tokens", cached, recorded or dict.fromkeys(started, 0)),
            ("free tokens", self._pages(), [event["free_after"], event["evictable"]]),
            ("new_token_ratio", ratio, event["ratio_after"] if ratio is not None else None),
        )
        return next((_differ(*each) for each in answers if each[1] != each[2]), None)

    def _pages(self) -> list[int]:
        """Return the free tokens, and those of what nobody pins."""
        pool = self._batcher.pool
        idle_pages = pool.free_pages - pool.empty_pages
        return [pool.empty_pages * self._page_tokens, idle_pages * self._page_tokens]

    def _complete(self, event: Event, now_s: float) -> str | None:
        ended = self._batcher.complete(self._travelling.popleft(), now_s)
        finished = sorted(seq.request.request_id for seq in ended)
        if finished != sorted(event["finished"]):
            return _differ("finished", finished, sorted(event["finished"]))
        return None


def _differ(name: str, ours: object, theirs: object) -> str:
    return f"{differ(name, ours, theirs)} ({RULES[name]})"


def generated(known: int, stop: int) -> list[int]:
    """Return the tokens that follow `known` ones: without a model, 7 and at the end 2."""
    return [7] * (stop - known - 1) + [2]


def contents_of(path: Path, config: Event) -> Contents | None:
    """Return what is in the tokens of a journal with radix cache."""
    return Contents(path, config["page_size"], generated) if config["radix"] else None


def request_of(event: Event, now_s: float, contents: Contents | None = None) -> Request:
    """Return the request that arrives in an event."""
    return Request(
        event["id"],
        event.get("at", now_s),
        event["prompt"],
        event["output"],
        prefix=None if contents is None else contents.prefix(event["id"], event["output"]),
        max_new_tokens=None if event["ignore_eos"] else event["max_new"],
    )


def replay(path: Path, scheduler: str | None = None) -> Outcome:
    """Replay a journal of SGLang through the policy `scheduler`, or that which its settings mean.

    UsageError for a file that cannot be read, or settings that are not modelled.
    """
    events = read(path, FIELDS)
    return replayed(events, Replayer(path, events[0], scheduler))
