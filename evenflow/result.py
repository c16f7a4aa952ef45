"""What happened in a run, as columns. Knows nothing of how it happened, nor what to conclude."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WAIT_REASONS = ("work", "kv", "policy")
"""Why the driver had no micro-batch for a stage that could take one: there was nothing to run; work
waited and pages did not suffice; work waited, pages sufficed, and the policy sent nothing."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Columns of one run. Times are seconds from the start of the run; NaN means "never".

    Requests (n rows, in order of request id): `request_id`, `arrival_s`, `prompt_tokens`,
    `output_tokens`, `first_token_s`, `completion_s`, `preemptions`, `status` ("completed" or
    "rejected"), `reason` (why it was rejected, else "").

    Micro-batches (m rows, in the order scheduled, which is also the order in which they return):
    `scheduled_s`, `prefill_tokens`, `decode_tokens`, `free_pages`, `returned_s`; and per stage, as
    [m, depth]: `available_s` (its input is there), `start_s`, `end_s` (it computes). Between
    `available_s` and `start_s` the micro-batch queues behind its predecessor, then the CPU prepares it.

    `wait_s`, `wait_reason`: each time the driver asked for a micro-batch and got none, and why (an
    index into WAIT_REASONS). `gap_s`, `gap_count`: time between successive tokens of a request, and
    how many such gaps; `token_s`, `token_count`: output tokens and when they came.
    """

    depth: int
    max_in_flight: int | None
    total_pages: int
    page_tokens: int
    request_id: Ints
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    first_token_s: Floats
    completion_s: Floats
    preemptions: Ints
    status: list[str]
    reason: list[str]
    scheduled_s: Floats
    prefill_tokens: Ints
    decode_tokens: Ints
    free_pages: Ints
    returned_s: Floats
    available_s: Floats
    start_s: Floats
    end_s: Floats
    wait_s: Floats
    wait_reason: Ints
    gap_s: Floats
    gap_count: Ints
    token_s: Floats
    token_count: Ints
    provenance: dict[str, Any] = field(default_factory=dict)
