"""View of the policy of a serving engine, which shows more than a plain View."""

from __future__ import annotations

from collections import abc
from itertools import filterfalse, islice
from operator import attrgetter
from typing import NamedTuple

from evenflow.compiled import mypyc_attr
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.core.scheduling import Prompt, View
from evenflow.engines.queues import EngineQueues
from evenflow.engines.speculation import ReservingGroup


@mypyc_attr(allow_interpreted_subclasses=True)
class EnginePrompt(Prompt):
    """A request that awaits prefill, with what its client asks for."""

    __slots__ = ()

    @property
    def exact(self) -> bool:
        """Whether the client asks for exactly its limit of output tokens (`ignore_eos`)."""
        return self._sequence.request.max_new_tokens is None

    @property
    def order(self) -> int:
        """The number of its arrival."""
        return self._sequence.order

    @property
    def most_tokens(self) -> int:
        """Its prompt and all the output that its client allows."""
        return self._sequence.request.prompt_tokens + self.output_limit

    def begins_with(self, tokens: int) -> tuple[int, ...] | None:
        """Return names of its first blocks, of `tokens` tokens in all; None if it has fewer."""
        prefix = self._sequence.request.prefix
        if prefix is None or min(prefix.tokens, self.tokens) < tokens:
            return None
        return prefix.blocks[: -(-tokens // prefix.block_tokens)]


class Active(NamedTuple):
    """A request that is served. A `decode` is one with all of its prompt scheduled, and has
    `kv_tokens` once what is in flight is back. `ready`: it could be in the next micro-batch.
    """

    request: EnginePrompt
    decode: bool
    ready: bool
    kv_tokens: int


class DecodeRow:
    """A row of a decode, with the output tokens so far and those allowed.

    `exact`: the client asks for as many as it allows.
    """

    def __init__(self, request: Request, generated: int) -> None:
        self.request_id, self.prompt_tokens = request.request_id, request.prompt_tokens
        self.generated, self.output_limit = generated, request.output_limit
        self.exact = request.max_new_tokens is None

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
    def running(self) -> int:
        """Requests that were admitted and hold pages."""
        return len(self._engine.admitted) + len(self._engine.leaving)

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
    def lined_up(self) -> list[tuple[int, bool]]:
        """All waiting requests in order, with whether a token in flight delays their admission."""
        owed = self._engine.owed
        return [(seq.request.request_id, seq in owed) for seq in self._engine.waiting]

    @property
    def partials(self) -> abc.Sequence[EnginePrompt]:
        """Partly scheduled prompts that may send their next chunk now, by arrival."""
        return [EnginePrompt(seq) for seq in self._engine.partials]

    @property
    def unfinished(self) -> list[EnginePrompt]:
        """Prompts of which a part is scheduled, in flight or not, by arrival."""
        found = dict.fromkeys(self._engine.partials)
        for batch in self._engine.in_flight.values():
            found |= dict.fromkeys(chunk.sequence for chunk in batch.chunks if not chunk.last)
        those = (seq for seq in found if seq.remaining and seq.pages and not seq.aborted)
        return [EnginePrompt(seq) for seq in sorted(those, key=_ORDER)]

    @property
    def unpromised_pages(self) -> int:
        """Pages that are left once all decodes have all the output that their clients allow.

        A prompt under way, and a request with its last allowed token in flight, keep what they
        have.
        """
        queues = self._engine
        pages = self.total_pages - queues.promised_pages
        for seq in [*(prompt._sequence for prompt in self.unfinished), *queues.ending()]:
            pages += queues.most_pages(seq) - len(seq.pages)
        return min(pages, self.free_pages)

    def decodes_before(self, prompt: EnginePrompt) -> int:
        """Return how many ready decodes came before a prompt."""
        groups = self._engine.ready.groups
        return sum(seq.order < prompt.order for group in groups for seq in group.sequences())

    def active(self, most: int) -> list[Active]:
        """Return the first `most` requests by arrival, but for those with their last allowed token
        in flight; O(requests).
        """
        queues, tokens = self._engine, self._decode_tokens()
        free, ended = {*self._waiting, *queues.partials}, {*queues.ending()}
        found = []
        for seq in islice(queues.live.values(), most):
            if seq not in ended and not seq.aborted:
                ready = seq in free or seq in queues.ready
                found.append(Active(EnginePrompt(seq), seq in tokens, ready, tokens.get(seq, 0)))
        return found

    def _decode_tokens(self) -> dict[Sequence, int]:
        """Return the tokens in the pages of each decode once what is in flight is back."""
        queues = self._engine
        tokens: dict[Sequence, int] = {}
        for batch in () if queues.ahead else queues.in_flight.values():
            tokens |= {chunk.sequence: chunk.stop for chunk in batch.chunks if chunk.last}
            group = batch.decodes
            if group is not None:
                tokens |= {seq: group.context_of(seq) + 1 for seq in group.sequences()}
        for group in queues.ready.groups:
            tokens |= {seq: group.context_of(seq) for seq in group.sequences()}
        return tokens

    @property
    def _waiting(self) -> abc.Iterator[Sequence]:
        owed, waiting = self._engine.owed, self._engine.waiting
        return filterfalse(owed.__contains__, waiting) if owed else iter(waiting)

    @property
    def rows(self) -> list[DecodeRow]:
        """The ready decodes, in the order of their rows; O(decodes).

        Where decodes run ahead, these are followed by decodes with their last allowed token in
        flight.
        """
        queues, late = self._engine, self._engine.late_tokens()
        ready = [seq for group in queues.ready.groups for seq in group.sequences()]
        ready.sort(key=queues.row_key)
        rows = [(seq.request, seq.group.generated_by(seq)) for seq in ready]
        rows += [(seq.request, seq.generated) for seq in queues.ending()]
        return [DecodeRow(each, tokens - late.get(each.request_id, 0)) for each, tokens in rows]

    @property
    def due_tokens(self) -> int | None:
        """Tokens that the next step of the ready decodes needs room for; None: one each."""
        if self._engine.decoding.row_tokens == 1:
            return None
        groups = self._engine.ready.groups
        return sum(group.due_tokens() for group in groups if isinstance(group, ReservingGroup))

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
    def sent(self) -> int:
        """Micro-batches so far."""
        return self._engine.batches

    @property
    def asked(self) -> int:
        """Questions so far, this one too."""
        return self._engine.asked

    @property
    def idles(self) -> int:
        """Number of times that nothing was to serve; a request that comes in time prevents it."""
        return self._engine.idles


_ORDER = attrgetter("order")
