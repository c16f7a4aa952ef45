"""The naive simulator of replicas behind a router, of a closed loop, and of vLLM V0's engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenflow.types import Request
from tests.oracle.plain import Part, Plain, Row, Setting


class PlainReplicas:
    """One run of `pipelines`, which have what happened on each.

    `router`: `round_robin`; `least_outstanding`, the first of those with the fewest requests that
    are not done; or `prefix_affinity`, the same among those that were sent the longest part of the
    prompt's prefix before, if that is half of it. `concurrency`: so many are served at once.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pipelines: Sequence[Plain],
        router: str,
        concurrency: int | None,
    ) -> None:
        self.requests, self.router, self.concurrency = requests, router, concurrency
        self.pipelines = pipelines
        self.sent_to: list[list[tuple[int, ...]]] = [[] for _ in pipelines]
        self.coming = [
            Row(i, r.prompt_tokens, r.output_tokens, r.arrival_s, todo=r.prompt_tokens)
            for i, r in enumerate(requests)
        ]
        self.rows = list(self.coming)
        self.now_s = 0.0

    def run(self) -> PlainReplicas:
        if self.concurrency is not None:
            self.replace(self.concurrency)
            self.ask()
        while self.times_s():
            self.now_s = min(self.times_s())
            for pipeline in self.pipelines:
                pipeline.now_s = self.now_s
                while pipeline.in_flight and pipeline.in_flight[0][0] == self.now_s:
                    before = len(pipeline.running)
                    pipeline.take_back(pipeline.in_flight.pop(0)[1])
                    if self.concurrency is not None:
                        self.replace(before - len(pipeline.running))
            if self.concurrency is None:
                while self.coming and self.coming[0].arrival_s == self.now_s:
                    self.enter(self.coming.pop(0))
            self.ask()
        for pipeline in self.pipelines:
            assert pipeline.waiting == pipeline.running == []
            assert pipeline.free == pipeline.setting.total_pages
        return self

    def times_s(self) -> list[float]:
        times_s = [end_s for pipeline in self.pipelines for end_s, _ in pipeline.in_flight]
        if self.concurrency is None:
            times_s += [row.arrival_s for row in self.coming[:1]]
        times_s += [p.stage_free_s[0] for p in self.pipelines if p.stage_free_s[0] > self.now_s]
        return times_s

    def ask(self) -> None:
        for pipeline in self.pipelines:
            pipeline.ask()

    def replace(self, count: int) -> None:
        """Let in as many as ended; one that is rejected is none."""
        while count and self.coming:
            self.coming[0].arrival_s = self.now_s
            count -= self.enter(self.coming.pop(0))

    # -- the router -----------------------------------------------------------------------------

    def enter(self, row: Row) -> bool:
        number = self.choose(row)
        pipeline = self.pipelines[number]
        self.sent_to[number].append(self.blocks(row))
        pipeline.rows.append(row)
        if not pipeline.can_ever_fit(row):
            return False
        pipeline.waiting.append(row)
        return True

    def choose(self, row: Row) -> int:
        if self.router == "round_robin":
            return row.index % len(self.pipelines)
        candidates = list(range(len(self.pipelines)))
        if self.router == "prefix_affinity":
            shared = [self.shared(number, self.blocks(row)) for number in candidates]
            if 2 * max(shared) >= len(self.blocks(row)):
                candidates = [n for n in candidates if shared[n] == max(shared)]
        return min(candidates, key=self.outstanding)

    def outstanding(self, number: int) -> int:
        pipeline = self.pipelines[number]
        return len(pipeline.waiting) + len(pipeline.running)

    def blocks(self, row: Row) -> tuple[int, ...]:
        """The full blocks of the prompt whose content is known."""
        prefix = self.requests[row.index].prefix
        if prefix is None:
            return ()
        return tuple(prefix.blocks[: min(row.prompt, prefix.tokens) // prefix.block_tokens])

    def shared(self, number: int, blocks: tuple[int, ...]) -> int:
        """How many first blocks of a prompt were sent there, in one prompt."""
        return max((common(blocks, sent) for sent in self.sent_to[number]), default=0)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


class PlainEngines(PlainReplicas):
    """Virtual engines on one pipeline: `depth` of them, with an equal part of the pages each and
    one micro-batch in flight.

    An arrival goes to the engine with the fewest requests; the engine that was served longest ago
    is asked first. `sent` is as in `Plain`, with the free pages of the engine that sent it.
    """

    def __init__(self, requests: Sequence[Request], setting: Setting) -> None:
        part = replace(setting, total_pages=setting.total_pages // setting.depth)
        engines = [Plain([], part) for _ in range(setting.depth)]
        super().__init__(requests, engines, "least_outstanding", None)
        self.setting = setting
        self.turns = list(engines)
        self.stage_free_s, self.sent = engines[0].stage_free_s, engines[0].sent
        for engine in engines:
            engine.stage_free_s, engine.sent = self.stage_free_s, self.sent

    def ask(self) -> None:
        while self.send_one():
            pass

    def send_one(self) -> bool:
        """Have one engine send a micro-batch if one may; say whether one did."""
        if self.setting.dispatch == "stage0" and self.stage_free_s[0] > self.now_s:
            return False
        for engine in [engine for engine in self.turns if not engine.in_flight]:
            if parts := self.ask_one(engine):
                engine.send(parts)
                self.turns.remove(engine)
                self.turns.append(engine)
                return True
        return False

    def ask_one(self, engine: Plain) -> list[Part]:
        while True:
            engine.preempted = False
            parts: list[Part] = getattr(engine, engine.setting.policy)()
            if parts or not engine.preempted:
                return parts
