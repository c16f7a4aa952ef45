"""Load a trace by path or by the name of a bundled sample.

Knows files, limits and filters; each format's columns are its reader's business.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evenflow.errors import UsageError, instead_of
from evenflow.types import Prefix
from traces.formats import FORMATS, Row, Source, encoder, find_format, fingerprint, open_trace
from traces.samples import SAMPLE_NAMES, sample_trace
from traces.trace import FILTERS, SKIPPED, Floats, Ints, LengthFilter, Trace


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
) -> Trace:
    """Load a trace file, or draw a bundled sample.

    `limit` requests are kept and the rest of the file is not read; a sample is drawn with as many
    (by default as its source has) from `seed`, with lengths as alike as `neighbours` says
    (`draw_lengths`), 0 for a file. The first `skip` requests are left out, in the order
    of the file and counted as dropped; time then starts at the first one kept. `format` is a name
    in FORMATS (None: seen from the file), `filter` one in FILTERS, `tokenizer` the path of a
    tokenizer.json for traces that hold text, `keep_text` keeps that text. Raises UsageError naming
    the file, the line and what would be right.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} requests of a trace; expected at least 1")
    if skip < 0:
        raise UsageError(f"{skip} requests of a trace to skip; expected 0 or more")
    if filter is not None and filter not in FILTERS:
        raise UsageError(f'trace filter "{filter}" is unknown; {instead_of(filter, FILTERS)}')
    if str(path_or_name) in SAMPLE_NAMES:
        if format is not None or filter is not None:
            raise UsageError(f"{path_or_name} is a sample; it takes no format and no filter")
        return sample_trace(str(path_or_name), limit, seed, skip, neighbours)
    if neighbours:
        raise UsageError(f"neighbours: {path_or_name} is no sample; it has the order of its file")
    path = Path(path_or_name)
    if not path.exists():
        known = instead_of(path_or_name, SAMPLE_NAMES)
        raise UsageError(f'trace "{path_or_name}" is neither a file nor a bundled sample; {known}')
    encode = None if tokenizer is None else encoder(tokenizer)
    count_tokens = None if encode is None else lambda text: len(encode(text))
    with open_trace(path) as stream:
        source = Source(path, stream, count_tokens)
        bounds = FILTERS[filter] if filter else None
        return read_trace(source, format, limit, bounds, keep_text=keep_text, skip=skip)


def read_trace(
    source: Source,
    format_name: str | None,
    limit: int | None,
    bounds: LengthFilter | None,
    keep_text: bool = False,
    *,
    skip: int = 0,
) -> Trace:
    """Read up to `limit` requests that pass `bounds` from an open file, after `skip` such."""
    name = find_format(source, format_name)
    reader = FORMATS[name]
    columns = Columns(reader.ticks_per_s, reader.block_tokens, keep_text, skip)
    for row in reader.rows(source):
        columns.add(row, bounds)
        if limit is not None and len(columns.prompt_tokens) >= limit:
            break
    if not columns.prompt_tokens:
        reasons = ", ".join(f"{n} {why}" for why, n in columns.dropped.items())
        raise source.error(f"no request is left; dropped: {reasons}" if reasons else "no rows")
    arrival_s, order, reordered = columns.in_order()
    prompt_tokens, output_tokens = np.array(columns.prompt_tokens), np.array(columns.output_tokens)
    return Trace(
        name=source.path.name,
        format=name,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens[order],
        output_tokens=output_tokens[order],
        dropped=dict(columns.dropped),
        sha256=fingerprint(source.path),
        path=str(source.path),
        rows_read=columns.rows_read,
        reordered=reordered,
        texts=columns.texts if len(columns.texts) == len(prompt_tokens) else None,
        prefixes=[columns.prefixes[row] for row in order] if columns.prefixes else None,
        max_new=[columns.max_new[row] for row in order] if any(columns.max_new) else None,
        priority=[columns.priority[row] for row in order] if any(columns.priority) else None,
    )


@dataclass(slots=True, eq=False, repr=False)
class Columns:
    """The rows read so far, 8 bytes a value. Times are seconds since the first row kept."""

    ticks_per_s: int
    block_tokens: int = 0
    keep_text: bool = False
    skip: int = 0
    first_tick: int | float | None = None
    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    texts: list[str] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    max_new: list[int | None] = field(default_factory=list)
    priority: array[int] = field(default_factory=lambda: array("q"))

    def add(self, row: Row, bounds: LengthFilter | None) -> None:
        """Keep a row, or count why it is dropped."""
        self.rows_read += 1
        time, prompt, output, dropped, text, blocks, max_new, priority = row
        if not dropped and not (prompt and output):
            dropped = f"no {'output' if prompt else 'prompt'} tokens"
        if not dropped and bounds is not None:
            dropped = bounds.reason(prompt, output)
        if not dropped and self.dropped[SKIPPED] < self.skip:
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
            tokens = min(prompt, len(blocks) * self.block_tokens)
            self.prefixes.append(Prefix(blocks, self.block_tokens, tokens))
        if time is not None:
            if self.first_tick is None:
                self.first_tick = time
            # Whole ticks are subtracted before dividing: exact, where seconds since 1970 are not.
            self.arrival_s.append((time - self.first_tick) / self.ticks_per_s)

    def in_order(self) -> tuple[Floats | None, Ints, int]:
        """Return times in order (None: the file has none), which row has which, and how many rows
        came too late. Ties keep the file's order."""
        if self.first_tick is None:
            return None, np.arange(len(self.prompt_tokens)), 0
        arrival_s = np.array(self.arrival_s)
        order = np.argsort(arrival_s, kind="stable")
        reordered = int(np.count_nonzero(np.diff(arrival_s) < 0))
        return arrival_s[order] - arrival_s.min(), order, reordered
