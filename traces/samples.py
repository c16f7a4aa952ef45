"""Draw traces that look like public ones, from tables of quantiles of the real lengths and gaps.

A sample has the source's marginal distributions (the inverse of an interpolated quantile function)
and its rank correlation of prompt and output (a Gaussian copula). It does not have the source's
rows, its order of lengths, nor its slow changes of rate: gaps are independent, but for the bursts
of azure-code.
"""

from __future__ import annotations

import csv
import hashlib
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenflow.errors import UsageError, instead_of
from traces.trace import SKIPPED, Floats, Ints, Trace

SAMPLE_NAMES = (
    "arxiv-sample",
    "arxiv-16k-sample",
    "azure-code-sample",
    "azure-conv-sample",
    "gllm-sharegpt-sample",
    "sharegpt-multiturn-sample",
    "sharegpt-sample",
    "tdpipe-sharegpt-sample",
)
"""The bundled samples; each is a table in `traces/data` of the same name."""


def random_stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the stream `name` under `seed` (a whole number, 0 or more).

    Each use of randomness draws from its own: parts of a run with streams of different names never
    disturb each other, so a change of one (the arrival rate, say) leaves the other (the lengths) as
    it was.
    """
    spawn_key = (zlib.crc32(name.encode()),)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))


class SampleTable(NamedTuple):
    """What a sample is drawn from: facts about a real trace.

    `facts` holds the lines above the table (`rows`, `spearman`, `source`, `licence`, `filter`);
    `percent` [q] rises from 0 to 100 and each of `quantiles` [q] belongs to it.
    """

    facts: dict[str, str]
    percent: Floats
    quantiles: dict[str, Floats]
    sha256: str

    def draw(self, column: str, percent: Floats) -> Floats:
        """Return the column's values at these percents, linear between quantiles."""
        return np.interp(percent, self.percent, self.quantiles[column])


def sample_table(name: str) -> SampleTable:
    """Read the table of a bundled sample. Raises UsageError for an unknown name."""
    if name not in SAMPLE_NAMES:
        raise UsageError(f'sample "{name}" is unknown; {instead_of(name, SAMPLE_NAMES)}')
    text = (Path(__file__).parent / "data" / f"{name}.csv").read_text(encoding="utf-8")
    lines = text.splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("#"))
    header, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    columns = dict(zip(header, np.array(rows, dtype=np.float64).T, strict=True))
    percent = columns.pop("percent")
    return SampleTable(facts, percent, columns, hashlib.sha256(text.encode()).hexdigest())


def sample_trace(
    name: str, n: int | None = None, seed: int = 0, skip: int = 0, neighbours: float = 0.0
) -> Trace:
    """Draw `n` requests of a bundled sample (by default as many as its source has).

    The same (name, n, seed) gives the same trace, and a longer draw begins with the shorter one.
    The first `skip` of a draw of `skip` + n are left out; time starts at the first one kept.
    `neighbours`: as for `draw_lengths`.
    """
    table = sample_table(name)
    total = skip + (int(table.facts["rows"]) if n is None else n)
    prompt_tokens, output_tokens = draw_lengths(table, total, seed, neighbours)
    arrival_s = draw_arrivals(table, total, seed) if "gap_s" in table.quantiles else None
    return Trace(
        name=name,
        format="sample",
        arrival_s=None if arrival_s is None else arrival_s[skip:] - arrival_s[skip],
        prompt_tokens=prompt_tokens[skip:],
        output_tokens=output_tokens[skip:],
        dropped={SKIPPED: skip} if skip else {},
        sha256=table.sha256,
        path=None,
        rows_read=total,
        seed=seed,
        neighbours=neighbours,
    )


def draw_lengths(
    table: SampleTable, n: int, seed: int, neighbours: float = 0.0
) -> tuple[Ints, Ints]:
    """Draw prompt and output lengths, [n] each, with the table's rank correlation.

    A Gaussian copula of correlation 2 sin(pi r / 6) has Spearman correlation r (Kruskal 1958).
    Where the source bounds the sum, a prompt too long for its output is cut. `neighbours`: the rank
    correlation of a length with that of the request before, of an autoregressive process of the
    same marginals; 0: each is drawn by itself.
    """
    rho = pearson(float(table.facts["spearman"]))
    draws = random_stream(seed, "lengths").standard_normal((n, 2))
    first, second = (_chained(draws, pearson(neighbours)) if neighbours else draws).T
    second = rho * first + math.sqrt(1 - rho**2) * second
    prompt = np.rint(table.draw("prompt_tokens", normal_percent(first))).astype(np.int64)
    output = np.rint(table.draw("output_tokens", normal_percent(second))).astype(np.int64)
    if "max_total_tokens" in table.facts:
        prompt = np.minimum(prompt, int(table.facts["max_total_tokens"]) - output)
    return prompt, output


def pearson(spearman: float) -> float:
    """Return the correlation of a Gaussian copula with this rank correlation (Kruskal 1958)."""
    return 2 * math.sin(math.pi * spearman / 6)


def _chained(draws: Floats, share: float) -> Floats:
    """Return x[t] = share x[t - 1] + sqrt(1 - share^2) draws[t], [n, 2], x[0] = draws[0]."""
    chained, rest = draws.copy(), math.sqrt(1 - share**2)
    for place in range(1, len(draws)):
        chained[place] = share * chained[place - 1] + rest * draws[place]
    return chained


def draw_arrivals(table: SampleTable, n: int, seed: int) -> Floats:
    """Draw arrival times in seconds, [n], the first at 0, with independent gaps.

    Where the table has bursts, `gap_s` holds the gaps inside one, `pause_s` those between two and
    `burst_requests` the number of requests of one.
    """
    gaps_s = table.draw("gap_s", random_stream(seed, "gaps").uniform(0, 100, n))
    if "pause_s" in table.quantiles:
        percent = random_stream(seed, "bursts").uniform(0, 100, n)
        starts = np.cumsum(np.rint(table.draw("burst_requests", percent)).astype(np.int64))
        starts = starts[starts < n]
        percent = random_stream(seed, "pauses").uniform(0, 100, n)
        gaps_s[starts] = table.draw("pause_s", percent[: len(starts)])
    gaps_s[0] = 0.0
    return np.cumsum(gaps_s)


def normal_percent(values: Floats) -> Floats:
    """Return the standard normal distribution function, in percent, [n]."""
    scaled = (values / math.sqrt(2)).tolist()
    return 50 * (1 + np.fromiter(map(math.erf, scaled), dtype=np.float64, count=len(scaled)))
