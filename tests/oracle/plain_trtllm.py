"""TensorRT-LLM's executor, as plain as can be: lists, one pass a turn, a virtual clock.

Written from the rules alone (docs/engines.md). It writes the journal of a load, as the real
schedulers' are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


class DryError(Exception):
    """The pool has no block left."""


class SpinError(Exception):
    """Nothing will ever be chosen again."""


@dataclass(eq=False)
class Plain:
    """A request: `known` outputs are processed, `sent` are too or in flight, `at` of the prompt."""

    number: int
    arrival_s: float
    prompt: int
    output: int
    most: int
    now: int = 0
    at: int = 0
    known: int = 0
    sent: int = 0
    kv: int = 0
    blocks: int = 0
    decodes: bool = False
    flies: bool = False


@dataclass
class Sent:
    """A micro-batch: rows and their tokens, `ends` of its stages."""

    rows: list[tuple[Plain, int, bool]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)


class PlainExecutor:
    """The executor of a journal's `config`, with its scheduler, its pool and its loops."""

    def __init__(self, config: Event, loads: list[Event]) -> None:
        self.config = config
        self.free = config["blocks"]
        self.active: list[Plain] = []
        self.queued: list[Plain] = []
        self.coming = [
            Plain(one["id"], one["at"], one["prompt"], one["output"], one["max_new"], one["prompt"])
            for one in loads
        ]
        self.now_s = 0.0
        self.stages_s = [0.0] * config["pp"]
        self.waits = 0

    def run(self) -> Iterator[Event]:
        """Serve all; yield the events."""
        yield self.config
        slots: list[Sent | None] = [None] * (self.config["pp"] + (self.config["loop"] == "overlap"))
        turn = -1
        while self.active or self.queued or self.coming:
            turn = (turn + 1) % len(slots)
            if not (self.active or self.queued):
                self.now_s = max(self.now_s, self.coming[0].arrival_s)
            yield from self.fetch()
            event = self.describe(turn % self.config["pp"])
            try:
                batch = self.schedule(event)
            except DryError:
                yield event | {"free_after": None}
                yield {"kind": "dies", "t": self.now_s}
                return
            event["free_after"] = self.free
            yield event
            slots[turn] = self.launch(batch) if batch.rows else None
            before = slots[turn - 1]
            if self.config["waits_first"] and before is not None:
                self.now_s = max(self.now_s, before.ends_s[0])
            oldest = (turn + 1) % len(slots)
            if (back := slots[oldest]) is not None:
                self.now_s = max(self.now_s, back.ends_s[-1])
                yield self.process(back)
                slots[oldest] = None
            if not any(slots) and not batch.rows and event["active"] and back is None:
                raise SpinError

    def fetch(self) -> Iterator[Event]:
        while self.coming and self.coming[0].arrival_s <= self.now_s:
            one = self.coming.pop(0)
            self.queued.append(one)
            lengths = {"prompt": one.prompt, "output": one.output, "max_new": one.most}
            yield {"kind": "add", "id": one.number, "at": one.arrival_s, "t": self.now_s} | lengths
        seats = self.config["max_num_requests"] - len(self.active)
        self.active += self.queued[:seats]
        del self.queued[:seats]

    def describe(self, slot: int) -> Event:
        active = [[one.number, one.at, one.now, one.known] for one in self.active]
        facts = {"active": active, "queued": len(self.queued), "free_before": self.free}
        return {"kind": "ask", "mb": slot, "t": self.now_s} | facts

    def schedule(self, event: Event) -> Sent:
        """Choose a micro-batch, give it its blocks, and complete the event."""
        fitting, paused = self.fits()
        prompts, decodes = self.choose(fitting)
        if prompts and decodes:
            prompts = self.gather(prompts, len(decodes))
        event["tokens"] = {str(one.number): size for one, size in prompts}
        event["tokens"] |= {str(one.number): 1 for one in decodes}
        event["context"] = [one.number for one, _ in prompts]
        event["new"] = [one.number for one, _ in prompts if not one.at]
        event["last"] = [one.number for one, size in prompts if one.at + size == one.now]
        event["paused"] = [one.number for one in paused]
        if self.config["pp"] == 1:
            for one in paused:
                self.free += one.blocks
                one.blocks = one.at = one.kv = 0
                one.sent, one.now, one.decodes = one.known, one.prompt + one.known, False
        batch = Sent()
        for one, size in prompts:
            if not one.at:
                self.take(one, self.pages(one.now))
            one.at += size
            last = one.at == one.now
            one.flies = self.config["loop"] == "pp" and (last or not self.config["chunks_fly"])
            if last:
                one.decodes, one.kv, one.sent = True, one.now, one.sent + 1
            batch.rows.append((one, size, last))
        for one in decodes:
            one.kv += 1
            self.take(one, self.pages(one.kv) - one.blocks)
            one.flies, one.sent = self.config["loop"] == "pp", one.sent + 1
            batch.rows.append((one, 1, True))
        return batch

    def take(self, one: Plain, blocks: int) -> None:
        if blocks > self.free:
            raise DryError
        self.free -= blocks
        one.blocks += blocks

    def pages(self, tokens: int) -> int:
        return -(-tokens // int(self.config["block_size"]))

    def is_ending(self, one: Plain) -> bool:
        return self.config["loop"] == "overlap" and one.sent >= one.most

    def fits(self) -> tuple[list[Plain], list[Plain]]:
        """Return the requests that the pool suffices for, and those to pause."""
        able, free = [one for one in self.active if not self.is_ending(one)], self.free
        if self.config["capacity_policy"] == "GUARANTEED_NO_EVICT":
            fitting = [one for one in able if one.decodes]
            free -= sum(self.pages(one.prompt + one.most) - one.blocks for one in fitting)
            for one in able:
                if not one.decodes:
                    free -= self.pages(one.prompt + one.most) - one.blocks
                    if free < 0:
                        break
                    fitting.append(one)
            return [one for one in able if one in fitting], []
        paused, at = [], 0
        while at < len(able):
            one = able[at]
            need = 0 if one.at else self.pages(one.now)
            if one.decodes:
                steps = 2 if self.config["two_step_lookahead"] else 1
                need = self.pages(min(one.kv + steps, one.prompt + one.most)) - self.pages(one.kv)
            if need <= free:
                free, at = free - need, at + 1
                continue
            started = [index for index in range(at, len(able)) if able[index].at]
            if not started:
                break
            paused.append(able[started[-1]])
            free += paused[-1].blocks
            able = able[: started[-1]]
        return able[:at], paused

    def choose(self, fitting: list[Plain]) -> tuple[list[tuple[Plain, int]], list[Plain]]:
        """Return the prompts of a micro-batch, with their tokens, and its decodes."""
        prompts: list[Plain] = []
        decodes: list[Plain] = []
        left, chunks = self.config["max_num_tokens"], self.config["chunking"]
        for one in fitting:
            if one.flies:
                continue
            need = 1 if one.decodes else 0 if chunks else one.now
            if need > left:
                break
            left -= need
            (decodes if one.decodes else prompts).append(one)
            if len(prompts) + len(decodes) == self.config["max_batch_size"]:
                break
        rest = [one.now - one.at for one in prompts]
        if not chunks or sum(rest) <= left:
            return [*zip(prompts, rest, strict=True)], decodes
        sizes = self.equal(rest, left) if chunks == "EQUAL_PROGRESS" else self.first(rest, left)
        cut = [(one, size) for one, size in zip(prompts, sizes, strict=True) if size]
        ends = [(one, size) for one, size in cut if one.at + size == one.now]
        return [chunk for chunk in cut if chunk not in ends] + ends, decodes

    def gather(self, prompts: list[tuple[Plain, int]], decodes: int) -> list[tuple[Plain, int]]:
        """Return the prompts, or none of them where they wait for more."""
        scheduled = sum(size for _, size in prompts) + decodes
        enough = self.config["batch_wait_max_tokens_ratio"] * self.config["max_num_tokens"]
        if scheduled >= enough or self.waits == self.config["batch_wait_timeout_iters"]:
            self.waits = 0
            return prompts
        self.waits += 1
        return []

    def first(self, rest: list[int], left: int) -> list[int]:
        sizes = []
        for tokens in rest:
            size = tokens if tokens <= left else left - left % self.config["chunk_unit"]
            sizes.append(size)
            left -= size
        return sizes

    def equal(self, rest: list[int], left: int) -> list[int]:
        sizes = [0] * len(rest)
        dealt = True
        while dealt:
            dealt = False
            for index, tokens in enumerate(rest):
                more = min(self.config["chunk_unit"], tokens - sizes[index])
                if 0 < more <= left:
                    sizes[index] += more
                    left -= more
                    dealt = True
        return sizes

    def launch(self, batch: Sent) -> Sent:
        start_s = self.now_s
        tokens = sum(size for _, size, _ in batch.rows)
        for stage, free_s in enumerate(self.stages_s):
            start_s = max(start_s, free_s)
            start_s += self.config["base_s"] + self.config["per_token_s"] * tokens
            self.stages_s[stage] = start_s
            batch.ends_s.append(start_s)
        return batch

    def process(self, batch: Sent) -> Event:
        ended = []
        for one, _, yields in batch.rows:
            one.flies &= not (yields or not self.config["chunks_fly"])
            one.known += yields
            if not one.decodes and yields:  # it was paused meanwhile
                one.sent, one.now = one.known, one.prompt + one.known
            elif yields and one.known >= min(one.output, one.most) and one in self.active:
                ended.append(one)
                self.active.remove(one)
                self.free += one.blocks
        return {"kind": "done", "finished": [one.number for one in ended], "t": self.now_s}
