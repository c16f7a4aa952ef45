"""What the host spends on a micro-batch, and a hop: measured while a pipeline serves.

The driver's whole step (policy, Batcher, page tables, messages and their ways), the inputs on stage
0, and the way from a stage to the next, each as whoever serves saw it: processes share cores, and a
message waits for its reader. Knows no workers and no sockets. A policy's own time comes on top of
that of this one, which is of few lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from evenflow.costs import AffineCost
from evenflow.costs.profile.file import Point
from evenflow.files import load_tokenizer
from evenflow.results.around import Around
from evenflow.results.run import Floats, RunResult
from evenflow.scheduling import Plan, Prefill, View
from evenflow.types import Request
from evenflow.world import World
from profiler.timed_runs import Key, point

PROMPT_TOKENS = 16
WARM_UP = 5
LEAST_S = 1e-9
"""A time of nothing, as files hold times above 0."""


class Service(NamedTuple):
    """A pipeline of `depth` stages: `serve` serves the requests of a world on it, for real.

    `crosses`: hidden states go from device to device there, as in a deployment.
    """

    depth: int
    serve: Callable[[World], tuple[RunResult, Around]]
    crosses: bool


class Rounds:
    """Computes groups of prompts, then their decodes, one group after the other, until all end.

    `phases`: how many requests are in a group, and how many requests there are, in their order.
    """

    def __init__(self, phases: Sequence[tuple[int, int]]) -> None:
        self._phases = deque(phases)
        self._rows = self._left = 0

    def schedule(self, view: View) -> Plan:
        if not self._left and not view.running and self._phases:
            self._rows, self._left = self._phases.popleft()
        if self._left:
            group = islice(view.waiting, self._rows)
            prefills = [Prefill(prompt.request_id, prompt.remaining) for prompt in group]
            self._left -= len(prefills)
            return Plan(prefills=prefills)
        return Plan(decodes=min(self._rows, view.ready_decodes))


def host_points(
    service: Service,
    rows: Sequence[int],
    prompts: Sequence[int],
    *,
    token_bytes: int,
    repeats: int,
) -> list[Point]:
    """Measure micro-batches of so many decodes, and of one prompt of so many tokens.

    Points of `cpu_message`, `cpu_schedule` and `cpu_prepare` against rows, of `cpu_prompt` against
    tokens and, where the service crosses, of `transfer`. `token_bytes` of each token cross.
    """
    costs = AffineCost(1e-3, 0.0, service.depth, token_bytes)
    result, around = service.serve(_world(costs, rows, prompts, repeats))
    tokens, decodes = result.prefill_tokens, result.decode_tokens
    prepare_s = around.prepare_s[:, 0]
    by_rows = {
        "cpu_message": around.freed_s,
        "cpu_schedule": around.schedule_s,
        "cpu_prepare": prepare_s,
    }
    alone = np.arange(len(tokens)) > np.flatnonzero(decodes)[-1]
    found = [
        _point((name, count, None, None), seconds[(decodes == count) & (tokens == 0)])
        for name, seconds in by_rows.items()
        for count in rows
    ]
    whole_s = around.freed_s + around.schedule_s + prepare_s
    found += [
        _point(("cpu_prompt", count, None, None), whole_s[alone & (tokens == count)])
        for count in prompts
    ]
    if not service.crosses:
        return found
    crossing_s = around.hops_s[:, 0] + around.prepare_s[:, 1]
    told = np.where(alone, tokens, np.where(tokens == 0, decodes, 0))
    return found + [
        _point(("transfer", None, None, count * token_bytes), crossing_s[told == count])
        for count in sorted({*rows, *prompts})
    ]


def _world(costs: AffineCost, rows: Sequence[int], prompts: Sequence[int], repeats: int) -> World:
    """Return requests that decode in groups, one more than there are stages; then prompts alone."""
    groups, single = costs.depth + 1, WARM_UP + repeats
    steps = -(-single // groups)
    decoding = [(count, groups * count) for count in rows]
    shapes = [(PROMPT_TOKENS, steps + 1)] * sum(count for _, count in decoding)
    shapes += [(tokens, 1) for tokens in prompts for _ in range(single)]
    longest = max(*prompts, PROMPT_TOKENS + steps + 1)
    pages = [
        groups * max(rows) * -(-(PROMPT_TOKENS + steps + 1) // 16),
        groups * -(-(longest + 1) // 16),
    ]
    return World(
        [Request(index, 0.0, *shape) for index, shape in enumerate(shapes)],
        lambda: Rounds([*decoding, *[(1, single)] * len(prompts)]),
        costs,
        costs.depth,
        total_pages=max(pages),
        max_model_len=longest + 1,
        max_in_flight=groups,
    )


def _point(key: Key, seconds: Floats) -> Point:
    return point(key, np.maximum(seconds[WARM_UP:], LEAST_S).tolist())


def detokenise_points(tokenizer: Path, rows: Sequence[int], repeats: int) -> list[Point]:
    """Measure turning one token of each of so many requests into text (cpu_detokenise).

    `tokenizer` is a tokenizer.json. UsageError when it cannot be read, or the package is missing.
    """
    words, rng = load_tokenizer(tokenizer), np.random.default_rng(0)
    points = []
    for count in rows:
        seconds = []
        for _ in range(WARM_UP + repeats):
            tokens = rng.integers(words.get_vocab_size(), size=count).tolist()
            start_s = perf_counter()
            for token in tokens:
                words.decode([token])
            seconds.append(perf_counter() - start_s)
        points.append(point(("cpu_detokenise", count, None, None), seconds[-repeats:]))
    return points
