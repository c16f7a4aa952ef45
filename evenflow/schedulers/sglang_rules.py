"""SGLang's arithmetic: what a pass over prompts may take, who fits, and how long a chunk may be.

The rules are SGLang 0.5.23's, in our own words (its PrefillAdder, PrefillBudget and
ChunkSizePredictor); who is asked about, and what follows, is `evenflow.schedulers.sglang`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, sqrt

import numpy as np

from evenflow.scheduling import Decode, Prefill, Prompt, View

CLIP = 4096  # more output than this is not reserved
MARGIN = 100  # tokens of the context that a dynamic chunk leaves free
PROFILED = 128  # prompts
SHARED = 32  # tokens
SMOOTH = 0.75


def share(request: Decode | Prompt, ratio: float) -> float:
    """Return which share of the output it is allowed a request is thought to need."""
    return 1.0 if request.exact else ratio


def needed_tokens(decodes: Iterable[Decode], ratio: float) -> float:
    """Return how many tokens running decodes are thought to need yet."""
    rest = ((min(one.output_limit - one.generated, CLIP), one) for one in decodes)
    return sum(tokens * share(one, ratio) for tokens, one in rest)


@dataclass(slots=True)
class Room:
    """What a pass over the prompts has left, in tokens, and what it has taken.

    Of prompts it takes `chunk` and `inputs` at most, both charged whole pages. Of `free` tokens,
    `planned` are those of this pass; `reserved` also has what running decodes, and the outputs of
    this pass, may need: admission reserves, it does not allocate. Where outputs have an exact
    length and no prefix cache (`walks`), it is looked ahead to the ends instead.
    """

    page_tokens: int
    chunk: int
    inputs: int
    free: int
    planned: int
    reserved: float
    walks: bool
    decodes: Sequence[Decode]
    ratio: float
    prompts: list[Prompt] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    cut: int | None = None  # which of `prefills` goes on
    ends: list[tuple[float, int]] = field(default_factory=list)

    @property
    def total(self) -> float:
        return self.free - self.reserved

    @property
    def has_pages(self) -> bool:
        return self.total > 0 and self.free > self.planned

    @property
    def is_spent(self) -> bool:
        return self.chunk <= 0 or self.inputs <= 0

    def paged(self, tokens: int) -> int:
        """Return the tokens of as many whole pages as `tokens` fill."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def next_chunk_of(self, prompt: Prompt) -> int:
        """Return the next chunk of the prompt under way, which goes on in however little room."""
        tokens = min(self.chunk, int(self.total))
        return min(tokens if tokens > 0 else self.chunk, prompt.remaining)

    def chunk_of(self, prompt: Prompt) -> int:
        """Return how much of a prompt that fits is taken: all of it, or whole pages."""
        tokens = prompt.remaining
        if prompt.exact and self.walks:
            return min(tokens, self.chunk)
        cut = self.chunk // self.page_tokens * self.page_tokens
        return tokens if self.paged(tokens) <= self.chunk else cut

    def take(self, prompt: Prompt, tokens: int) -> None:
        """Take the next `tokens` of a prompt; with the last of them, all the output it may need.

        One prompt goes on: if a second one is cut, the first decodes from what there is of it.
        """
        cut = tokens < prompt.remaining
        if cut and self.cut is not None:
            self.prefills[self.cut] = self.prefills[self.cut]._replace(ends=True)
        if cut:
            self.cut = len(self.prefills)
        self.prompts.append(prompt)
        self.prefills.append(Prefill(prompt.request_id, tokens))
        tokens = self.paged(tokens)
        self.chunk -= tokens
        self.inputs -= tokens
        self.planned += tokens + self.page_tokens
        self.reserved += tokens + self.page_tokens
        self.reserved += 0 if cut else min(prompt.output_limit, CLIP)

    def fits(self, prompt: Prompt) -> bool:
        """Say whether a prompt and its output fit beside all that is reserved."""
        if prompt.exact and self.walks:
            return self._fits_until_the_end(prompt)
        output = min(max(prompt.output_limit - prompt.generated, 0), CLIP)
        return prompt.remaining + output + self.page_tokens < self.total - self.pinned(prompt)

    def pinned(self, prompt: Prompt) -> int:
        """Return the tokens kept of a prompt that come into pages which are free now."""
        return max(prompt.computed - prompt.pages * self.page_tokens, 0)

    @property
    def needed_pages(self) -> int:
        """Pages that are emptied for what is taken: one more for each prompt than it fills."""
        tokens = sum(prefill.tokens for prefill in self.prefills)
        if self.page_tokens > 1:
            tokens += len(self.prefills) * self.page_tokens
        return -(-tokens // self.page_tokens)

    def _fits_until_the_end(self, prompt: Prompt) -> bool:
        """Walk through the ends to come: does the pool run short before one of them?"""

        def end(request: Decode | Prompt) -> tuple[float, int]:
            steps = request.output_limit * share(request, self.ratio) - request.generated
            return steps, request.tokens

        tokens = self.paged(prompt.remaining + self.pinned(prompt)) + self.page_tokens
        if tokens > min(self.free - self.planned, self.total):
            return False
        if not self.ends:
            others = [*map(end, self.decodes), *map(end, self.prompts)]
            self.ends = sorted([end(prompt), *others], key=_first)
        else:  # before the last at the latest, as there
            found = (at for at, other in enumerate(self.ends) if end(prompt)[0] <= other[0])
            self.ends.insert(next(found, len(self.ends) - 1), end(prompt))
        ends = [pair for pair in self.ends if pair[0] > 0]
        free = float(self.free - self.planned - tokens)
        for index, (steps, held_tokens) in enumerate(ends):
            running = len(ends) - index
            if free - steps * running <= running:
                return False
            free += held_tokens
        return True


def _first(pair: tuple[float, int]) -> float:
    return pair[0]


def dynamic_chunk(
    prefill_s: Callable[[int], float],
    context: int,
    limits: tuple[int, int],
    computed: int,
    page_tokens: int,
) -> int:
    """Return the size of the next chunk after `computed` tokens of a prompt.

    `limits` are the first chunk and the most that any may have.
    f(l) = a l^2 + b l + c is fitted to the time of prompts. A chunk x after l tokens takes as long
    as the first, f(l + x) - f(l) = f(chunk) - f(0), smoothed. Without a square, all are alike.
    """
    chunk, most = limits
    a, b = _fitted(prefill_s, min(int(1.25 * chunk), context))
    if a * chunk <= 1e-9 * b:
        return chunk
    target = a * chunk * chunk + b * chunk
    unit = max(page_tokens, 64)
    slope = 2 * a * computed + b
    even = (sqrt(slope * slope + 4 * a * target) - slope) / (2 * a)
    tokens = max(int(chunk + SMOOTH * (even - chunk)), chunk // 4) // unit * unit
    tokens = min(max(tokens, unit), context - computed - MARGIN, most) // unit * unit
    return tokens if tokens >= unit else chunk


@lru_cache(maxsize=8)
def _fitted(prefill_s: Callable[[int], float], longest: int) -> tuple[float, float]:
    """Return the square and the linear coefficient of the time of prompts up to a length."""
    step = max(longest // PROFILED, 1)
    lengths = [longest - index * step for index in range(PROFILED) if longest > index * step][1:]
    sizes = np.array(lengths, dtype=np.float64)
    design = np.column_stack([sizes * sizes, sizes, np.ones_like(sizes)])
    times = np.array([prefill_s(length) for length in lengths])
    square, linear = map(float, np.linalg.lstsq(design, times, rcond=None)[0][:2])
    return square, max(linear, 0.0)


def longest_prefix_first(view: View) -> list[int]:
    """Return those that wait by how much of them is cached, the most first.

    Of those that begin with the same tokens, little of them cached, all but the first go last.
    """
    begun: set[tuple[int, ...]] = set()
    missing: dict[int, float] = {}
    for prompt in view.queue:
        cached = view.cached_tokens(prompt)
        missing[prompt.request_id] = -min(cached, prompt.tokens - 1)
        begins = prompt.begins_with(SHARED)
        if cached <= SHARED and begins is not None:
            if begins in begun:
                missing[prompt.request_id] = inf
            begun.add(begins)
    return sorted(missing, key=missing.__getitem__)
