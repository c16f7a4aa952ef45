"""The sequences that an engine serves: where each is, and what moves it from there.

A sequence waits, is prefilled in chunks, decodes in a group, and ends; preempted, it waits again.
The counters follow. Knows no policy and no clock: `evenflow.core.batcher` says what happens.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, abc, deque
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, groupby
from operator import attrgetter

from evenflow.core.batch import Chunk, MicroBatch
from evenflow.core.decodes import (
    AheadGroup,
    DecodeGroup,
    ReadyQueue,
    Sequence,
    Speculation,
    SpeculativeGroup,
)
from evenflow.core.kv import KvCache
from evenflow.core.request import Request


def _by_arrival(seq: Sequence) -> int:
    return seq.order


def _by_priority(seq: Sequence) -> tuple[int, float, int]:
    return *_priority(seq), seq.request.request_id


def _priority(seq: Sequence) -> tuple[int, float]:
    return seq.request.priority, seq.request.arrival_s


def _by_pages(seq: Sequence) -> tuple[int, int]:
    return len(seq.pages), seq.order


@dataclass(slots=True, eq=False)
class Queues:
    """The sequences of one engine, and how many there are of which.

    `live` are all that are being served: those `waiting`, `partials` (partly scheduled and free to
    go on, by arrival), those `ready` to decode, and those of the micro-batches `in_flight`. All but
    the waiting ones are `admitted`, in that order. Beside them, `moving` sequences hold pages while
    their KV leaves or arrives. `owed` is what is in flight of sequences that were preempted since.
    `gap_s` has each gap between tokens, for `gap_count` requests each; `now_s` is when something
    last happened. With several `slots`, which are asked in turn, a request decodes in the slot of
    its last chunk, and `ready` are those of the slot whose turn it is. What is in flight of a
    decode that is preempted counts when it returns (`delivers`), or is lost. `keeps_pages`: another
    engine fetches those of who ends here.
    """

    kv: KvCache
    _: KW_ONLY
    pipelined_chunks: bool
    speculation: Speculation | None
    ahead: int  # a decode is ready so many questions after it was sent; 0: once back
    num_slots: int
    delivers: bool
    preempted_last: bool
    newest_first: bool
    by_priority: bool
    keeps_pages: bool
    asked: int = 0
    resting: deque[tuple[int, DecodeGroup]] = field(default_factory=deque)  # till which question
    now_s: float = 0.0
    waiting: deque[Sequence] = field(default_factory=deque)
    partials: list[Sequence] = field(default_factory=list)
    in_flight: dict[int, MicroBatch] = field(default_factory=dict)
    live: dict[int, Sequence] = field(default_factory=dict)
    admitted: dict[int, Sequence] = field(default_factory=dict)
    moving: dict[int, Sequence] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)  # of the live: end when what is sent returns
    waiting_tokens: int = 0
    owed: int = 0
    running_decodes: int = 0
    preemptions: int = 0
    idles: int = 0
    completed: int = 0
    completed_tokens: int = 0  # the output of those
    gap_s: list[float] = field(default_factory=list)
    gap_count: list[int] = field(default_factory=list)
    _arrived: int = 0
    _hidden: deque[Sequence] = field(default_factory=deque)
    _unpublished: list[Sequence] = field(default_factory=list)  # until the next question
    slots: list[ReadyQueue] = field(init=False)
    slot: int = field(init=False)
    ready: ReadyQueue = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [ReadyQueue(self.kv.pool.page_tokens) for _ in range(self.num_slots)]
        self.slot = self.num_slots - 1
        self.ready = self.slots[self.slot]

    # -- waiting, and prefilled in chunks -------------------------------------------------------

    def enter(self, seq: Sequence) -> None:
        """Count a sequence among the live, the last to arrive."""
        self._number(seq)
        self.live[seq.request.request_id] = seq

    def _number(self, seq: Sequence) -> None:
        seq.order = self._arrived
        self._arrived += 1

    def take_turn(self) -> None:
        """Count a question; it is the turn of the next slot, and of decodes that rested enough."""
        self.asked += 1
        self.idles += not self.live and not self.in_flight
        for seq in self._unpublished:
            if seq.pages:
                self.kv.publish(seq, seq.computed)
        self._unpublished.clear()
        self.slot = (self.slot + 1) % len(self.slots)
        self.ready = self.slots[self.slot]
        while self.resting and self.resting[0][0] <= self.asked:
            group = self.resting.popleft()[1]
            if group.members:
                self.ready.append(group)

    def enqueue(self, request: Request) -> None:
        """Let a request wait."""
        seq = Sequence(request, request.prompt_tokens)
        self.enter(seq)
        self._wait(seq, last=True)

    def _wait(self, seq: Sequence, *, last: bool) -> None:
        """Let a sequence wait, the first or the last."""
        self._line_up(seq, last=last)
        self.waiting_tokens += seq.remaining
        if not self.kv.late:
            self.looked_up(seq)

    def _line_up(self, seq: Sequence, *, last: bool) -> None:
        if self.by_priority:
            insort(self.waiting, seq, key=_by_priority)
        else:
            (self.waiting.append if last else self.waiting.appendleft)(seq)

    def looked_up(self, seq: Sequence) -> Sequence:
        """Return a sequence that waits after looking what is kept of it now."""
        self.kv.look_up(seq, seq.prompt_tokens - 1)  # at least one is left to compute
        self.waiting_tokens += seq.computed - seq.kept_tokens
        seq.computed = seq.kept_tokens
        return seq

    def hide_waiting(self) -> None:
        """Let nobody be admitted until `show_waiting`; prompts that were begun go on."""
        self._hidden, self.waiting = self.waiting, deque()

    def show_waiting(self) -> None:
        """Show who was hidden, and who was preempted meanwhile in his place."""
        preempted, self.waiting = self.waiting, self._hidden
        for seq in preempted if self.preempted_last else reversed(preempted):
            self._line_up(seq, last=self.preempted_last)

    def reorder(self, request_ids: abc.Iterable[int]) -> None:
        """Let those that wait do so in another order; ValueError unless it is all of them."""
        waiting = [self.live[request_id] for request_id in request_ids]
        if {*waiting} != {*self.waiting} or len(waiting) != len(self.waiting):
            raise ValueError("another order names all that wait, once each")
        self.waiting = deque(waiting)

    def resume(self, seq: Sequence) -> None:
        """Give a sequence that is about to leave the queue what is kept of it."""
        self.kv.resume(self.looked_up(seq))
        if not seq.epoch:
            seq.cached_tokens = seq.kept_tokens

    def schedule_chunk(self, seq: Sequence, stop: int) -> Chunk:
        """Send the tokens of a sequence up to `stop`, for which it holds pages."""
        start = seq.computed
        last = stop == seq.prompt_tokens
        goes_on = self.pipelined_chunks and not last
        if start == seq.kept_tokens:
            self._leave_queue(seq)
            if not seq.epoch:
                seq.first_scheduled_s = self.now_s
            self.admitted[seq.request.request_id] = seq
            if self.by_priority:  # then who comes first runs later
                self._number(seq)
            self.kv.tokens += start
            if goes_on:
                insort(self.partials, seq, key=_by_arrival)
        elif not goes_on:
            self.partials.remove(seq)
        seq.computed = stop
        if last:
            seq.prefilled_s = self.now_s
        seq.chunks_in_flight += 1
        self.waiting_tokens -= stop - start
        if self.kv.late:
            self._unpublished += [seq] * goes_on
        elif self.kv.keeps:
            self.kv.publish(seq, stop)
        return Chunk(seq, start, stop, last, seq.epoch)

    def cut(self, seq: Sequence, stop: int) -> None:
        """Let the prefill of a sequence end at `stop`; what it leaves out is not computed again."""
        seq.left_out = seq.prompt_tokens - stop
        self.waiting_tokens -= seq.left_out
        seq.prompt_tokens = stop

    def return_chunk(self, chunk: Chunk) -> bool:
        """Take a chunk back, after which the sequence may go on; return whether it was the last.

        Of a sequence that was preempted since, `deliver` takes it back.
        """
        seq = chunk.sequence
        seq.chunks_in_flight -= 1
        if chunk.epoch != seq.epoch:
            return False
        if not (chunk.last or self.pipelined_chunks or seq.aborted):
            insort(self.partials, seq, key=_by_arrival)
        return chunk.last

    def _leave_queue(self, seq: Sequence) -> None:
        if self.waiting[0] is seq:
            self.waiting.popleft()
        else:
            self.waiting.remove(seq)

    # -- decoding, and the end ------------------------------------------------------------------

    def token_of_prefill(self, seq: Sequence, now_s: float) -> bool:
        """Record a token that a sequence gets alone; return whether it is the request's last."""
        self._record_token(seq, now_s)
        seq.generated += 1
        return seq.generated >= seq.request.output_tokens

    def _record_token(self, seq: Sequence, now_s: float) -> None:
        if seq.first_token_s <= now_s:
            self.gap_s.append(now_s - seq.last_token_s)
            self.gap_count.append(1)
        else:  # not a number: it is the first
            seq.first_token_s = now_s
        seq.last_token_s = now_s

    def _record_tokens(self, sequences: list[Sequence], now_s: float) -> None:
        """Record a token of each; those with the same time since the last are counted together."""
        for last_s, alike in groupby(sequences, _LAST_TOKEN_S):
            if not last_s <= now_s:  # not a number: these are the first
                for seq in alike:
                    self._record_token(seq, now_s)
                continue
            count = 0
            for seq in alike:
                seq.last_token_s = now_s
                count += 1
            self.gap_s.append(now_s - last_s)
            self.gap_count.append(count)

    def empty_group(self) -> DecodeGroup:
        """Return a group of decodes without members."""
        if self.ahead:
            return AheadGroup()
        if self.speculation is None:
            return DecodeGroup()
        return SpeculativeGroup(self.speculation.tokens_per_step)

    def start_decoding(self, seq: Sequence, group: DecodeGroup) -> None:
        """Let a sequence whose prompt is computed join a group of decodes."""
        seq.decoding = True
        group.join(seq, seq.prompt_tokens, self.kv.pool.page_tokens)
        self.running_decodes += 1

    def row_key(self, seq: Sequence) -> float:
        """Order the rows of a batch by when they were prompts in one."""
        return -seq.prefilled_s if self.newest_first else seq.prefilled_s

    def rows_of(self, batch: MicroBatch, finished: abc.Sequence[Sequence]) -> list[Sequence]:
        """Return those that finish and those that begin to decode in the order of the rows."""
        begun = [chunk.sequence for chunk in batch.chunks if chunk.last]
        begun = [seq for seq in begun if seq.pages and seq.computed == seq.prompt_tokens]
        return sorted(dict.fromkeys([*begun, *finished]), key=self.row_key)

    def publish_decodes(self, group: DecodeGroup) -> None:
        """Make the pages findable that the next step of a group fills, in order of admission.

        Where decodes run ahead, a page is full once its last token is known.
        """
        late = self.late_tokens()
        for number, seq in self.admitted.items():
            if seq in group:
                self._publish_full(seq, group.context_of(seq) + 1 - late[number])

    def _publish_full(self, seq: Sequence, tokens: int) -> None:
        """Make the pages of so many tokens findable if the last of them is full with these."""
        if tokens % self.kv.pool.page_tokens == 0:
            self.kv.publish(seq, tokens)

    def retire(self, seq: Sequence, now_s: float) -> None:
        """End a sequence; its pages are free unless another engine is to fetch them."""
        held_tokens = seq.held_tokens  # what went on ahead of the last token too
        seq.generated = min(seq.generated, seq.request.output_tokens)
        seq.completion_s = now_s
        self.completed += 1
        self.completed_tokens += seq.generated
        if seq.pages:
            self.kv.publish(seq, held_tokens)
        else:  # preempted, and the last token was on its way
            self.leave_queues(seq)
        self.forget(seq, held_tokens, keeps_pages=self.keeps_pages)

    def forget(self, seq: Sequence, held_tokens: int, *, keeps_pages: bool = False) -> None:
        """Let go a sequence that is in no queue and no micro-batch, and its pages, if any."""
        request_id = seq.request.request_id
        del self.live[request_id]
        if not seq.pages:
            return
        if keeps_pages:
            self.moving[request_id] = seq
        else:
            self.kv.release(seq, held_tokens)
        del self.admitted[request_id]
        self.running_decodes -= seq.decoding

    # -- a client that leaves -------------------------------------------------------------------

    def leave_queues(self, seq: Sequence) -> None:
        """Take a sequence out of where it could be scheduled from; it still holds its pages."""
        if seq.decoding:
            for _, group in self.resting:
                if seq in group:
                    group.leave(seq)
            if (ready := self.ready_with(seq)) is not None:
                ready.remove(seq)
            return
        self.waiting_tokens -= seq.remaining
        if not seq.pages:
            self._leave_queue(seq)
        elif seq in self.partials:
            self.partials.remove(seq)

    def ready_with(self, seq: Sequence) -> ReadyQueue | None:
        """Return the ready decodes of which a sequence is one; None for one that is not ready."""
        return next((ready for ready in self.slots if seq in ready), None)

    def end_early(
        self,
        finished: list[Sequence],
        chunks: abc.Sequence[Chunk],
        group: DecodeGroup | None,
        stopped: abc.Collection[int],
    ) -> list[Sequence]:
        """Take those that stopped or were aborted out of what a micro-batch brought back.

        Return all that finished; aborted ones did not.
        """
        if group is not None:
            ended = {*stopped, *self.aborted}
            members = [seq for seq in group.sequences() if seq.request.request_id in ended]
            for seq in members:
                group.leave(seq)
            finished += members
        gone = [seq for seq in finished if seq.aborted]
        mine = (chunk.sequence for chunk in chunks if chunk.sequence.epoch == chunk.epoch)
        gone += (seq for seq in mine if seq.aborted)
        for seq in dict.fromkeys(gone):
            if not seq.chunks_in_flight:
                self.aborted.remove(seq.request.request_id)
                self.forget(seq, seq.held_tokens)
        return [seq for seq in finished if not seq.aborted]

    # -- preemption -----------------------------------------------------------------------------

    def victim(self, rule: str, forming: DecodeGroup | None = None) -> Sequence:
        """Choose among what is not in flight: ready decodes, those `forming`, partials by arrival.

        `rule` is a `scheduling.Victim`. Of those that returned together, the last one is the last
        returned. The latest admitted may be in flight.
        """
        if rule == "lowest_priority":
            return max(filter(self._is_running, self.admitted.values()), key=_priority)
        if rule == "latest_admitted":
            return next(filter(self._is_running, reversed(self.admitted.values())))
        groups = [*self.ready.groups, forming] if forming is not None else self.ready.groups
        members = [(group, seq) for group in groups for seq in group.sequences()]
        if rule == "last_returned":
            return max(reversed(members), key=_last_token_s)[1]
        decoding = [seq for _, seq in members]
        if rule == "most_pages":
            return max(decoding, key=_by_pages)
        partials = [seq for seq in self.partials if not seq.chunks_in_flight]
        return max(decoding + partials, key=_by_arrival)

    def _is_running(self, seq: Sequence) -> bool:
        return not seq.aborted and (seq.decoding or not self.is_forming(seq))

    def is_forming(self, seq: Sequence) -> bool:
        """Say whether a sequence is in a micro-batch that has not been sent yet."""
        batches = self.in_flight.values()
        if seq.decoding:
            groups = [batch.decodes for batch in batches if batch.decodes is not None]
            groups += (group for _, group in self.resting)
            return self.ready_with(seq) is None and not any(seq in group for group in groups)
        sent = (chunk.sequence is seq for batch in batches for chunk in batch.chunks)
        return sum(sent) < seq.chunks_in_flight

    def preempt(self, seq: Sequence, group: DecodeGroup | None = None) -> None:
        """Free all pages and queue the sequence first; its output is part of its next prompt.

        `group` is what is forming, which may hold the sequence. Where what is in flight of it still
        counts when it returns, the sequence waits so long.
        """
        if group is not None and seq in group:
            group.leave(seq)
        else:
            self.leave_queues(seq)
        seq.owed = seq.chunks_in_flight if self.delivers else 0
        late_tokens = self.recall(seq, delivers=self.delivers)
        held_tokens = seq.held_tokens
        if self.ahead:
            seq.generated -= late_tokens
        else:
            held_tokens += late_tokens
        self.kv.suspend(seq, held_tokens)
        self.owed += seq.owed
        del self.admitted[seq.request.request_id]
        self.running_decodes -= seq.decoding
        self.preemptions += 1
        seq.decoding = False
        seq.left_out = 0
        seq.prompt_tokens = seq.request.prompt_tokens + seq.generated
        seq.epoch += 1
        seq.computed = seq.kept_tokens
        self._wait(seq, last=self.preempted_last)

    def recall(self, seq: Sequence, *, delivers: bool = False) -> int:
        """Take a sequence out of what is in flight; return how many tokens of it are.

        They are lost, or `delivers` later what is in them of output. Where decodes run ahead, the
        sequence has counted them already.
        """
        late_tokens = 0
        for batch in self.in_flight.values():
            group, tokens = batch.decodes, 0
            decodes = group is not None and seq in group
            if batch.ahead is not None:
                tokens = int(batch.ahead.pop(seq.request.request_id, None) is not None)
            elif group is not None and decodes:
                group.leave(seq)
                tokens = min(group.stride, seq.request.output_tokens - seq.generated)
            if tokens and decodes and delivers:
                seq.owed += 1
                batch.preempted = (*batch.preempted, (seq, tokens))
            late_tokens += tokens
        return late_tokens

    # -- decodes that go again before their last token is there ---------------------------------

    def run_ahead(self, batch: MicroBatch) -> None:
        """Let what is sent go on as if it were back, unless its output has reached its limit."""
        group = batch.decodes or AheadGroup()
        if batch.decodes is not None:
            assert isinstance(group, AheadGroup)
            batch.decodes = group.sent()
        group.step(self.now_s, [], [])
        batch.ahead = {}
        if batch.decodes is not None:
            tick, going = group.tick, group.members
            batch.ahead = {
                number: (seq, seq.generated + (tick - seq.joined_tick if number in going else 0))
                for number, seq in batch.decodes.members.items()
            }
        for chunk in batch.chunks:
            seq = chunk.sequence
            if chunk.last:
                seq.generated += 1
                batch.ahead[seq.request.request_id] = (seq, seq.generated)
                if seq.generated < seq.request.output_limit:
                    self.start_decoding(seq, group)
        if group.members:
            self.resting.append((self.asked + self.ahead, group))

    def catch_up(self, batch: MicroBatch, now_s: float) -> list[Sequence]:
        """Record the tokens that decodes, gone ahead, get now; return those that end."""
        assert batch.ahead is not None
        for chunk in batch.chunks:
            self.return_chunk(chunk)
        self._record_tokens([seq for seq, _ in batch.ahead.values()], now_s)
        if self.kv.append_only:
            for seq, generated in batch.ahead.values():
                self._publish_full(seq, seq.request.prompt_tokens + generated - 1)
        ended = [seq for seq, count in batch.ahead.values() if count == seq.request.output_tokens]
        for seq in ended:
            self.leave_queues(seq)
            self.recall(seq)
        return ended

    def late_tokens(self) -> Counter[int]:
        """Return how many tokens of whom are in flight, where decodes run ahead of them."""
        return Counter(chain(*(batch.ahead or () for batch in self.in_flight.values())))

    def is_lost(self, seq: Sequence, tokens: int = 1) -> bool:
        """Say whether tokens that come now are computed again, as pages to fetch would be gone."""
        is_last = seq.generated + tokens >= seq.request.output_tokens
        return is_last and self.keeps_pages and not seq.pages

    def deliver(
        self, batch: MicroBatch, now_s: float, stopped: abc.Collection[int]
    ) -> list[Sequence]:
        """Record what a micro-batch yields sequences preempted since; return those that end."""
        chunks = (chunk for chunk in batch.chunks if chunk.epoch != chunk.sequence.epoch)
        late = [*batch.preempted, *((chunk.sequence, int(chunk.last)) for chunk in chunks)]
        finished = []
        for seq, tokens in late:
            seq.owed -= 1
            self.owed -= 1
            if seq.aborted or not tokens or self.is_lost(seq, tokens):
                continue
            seq.prompt_tokens += tokens
            self.waiting_tokens += tokens
            ended = [self.token_of_prefill(seq, now_s) for _ in range(tokens)][-1]
            if ended or seq.request.request_id in stopped:
                finished.append(seq)
        return finished


_LAST_TOKEN_S = attrgetter("last_token_s")


def _last_token_s(member: tuple[DecodeGroup, Sequence]) -> float:
    group, seq = member
    return group.last_token_of(seq)
