"""The naive simulator of vLLM V0's virtual engines: one for each stage, on one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evenflow.types import Request
from tests.oracle.plain import Part, Plain, Row, Setting


class PlainEngines:
    """One run: `depth` engines with an equal part of the pages and one micro-batch in flight each.

    An arrival goes to the engine with the fewest requests; the engine that was served longest ago
    is asked first. `sent` is as in `Plain`, with the free pages of the engine that sent it.
    """

    def __init__(self, requests: Sequence[Request], setting: Setting) -> None:
        part = replace(setting, total_pages=setting.total_pages // setting.depth)
        self.setting = setting
        self.engines = [Plain(requests, part) for _ in range(setting.depth)]
        self.rows = self.engines[0].rows
        self.turns = list(self.engines)
        self.stage_free_s = self.engines[0].stage_free_s
        self.sent = self.engines[0].sent
        for engine in self.engines:
            engine.stage_free_s, engine.sent = self.stage_free_s, self.sent

    def run(self) -> PlainEngines:
        coming = [row for row in self.rows if self.engines[0].can_ever_fit(row)]
        while coming or any(engine.in_flight for engine in self.engines):
            now_s = self.next_instant(coming)
            for engine in self.engines:
                engine.now_s = now_s
                if engine.in_flight and engine.in_flight[0][0] == now_s:
                    engine.take_back(engine.in_flight.pop(0)[1])
            while coming and coming[0].arrival_s == now_s:
                self.fewest().waiting.append(coming.pop(0))
            while self.send_one():
                pass
        assert not any(engine.waiting or engine.running for engine in self.engines)
        return self

    def next_instant(self, coming: list[Row]) -> float:
        times_s = [row.arrival_s for row in coming[:1]]
        times_s += [end_s for engine in self.engines for end_s, _ in engine.in_flight]
        if self.sent and self.stage_free_s[0] > self.engines[0].now_s:
            times_s.append(self.stage_free_s[0])
        return min(times_s)

    def fewest(self) -> Plain:
        return min(self.engines, key=lambda engine: len(engine.waiting) + len(engine.running))

    def send_one(self) -> bool:
        """Have one engine send a micro-batch if one may; say whether one did."""
        if self.setting.dispatch == "stage0" and self.stage_free_s[0] > self.engines[0].now_s:
            return False
        for engine in [engine for engine in self.turns if not engine.in_flight]:
            if parts := self.ask(engine):
                engine.send(parts)
                self.turns.remove(engine)
                self.turns.append(engine)
                return True
        return False

    def ask(self, engine: Plain) -> list[Part]:
        while True:
            engine.preempted = False
            parts = getattr(engine, engine.setting.policy)()
            if parts or not engine.preempted:
                return parts
