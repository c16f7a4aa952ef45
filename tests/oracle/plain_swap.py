"""The naive simulator with swap: what is preempted waits on the host, and comes back from there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.types import Request
from tests.oracle.plain import PAGE_TOKENS, Part, Plain, Row, Setting
from tests.oracle.plain_gllm import PlainGllm


@dataclass(frozen=True)
class HostLink:
    """Seconds that the copies of a row take: `row_s`, and `page_s` a filled page."""

    row_s: float = 0.0
    page_s: float = 0.0


class PlainSwap(Plain):
    """One run. `on_host` has the rows that come back when they are admitted.

    The copies that decisions order hold up every stage before the next micro-batch.
    """

    def __init__(self, requests: Sequence[Request], setting: Setting, host: HostLink) -> None:
        super().__init__(requests, setting)
        self.host = host
        self.on_host: list[Row] = []
        self.copied: list[int] = []

    def preempt(self, row: Row) -> None:
        held = row.context if row.decoding else row.computed
        super().preempt(row)
        row.computed = held
        if held:
            self.on_host.append(row)
            self.copied.append(math.ceil(held / PAGE_TOKENS))

    def send(self, parts: list[Part]) -> None:
        for row in [row for row, _, _ in parts if row in self.on_host]:
            self.on_host.remove(row)
            self.copied.append(math.ceil(row.computed / PAGE_TOKENS))
        super().send(parts)

    def copies_s(self) -> float:
        copied, self.copied = self.copied, []
        return len(copied) * self.host.row_s + sum(copied) * self.host.page_s


class PlainSwapGllm(PlainSwap, PlainGllm):
    """The same on gLLM's runtime."""
