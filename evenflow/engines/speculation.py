"""Speculative decoding: several tokens are proposed in a step, and some of them accepted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from math import floor
from operator import mul

from evenflow.compiled import mypyc_attr
from evenflow.core.decodes import DecodeGroup, Decoding, Sequence
from evenflow.sums import plain_sum


@mypyc_attr(allow_interpreted_subclasses=True)
class SpeculativeGroup(DecodeGroup):
    """Sequences that gain several tokens together in a step, `tokens_per_step` on average.

    Every member gains the same whole number of tokens in a step. The rest of the average is carried
    to the next step, so n steps yield the average times n, rounded. Known error: real sequences
    accept independently, so real latencies spread more.
    """

    def __init__(self, tokens_per_step: float, carry: float = 0.5) -> None:
        super().__init__()
        self._tokens_per_step = tokens_per_step
        self._carry = carry + tokens_per_step
        self.stride = int(self._carry)

    def empty(self) -> SpeculativeGroup:
        """Return a group without members that goes on at the same point."""
        return SpeculativeGroup(self._tokens_per_step, self._carry - self._tokens_per_step)

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step yields; a sequence that reaches its end yields fewer."""
        stop = self.tick + self.stride
        excess = sum(
            (stop - tick) * len(self.finish_at.get(tick, ())) for tick in range(self.tick + 1, stop)
        )
        return len(self.members) * self.stride - excess

    def due_pages(self) -> list[Sequence]:
        """Return the sequences that need a new page for their next step."""
        ticks = range(self.tick, self.tick + self.stride)
        return [seq for tick in ticks for seq in self.page_at.get(tick, ())]

    def grow(self, pages: list[int], page_tokens: int) -> None:
        """Give one page to each sequence that is due."""
        for tick in range(self.tick, self.tick + self.stride):
            count = len(self.page_at.get(tick, ()))
            if count:
                self._grow_at(tick, pages[:count], page_tokens)
                pages = pages[count:]

    def step(self, now_s: float, gap_s: list[float], gap_count: list[int]) -> list[Sequence]:
        """Record the tokens of a step, which come together; return the members that end."""
        finished: list[Sequence] = []
        for _ in range(self.stride):
            if self.members:
                finished += super().step(now_s, gap_s, gap_count)
        self._carry += self._tokens_per_step - self.stride
        self.stride = int(self._carry)
        return finished


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Speculation(Decoding):
    """Proposed tokens, accepted with given probabilities.

    `acceptance`: the probability of each proposal, from 0 to 1, if those before it were accepted.
    """

    acceptance: tuple[float, ...]

    @property
    def row_tokens(self) -> int:
        """Tokens that a sequence computes in a step: the proposals and the last sure token."""
        return len(self.acceptance) + 1

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens that a sequence gains in a step: 1 + a1 + a1 a2 + ... + a1 ... ak.

        The first wrong proposal ends the step and is replaced by a right token. If all are right,
        the step yields one more (Leviathan et al., 2023, equation 1).
        """
        return plain_sum(accumulate(self.acceptance, mul, initial=1.0))

    def gain(self, request_id: int, generated: int, first: int = 1) -> int:
        """Return how many tokens a step of a request yields that has `generated` ones.

        They end at the next of f, f + t, f + 2 t, ... rounded, for t tokens a step on average;
        with f, the `first`, proposals began.
        """
        average = self.tokens_per_step
        steps = floor((generated - first + 0.5) / average) + 1
        return first + floor(steps * average + 0.5) - generated

    def group(self) -> DecodeGroup:
        """Return a group of decodes without members."""
        return SpeculativeGroup(self.tokens_per_step)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReservingGroup(DecodeGroup):
    """Sequences that each gain their own number of tokens in a step, and hold pages for two steps.

    Source: SGLang's `get_alloc_reserve_per_decode`. With `relayed` proposals, the last stage makes
    them after a step of decodes. The first step after a prompt has none (its `degenerate` rows).
    Counts stay with the sequences: the group's tick is 0, and a step costs O(sequences).
    """

    def __init__(self, speculation: Speculation, *, relayed: bool) -> None:
        super().__init__()
        self._speculation = speculation
        self._relayed = relayed
        self._page_tokens = 1
        self.stride = 2 * speculation.row_tokens

    def empty(self) -> ReservingGroup:
        """Return a group without members."""
        return ReservingGroup(self._speculation, relayed=self._relayed)

    def last_token_of(self, seq: Sequence) -> float:
        """Return when a member got its last token."""
        return seq.last_token_s

    def join(self, seq: Sequence, context: int, page_tokens: int) -> None:
        """Add a sequence that attends to `context` tokens."""
        seq.group, seq.base, seq.joined_tick = self, context, 0
        self._page_tokens = page_tokens
        self.members[seq.request.request_id] = seq
        self.context += context

    def leave(self, seq: Sequence) -> int:
        """Remove a sequence; return the number of tokens it attends to."""
        del self.members[seq.request.request_id]
        self.context -= seq.base
        return seq.base

    def _gain(self, seq: Sequence) -> int:
        if self._relayed and seq.base == seq.prompt_tokens:
            return 1
        first = 1 + seq.prompt_tokens - seq.request.prompt_tokens + self._relayed
        return self._speculation.gain(seq.request.request_id, seq.generated, first)

    @property
    def next_tokens(self) -> int:
        """Tokens that the next step yields."""
        return sum(
            min(self._gain(seq), seq.request.output_tokens - seq.generated)
            for seq in self.members.values()
        )

    def due_pages(self) -> list[Sequence]:
        """Return the sequences that need pages for their next step, once for each page."""
        due: list[Sequence] = []
        for seq in self.members.values():
            pages = -(-(seq.base + self.stride) // self._page_tokens)
            due.extend(repeat(seq, pages - len(seq.pages)))
        return due

    def due_tokens(self) -> int:
        """Return how many tokens the due pages hold, and after a prompt what its last page does."""
        fresh = (seq for seq in self.members.values() if seq.base == seq.prompt_tokens)
        left = sum(len(seq.pages) * self._page_tokens - seq.base for seq in fresh)
        return left + len(self.due_pages()) * self._page_tokens

    def grow(self, pages: list[int], page_tokens: int) -> None:
        """Give one page for each time that a sequence is due."""
        for seq, page in zip(self.due_pages(), pages, strict=True):
            seq.pages.append(page)

    def step(self, now_s: float, gap_s: list[float], gap_count: list[int]) -> list[Sequence]:
        """Record the tokens of a step, which come together; return the members that end.

        Where more were accepted than a member lacks, one more is counted: its KV is there.
        """
        finished: list[Sequence] = []
        for seq in list(self.members.values()):
            lacks = seq.request.output_tokens - seq.generated
            accepted = self._gain(seq)
            gain = min(accepted, lacks)
            gap_s += [now_s - seq.last_token_s, 0.0]
            gap_count += [1, gain - 1]
            seq.last_token_s = now_s
            seq.generated += gain
            seq.base += gain
            self.context += gain
            if gain == lacks:
                self.leave(seq)
                seq.generated += accepted > lacks
                finished.append(seq)
        return finished
