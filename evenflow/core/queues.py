"""The queues of one engine: the state of each sequence, and its transitions.

A sequence waits, is prefilled in chunks, decodes in a group, and ends; preempted, it waits again.
Knows no policy and no clock: the Batcher says what happens.
"""

from __future__ import annotations

from bisect import insort
from collections import abc, deque
from dataclasses import dataclass, field

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import Chunk, MicroBatch
from evenflow.core.decodes import DecodeGroup, Decoding, ReadyQueue, Sequence, by_arrival
from evenflow.core.kv import KvCache
from evenflow.core.request import Request

Free = abc.Callable[[Sequence, int], None]  # gives back pages with that many tokens


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(eq=False)
class Queues:
    """Sequences of an engine by state, and counters.

    `live`: all unfinished requests. `waiting`: prompts without pages. `partials`: prompts with a
    next chunk to schedule, by arrival. `ready`: decodes not in flight. `in_flight`: micro-batches
    in the pipeline. `admitted`: requests with pages, in order of admission. `aborted`: ids that end
    once their micro-batches return. `gap_s`, `gap_count`: seconds between tokens, and for how many
    requests. `batches` were sent, in `num_slots` slots round-robin.
    """

    kv: KvCache
    decoding: Decoding
    pipelined_chunks: bool = False
    num_slots: int = 1
    now_s: float = 0.0
    batches: int = 0
    waiting: deque[Sequence] = field(default_factory=deque)
    partials: list[Sequence] = field(default_factory=list)
    in_flight: dict[int, MicroBatch] = field(default_factory=dict)
    live: dict[int, Sequence] = field(default_factory=dict)
    admitted: dict[int, Sequence] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    waiting_tokens: int = 0
    running_decodes: int = 0
    preemptions: int = 0
    completed: int = 0
    completed_tokens: int = 0
    gap_s: list[float] = field(default_factory=list)
    gap_count: list[int] = field(default_factory=list)
    victims: tuple[str, ...] = ("latest_arrived", "last_returned", "most_pages")  # to preempt
    _arrived: int = 0
    ready: ReadyQueue = field(init=False)
    free: Free = field(init=False)  # pages of what ended

    def __post_init__(self) -> None:
        self.ready = ReadyQueue(self.kv.pool.page_tokens)
        self.free = self.kv.release

    # -- the four hooks -------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a question to the policy."""

    def sent(self, batch: MicroBatch) -> None:
        """Put a micro-batch in flight."""
        if self.kv.copies:
            self.kv.charge(batch)
        self.in_flight[batch.batch_id] = batch
        batch.slot, batch.num_active = self.batches % self.num_slots, len(self.admitted)
        if batch.decodes is not None:
            batch.decodes.slot = batch.slot
        self.batches += 1

    def take_back(self, batch: MicroBatch, stopped: abc.Collection[int]) -> list[Sequence]:
        """Complete a micro-batch, in which requests `stopped` early; return finished sequences."""
        group, finished = batch.decodes, []
        if group is not None:
            finished = group.step(self.now_s, self.gap_s, self.gap_count)
        if batch.chunks:
            group = self.take_chunks(batch, group, finished)
        if stopped or self.aborted:
            finished = self.end_early(finished, batch.chunks, group, stopped)
        for seq in finished:
            self.retire(seq)
        if group is not None and group.members:
            group.slot = batch.slot
            self.ready.append(group)
        return finished

    def may_preempt(self, seq: Sequence) -> str:
        """Return why a sequence cannot be preempted now, or nothing."""
        if seq.request.request_id not in self.admitted or seq.chunks_in_flight:
            return "which holds no pages or is in flight"
        if seq.decoding and seq not in self.ready:
            return "which is in flight"
        return ""

    # -- waiting, and prefilled in chunks -------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Queue a request."""
        seq = Sequence(request, request.prompt_tokens)
        self.enter(seq)
        self.wait(seq, last=True)

    def enter(self, seq: Sequence) -> None:
        """Count a sequence among the live, the last to arrive."""
        self.number(seq)
        self.live[seq.request.request_id] = seq

    def number(self, seq: Sequence) -> None:
        seq.order = self._arrived
        self._arrived += 1

    def wait(self, seq: Sequence, *, last: bool) -> None:
        """Queue a sequence, at the front or the back."""
        self.line_up(seq, last=last)
        self.waiting_tokens += seq.remaining
        self.looked_up(seq)

    def line_up(self, seq: Sequence, *, last: bool) -> None:
        (self.waiting.append if last else self.waiting.appendleft)(seq)

    def looked_up(self, seq: Sequence) -> Sequence:
        """Return a waiting sequence, updated with what is kept of it now."""
        self.kv.look_up(seq, seq.prompt_tokens - 1)  # at least one is left to compute
        self.waiting_tokens += seq.computed - seq.kept_tokens
        seq.computed = seq.kept_tokens
        return seq

    def resume(self, sequences: abc.Iterable[Sequence | None]) -> None:
        """Give waiting sequences their kept KV, before pages for others evict it."""
        for seq in dict.fromkeys(sequences):
            if seq is not None and not seq.pages:
                self.kv.resume(self.looked_up(seq))
                if not seq.epoch:
                    seq.cached_tokens = seq.kept_tokens

    def may_prefill(self, seq: Sequence) -> str:
        """Return why no chunk of a sequence may be sent now, or nothing."""
        if seq.chunks_in_flight and not self.pipelined_chunks:
            return "prefills while an earlier chunk is in flight"
        return ""

    def cut(self, seq: Sequence, stop: int) -> bool:
        """End the prefill of a sequence at `stop`; return whether the rules allow it."""
        return False

    def schedule_chunk(self, seq: Sequence, stop: int) -> Chunk:
        """Schedule the tokens of a sequence up to `stop`, for which it holds pages."""
        start, last = seq.computed, stop == seq.prompt_tokens
        goes_on = self.pipelined_chunks and not last
        if start == seq.kept_tokens:
            self.admit(seq)
            if goes_on:
                insort(self.partials, seq, key=by_arrival)
        elif not goes_on:
            self.partials.remove(seq)
        seq.computed = stop
        seq.chunks_in_flight += 1
        self.waiting_tokens -= stop - start
        if self.kv.keeps:
            self.publish_chunk(seq, stop, last=last)
        return Chunk(seq, start, stop, last, seq.epoch)

    def admit(self, seq: Sequence) -> None:
        """Take a sequence out of the queue: it runs from now on."""
        self.waiting.remove(seq)
        if not seq.epoch:
            seq.first_scheduled_s = self.now_s
        self.admitted[seq.request.request_id] = seq
        self.kv.tokens += seq.computed

    def publish_chunk(self, seq: Sequence, stop: int, *, last: bool) -> None:
        """Make the full pages of a chunk findable, from when it is scheduled."""
        self.kv.publish(seq, stop)

    def take_chunks(
        self, batch: MicroBatch, group: DecodeGroup | None, finished: list[Sequence]
    ) -> DecodeGroup | None:
        """Complete chunks; add to `finished` what ends, return the group of new decodes."""
        for chunk in batch.chunks:
            if not self.return_chunk(chunk):
                continue
            if self.token_of_prefill(chunk.sequence) or chunk.sequence.aborted:
                finished.append(chunk.sequence)
            else:
                group = self.empty_group() if group is None else group
                self.start_decoding(chunk.sequence, group)
        return group

    def return_chunk(self, chunk: Chunk) -> bool:
        """Complete a chunk, after which the sequence may go on; return whether it was the last."""
        seq = chunk.sequence
        seq.chunks_in_flight -= 1
        if not (chunk.last or self.pipelined_chunks or seq.aborted):
            insort(self.partials, seq, key=by_arrival)
        return chunk.last

    # -- decoding, and the end ------------------------------------------------------------------

    def take_decodes(
        self, count: int, order: str, victims: str, named: abc.Sequence[Sequence] = ()
    ) -> DecodeGroup | None:
        """Take `named` ready decodes, or the first; preempt by a rule while pages are too few."""
        ready, pool = self.ready, self.kv.pool
        group = ready.take_rows(named) if named else ready.take(count, order)
        if group.stride == 1 and group.tick not in group.page_at:
            return group
        due = group.due_pages()
        while len(due) > pool.free_pages:
            self.preempt(self.victim(victims, group), group)
            group = ready.top_up(group, count, order)
            due = group.due_pages()
        if due:
            group.grow(pool.allocate(len(due)), pool.page_tokens)
        return group if group.members else None

    def token_of_prefill(self, seq: Sequence) -> bool:
        """Record a token outside a group's step; return whether it is the request's last."""
        self.record_token(seq)
        seq.generated += 1
        return seq.generated >= seq.request.output_tokens

    def record_token(self, seq: Sequence) -> None:
        now_s = self.now_s
        if seq.first_token_s <= now_s:
            self.gap_s.append(now_s - seq.last_token_s)
            self.gap_count.append(1)
        else:  # not a number: it is the first
            seq.first_token_s = now_s
        seq.last_token_s = now_s

    def empty_group(self) -> DecodeGroup:
        """Return a group of decodes without members."""
        return self.decoding.group()

    def start_decoding(self, seq: Sequence, group: DecodeGroup) -> None:
        """Add a sequence with a computed prompt to a group of decodes."""
        seq.decoding = True
        group.join(seq, seq.prompt_tokens, self.kv.pool.page_tokens)
        self.running_decodes += 1

    def decode_groups(self) -> abc.Iterator[DecodeGroup]:
        """Iterate over all groups of running decodes, ready and in flight."""
        yield from self.ready.groups
        for batch in self.in_flight.values():
            if batch.decodes is not None:
                yield batch.decodes

    def retire(self, seq: Sequence) -> None:
        """End a sequence that has all its output."""
        held_tokens = seq.held_tokens
        seq.generated = min(seq.generated, seq.request.output_tokens)
        seq.completion_s = self.now_s
        self.completed += 1
        self.completed_tokens += seq.generated
        if seq.pages:
            self.kv.publish(seq, held_tokens)
        else:
            self.leave_queues(seq)
        self.forget(seq, held_tokens, self.free)

    def forget(self, seq: Sequence, held_tokens: int, free: Free) -> None:
        """Remove a sequence that is in no queue and no micro-batch, and its pages, if any."""
        request_id = seq.request.request_id
        del self.live[request_id]
        if seq.pages:
            free(seq, held_tokens)
            del self.admitted[request_id]
            self.running_decodes -= seq.decoding

    # -- a client that leaves -------------------------------------------------------------------

    def abort(self, seq: Sequence) -> None:
        """End a sequence at once or, where micro-batches compute with its pages, on return."""
        seq.aborted = True
        self.leave_queues(seq)
        if seq.decoding and seq in seq.group:
            seq.group.settle(seq)
        elif not seq.chunks_in_flight:
            self.drop(seq)
            return
        self.aborted.add(seq.request.request_id)

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that was aborted."""
        self.forget(seq, seq.held_tokens, self.kv.release)

    def leave_queues(self, seq: Sequence) -> None:
        """Remove a sequence from the queues it could be scheduled from; it keeps its pages."""
        if seq.decoding:
            if seq in self.ready:
                self.ready.remove(seq)
            return
        self.waiting_tokens -= seq.remaining
        if not seq.pages:
            self.waiting.remove(seq)
        elif seq in self.partials:
            self.partials.remove(seq)

    def end_early(
        self,
        finished: list[Sequence],
        chunks: abc.Sequence[Chunk],
        group: DecodeGroup | None,
        stopped: abc.Collection[int],
    ) -> list[Sequence]:
        """Remove sequences that stopped or were aborted; return all that finished."""
        if group is not None:
            ended = {*stopped, *self.aborted}
            members = [seq for seq in group.sequences() if seq.request.request_id in ended]
            for seq in members:
                group.leave(seq)
            finished += members
        there = [*finished, *(c.sequence for c in chunks if c.epoch == c.sequence.epoch)]
        for seq in dict.fromkeys(there):
            if seq.aborted and not seq.chunks_in_flight:
                self.aborted.remove(seq.request.request_id)
                self.drop(seq)
        return [seq for seq in finished if not seq.aborted]

    # -- preemption -----------------------------------------------------------------------------

    def victim(self, rule: str, forming: DecodeGroup | None = None) -> Sequence:
        """Choose by a rule of `victims` among ready decodes, those `forming`, and partials."""
        groups = [*self.ready.groups, forming] if forming is not None else self.ready.groups
        decoding = [seq for group in groups for seq in group.sequences()]
        if rule == "last_returned":
            return max(reversed(decoding), key=lambda seq: seq.group.last_token_of(seq))
        if rule == "most_pages":
            return max(decoding, key=lambda seq: (len(seq.pages), seq.order))
        partials = [seq for seq in self.partials if not seq.chunks_in_flight]
        return max(decoding + partials, key=by_arrival)

    def preempt(self, seq: Sequence, group: DecodeGroup | None = None) -> None:
        """Free all pages and queue the sequence first; its output is part of its next prompt."""
        self.withdraw(seq, group)
        self.kv.publish(seq, seq.held_tokens)
        self.suspend(seq, seq.held_tokens)

    def withdraw(self, seq: Sequence, group: DecodeGroup | None) -> None:
        """Take a sequence out of the forming group or the queues."""
        if group is not None and seq in group:
            group.leave(seq)
        else:
            self.leave_queues(seq)

    def suspend(self, seq: Sequence, held_tokens: int, *, last: bool = False) -> None:
        """Free the pages of a sequence and queue it, at the front or the back."""
        self.kv.suspend(seq, held_tokens)
        del self.admitted[seq.request.request_id]
        self.running_decodes -= seq.decoding
        self.preemptions += 1
        seq.decoding = False
        seq.left_out = 0
        seq.prompt_tokens = seq.request.prompt_tokens + seq.generated
        seq.epoch += 1
        seq.computed = seq.kept_tokens
        self.wait(seq, last=last)
