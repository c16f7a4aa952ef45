"""The naive simulator of vLLM V1 and its engine loop, with prefix caching and ahead of the answers.

Written from the eleven rules that its journals show. A row knows how many of its tokens are known
(prompt and answers that are back), how many are computed (sent, in flight or not), and how many
answers are promised. Blocks are objects in one list of free ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from evenflow.types import Request
from tests.oracle.plain import Setting

BLOCK_TOKENS = 16
Key = tuple[int, ...]


@dataclass(frozen=True)
class VllmSetting(Setting):
    """`async_scheduling`: False where no decode goes ahead of its answer, else v1 or v2.

    `share`: how much of the work a micro-batch leaves to those of the other stages.
    """

    max_num_batched_tokens: int = 64
    async_scheduling: str | bool = False
    caching: bool = False
    share: str | None = None

    @property
    def places(self) -> int:
        return self.depth + bool(self.async_scheduling)


@dataclass(eq=False)
class Block:
    """A block of the KV cache; `key` is all tokens up to its end, once it is full and known."""

    key: Key | None = None
    holders: int = 0


@dataclass(eq=False)
class VllmRow:
    request: Request
    known: int
    goal: int  # known when it was admitted: what counts as prefill
    computed: int = 0
    promised: int = 0
    blocks: list[Block] = field(default_factory=list)
    in_flight: int = 0
    owed: int = 0  # answers in flight from before a preemption
    rests_until: int = 0
    preemptions: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def ended(self) -> bool:
        return self.known == self.end

    def key(self, index: int) -> Key | None:
        """What a full block holds, if its content is known to anyone."""
        prefix = self.request.prefix
        if prefix is None or (index + 1) * BLOCK_TOKENS > prefix.tokens:
            return None
        return prefix.blocks[: index + 1]


Sent = list[tuple[VllmRow, int, bool, bool]]
"""Of each row: its tokens, whether an answer comes of them, and whether they are stale by now."""


class PlainVllm:
    """One run; `rows` and `sent` are as in `Plain`."""

    def __init__(self, requests: Sequence[Request], setting: VllmSetting) -> None:
        self.setting = setting
        self.rows = [VllmRow(r, r.prompt_tokens, r.prompt_tokens) for r in requests]
        self.waiting: list[VllmRow] = []
        self.running: list[VllmRow] = []
        self.free = [Block() for _ in range(setting.total_pages)]
        self.cached: dict[Key, list[Block]] = {}
        self.stage_free_s = [0.0] * setting.depth
        self.queue: list[tuple[float, Sent]] = []
        self.sent: list[tuple[float, int, int, int]] = []
        self.steps = 0
        self.now_s = 0.0

    def run(self) -> PlainVllm:
        coming = [
            row
            for row in self.rows
            if math.ceil(row.end / BLOCK_TOKENS) <= self.setting.total_pages
        ]
        while coming or self.waiting or self.running or self.queue:
            if not (self.waiting or self.running or self.queue):
                self.now_s = max(self.now_s, coming[0].request.arrival_s)
            while coming and coming[0].request.arrival_s <= self.now_s:
                self.waiting.append(coming.pop(0))
            self.turn()
        assert len(self.free) == self.setting.total_pages
        return self

    def turn(self) -> None:
        """Ask once, and take the oldest answer back unless there is room and work for more."""
        if self.waiting or self.running:
            batch = self.schedule()
            self.queue.append((self.travel(batch, self.tokens_s()), batch))
            if len(self.queue) < self.setting.places:
                return
        end_s, batch = self.queue.pop(0)
        self.now_s = max(self.now_s, end_s)
        for row, _, answers, stale in batch:
            row.in_flight -= 1
            self.take_back(row, answers, stale)

    def tokens_s(self) -> float:
        """When stage 0 has the tokens of the answer that is as many back as there are stages."""
        depth = self.setting.depth
        if depth == 1 or len(self.queue) < depth:
            return self.now_s
        end_s, batch = self.queue[-depth]
        return max(self.now_s, end_s if any(answers for _, _, answers, _ in batch) else 0.0)

    def travel(self, batch: Sent, at_s: float) -> float:
        if not batch:
            return self.now_s
        prefill = sum(n for row, n, _, _ in batch if row.computed <= row.goal)
        total = sum(n for _, n, _, _ in batch)
        self.sent.append((at_s, prefill, total - prefill, len(self.free)))
        takes_s = self.setting.base_s + self.setting.per_token_s * total
        for stage, free_s in enumerate(self.stage_free_s):
            self.stage_free_s[stage] = at_s = max(at_s, free_s) + takes_s
        return at_s

    def limits(self) -> tuple[int, int]:
        """How many decodes and how many tokens may go."""
        setting, budget = self.setting, self.setting.max_num_batched_tokens
        decodes = sum(row.known > row.goal for row in self.running)
        prompts = sum(row.goal - row.computed for row in self.running if row.known == row.goal)
        prompts += sum(row.known for row in self.waiting)
        work = {"seats": setting.max_num_seqs, "decodes": decodes, "tokens": decodes + prompts}
        part = math.ceil(work.get(setting.share or "", 0) / setting.depth)
        if setting.share == "tokens":
            return budget, min(budget, part)
        return part if setting.share else budget, budget

    # -- one step -------------------------------------------------------------------------------

    def schedule(self) -> Sent:
        self.steps += 1
        (most, left), preempted, batch = self.limits(), False, Sent()
        for row in list(self.running):
            tokens = min(row.known + row.promised - row.computed, left)
            if row not in self.running or not tokens or not self.may_go(row):
                continue
            if row.known > row.goal:
                if not most:
                    continue
                most -= 1
            while row in self.running and not self.grow(row, row.computed + tokens):
                self.preempt(self.running[-1])
                preempted = True
            if row not in self.running:
                break
            batch.append(self.send(row, tokens))
            left -= tokens
        if not preempted:
            batch += self.admit(left)
        return batch

    def may_go(self, row: VllmRow) -> bool:
        return self.steps >= row.rests_until and row.known + row.promised < row.end

    def admit(self, left: int) -> Sent:
        batch = Sent()
        for row in [row for row in self.waiting if not row.owed]:
            if not left or len(self.running) == self.setting.max_num_seqs:
                break
            found = self.find(row)
            idle = sum(not block.holders for block in found)
            spare = int(self.setting.watermark * (self.setting.total_pages + 1))
            new = math.ceil(row.known / BLOCK_TOKENS) - len(found)
            if new + idle + (spare if self.running else 0) > len(self.free):
                break
            for block in found:
                self.hold(block)
            self.waiting.remove(row)
            self.running.append(row)
            row.blocks, row.computed, row.goal = found, len(found) * BLOCK_TOKENS, row.known
            tokens = min(row.known - row.computed, left)
            assert self.grow(row, row.computed + tokens)
            batch.append(self.send(row, tokens))
            left -= tokens
        return batch

    def send(self, row: VllmRow, tokens: int) -> tuple[VllmRow, int, bool, bool]:
        row.computed += tokens
        row.in_flight += 1
        answers = row.computed == row.known + row.promised
        self.publish(row, min(row.computed, row.known))
        if answers and self.setting.async_scheduling:
            row.promised += 1
            if self.setting.async_scheduling == "v2":
                row.rests_until = self.steps + self.setting.depth
        return row, tokens, answers, False

    def preempt(self, row: VllmRow) -> None:
        self.running.remove(row)
        self.release(row)
        row.computed = row.promised = 0
        row.owed = row.in_flight
        row.preemptions += 1
        self.waiting.insert(0, row)
        for _, batch in self.queue:
            batch[:] = [(r, n, back, late or r is row) for r, n, back, late in batch]

    def take_back(self, row: VllmRow, answers: bool, stale: bool) -> None:
        row.owed -= stale
        if not answers:
            return
        row.known += 1
        row.token_s.append(self.now_s)
        if not stale and self.setting.async_scheduling:
            row.promised -= 1
            self.publish(row, row.computed - row.promised)
        if row.ended:
            (self.waiting if row in self.waiting else self.running).remove(row)
            self.release(row)

    # -- blocks ---------------------------------------------------------------------------------

    def grow(self, row: VllmRow, tokens: int) -> bool:
        need = math.ceil(tokens / BLOCK_TOKENS) - len(row.blocks)
        if need > len(self.free):
            return False
        for _ in range(need):
            block = next((block for block in self.free if block.key is None), self.free[0])
            if block.key is not None:
                self.cached[block.key].remove(block)
                block.key = None
            row.blocks.append(self.hold(block))
        return True

    def hold(self, block: Block) -> Block:
        if not block.holders:
            self.free.remove(block)
        block.holders += 1
        return block

    def release(self, row: VllmRow) -> None:
        for block in reversed(row.blocks):
            block.holders -= 1
            if not block.holders:
                self.free.append(block)
        row.blocks = []

    def publish(self, row: VllmRow, tokens: int) -> None:
        for index in range(tokens // BLOCK_TOKENS if self.setting.caching else 0):
            key = row.key(index)
            if key is not None and row.blocks[index].key is None:
                row.blocks[index].key = key
                self.cached.setdefault(key, []).append(row.blocks[index])

    def find(self, row: VllmRow) -> list[Block]:
        """The blocks that hold what a row begins with; its last token is computed anyway."""
        found: list[Block] = []
        for index in range((row.known - 1) // BLOCK_TOKENS if self.setting.caching else 0):
            key = row.key(index)
            if key is None or not self.cached.get(key):
                break
            found.append(self.cached[key][0])
        return found
