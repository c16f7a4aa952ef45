"""Lower bounds on how many requests are beyond a limit, of many deployments, without simulation.

All follow from what a micro-batch takes at least; one pass over the trace serves all deployments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.core.batch import Work
from evenflow.costs import StageCost
from evenflow.study.early import Allowed
from evenflow.types import Request

MOST_TOKENS = 1 << 20
"""No micro-batch has more."""

RATIO = 1.05
"""From one number of tokens to the next at which a stage's time is looked up."""


class Least(NamedTuple):
    """The least seconds for a token: of an output, and of a prompt on its slowest stage."""

    step_s: float
    token_s: float


def least(cost: StageCost) -> Least:
    """Return the least seconds a token of a pipeline, by costs that do not fall with tokens.

    A micro-batch of m tokens takes a stage t(m) seconds or more, of a prompt or of decodes in CUDA
    graphs. Attention and rows that are sampled come on top. So a step takes the sum of the stages'
    t(1). With a <= m <= b it is t(m) / m >= t(a) / b. So the least of these over neighbours a, b
    bounds a token's seconds.
    """
    sizes = np.unique(np.geomspace(1, MOST_TOKENS, int(np.log(MOST_TOKENS) / np.log(RATIO))))
    sizes = np.unique(sizes.astype(int))
    kinds = [[Work((), size), Work((), 0, size)] for size in sizes.tolist()]
    times_s = np.array([np.min([cost.times(work) for work in each], axis=0) for each in kinds])
    of_token_s = times_s[:-1] / (sizes[1:, None] - 1)
    return Least(float(times_s[0].sum()), float(of_token_s.min(axis=0).max()))


@dataclass(frozen=True, slots=True)
class Refuted:
    """A limit that a bound refutes: at least `beyond` requests miss it, and only `most` may."""

    metric: str
    bound: str
    beyond: int
    most: int


def late_by_work(
    requests: Sequence[Request], tokens_per_s: NDArray[np.float64], limit_s: float
) -> NDArray[np.intp]:
    """Return of how many requests, at least, a latency from arrival to prefill is above a limit.

    `tokens_per_s` is what the slowest stages of each deployment's pipelines compute together, at
    most. A request in time has all its prompt on one of these stages from its arrival to the limit.
    So requests in time that arrive in [a, b] have at most `tokens_per_s` x (b - a + limit) prompt
    tokens. The others have the rest. A queue that is served at that rate, and loses what is above
    `tokens_per_s` x limit, adds up this rest. From when it was empty to its last loss, arrivals are
    what was served, the full queue, and the losses. These stretches have no request in common, so
    all that is lost is in late requests. They are at least as many as the longest prompts that hold
    it.
    """
    room = tokens_per_s * limit_s
    queued, lost, now_s = np.zeros_like(room), np.zeros_like(room), 0.0
    for request in requests:
        queued -= tokens_per_s * (request.arrival_s - now_s)
        now_s = request.arrival_s
        np.maximum(queued, 0.0, out=queued)
        queued += request.prompt_tokens
        above = np.maximum(queued - room, 0.0)
        lost += above
        queued -= above
    longest = np.cumsum([0, *sorted((each.prompt_tokens for each in requests), reverse=True)])
    return np.searchsorted(longest, lost * (1 - 1e-9))


def refuted(
    limits: Iterable[Allowed], requests: Sequence[Request], deployments: Sequence[tuple[Least, int]]
) -> list[Refuted | None]:
    """Return for each deployment a limit that it cannot keep; None where bounds refute none.

    A deployment is the least that a pipeline takes, and the number of pipelines. Percentiles of
    TTFT and E2EL are bounded by the prefill alone, which ends no later. Those of TPOT, the mean of
    gaps between tokens, are by one step.
    """
    found: list[Refuted | None] = [None] * len(deployments)
    late: NDArray[Any]
    per_s = [count / max(each.token_s, 1e-12) for each, count in deployments]
    rates, places = np.unique(per_s, return_inverse=True)
    for metric, name, limit_ms, most in limits:
        limit_s = limit_ms / 1e3
        if name == "tpot":
            several = sum(each.output_tokens > 1 for each in requests)
            late = np.array([several * (each.step_s > limit_s) for each, _ in deployments])
        elif name in ("ttft", "e2el"):
            late = late_by_work(requests, rates, limit_s)[places]
        else:
            continue
        bound = "one decode step" if name == "tpot" else "work of the slowest stage"
        for index in np.flatnonzero(late > most):
            told = Refuted(metric, bound, int(late[index]), most)
            found[index] = found[index] or told
    return found
