"""The nouns both worlds share, in one place to import them from."""

from __future__ import annotations

from evenflow.batch import Chunk, MicroBatch
from evenflow.request import Handover, Prefix, Request
from evenflow.scheduling import (
    Order,
    Plan,
    Prefill,
    Prompt,
    Scheduler,
    SearchSpace,
    Upkeep,
    Victim,
    View,
)

__all__ = [
    "Chunk",
    "Handover",
    "MicroBatch",
    "Order",
    "Plan",
    "Prefill",
    "Prefix",
    "Prompt",
    "Request",
    "Scheduler",
    "SearchSpace",
    "Upkeep",
    "Victim",
    "View",
]
