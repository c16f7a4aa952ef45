"""Replays journals of gLLM's decisions (`tools.gllm_package`) through a Batcher of our own.

A line of a journal is an event: `config`, its first; `add`, a request arrives; `ask`, and what the
package answered: the rows that decode and the tokens of prompts, in its order, whom it preempted,
and how many pages were free then; `done`, the oldest micro-batch returns; `fails`, its last where
the package finds no page for a prefill, or would wait for ever.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenflow.batch import MicroBatch
from evenflow.batcher import Batcher
from evenflow.errors import StallError
from evenflow.kv import PagePool
from evenflow.schedulers.token_throttling import TokenThrottling, Variant
from evenflow.types import Request

Event = Mapping[str, Any]
RULES = ("iterations", "max_prefill", "min_prefill", "kv_thresh")


@dataclass(frozen=True)
class Outcome:
    """How many micro-batches were recorded, in how many ours has the same rows and tokens, and the
    first answer that differs in anything: rows, their order, preemptions, free pages."""

    batches: int = 0
    equal: int = 0
    difference: str | None = None

    def __add__(self, other: Outcome) -> Outcome:
        difference = self.difference or other.difference
        return Outcome(self.batches + other.batches, self.equal + other.equal, difference)

    @property
    def share(self) -> float:
        """Percent of the micro-batches that are equal."""
        return 100 * self.equal / max(self.batches, 1)


def read(path: Path) -> list[Event]:
    """Read a journal."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def replay(journal: Sequence[Event], variant: Variant) -> Outcome:
    """Serve what arrived in a journal, in its steps, and compare each answer."""
    ours = _Served(journal[0], variant)
    outcome = Outcome()
    for step, event in enumerate(journal[1:], start=1):
        if event["kind"] == "add":
            ours.add(event)
        elif event["kind"] == "done":
            ours.take_back(step)
        elif event["kind"] == "ask":
            answer = ours.ask(step)
            recorded = {key: event[key] for key in answer}
            differs = None if answer == recorded else f"step {step}: {answer}, not {recorded}"
            is_batch = bool(event["decodes"] or event["prefills"])
            is_equal = is_batch and _rows(answer) == _rows(recorded)
            outcome += Outcome(is_batch, is_equal, differs)
    return outcome


def _rows(answer: Event) -> tuple[list[int], list[list[int]]]:
    return sorted(answer["decodes"]), sorted(answer["prefills"])


class _Served:
    """Our Batcher under a journal's load."""

    def __init__(self, config: Event, variant: Variant) -> None:
        policy = TokenThrottling(variant=variant, **{key: config[key] for key in RULES})
        pool = PagePool(config["pages"], config["page_tokens"])
        depth = config["depth"]
        limit = config["pages"] * config["page_tokens"]
        self.batcher = Batcher(policy, pool, depth=depth, max_in_flight=depth, max_model_len=limit)
        self.in_flight: deque[MicroBatch] = deque()

    def add(self, event: Event) -> None:
        request = Request(event["id"], 0.0, event["prompt"], event["output"])
        assert self.batcher.add(request) is None

    def ask(self, step: int) -> dict[str, Any]:
        queues = self.batcher.queues
        before = {seq: seq.epoch for seq in queues.live.values()}
        try:
            batch = self.batcher.next(float(step))
        except StallError:
            batch = None
        if batch is not None:
            self.in_flight.append(batch)
        preempted = [seq.request.request_id for seq in before if seq.epoch > before[seq]]
        group = batch.decodes if batch is not None else None
        chunks = batch.chunks if batch is not None else ()
        return {
            "decodes": list(group.members) if group is not None else [],
            "prefills": [[c.sequence.request.request_id, c.stop - c.start] for c in chunks],
            "preempted": sorted(preempted),
            "free": self.batcher.pool.free_pages,
        }

    def take_back(self, step: int) -> None:
        if self.in_flight:
            self.batcher.complete(self.in_flight.popleft(), float(step))
