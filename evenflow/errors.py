"""What a user can do wrong, as exceptions. Each message is one line: what, where, what would be right."""

from __future__ import annotations


class UsageError(Exception):
    """A mistake in what the user gave; the command line prints it and exits with status 2."""


class PolicyError(UsageError):
    """A policy broke its promise: it raised, or returned a plan that cannot be carried out."""


class StallError(PolicyError):
    """Nothing is in flight, requests wait, and the policy sends nothing: the run would never end."""
