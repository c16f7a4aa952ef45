"""Journals of gLLM's scheduler (tools/gllm_package.py), replayed through a Batcher.

An `ask` has the rows that decode and the tokens of prompts, in the package's order, whom it
preempted, and how many pages were free then. `fails` is the last event where the package finds no
page for a prefill, or would wait for ever.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from evenflow.batch import MicroBatch
from evenflow.batcher import Batcher
from evenflow.errors import StallError
from evenflow.kv import PagePool
from evenflow.request import Request
from evenflow.schedulers import create, parameters, policy
from experiments.engines.journal import Event, Outcome, differ, read, replayed

MARK = "iterations"

FIELDS = {
    "config": (MARK, "max_prefill", "min_prefill", "kv_thresh", "depth", "pages", "page_tokens"),
    "add": ("id", "prompt", "output"),
    "ask": ("decodes", "prefills", "preempted", "free"),
    "done": (),
    "fails": (),
}
"""What each kind of event has to hold."""

RULES = {
    "preempted": "as many pages are free as there will be decodes, or the last to return go",
    "decodes": "a share of all rows in flight; of what returns, the last row decodes first",
    "prefills": "who was preempted goes first, the last preempted before the others",
    "tokens": "WT while more than one prompt waits, and UT",
    "free pages": "pages come with the tokens",
}
"""What decides each part of an answer."""


NOT_COVERED = "prefix cache, other scheduling methods, multi-modal input"


def mode(config: Event) -> str:
    """Return how a journal's engine ran."""
    return "pages enough" if config["pages"] >= 4000 else "pages too few"


class Replayer:
    """Feeds the events of a journal to a Batcher and compares what it answers."""

    def __init__(self, config: Event, scheduler: str | None = None, variant: str = "code") -> None:
        name = scheduler or "token_throttling"
        settings = {**config, "variant": variant}
        params = {key: settings[key] for key in parameters(policy(name)) if key in settings}
        depth, pages = config["depth"], PagePool(config["pages"], config["page_tokens"])
        limit = pages.total_pages * pages.page_tokens
        self._batcher = Batcher(
            create(name, params, max_model_len=limit),
            pages,
            depth=depth,
            max_in_flight=depth,
            max_model_len=limit,
        )
        self._travelling: deque[MicroBatch] = deque()

    def feed(self, event: Event, now_s: float) -> str | None:
        """Hand on an event; return what is not as recorded, or None."""
        if event["kind"] == "add":
            request = Request(event["id"], now_s, event["prompt"], event["output"])
            return self._batcher.add(request)
        if event["kind"] == "done" and self._travelling:
            self._batcher.complete(self._travelling.popleft(), now_s)
        if event["kind"] != "ask":
            return None
        ours, theirs = _named(self.answer(now_s)), _named(event)
        return next(
            (
                f"{differ(name, ours[name], theirs[name])} ({RULES[name]})"
                for name in RULES
                if ours[name] != theirs[name]
            ),
            None,
        )

    def answer(self, now_s: float) -> Event:
        """Ask for a micro-batch; return it as a journal has it."""
        queues = self._batcher.queues
        before = {seq: seq.epoch for seq in queues.live.values()}
        try:
            batch = self._batcher.next(now_s)
        except StallError:
            batch = None
        if batch is not None:
            self._travelling.append(batch)
        preempted = [seq.request.request_id for seq in before if seq.epoch > before[seq]]
        group = batch.decodes if batch is not None else None
        chunks = batch.chunks if batch is not None else ()
        return {
            "preempted": sorted(preempted),
            "decodes": list(group.members) if group is not None else [],
            "prefills": [[c.sequence.request.request_id, c.stop - c.start] for c in chunks],
            "free": self._batcher.pool.free_pages,
        }


def _named(answer: Event) -> dict[str, Any]:
    """Return the parts of an answer by what decides them."""
    return {
        "preempted": answer["preempted"],
        "decodes": answer["decodes"],
        "prefills": [request for request, _ in answer["prefills"]],
        "tokens": dict(answer["prefills"]),
        "free pages": answer["free"],
    }


def replay(path: Path, scheduler: str | None = None) -> Outcome:
    """Replay a journal of gLLM through the policy `scheduler`, or that which its settings mean.

    UsageError for a file that cannot be read.
    """
    events = read(path, FIELDS)
    return replayed(events, Replayer(events[0], scheduler))
