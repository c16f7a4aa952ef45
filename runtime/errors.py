"""What can go wrong with processes, as opposed to what a user gave or a policy planned."""

from __future__ import annotations


class WorkerError(Exception):
    """A worker died, failed, or does not answer; the message says which stage and how."""
