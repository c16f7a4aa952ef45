"""Journals of vLLM V1's scheduler: what it was asked and answered, replayed through a Batcher.

A line is an event (docs/engines.md says what is in it): requests arrive, vLLM is asked for a step,
a micro-batch returns. Knows the format, and which settings of vLLM are which of ours; the rules are
the policy's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evenflow.batch import MicroBatch
from evenflow.batcher import Batcher
from evenflow.costs import AffineCost
from evenflow.errors import UsageError
from evenflow.kv import KvCache, PagePool, PrefixCache
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
from sim import World, simulate

FIELDS = {
    "config": ("blocks", "block_size", "budget", "max_num_seqs", "pp", "max_concurrent_batches"),
    "add": ("id", "prompt", "output"),
    "ask": ("tokens", "new", "resumed", "preempted", "free_after", "running", "waiting", "held"),
    "done": ("ids", "finished"),
    "finished": (),
}
"""What each kind of event has to hold."""

RULES = {
    "running": "requests run in the order of their admission",
    "preempted": "the last admitted is preempted, in flight or not",
    "admitted": "who waits is admitted while nothing was preempted in this step, all of the prompt "
    "fits and no output of it is in flight",
    "tokens": "decodes and chunks, the last one in flight or not, share one budget",
    "cached tokens": "full pages are found by what is in them, and the last token is computed",
    "pages held": "pages come with the chunk",
    "free pages": "one block is the null block; the pages of what is preempted are free at once",
    "waiting": "who is preempted waits first",
    "finished": "what is in flight counts when it returns, also after a preemption",
    "first_token_s": "arrivals are seen when the loop does not wait for the oldest answer",
    "completion_s": "an empty answer takes a place in the queue of answers",
}
"""What decides each part of an answer."""

GENERATED = 500
"""Without a model, the token after n known ones is 3 + n mod 500."""


NOT_COVERED = (
    "priorities, `long_prefill_token_threshold`, `full_isl: false`, asynchronous scheduling with "
    "speculation or in a real run, LoRA, encoders, KV connectors, structured output"
)

MARK = "max_concurrent_batches"

MODELLED = {"policy": "fcfs", "long_prefill_token_threshold": 0, "full_isl": True}
"""Settings of vLLM that are modelled with one value only."""


def mode(config: Event) -> str:
    """Return how a journal's engine ran."""
    words = ["synchronous"]
    if config.get("async_scheduling"):
        words = [f"asynchronous, runner V{1 + bool(config.get('v2_runner'))}"]
    return ", ".join([*words, *["prefix caching"] * bool(config.get("prefix_caching"))])


def scheduler_of(config: Event, name: str = "vllm_v1") -> Scheduler:
    """Return the policy that a journal's settings stand for; `name` takes those that it has."""
    params = {
        "max_num_batched_tokens": config["budget"],
        "token_budget": config["budget"],
        "max_num_seqs": config["max_num_seqs"],
        "watermark": float(config.get("watermark", 0.0)),
        "async_scheduling": False,
    }
    if config.get("async_scheduling"):
        params["async_scheduling"] = "v2" if config.get("v2_runner") else "v1"
    known = parameters(policy(name))
    own = {key: value for key, value in params.items() if key in known}
    return create(name, own, max_model_len=config.get("max_model_len"))


def batcher_of(config: Event, scheduler: Scheduler) -> Batcher:
    """Return a Batcher with a journal's settings; one of vLLM's blocks is its null block."""
    pages = PagePool(config["blocks"] - 1, config["block_size"])
    if config.get("prefix_caching"):
        pages = PrefixCache(pages.total_pages, pages.page_tokens, append_only=True)
    return Batcher(
        scheduler,
        KvCache(pages),
        depth=config["pp"],
        max_in_flight=config["max_concurrent_batches"],
        max_model_len=config.get("max_model_len", 1 << 30),
        asks_again=False,
    )


def generated(known: int, stop: int) -> list[int]:
    """Return the tokens that follow `known` ones."""
    return [3 + position % GENERATED for position in range(known, stop)]


class Times(NamedTuple):
    """When a request got its first token and its last, in seconds."""

    first_token_s: float
    completion_s: float


class Replayer:
    """Feeds the events of a journal to a Batcher and compares what it answers.

    The batches travel in a queue, first in first out, as in vLLM; empty answers are in it too.
    """

    def __init__(self, path: Path, config: Event, scheduler: str) -> None:
        refuse(path, config, MODELLED)
        if config.get("async_scheduling") and config["pp"] > 1 and not config.get("v2_runner"):
            what = "async_scheduling with runner V1 and stages, which vLLM does not support,"
            raise UsageError(f"{path}: {what} is not modelled")
        self._batcher = batcher_of(config, scheduler_of(config, scheduler))
        self._contents = None
        if config.get("prefix_caching"):
            self._contents = Contents(path, config["block_size"], generated)
        self._travelling: deque[MicroBatch | None] = deque()
        self.requests: list[Request] = []
        self.times: dict[int, Times] = {}

    def feed(self, event: Event, now_s: float) -> str | None:
        """Hand on an event; return what is not as recorded, or None."""
        if event["kind"] == "add":
            self.requests.append(self._request(event, now_s))
            return self._batcher.add(self.requests[-1])
        if event["kind"] == "ask":
            return self._ask(event, now_s)
        if event["kind"] == "done" and self._travelling:
            return self._complete(event, now_s)
        return None

    def _request(self, event: Event, now_s: float) -> Request:
        prefix = None
        if self._contents is not None:
            prefix = self._contents.prefix(event["id"], event["output"])
        return Request(
            event["id"],
            event.get("arrival_s", now_s),
            event["prompt"],
            event["output"],
            prefix=prefix,
        )

    def _ask(self, event: Event, now_s: float) -> str | None:
        queues = self._batcher.queues
        before = list(queues.admitted)
        waiting = list(queues.waiting)
        if before != [row[0] for row in event["running"]]:
            return self._differ("running", before, [row[0] for row in event["running"]])
        batch = self._batcher.next(now_s)
        self._travelling.append(batch)
        after = queues.admitted
        started = [number for number in after if number not in before]
        new = [number for number in started if number in event["new"]]
        kept = {str(number): queues.live[number].kept_tokens for number in new}
        cached = {number: tokens for number, tokens in kept.items() if tokens}
        held = {str(number): len(seq.pages) for number, seq in after.items()}
        preempted = [number for number in reversed(before) if number not in after]
        order = [seq.request.request_id for seq in waiting]
        answers = (
            ("preempted", preempted, event["preempted"]),
            ("admitted", sorted(started), sorted([*event["new"], *event["resumed"]])),
            ("tokens", tokens_of(batch), {int(key): n for key, n in event["tokens"].items()}),
            ("cached tokens", cached, event.get("cached", {})),
            ("pages held", held, event["held"]),
            ("free pages", self._batcher.pool.free_pages, event["free_after"]),
            ("waiting", order, event["waiting"]),
        )
        for name, ours, theirs in answers:
            if ours != theirs:
                return self._differ(name, ours, theirs)
        return None

    def _complete(self, event: Event, now_s: float) -> str | None:
        batch = self._travelling.popleft()
        finished: list[int] = []
        if batch is not None:
            ended = self._batcher.complete(batch, now_s)
            finished = [seq.request.request_id for seq in ended]
            self.times |= {
                seq.request.request_id: Times(seq.first_token_s, seq.completion_s) for seq in ended
            }
        if sorted(finished) != sorted(event["finished"]):
            return self._differ("finished", finished, event["finished"])
        return None

    def _differ(self, name: str, ours: object, theirs: object) -> str:
        return f"{differ(name, ours, theirs)} ({RULES[name]})"


def simulated(config: Event, requests: Sequence[Request], scheduler: str) -> dict[int, Times]:
    """Return the times of requests in a simulation with the engine's loop and its stage times."""
    world = World(
        requests,
        lambda: scheduler_of(config, scheduler),
        AffineCost(config["base_s"], config["per_token_s"], config["pp"]),
        depth=config["pp"],
        total_pages=config["blocks"] - 1,
        max_model_len=config["max_model_len"],
        page_tokens=config["block_size"],
        max_in_flight=config["max_concurrent_batches"],
        dispatch="engine_loop",
        prefix_cache=bool(config.get("prefix_caching")),
    )
    result = simulate(world)
    columns = result.request_id, result.first_token_s, result.completion_s
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {number: Times(first_s, last_s) for number, first_s, last_s in rows}


def replay(path: Path, scheduler: str | None = None) -> Outcome:
    """Replay a journal of vLLM through the policy `scheduler`, or that which its settings mean.

    What a journal of equal steps took on a virtual clock is simulated too, and compared to 1 ns.
    UsageError for a file that cannot be read, or settings that are not modelled.
    """
    events = read(path, FIELDS)
    config, scheduler = events[0], scheduler or "vllm_v1"
    replayer = Replayer(path, config, scheduler)
    outcome = replayed(events, replayer)
    if outcome.difference is not None or "base_s" not in config:
        return outcome
    ours = simulated(config, replayer.requests, scheduler)
    for number, theirs in replayer.times.items():
        for name, one, other in zip(Times._fields, ours[number], theirs, strict=True):
            if not abs(one - other) <= 1e-9:
                what = f"request {number}, {name}: {one!r}, recorded {other!r} ({RULES[name]})"
                return outcome._replace(difference=what)
    return outcome._replace(timed=len(ours))
