"""Traces: lengths of prompts and outputs as columns, read from a file or drawn like a public one.

A sample is drawn from a table of quantiles of real lengths and gaps. It has the source's marginal
distributions (the inverse of an interpolated quantile function). It has its rank correlation of
prompt and output, too (a Gaussian copula). It does not have the source's rows, its order of
lengths, nor its slow changes of rate. Gaps are independent, but for the bursts of azure-code.

Knows limits and filters. Each format's columns are the business of `traces.formats`, and how a
trace becomes requests is that of `traces.arrivals`.
"""

from __future__ import annotations

import csv
import hashlib
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.errors import UsageError, instead_of
from evenflow.files import local_file
from evenflow.traces.formats import (
    UNITS,
    UNREADABLE,
    Row,
    ShareGpt,
    TraceTable,
    encoder,
    reader_of,
    unread,
)
from evenflow.traces.lines import Source, fingerprint, open_trace
from evenflow.traces.plain import plain_columns
from evenflow.types import Prefix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SKIPPED = "skipped as asked"
"""Why the first requests of a trace are dropped where a run skips some."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """Requests in order of arrival (file order where there are no times), and their origin.

    `arrival_s`: seconds since the earliest request, [n], never decreasing; None without times.
    `prompt_tokens`, `output_tokens`: [n], 1 or more. `dropped`: rows left out, by reason, among the
    `rows_read`. `reordered`: rows that the file has earlier than the row before them. `sha256`: see
    `traces.lines.fingerprint`. `seed` and `neighbours`: what a sample was drawn with; None and 0
    for a file. `texts`: the prompts, [n], where they were asked for and the file holds them.
    `prefixes`: what the requests have in common, [n]; None where nothing is known of it. `max_new`:
    output tokens that clients allow, [n], None for a request without one; None where no request has
    one. `priority`: how urgent they are, [n], the lower first; None: all the same. `doubts`: what
    makes it likely that the file was meant otherwise. `unread`: columns that nothing reads.
    """

    name: str
    format: str
    arrival_s: Floats | None
    prompt_tokens: Ints
    output_tokens: Ints
    dropped: dict[str, int]
    sha256: str | None
    path: str | None
    rows_read: int
    reordered: int = 0
    seed: int | None = None
    neighbours: float = 0.0
    texts: Sequence[str] | None = None
    prefixes: Sequence[Prefix] | None = None
    max_new: Sequence[int | None] | None = None
    priority: Sequence[int] | None = None
    doubts: Sequence[str] = ()
    unread: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def last_s(self) -> float:
        """The last arrival in seconds; 0 without arrival times."""
        return 0.0 if self.arrival_s is None else float(self.arrival_s[-1])


def with_conversations(trace: Trace) -> Trace:
    """Return the trace with each turn's tokens, prompt and output, marked as its conversation's.

    A turn with a prompt as long as the prompt and output before it, or longer, continues that
    conversation. Its prompt can then hold the whole history.

    Known error: neighbouring rows of two conversations with lengths that fit count as one.
    Raises UsageError for a sample, whose rows are drawn apart, and where prefixes are known.
    """
    if trace.path is None or trace.prefixes is not None:
        why = "its rows are drawn one by one" if trace.path is None else "it names its prefixes"
        raise UsageError(f"trace {trace.name}: conversations: true does not apply, {why}")
    conversation = total = 0
    prefixes = []
    rows = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for prompt, output in rows:
        if prompt < total:
            conversation += 1
        total = prompt + output
        prefixes.append(Prefix((conversation,), total, total))
    return replace(trace, prefixes=prefixes)


class LengthFilter(NamedTuple):
    """Bounds on lengths, all inclusive, in tokens; None means no bound."""

    min_prompt: int
    min_output: int
    max_prompt: int
    max_output: int | None = None
    max_total: int | None = None

    def reason(self, prompt: int, output: int) -> str:
        """Say why a request is left out; "" keeps it."""
        if prompt < self.min_prompt:
            return f"prompt under {self.min_prompt} tokens"
        if output < self.min_output:
            return f"output under {self.min_output} tokens"
        if prompt > self.max_prompt:
            return f"prompt over {self.max_prompt} tokens"
        if self.max_output is not None and output > self.max_output:
            return f"output over {self.max_output} tokens"
        if self.max_total is not None and prompt + output > self.max_total:
            return f"prompt + output over {self.max_total} tokens"
        return ""


FILTERS: Mapping[str, LengthFilter] = MappingProxyType(
    {
        "vllm": LengthFilter(4, 4, max_prompt=1024, max_total=2048),
        "gllm": LengthFilter(4, 4, max_prompt=1024, max_output=512),
    }
)
"""The filters of the benchmarks of vLLM and gLLM. Rows are not shuffled: they keep their order."""


# -- a file ----------------------------------------------------------------------------------------


def load_trace(
    path_or_name: str | Path,
    *,
    format: str | None = None,
    limit: int | None = None,
    skip: int = 0,
    tokenizer: str | Path | None = None,
    filter: str | None = None,
    seed: int = 0,
    neighbours: float = 0.0,
    keep_text: bool = False,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
    on_bad_row: str = "refuse",
) -> Trace:
    """Load a trace file, or draw a bundled sample.

    `limit` requests are kept and the rest of the file is not read. A sample is drawn with as many
    (by default as its source has) from `seed`. `neighbours` says how alike successive lengths are
    (`draw_lengths`). The first `skip` requests of the file are left out, and counted as dropped.
    Time then starts at the first one kept. `format` is a name in FORMATS (None: seen from the
    file), `filter` one in FILTERS. `tokenizer` is the path of a tokenizer.json for traces of text,
    which `keep_text` keeps. `columns` name a log's `arrival`, `prompt` and `output`. `time_unit` is
    one of UNITS (None: the format's, or seen). `on_bad_row`: "skip" drops rows that cannot be read,
    and names the first five. Raises UsageError naming the file, the line and what would be right.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} requests of a trace; expected at least 1")
    if skip < 0:
        raise UsageError(f"{skip} requests of a trace to skip; expected 0 or more")
    if filter is not None and filter not in FILTERS:
        raise UsageError(f'trace filter "{filter}" is unknown; {instead_of(filter, FILTERS)}')
    if str(path_or_name) in SAMPLE_NAMES:
        if format is not None or filter is not None or columns or time_unit is not None:
            told = "it takes no format and no filter, columns or time_unit"
            raise UsageError(f"{path_or_name} is a sample; {told}")
        return sample_trace(str(path_or_name), limit, seed, skip, neighbours)
    if neighbours:
        raise UsageError(f"neighbours: {path_or_name} is no sample; it has the order of its file")
    path = Path(path_or_name)
    file = local_file(path)
    if not file.exists():
        known = instead_of(path_or_name, SAMPLE_NAMES)
        raise UsageError(f'trace "{path_or_name}" is neither a file nor a bundled sample; {known}')
    encode = None if tokenizer is None else encoder(tokenizer)
    count_tokens = None if encode is None else lambda text: len(encode(text))
    with open_trace(file) as stream:
        source = Source(path, stream, count_tokens, [] if on_bad_row == "skip" else None)
        reader = reader_of(source, format, columns, time_unit)
        bounds = FILTERS[filter] if filter else None
        return read_trace(source, reader, limit, bounds, keep_text=keep_text, skip=skip)


def read_trace(
    source: Source,
    named: tuple[str, TraceTable | ShareGpt],
    limit: int | None,
    bounds: LengthFilter | None,
    keep_text: bool = False,
    *,
    skip: int = 0,
) -> Trace:
    """Read up to `limit` requests that pass `bounds` from an open file, after `skip` of them.

    `named` is the name of the format with its reader.
    """
    name, reader = named
    left = unread(source, reader)
    columns = Columns(reader.ticks_per_s, reader.block_tokens, keep_text, skip)
    plain = None if bounds or skip else plain_columns(source, reader, limit)
    if plain is not None:
        columns.take(*plain)
    else:
        for row in reader.rows(source):
            columns.add(row, bounds)
            if limit is not None and len(columns.prompt_tokens) >= limit:
                break
    dropped = dict(columns.dropped)
    if UNREADABLE in dropped:
        first = "; ".join(source.bad_rows or ())
        dropped[f"{UNREADABLE}, the first: {first}"] = dropped.pop(UNREADABLE)
    if not columns.prompt_tokens:
        reasons = ", ".join(f"{n} {why}" for why, n in dropped.items())
        raise source.error(f"no request is left; dropped: {reasons}" if reasons else "no rows")
    arrival_s, order, reordered = columns.in_order()
    prompt_tokens, output_tokens = np.array(columns.prompt_tokens), np.array(columns.output_tokens)
    try:
        prefixes, doubts = columns.prefixes()
    except ValueError as error:
        raise source.error(str(error)) from None
    return Trace(
        name=source.path.name,
        format=name,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens[order],
        output_tokens=output_tokens[order],
        dropped=dropped,
        sha256=fingerprint(local_file(source.path)),
        path=str(source.path),
        rows_read=columns.rows_read,
        reordered=reordered,
        texts=columns.texts if len(columns.texts) == len(prompt_tokens) else None,
        prefixes=[prefixes[row] for row in order] if prefixes else None,
        max_new=[columns.max_new[row] for row in order] if any(columns.max_new) else None,
        priority=[columns.priority[row] for row in order] if any(columns.priority) else None,
        doubts=(*doubts, *doubts_of_times(arrival_s)),
        unread=left,
    )


MOST_RATE, LEAST_RATE, FEW = 1000.0, 0.01, 10
"""Requests a second beyond which a trace's unit of time is doubted, if it has more than a few."""


def doubts_of_times(arrival_s: Floats | None) -> list[str]:
    """Return doubts whether times are in the unit that they were read in."""
    if arrival_s is None or len(arrival_s) < FEW or not arrival_s[-1]:
        return []
    rate = (len(arrival_s) - 1) / float(arrival_s[-1])
    if LEAST_RATE <= rate <= MOST_RATE:
        return []
    units = f"time_unit: one of {', '.join(UNITS)}"
    return [f"the trace's times make {rate:.3g} requests a second; is their unit right? ({units})"]


BLOCKS_OFF = 0.5
"""Where more of the rows have other numbers of blocks than their tokens make, none is known."""


def block_size(
    prompts: Sequence[int], blocks: Sequence[Sequence[int]], usual: int
) -> tuple[int, int]:
    """Return the block size that fits the blocks that prompts name, and how many it does not fit.

    A size in tokens fits a prompt that it divides into as many blocks as are named.
    The last block may be partial, and named or not. Of sizes alike it is `usual`, then a power of
    two, then the least that all rows allow. Raises ValueError where none fits half of the rows.
    """
    named = [(prompt, len(each)) for prompt, each in zip(prompts, blocks, strict=True) if each]
    least = max((-(-prompt // count) for prompt, count in named), default=usual)

    def fits(size: int) -> int:
        return sum(prompt // size <= count <= -(-prompt // size) for prompt, count in named)

    best = max((usual, *(2**power for power in range(13)), least), key=fits)
    if fits(best) < BLOCKS_OFF * len(named):
        prompt, count = max(named)
        raise ValueError(f"hash_ids: {count} for {prompt} tokens; one for each block is right")
    return best, len(named) - fits(best)


MOST_EXACT = 2**53
"""The whole number beyond which floats leave some out, as nanoseconds since 1970 are."""


def origin_of(first: int | float) -> int | float:
    """Return from when on ticks are counted: 0, or the first where floats are too coarse."""
    return first if abs(first) > MOST_EXACT else 0


@dataclass(slots=True, eq=False, repr=False)
class Columns:
    """The rows read so far, 8 bytes a value. Times are ticks since `origin`."""

    ticks_per_s: int
    block_tokens: int = 0
    keep_text: bool = False
    skip: int = 0
    origin: int | float | None = None
    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ticks: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    texts: list[str] = field(default_factory=list)
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    max_new: list[int | None] = field(default_factory=list)
    priority: array[int] = field(default_factory=lambda: array("q"))

    def take(self, ticks: NDArray[Any], prompts: Ints, outputs: Ints) -> None:
        """Keep all rows of a plain file, as `plain_columns` found them."""
        self.rows_read, self.origin = len(ticks), origin_of(ticks[0].item())
        self.ticks.frombytes((ticks - self.origin).astype(np.float64).tobytes())
        self.prompt_tokens.frombytes(prompts.tobytes())
        self.output_tokens.frombytes(outputs.tobytes())

    def add(self, row: Row, bounds: LengthFilter | None) -> None:
        """Keep a row, or count why it is dropped."""
        self.rows_read += 1
        time, prompt, output, dropped, text, blocks, max_new, priority = row
        if not dropped and not (prompt and output):
            dropped = f"no {'output' if prompt else 'prompt'} tokens"
        if not dropped and bounds is not None:
            dropped = bounds.reason(prompt, output)
        if self.skip and not dropped and self.dropped[SKIPPED] < self.skip:
            dropped = SKIPPED
        if dropped:
            self.dropped[dropped] += 1
            return
        self.prompt_tokens.append(prompt)
        self.output_tokens.append(output)
        self.max_new.append(max_new)
        self.priority.append(priority)
        if self.keep_text and text is not None:
            self.texts.append(text)
        if self.block_tokens:
            self.blocks.append(blocks)
        if time is not None:
            if self.origin is None:
                self.origin = origin_of(time)
            self.ticks.append(time - self.origin)

    def prefixes(self) -> tuple[list[Prefix], list[str]]:
        """Return what prompts have in common, and a doubt where blocks are not of the usual size.

        ValueError where the sizes of blocks are not known.
        """
        if not self.blocks:
            return [], []
        size, others = block_size(self.prompt_tokens, self.blocks, self.block_tokens)
        rows = zip(self.prompt_tokens, self.blocks, strict=True)
        found = [Prefix(each, size, min(n, len(each) * size)) for n, each in rows]
        told = f"hash_ids: a block is taken as {size} tokens"
        doubts = [f"{told}, where {self.block_tokens} are usual"] * (size != self.block_tokens)
        return found, [
            *doubts,
            *[f"{told}, and {others} rows have other numbers of them"] * (others > 0),
        ]

    def in_order(self) -> tuple[Floats | None, Ints, int]:
        """Return sorted times (None without any), the order of rows, and how many were late."""
        if self.origin is None:
            return None, np.arange(len(self.prompt_tokens)), 0
        ticks = np.array(self.ticks)
        order = np.argsort(ticks, kind="stable")
        reordered = int(np.count_nonzero(np.diff(ticks) < 0))
        # Ticks are subtracted before dividing: exact, where seconds since 1970 are not.
        return (ticks[order] - ticks.min()) / self.ticks_per_s, order, reordered


# -- a sample --------------------------------------------------------------------------------------

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

    Streams of different names are independent. A change of what draws from one (the arrival rate,
    say) leaves the others (the lengths) as they were.
    """
    spawn_key = (zlib.crc32(name.encode()),)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))


class SampleTable(NamedTuple):
    """Facts about a real trace, from which a sample is drawn.

    `facts` holds the lines above the table (`rows`, `spearman`, `source`, `licence`, `filter`).
    `percent` [q] rises from 0 to 100, and each of `quantiles` [q] belongs to it.
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
    prompt_tokens, output_tokens = draw_lengths(table, total, seed, neighbours, skip)
    arrival_s = draw_arrivals(table, total, seed) if "gap_s" in table.quantiles else None
    return Trace(
        name=name,
        format="sample",
        arrival_s=None if arrival_s is None else arrival_s[skip:] - arrival_s[skip],
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        dropped={SKIPPED: skip} if skip else {},
        sha256=table.sha256,
        path=None,
        rows_read=total,
        seed=seed,
        neighbours=neighbours,
    )


def draw_lengths(
    table: SampleTable, n: int, seed: int, neighbours: float = 0.0, skip: int = 0
) -> tuple[Ints, Ints]:
    """Draw n prompt and output lengths with the table's rank correlation; return those after
    `skip`.

    A Gaussian copula of correlation 2 sin(pi r / 6) has Spearman correlation r (Kruskal 1958).
    Where the source bounds the sum, a prompt too long for its output is cut. `neighbours`: the rank
    correlation of a length with that of the request before; 0: each is drawn by itself. The process
    is autoregressive, with the same marginals.
    """
    rho = pearson(float(table.facts["spearman"]))
    draws = random_stream(seed, "lengths").standard_normal((n, 2))
    first, second = (_chained(draws, pearson(neighbours)) if neighbours else draws)[skip:].T
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
    steps = math.sqrt(1 - share**2) * draws
    steps[0] = draws[0]
    for column in steps.T:
        column[:] = list(accumulate(column.tolist(), lambda last, step: share * last + step))
    return steps


def draw_arrivals(table: SampleTable, n: int, seed: int) -> Floats:
    """Draw arrival times in seconds, [n], the first at 0, with independent gaps.

    Where the table has bursts, `gap_s` holds the gaps inside one, `pause_s` the gaps between two.
    `burst_requests` is the number of requests of one.
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
