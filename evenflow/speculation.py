"""Speculative decoding: how many tokens a decode step verifies, and how many it yields.

Knows nothing of what a draft costs (that is `evenflow.costs.drafts`), nor which tokens are right:
an acceptance rate stands for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenflow.errors import UsageError
from evenflow.groups import DecodeGroup, Row
from evenflow.specs.checks import require_counts, require_not_negative


@dataclass(frozen=True, slots=True)
class Speculation:
    """`k` tokens are proposed a step; each is accepted with probability `acceptance`, in turn.

    UsageError when the numbers are none.
    """

    k: int
    acceptance: float

    def __post_init__(self) -> None:
        require_counts("speculative", k=self.k)
        require_not_negative("speculative", acceptance=self.acceptance)
        if self.acceptance > 1:
            raise UsageError(f"speculative: acceptance is {self.acceptance}; at most 1 is right")

    @property
    def verified_tokens(self) -> int:
        """Tokens that a row computes in a step: the proposals and the last sure token."""
        return self.k + 1

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens that a row gains in a step: 1 + a + a^2 + ... + a^k.

        The first wrong proposal ends the step and is replaced by a right token; if all are right,
        the step yields one more (Leviathan et al., 2023, equation 1).
        """
        return sum(self.acceptance**power for power in range(self.k + 1))


class SpeculativeGroup(DecodeGroup):
    """Rows that gain several tokens together in a step, `tokens_per_step` on average.

    Every row of the group gains the same whole number of tokens in a step: what is left over from
    the average is carried to the next step, so n steps yield the average times n, rounded. Known
    error: real rows accept independently, so real latencies spread more.
    """

    __slots__ = ("_carry", "_tokens_per_step")

    def __init__(self, tokens_per_step: float, carry: float = 0.5) -> None:
        super().__init__()
        self._tokens_per_step = tokens_per_step
        self._carry = carry + tokens_per_step
        self._plan_step()

    def _plan_step(self) -> None:
        self.stride = int(self._carry)

    def empty(self) -> SpeculativeGroup:
        """Return a group without rows that goes on at the same point."""
        return SpeculativeGroup(self._tokens_per_step, self._carry - self._tokens_per_step)

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step yields; a row that reaches its end yields fewer."""
        stop = self.tick + self.stride
        excess = sum(
            (stop - tick) * len(self.finish_at.get(tick, ())) for tick in range(self.tick + 1, stop)
        )
        return len(self.members) * self.stride - excess

    def due_pages(self) -> list[Row]:
        """Return the rows whose next step needs a new page."""
        ticks = range(self.tick, self.tick + self.stride)
        return [row for tick in ticks for row in self.page_at.get(tick, ())]

    def grow(self, pages: list[int], page_tokens: int) -> None:
        """Give one page to each row that is due."""
        for tick in range(self.tick, self.tick + self.stride):
            count = len(self.page_at.get(tick, ()))
            if count:
                self._grow_at(tick, pages[:count], page_tokens)
                pages = pages[count:]

    def step(self, now_s: float, gap_s: list[float], gap_count: list[int]) -> list[Row]:
        """Record the tokens of a step, which come together; return the members that end."""
        finished: list[Row] = []
        for _ in range(self.stride):
            if self.members:
                finished += super().step(now_s, gap_s, gap_count)
        self._carry += self._tokens_per_step - self.stride
        self._plan_step()
        return finished
