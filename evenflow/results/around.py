"""What a real run spends around its stages: on messages, in the driver, before a stage computes.

Knows when things happened; not what computed, nor why.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evenflow.results.run import Floats, RunResult


class Around(NamedTuple):
    """Seconds, a row a micro-batch, and a column a stage or a hop.

    `schedule_s`: from the decision, or when stage 0 has the one before, until stage 0 has it.
    `prepare_s`: on each stage, until it computes what is there and could start. `hops_s`: from the
    end of a stage until the next one has what it needs. `freed_s`, `returned_s`: from the end of
    stage 0, and of the last one, until the driver hears of it.
    """

    schedule_s: Floats
    prepare_s: Floats
    hops_s: Floats
    freed_s: Floats
    returned_s: Floats


def around_stages(result: RunResult, freed_s: Floats, returned_s: Floats) -> Around:
    """Return the times around the stages of a real run, whose driver heard at these times of the
    run that stage 0 was free (nothing with a single stage) and that micro-batches were back."""
    decided_s = result.scheduled_s.copy()
    decided_s[1:] = np.maximum(decided_s[1:], result.available_s[:-1, 0])
    free_s = np.zeros_like(result.end_s)
    free_s[1:] = result.end_s[:-1]
    heard_s = freed_s if result.depth > 1 else returned_s
    return Around(
        schedule_s=result.available_s[:, 0] - decided_s,
        prepare_s=result.start_s - np.maximum(result.available_s, free_s),
        hops_s=result.available_s[:, 1:] - result.end_s[:, :-1],
        freed_s=heard_s[: len(returned_s)] - result.end_s[:, 0],
        returned_s=returned_s - result.end_s[:, -1],
    )
