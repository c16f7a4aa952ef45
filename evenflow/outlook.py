"""How much the running decodes are still expected to write. Knows lengths, not policies."""

from __future__ import annotations

from evenflow.groups import Row


class Outlook:
    """Running sums over the decoding requests: what they are expected to need costs O(1)."""

    __slots__ = ("completed", "completed_tokens", "generated", "predicted", "unpredicted")

    def __init__(self) -> None:
        self.completed = 0
        self.completed_tokens = 0
        self.generated = 0  # by the running decodes
        self.predicted = 0  # their predicted outputs
        self.unpredicted = 0  # how many of them have no prediction

    def add(self, row: Row) -> None:
        self.generated += row.generated
        self._count(row, 1)

    def remove(self, row: Row) -> None:
        self.generated -= row.generated
        self._count(row, -1)

    def _count(self, row: Row, sign: int) -> None:
        predicted = row.request.predicted_output_tokens
        if predicted is None:
            self.unpredicted += sign
        else:
            self.predicted += sign * predicted

    def complete(self, row: Row) -> None:
        self.completed += 1
        self.completed_tokens += row.generated

    def remaining(self) -> float:
        """Return the tokens the running decodes are still expected to produce."""
        mean = self.completed_tokens / self.completed if self.completed else 0.0
        return max(self.predicted + self.unpredicted * mean - self.generated, 0.0)
