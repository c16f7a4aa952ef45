"""What the policy of a serving engine sees beside a plain View."""

from __future__ import annotations

from collections import abc
from itertools import filterfalse
from typing import NamedTuple

from evenflow.compiled import mypyc_attr
from evenflow.core.decodes import Sequence
from evenflow.core.scheduling import Prompt, View
from evenflow.engines.queues import EngineQueues


@mypyc_attr(allow_interpreted_subclasses=True)
class EnginePrompt(Prompt):
    """A request that awaits prefill, with what its client asks for."""

    __slots__ = ()

    @property
    def exact(self) -> bool:
        """Whether the client asks for exactly its limit of output tokens (`ignore_eos`)."""
        return self._sequence.request.max_new_tokens is None

    def begins_with(self, tokens: int) -> tuple[int, ...] | None:
        """Return names of its first blocks, of `tokens` tokens in all; None if it has fewer."""
        prefix = self._sequence.request.prefix
        if prefix is None or min(prefix.tokens, self.tokens) < tokens:
            return None
        return prefix.blocks[: -(-tokens // prefix.block_tokens)]


class DecodeRow(NamedTuple):
    """A row of a decode, with the output tokens so far and those allowed.

    `exact`: the client asks for as many as it allows.
    """

    request_id: int
    prompt_tokens: int
    generated: int
    output_limit: int
    exact: bool

    @property
    def tokens(self) -> int:
        """Its prompt and its output so far."""
        return self.prompt_tokens + self.generated


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineView(View):
    """The state of serving where a policy follows the rules of an engine."""

    def __init__(self, queues: EngineQueues, depth: int) -> None:
        super().__init__(queues, depth)
        self._engine = queues

    @property
    def waiting(self) -> abc.Iterator[EnginePrompt]:
        """Prompts of which nothing is scheduled, in order; preempted ones only when nothing of them
        is in flight."""
        if self._engine.kv.keeps:
            return map(EnginePrompt, map(self._engine.looked_up, self._waiting))
        return map(EnginePrompt, self._waiting)

    @property
    def queue(self) -> abc.Iterator[EnginePrompt]:
        """The `waiting` prompts, without a lookup of what a cache keeps of them."""
        return map(EnginePrompt, self._waiting)

    @property
    def partials(self) -> abc.Sequence[EnginePrompt]:
        """Partly scheduled prompts that may send their next chunk now, by arrival."""
        return [EnginePrompt(seq) for seq in self._engine.partials]

    @property
    def _waiting(self) -> abc.Iterator[Sequence]:
        owed, waiting = self._engine.owed, self._engine.waiting
        return filterfalse(owed.__contains__, waiting) if owed else iter(waiting)

    @property
    def rows(self) -> list[DecodeRow]:
        """The ready decodes, in the order of their rows; looks at each.

        Where decodes run ahead, these are followed by decodes with their last allowed token in
        flight.
        """
        queues, late = self._engine, self._engine.late_tokens()
        pairs = ((group, seq) for group in queues.ready.groups for seq in group.sequences())
        members = [(seq, group.generated_by(seq)) for group, seq in pairs]
        members.sort(key=lambda member: queues.row_key(member[0]))
        sent = (queues.live[number] for number in late)
        ended = (seq for seq in sent if seq.generated >= seq.request.output_limit)
        members += ((seq, seq.generated) for seq in ended if seq not in queues.ready)
        return [
            DecodeRow(
                seq.request.request_id,
                seq.request.prompt_tokens,
                generated - late[seq.request.request_id],
                seq.request.output_limit,
                seq.request.max_new_tokens is None,
            )
            for seq, generated in members
        ]

    @property
    def prefix_cache(self) -> bool:
        """Whether there is a prefix cache."""
        return self._pool.keeps

    def cached_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens of a waiting prompt are cached; this is a use of them."""
        prefix = prompt._sequence.request.prefix
        if prefix is None:
            return 0
        return self._pool.find([], prefix, prompt.tokens) * self.page_tokens

    @property
    def slot(self) -> int:
        """The slot of the next micro-batch: the one being asked, where slots are asked in turn."""
        return self._engine.slot if self._engine.slotted else super().slot

    @property
    def asked(self) -> int:
        """Questions so far, this one too."""
        return self._engine.asked

    @property
    def idles(self) -> int:
        """How often there was nothing to serve; a request that comes in time prevents it."""
        return self._engine.idles
