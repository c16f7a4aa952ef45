"""The nouns both worlds share, in one place to import them from."""

from __future__ import annotations

from evenflow.core.batch import Chunk, MicroBatch
from evenflow.core.request import Prefix, Request
from evenflow.core.rules import Rules
from evenflow.core.scheduling import Action, Order, Plan, Prefill, Prompt, Scheduler, Victim, View

__all__ = [
    "Action",
    "Chunk",
    "MicroBatch",
    "Order",
    "Plan",
    "Prefill",
    "Prefix",
    "Prompt",
    "Request",
    "Rules",
    "Scheduler",
    "Victim",
    "View",
]
