"""Write a run as a Chrome trace: opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

Knows the trace format and the columns of a run. Does not know how the run came about, nor which
idle interval has which cause: that is `evenflow.results.bubbles`.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from evenflow.results.bubbles import CAUSES, Bubbles
from evenflow.results.run import Floats, Ints, RunResult
from experiments.report.data import present

PIPELINE, REQUESTS = 1, 2
"""Process ids of the trace; stage k computes on thread 2k + 1 and idles on thread 2k + 2."""


Place = tuple[int, int, int]
"""When an event is, in nanoseconds, and of which process and thread."""


def write_timeline(
    path: str | Path,
    result: RunResult,
    bubbles: Bubbles | None = None,
    requests_limit: int | None = 2000,
) -> None:
    """Write `result` to `path` as a gzipped Chrome trace; equal runs give equal bytes.

    A slice per stage and micro-batch, arrows that follow a micro-batch through the stages, idle
    slices named by cause (with `bubbles`), counters, and a slice per phase of each of the first
    `requests_limit` requests (None: all). Times in microseconds.
    """
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="ascii") as text,
    ):
        text.writelines(_document(_events(result, bubbles, requests_limit)))


def _document(events: Iterable[str]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in events:
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _events(
    result: RunResult, bubbles: Bubbles | None, requests_limit: int | None
) -> Iterator[str]:
    yield from _names(result.depth, bubbles is not None)
    yield from _stage_slices(result)
    if bubbles is not None:
        yield from _idle_slices(bubbles)
    yield from _counters(result)
    yield from _request_slices(result, requests_limit)


def _names(depth: int, with_idle: bool) -> Iterator[str]:
    for process, name in ((PIPELINE, "pipeline"), (REQUESTS, "requests")):
        yield _event("M", (0, process, 0), "process_name", f'"name":"{name}"')
        yield _event("M", (0, process, 0), "process_sort_index", f'"sort_index":{process}')
    for stage in range(depth):
        threads = [(2 * stage + 1, f"stage {stage}")]
        if with_idle:
            threads.append((2 * stage + 2, f"stage {stage} idle"))
        for thread, name in threads:
            yield _event("M", (0, PIPELINE, thread), "thread_name", f'"name":"{name}"')
            yield _event("M", (0, PIPELINE, thread), "thread_sort_index", f'"sort_index":{thread}')


def _event(phase: str, place: Place, name: str, args: str = "", more: str = "") -> str:
    """Return an event as JSON; `args`, and `more` of its own keys, are members."""
    at, process, thread = place
    args, more = args and f',"args":{{{args}}}', more and f",{more}"
    return (
        f'{{"ph":"{phase}","ts":{_microseconds(at)},"pid":{process},"tid":{thread},'
        f'"name":"{name}"{more}{args}}}'
    )


def _nanoseconds(times_s: Floats) -> Ints:
    """Whole nanoseconds: a slice that ends where the next starts still does so once rounded."""
    return np.rint(np.asarray(times_s) * 1e9).astype(np.int64)


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _stage_slices(result: RunResult) -> Iterator[str]:
    starts = _nanoseconds(result.start_s).tolist()
    ends = _nanoseconds(result.end_s).tolist()
    prefills = result.prefill_tokens.tolist()
    decodes = result.decode_tokens.tolist()
    for batch, (prefill, decode) in enumerate(zip(prefills, decodes, strict=True)):
        name = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        for stage in range(result.depth):
            start, duration = starts[batch][stage], ends[batch][stage] - starts[batch][stage]
            place = start, PIPELINE, 2 * stage + 1
            args = (
                f'"batch":{batch},"prefill_tokens":{prefill},"decode_tokens":{decode},'
                f'"cost_ms":{duration / 1e6:.6g}'
            )
            yield _event("X", place, name, args, f'"dur":{_microseconds(duration)}')
            if result.depth > 1:
                # After its slice: a viewer binds an arrow to the slice open at that time.
                phase = "s" if stage == 0 else "f" if stage == result.depth - 1 else "t"
                bind = ',"bp":"e"' if phase == "f" else ""
                more = f'"id":{batch},"cat":"micro-batch"{bind}'
                yield _event(phase, place, "micro-batch", more=more)


def _idle_slices(bubbles: Bubbles) -> Iterator[str]:
    starts, ends = _nanoseconds(bubbles.start_s), _nanoseconds(bubbles.end_s)
    columns = (bubbles.stage, starts, ends, bubbles.cause, bubbles.batch)
    rows = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    for stage, start, end, cause, batch in rows:
        lasts = f'"dur":{_microseconds(end - start)}'
        place = start, PIPELINE, 2 * stage + 2
        yield _event("X", place, CAUSES[cause], f'"batch":{batch}', lasts)


def _counters(result: RunResult) -> Iterator[str]:
    scheduled = _nanoseconds(result.scheduled_s).tolist()
    columns = zip(
        scheduled,
        result.free_pages.tolist(),
        result.prefill_tokens.tolist(),
        result.decode_tokens.tolist(),
        strict=True,
    )
    for at, free, prefill, decode in columns:
        yield _event("C", (at, PIPELINE, 0), "free pages", f'"pages":{free}')
        tokens = f'"prefill":{prefill},"decode":{decode}'
        yield _event("C", (at, PIPELINE, 0), "tokens per micro-batch", tokens)
    for at, count in _level(result.scheduled_s, result.returned_s):
        yield _event("C", (at, PIPELINE, 0), "in flight", f'"micro-batches":{count}')
    served = ~np.isnan(result.first_token_s)
    for at, count in _level(result.arrival_s[served], result.first_token_s[served]):
        yield _event("C", (at, PIPELINE, 0), "waiting for the first token", f'"requests":{count}')


def _level(enter_s: Floats, leave_s: Floats) -> Iterator[tuple[int, int]]:
    """How many are inside after each instant (nanoseconds) at which one enters or leaves."""
    enter, leave = _nanoseconds(enter_s), _nanoseconds(leave_s[~np.isnan(leave_s)])
    instants = np.unique(np.concatenate([enter, leave]))
    yield from zip(instants.tolist(), present(enter, leave, instants).tolist(), strict=True)


def _request_slices(result: RunResult, limit: int | None) -> Iterator[str]:
    for row in range(len(result.request_id))[:limit]:
        request = int(result.request_id[row])
        own, more = f'"request":{request},', f'"id":{request},"cat":"request"'
        arrival, first, last = _nanoseconds(
            np.nan_to_num(
                [result.arrival_s[row], result.first_token_s[row], result.completion_s[row]],
                nan=-1.0,
            )
        ).tolist()
        if result.status[row] == "rejected" or first < 0:
            reason = f'{own}"reason":{json.dumps(result.reason[row])}'
            yield _event("n", (arrival, REQUESTS, 0), result.status[row], reason, more)
            continue
        sizes = (
            f'{own}"prompt_tokens":{result.prompt_tokens[row]},'
            f'"output_tokens":{result.output_tokens[row]},"preemptions":{result.preemptions[row]}'
        )
        phases = [("queued and prefill", arrival, first), ("decode", first, last)]
        for name, start, stop in phases if last >= 0 else phases[:1]:
            yield _event("b", (start, REQUESTS, 0), name, sizes, more)
            yield _event("e", (stop, REQUESTS, 0), name, more=more)
