"""What happened in a run, as columns. Knows nothing of how it happened, nor what to conclude."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenflow.groups import Row
from evenflow.types import MicroBatch, Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WAIT_REASONS = ("kv", "policy", "work")
"""Why the driver had no micro-batch for a stage that could take one: work waited and pages did not
suffice; work waited, pages sufficed, and the policy sent nothing; there was nothing to run. Of
several engines that wait, the first of these reasons counts."""

WAIT_CODES = {reason: code for code, reason in enumerate(WAIT_REASONS)}


@dataclass(frozen=True, slots=True)
class Transfers:
    """KV that moved between the pools of one system: columns, in the order in which it set out.

    `source` and `destination` index the system's pools. The KV is ready from `ready_s` (the request
    has its first token), travels from `start_s` to `end_s`, and holds `tokens` tokens (whole pages)
    on both sides until then. It waited for the transfers before it; and for `blocked_s` of that
    wait the link was free and no pool had room for it (back-pressure). The link is busy for
    `link_busy_s` of each transfer. `bytes_per_token` None: unknown.
    """

    request_id: Ints
    source: Ints
    destination: Ints
    tokens: Ints
    ready_s: Floats
    start_s: Floats
    end_s: Floats
    blocked_s: Floats
    link_busy_s: Floats
    bytes_per_token: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Columns of one run. Times are seconds from the start of the run; NaN means "never".

    Requests (n rows, in order of request id): `request_id`, `arrival_s`, `prompt_tokens`,
    `output_tokens` (that it got; of a rejected one, that it asked for), `first_scheduled_s` (the
    first micro-batch with a part of its prompt), `first_token_s`, `completion_s`, `preemptions`,
    `status` ("completed", "rejected" or, where a client left, "aborted"), `reason` (why it was not
    completed, else ""), `cached_tokens` (of the prompt, found in the prefix cache when the request
    was first admitted; None without a prefix cache).

    Micro-batches (m rows, in the order scheduled, which is also the order in which they return):
    `scheduled_s`, `prefill_tokens`, `decode_tokens`, `sampled_rows` (the output tokens that come
    out when the micro-batch returns), `free_pages`, `kv_tokens` (token slots filled in the other
    pages; None where unknown), `returned_s`; and per stage, as [m, depth]:
    `available_s` (its input is there), `start_s`, `end_s` (it computes). Between `available_s` and
    `start_s` the micro-batch queues behind its predecessor, then the CPU prepares it.

    `wait_s`, `wait_reason`: from when on the driver had nothing to send, and why (an index into
    WAIT_REASONS), until the next micro-batch is scheduled; repeats of one answer with nothing
    scheduled in between are left out. `gap_s`, `gap_count`: time between successive tokens of a
    request, and how many such gaps. `replicas`: of how many pipelines these are the micro-batches
    (see `evenflow.results.merge`). Of `engines` that divide `total_pages` evenly, `free_pages` and
    `kv_tokens` are those of the engine that sent the micro-batch.

    A system of several pools has a result of its own for each in `pools`, and what moved between
    them in `transfers`; `evenflow.results.pools` says what the columns of the whole then mean.
    """

    depth: int
    max_in_flight: int | None
    total_pages: int
    page_tokens: int
    request_id: Ints
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    first_scheduled_s: Floats
    first_token_s: Floats
    completion_s: Floats
    preemptions: Ints
    status: list[str]
    reason: list[str]
    scheduled_s: Floats
    prefill_tokens: Ints
    decode_tokens: Ints
    sampled_rows: Ints
    free_pages: Ints
    available_s: Floats
    start_s: Floats
    end_s: Floats
    wait_s: Floats
    wait_reason: Ints
    gap_s: Floats
    gap_count: Ints
    cached_tokens: Ints | None = None
    kv_tokens: Ints | None = None
    engines: int = 1
    replicas: int = 1
    provenance: dict[str, Any] = field(default_factory=dict)
    pools: Mapping[str, RunResult] = field(default_factory=dict)
    transfers: Transfers | None = None

    @property
    def returned_s(self) -> Floats:
        """When each micro-batch left the last stage."""
        return self.end_s[:, -1]


BATCH_FIELDS = 6


class Recorder:
    """Collects what happens, as columns, and makes a RunResult of it. Both worlds write to one.

    Micro-batches are recorded in the order scheduled, each once all its stage times are known.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        # A micro-batch's BATCH_FIELDS numbers, then (available, start, end) of each stage.
        self._batches = array("d")
        self._finished: list[Row] = []
        self._aborted: list[tuple[Row, str]] = []
        self._rejected: list[tuple[Request, str]] = []
        self._wait_s = array("d")
        self._wait_reason = array("q")

    def batch(self, batch: MicroBatch, stage_times: Sequence[float]) -> None:
        """Record a micro-batch and its (available, start, end) on each stage, in seconds."""
        self._batches.fromlist(
            [
                batch.scheduled_s,
                batch.prefill_tokens,
                batch.decode_tokens,
                batch.output_tokens,
                batch.free_pages,
                batch.kv_tokens,
                *stage_times,
            ]
        )

    def wait(self, now_s: float, reason: str) -> None:
        """Record that the driver asked for a micro-batch and got none."""
        self._wait_s.append(now_s)
        self._wait_reason.append(WAIT_CODES[reason])

    def finish(self, rows: list[Row]) -> None:
        self._finished += rows

    def abort(self, row: Row, reason: str) -> None:
        self._aborted.append((row, reason))

    def reject(self, request: Request, reason: str) -> None:
        self._rejected.append((request, reason))

    @property
    def num_done(self) -> int:
        """Requests that need nothing more: finished, aborted or rejected."""
        return len(self._finished) + len(self._aborted) + len(self._rejected)

    def result(
        self,
        *,
        max_in_flight: int | None,
        total_pages: int,
        page_tokens: int,
        gap_s: Sequence[float],
        gap_count: Sequence[int],
        engines: int = 1,
        prefix_cache: bool = False,
    ) -> RunResult:
        """Return the columns of the run."""
        rows = [_line(row, "completed", "") for row in self._finished]
        rows += [_line(row, "aborted", why) for row, why in self._aborted]
        rows += [_rejected(request, why) for request, why in self._rejected]
        rows.sort(key=lambda entry: entry[0].request_id)
        columns = list(zip(*rows, strict=True)) if rows else [()] * 9
        requests, output, first_scheduled_s, first_token_s, completion_s, *others = columns
        preemptions, status, reason, cached = others
        table = np.array(self._batches).reshape(-1, BATCH_FIELDS + 3 * self._depth)
        stages = table[:, BATCH_FIELDS:].reshape(-1, self._depth, 3)
        counts = table[:, 1:BATCH_FIELDS].astype(np.int64)
        return RunResult(
            depth=self._depth,
            max_in_flight=max_in_flight,
            total_pages=total_pages,
            page_tokens=page_tokens,
            request_id=np.array([r.request_id for r in requests], dtype=np.int64),
            arrival_s=np.array([r.arrival_s for r in requests], dtype=np.float64),
            prompt_tokens=np.array([r.prompt_tokens for r in requests], dtype=np.int64),
            output_tokens=np.array(output, dtype=np.int64),
            first_scheduled_s=np.array(first_scheduled_s, dtype=np.float64),
            first_token_s=np.array(first_token_s, dtype=np.float64),
            completion_s=np.array(completion_s, dtype=np.float64),
            preemptions=np.array(preemptions, dtype=np.int64),
            status=list(status),
            reason=list(reason),
            scheduled_s=table[:, 0].copy(),
            prefill_tokens=counts[:, 0].copy(),
            decode_tokens=counts[:, 1].copy(),
            sampled_rows=counts[:, 2].copy(),
            free_pages=counts[:, 3].copy(),
            available_s=stages[:, :, 0].copy(),
            start_s=stages[:, :, 1].copy(),
            end_s=stages[:, :, 2].copy(),
            wait_s=np.array(self._wait_s),
            wait_reason=np.array(self._wait_reason, dtype=np.int64),
            gap_s=np.array(gap_s, dtype=np.float64),
            gap_count=np.array(gap_count, dtype=np.int64),
            cached_tokens=np.array(cached, dtype=np.int64) if prefix_cache else None,
            kv_tokens=counts[:, 4].copy(),
            engines=engines,
        )


def _line(row: Row, status: str, reason: str) -> tuple[Any, ...]:
    times = row.first_scheduled_s, row.first_token_s, row.completion_s
    return row.request, row.generated, *times, row.epoch, status, reason, row.cached_tokens


def _rejected(request: Request, reason: str) -> tuple[Any, ...]:
    times = [float("nan")] * 3
    return request, request.output_tokens, *times, 0, "rejected", reason, 0
