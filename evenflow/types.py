"""The nouns both worlds share, in one place to import them from."""

from __future__ import annotations

from evenflow.core.batch import Chunk, MicroBatch
from evenflow.core.request import Handover, Prefix, Request
from evenflow.core.scheduling import (
    Order,
    Plan,
    Prefill,
    Prompt,
    Scheduler,
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
    "Upkeep",
    "Victim",
    "View",
]
