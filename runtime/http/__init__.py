"""An HTTP server before a real run: OpenAI's completions and chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.runtime.http.text import Codec

FAILED_S = 1.0
"""How long a server that has failed still says so before it is gone."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The served model: its name, and what reads and writes for its clients.

    `workers` says what computes: torch, or emulated. At most `max_queue` requests wait for their
    first token (None: no limit). `allowed_hosts` are names by which clients may call the server,
    beside localhost.
    """

    model: str
    codec: Codec
    workers: str
    max_queue: int | None = None
    allowed_hosts: Sequence[str] = ()
    max_model_len: int = 0
