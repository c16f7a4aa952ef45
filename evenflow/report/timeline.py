"""Write a run as a Chrome trace: opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

Knows the trace format and the columns of a run. Does not know how the run came about, nor which
idle interval has which cause: that is `evenflow.results.bubbles`.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from evenflow.report.data import present
from evenflow.results.bubbles import CAUSES, Bubbles
from evenflow.results.metrics import blocks
from evenflow.results.run import BATCHES, STAGES, Floats, Ints, RunResult
from evenflow.results.run import REQUESTS as REQUEST_COLUMNS

PIPELINE, REQUESTS = 1, 2
"""Process ids of the trace; stage k computes on thread 2k + 1 and idles on thread 2k + 2."""

PIECES = "stage", "start_s", "end_s", "cause", "batch"
"""The columns of bubbles."""

SIZES = "prompt_tokens", "output_tokens", "preemptions"
"""The columns of a request that its slice shows."""

Window = tuple[float, float]
"""Seconds of a run, from and until."""
WHOLE: Window = (0.0, math.inf)

BLOCK = 10_000
"""Micro-batches, idle slices or samples whose events are made at a time."""

REQUESTS_SHOWN = 2000
"""Requests with a slice per phase."""

Piece = str | NDArray[Any]
"""A part of the text of some events: the same in all, or numbers or words, one for each."""


def write_timeline(
    path: str | Path,
    result: RunResult,
    bubbles: Bubbles | None = None,
    window: Window = WHOLE,
) -> None:
    """Write `result` to `path` as a gzipped Chrome trace; equal runs give equal bytes.

    It has a slice per stage and micro-batch, arrows that follow a micro-batch through the stages,
    and counters. Idle slices are named by cause (with `bubbles`). The first
    REQUESTS_SHOWN requests have a slice per phase. Only what is there at some time of the `window`,
    seconds of the run. The name of the pipeline then says which. Times in microseconds.
    """
    batches, name = slice(0, len(result.scheduled_s)), "pipeline"
    if window != WHOLE:
        batches, result, bubbles = _cut(result, bubbles, window)
        name = f"pipeline, {window[0]:.6g} to {window[1]:.6g} s"
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", 1, raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="ascii") as text,
    ):
        separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
        parts = [
            _names(name, result.depth, bubbles is not None),
            _stage_slices(result, np.arange(batches.start, batches.stop)),
            _idle_slices(bubbles) if bubbles is not None else (),
            _counters(result),
            _marks(result, window),
            _request_slices(result),
        ]
        for events in filter(None, chain(*parts)):
            text.write(separator + ",\n".join(events))
            separator = ",\n"
        text.write("\n]}\n")


def _cut(
    result: RunResult, bubbles: Bubbles | None, window: Window
) -> tuple[slice, RunResult, Bubbles | None]:
    """Return which micro-batches are there in a window, and the columns of what is."""
    since_s, until_s = window
    first = int(np.searchsorted(result.returned_s, since_s))
    batches = slice(first, max(first, int(np.searchsorted(result.scheduled_s, until_s, "right"))))
    gone = np.fmax(result.arrival_s, result.completion_s) < since_s
    requests = np.flatnonzero((result.arrival_s <= until_s) & ~gone)
    columns: dict[str, Any] = {}
    for names, rows in ((REQUEST_COLUMNS, requests), ([*BATCHES, *STAGES], batches)):
        for name in names:
            column = getattr(result, name)
            if column is not None:
                columns[name] = np.asarray(column)[rows]
    if bubbles is not None:
        near = (bubbles.end_s >= since_s) & (bubbles.start_s <= until_s)
        kept = {name: getattr(bubbles, name)[near] for name in PIECES}
        bubbles = bubbles._replace(**kept)
    return batches, replace(result, **columns), bubbles


def _event(
    phase: str, at_ns: Ints, place: tuple[int, Piece], name: Piece, *more: Piece
) -> list[str]:
    """Return events as JSON, one for each of the times; `more` are members behind the name.

    `place`: process and thread.
    """
    process, thread = place
    events: list[str] = _joined(
        f'{{"ph":"{phase}","ts":',
        at_ns / 1000,
        f',"pid":{process},"tid":',
        thread,
        ',"name":"',
        name,
        '"',
        *more,
        "}",
    ).tolist()
    return events


def _joined(*pieces: Piece) -> NDArray[Any]:
    """Join pieces into one text for each event."""
    return np.array([*map("".join, zip(*map(_cells, pieces), strict=False))], dtype=object)


def _cells(piece: Piece) -> Iterable[str]:
    """Return a piece's text for each event; pydantic's JSON writes numbers faster than Python."""
    if isinstance(piece, str):
        return repeat(piece)
    cells: list[Any] = piece.tolist()
    if not cells or piece.dtype.kind in "OU":
        return cells
    return to_json(cells)[1:-1].decode().split(",")


def _nanoseconds(times_s: Floats) -> Ints:
    """Whole nanoseconds: a slice that ends where the next starts still does so once rounded."""
    return np.rint(np.asarray(times_s) * 1e9).astype(np.int64)


def _names(pipeline: str, depth: int, with_idle: bool) -> Iterator[list[str]]:
    for process, name in ((PIPELINE, pipeline), (REQUESTS, "requests")):
        yield from _named("process", (process, "0"), name, process)
    for stage in range(depth):
        for thread, idle in enumerate(("", " idle") if with_idle else ("",), 2 * stage + 1):
            yield from _named("thread", (PIPELINE, str(thread)), f"stage {stage}{idle}", thread)


def _named(kind: str, place: tuple[int, Piece], name: str, position: int) -> Iterator[list[str]]:
    start = np.zeros(1, dtype=np.int64)
    yield _event("M", start, place, f"{kind}_name", f',"args":{{"name":"{name}"}}')
    yield _event("M", start, place, f"{kind}_sort_index", f',"args":{{"sort_index":{position}}}')


def _stage_slices(result: RunResult, batches: Ints) -> Iterator[list[str]]:
    last = result.depth - 1
    for block in blocks(len(batches), BLOCK):
        prefill, decode = result.prefill_tokens[block], result.decode_tokens[block]
        names = np.where(decode == 0, "prefill", np.where(prefill == 0, "decode", "mixed"))
        tokens = ',"prefill_tokens":', prefill, ',"decode_tokens":', decode
        args = _joined(',"args":{"batch":', batches[block], *tokens, "}")
        arrows = _joined(',"bind_id":', batches[block]) if last else ""
        starts, ends = _nanoseconds(result.start_s[block]), _nanoseconds(result.end_s[block])
        for stage in range(result.depth):
            ways = ',"flow_in":true' * (stage > 0) + ',"flow_out":true' * (stage < last)
            at, place = starts[:, stage], (PIPELINE, str(2 * stage + 1))
            yield _slices(at, ends[:, stage], place, names, arrows, ways, args)


def _slices(
    at_ns: Ints, stop_ns: Ints, place: tuple[int, Piece], name: Piece, *more: Piece
) -> list[str]:
    return _event("X", at_ns, place, name, ',"dur":', (stop_ns - at_ns) / 1000, *more)


def _idle_slices(bubbles: Bubbles) -> Iterator[list[str]]:
    names = np.array(CAUSES)[bubbles.cause]
    for block in blocks(len(names), BLOCK):
        at, stop = _nanoseconds(bubbles.start_s[block]), _nanoseconds(bubbles.end_s[block])
        place = PIPELINE, 2 * bubbles.stage[block] + 2
        args = ',"args":{"batch":', bubbles.batch[block], "}"
        yield _slices(at, stop, place, names[block], *args)


def _marks(result: RunResult, window: Window) -> Iterator[list[str]]:
    """Yield the marks of processes, as instants over all threads."""
    marks = [mark for mark in result.marks or () if window[0] <= mark.time_s <= window[1]]
    if marks:
        at = _nanoseconds(np.array([mark.time_s for mark in marks]))
        words = [json.dumps(f"{mark.kind}: {mark.text}")[1:-1] for mark in marks]
        names = np.array(words, dtype=object)
        yield _event("i", at, (PIPELINE, "0"), names, ',"s":"g"')


def _counters(result: RunResult) -> Iterator[list[str]]:
    scheduled = _nanoseconds(result.scheduled_s)
    prefill, decode = result.prefill_tokens, result.decode_tokens
    yield from _counter("free pages", scheduled, pages=result.free_pages)
    yield from _counter("tokens per micro-batch", scheduled, prefill=prefill, decode=decode)
    at, count = _level(result.scheduled_s, result.returned_s)
    yield from _counter("in flight", at, **{"micro-batches": count})
    served = ~np.isnan(result.first_token_s)
    at, count = _level(result.arrival_s[served], result.first_token_s[served])
    yield from _counter("waiting for the first token", at, requests=count)


def _counter(name: str, at_ns: Ints, **values: Ints) -> Iterator[list[str]]:
    for block in blocks(len(at_ns), BLOCK):
        args: list[Piece] = []
        for key, column in values.items():
            args += [f'{"," if args else ""}"{key}":', column[block]]
        yield _event("C", at_ns[block], (PIPELINE, "0"), name, ',"args":{', *args, "}")


def _level(enter_s: Floats, leave_s: Floats) -> tuple[Ints, Ints]:
    """Return the instants (ns) at which requests enter or leave, and the number then inside."""
    enter, leave = _nanoseconds(enter_s), _nanoseconds(leave_s[~np.isnan(leave_s)])
    instants = np.sort(np.concatenate([enter, leave]))
    instants = instants[np.diff(instants, prepend=-1) > 0]
    return instants, present(enter, leave, instants)


def _request_slices(result: RunResult) -> Iterator[list[str]]:
    limit, place = REQUESTS_SHOWN, (REQUESTS, "0")
    ids = result.request_id[:limit]
    own = _joined(',"id":', ids, ',"cat":"request"')
    arrival, first, last = (
        _nanoseconds(np.nan_to_num(times_s[:limit], nan=-1.0))
        for times_s in (result.arrival_s, result.first_token_s, result.completion_s)
    )
    status = np.array(result.status[:limit], dtype=object)
    refused = (status == "rejected") | (first < 0)
    reasons = np.array([json.dumps(reason) for reason in result.reason[:limit]], dtype=object)
    args = ',"args":{"request":', ids[refused], ',"reason":', reasons[refused], "}"
    yield _event("n", arrival[refused], place, status[refused], own[refused], *args)
    sizes = {name: getattr(result, name)[:limit] for name in SIZES}
    for name, start, stop, there in (
        ("queued and prefill", arrival, first, ~refused),
        ("decode", first, last, ~refused & (last >= 0)),
    ):
        pieces = [(f',"{key}":', column[there]) for key, column in sizes.items()]
        args = ',"args":{"request":', ids[there], *chain(*pieces), "}"
        yield _event("b", start[there], place, name, own[there], *args)
        yield _event("e", stop[there], place, name, own[there])
