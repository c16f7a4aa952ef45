"""The queues of serving engines.

Decodes may go again before their last token is known (vLLM V1, SGLang), and slots take turns. What
is in flight may be preempted, requests have priorities, and caches learn late.
A policy that declares plain `Rules` never comes here.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, abc, deque
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import Chunk, MicroBatch, Notes
from evenflow.core.decodes import DecodeGroup, ReadyQueue, Sequence
from evenflow.core.queues import Free, Queues
from evenflow.engines.ahead import AheadGroup
from evenflow.engines.append_only import AppendOnlyCache
from evenflow.engines.radix import RadixCache
from evenflow.engines.speculation import ReservingGroup, Speculation

_by_arrival = attrgetter("order")


def _by_priority(seq: Sequence) -> tuple[int, float, int]:
    return *_priority(seq), seq.request.request_id


def _priority(seq: Sequence) -> tuple[int, float]:
    return seq.request.priority, seq.request.arrival_s


class Sent(Notes):
    """Notes on a micro-batch in flight: tokens that are still to be recorded.

    `ahead`: sequences that get a token where decodes run ahead, by request id, and how many tokens
    they then have. `last` of them get their last allowed one. `preempted`: sequences that were
    preempted on the way, and the tokens that each is still to get.
    """

    def __init__(self) -> None:
        self.ahead: dict[int, tuple[Sequence, int]] | None = None
        self.last: list[Sequence] = []
        self.preempted: list[tuple[Sequence, int]] = []


def ahead_of(batch: MicroBatch) -> dict[int, tuple[Sequence, int]] | None:
    """Return the tokens to record of a micro-batch; None where decodes do not run ahead."""
    return batch.notes.ahead if isinstance(batch.notes, Sent) else None


def sent_of(batch: MicroBatch) -> Sent:
    """Return the notes on a micro-batch of EngineQueues."""
    assert isinstance(batch.notes, Sent)
    return batch.notes


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(eq=False, kw_only=True)
class EngineQueues(Queues):
    """Queues that follow EngineRules.

    A decode is ready `ahead` questions after it was sent (0: once it is back). `asked` counts
    questions, `idles` how often there was nothing to serve. `slotted`: slots are asked in turn, now
    `slot`, and each has its `ready` decodes. `resting` groups run ahead, and are ready from a given
    question on. `owed`: micro-batches in flight with results of sequences that were preempted
    since. `promised_pages`: pages of all admitted requests at their output limits. `keeps_pages`:
    finished requests keep theirs for another engine to fetch. `leaving`: where the engine only
    `prefills`, requests that keep their pages until `let_go`.
    """

    ahead: int
    slotted: bool
    delivers: bool
    preempted_last: bool
    by_arrival: bool
    newest_first: bool
    by_priority: bool
    by_admission: bool
    cuts: bool
    ends_late: bool
    reserves: bool = False
    prefills: bool = False
    keeps_pages: bool = False
    asked: int = 0
    idles: int = 0
    promised_pages: int = 0
    slots: list[ReadyQueue] = field(init=False)
    slot: int = field(init=False)
    resting: deque[tuple[int, DecodeGroup]] = field(default_factory=deque)
    leaving: dict[int, Sequence] = field(default_factory=dict)
    owed: Counter[Sequence] = field(default_factory=Counter)
    _late: bool = field(init=False)  # content is known when it is computed
    _append_only: bool = field(init=False)
    _unpublished: list[Sequence] = field(default_factory=list)  # until the next question
    _row_keys: dict[Sequence, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        queues = self.num_slots if self.slotted else 1
        self.slots = [ReadyQueue(self.kv.pool.page_tokens) for _ in range(queues)]
        self.slot = queues - 1
        self.ready = self.slots[self.slot]
        self._late = isinstance(self.kv.pool, RadixCache)
        self._append_only = isinstance(self.kv.pool, AppendOnlyCache)
        if self.prefills:
            self.free = self._keep
        if self.delivers:
            self.victims += ("latest_admitted", "lowest_priority")

    def _keep(self, seq: Sequence, held_tokens: int) -> None:
        self.leaving[seq.request.request_id] = seq

    def let_go(self, seq: Sequence) -> None:
        """Publish the full pages of a leaving request to the prefix cache, and free its pages."""
        del self.leaving[seq.request.request_id]
        self.kv.publish(seq, seq.held_tokens)
        self.kv.release(seq, seq.held_tokens)

    # -- the four hooks -------------------------------------------------------------------------

    def begin(self) -> None:
        """Count a call of the policy; move to the next slot, and make rested decodes ready."""
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

    def sent(self, batch: MicroBatch) -> None:
        """Put a micro-batch in flight; perhaps its decodes run ahead."""
        super().sent(batch)
        if self.slotted:
            batch.slot = self.slot
            if batch.decodes is not None:
                batch.decodes.slot = self.slot
        batch.notes = sent = Sent()
        if self.ahead:
            self._run_ahead(batch, sent)

    def take_back(self, batch: MicroBatch, stopped: abc.Collection[int]) -> list[Sequence]:
        """Complete a micro-batch, in which requests `stopped` early; return finished sequences."""
        sent, group = sent_of(batch), batch.decodes
        finished: list[Sequence] = []
        if sent.ahead is not None:
            group, finished = None, self._catch_up(batch, sent.ahead)
        else:
            if group is not None:
                finished = group.step(self.now_s, self.gap_s, self.gap_count)
            if batch.chunks:
                group = self.take_chunks(batch, group, finished)
        if self.owed:
            finished += self._deliver(batch, sent, stopped)
        if stopped or self.aborted:
            finished = self.end_early(finished, batch.chunks, group, stopped)
        for seq in self._rows_of(batch, finished) if self._late else finished:
            if seq in finished:
                self.retire(seq)
            else:
                self.kv.publish(seq, seq.prompt_tokens)
        if group is not None and group.members:
            group.slot = batch.slot
            self.slots[batch.slot if self.slotted else 0].append(group)
        return finished

    def may_preempt(self, seq: Sequence) -> str:
        """Return why a sequence cannot be preempted now, or nothing."""
        sent_too = self.delivers or (self.ahead and seq.decoding)
        running = seq.request.request_id in self.admitted
        if not running or (seq.chunks_in_flight and not sent_too):
            return "which holds no pages or is in flight"
        if seq.decoding and not self.delivers and self._ready_with(seq) is None:
            return "which is in flight"
        if seq.aborted or (self.delivers and self._is_forming(seq)):
            return "after it was aborted or planned"
        return ""

    # -- waiting, and prefilled in chunks -------------------------------------------------------

    def wait(self, seq: Sequence, *, last: bool) -> None:
        """Queue a sequence, at the front or the back."""
        if self._late:  # a lookup would be a use
            self.line_up(seq, last=last)
            self.waiting_tokens += seq.remaining
        else:
            super().wait(seq, last=last)

    def line_up(self, seq: Sequence, *, last: bool) -> None:
        if self.by_priority or self.by_arrival:
            insort(self.waiting, seq, key=_by_priority if self.by_priority else _by_arrival)
        else:
            super().line_up(seq, last=last)

    def may_prefill(self, seq: Sequence) -> str:
        """Return why no chunk of a sequence may be sent now, or nothing."""
        if seq in self.owed:
            return "prefills while an output of it is in flight"
        return super().may_prefill(seq)

    def cut(self, seq: Sequence, stop: int) -> bool:
        """End the prefill of a sequence at `stop`; return whether the rules allow it."""
        if self.cuts:
            seq.left_out = seq.prompt_tokens - stop
            self.waiting_tokens -= seq.left_out
            seq.prompt_tokens = stop
        return self.cuts

    def schedule_chunk(self, seq: Sequence, stop: int) -> Chunk:
        """Schedule the tokens of a sequence up to `stop`, for which it holds pages."""
        chunk = super().schedule_chunk(seq, stop)
        if chunk.last:
            self._row_keys[seq] = self.asked, 0
        return chunk

    def admit(self, seq: Sequence) -> None:
        """Take a sequence out of the queue: it runs from now on."""
        super().admit(seq)
        self.promised_pages += self.most_pages(seq)
        if self.by_admission:  # the first to run is the first to decode
            self.number(seq)

    def most_pages(self, seq: Sequence) -> int:
        """Return the pages of a sequence with its prompt and all the output that is allowed."""
        return self.kv.pool.pages_for(seq.request.prompt_tokens + seq.request.output_limit)

    def take_pages(self, seq: Sequence, tokens: int) -> None:
        """Give a running sequence pages for its next `tokens`, and make full ones findable."""
        pool, known = self.kv.pool, seq.computed + tokens
        if not seq.decoding:
            seq.pages += pool.allocate(max(pool.pages_for(known) - len(seq.pages), 0))
        else:
            group = seq.group
            known = group.context_of(seq) + tokens - self.late_tokens()[seq.request.request_id]
            due = group.due_pages()
            if seq in due and group.stride == 1:
                group.page_at[group.tick] = [seq]
                group.grow(pool.allocate(1), pool.page_tokens)
                if len(due) > 1:
                    group.page_at[group.tick] = [other for other in due if other is not seq]
        self.kv.publish(seq, known)

    def publish_chunk(self, seq: Sequence, stop: int, *, last: bool) -> None:
        """Make the full pages of a chunk findable: now, or with the next question."""
        if not self._late:
            super().publish_chunk(seq, stop, last=last)
        elif self.pipelined_chunks and not last:
            self._unpublished.append(seq)

    def return_chunk(self, chunk: Chunk) -> bool:
        """Complete a chunk, after which the sequence may go on; return whether it was the last.

        For a sequence that was preempted since, `_deliver` completes it.
        """
        if chunk.epoch == chunk.sequence.epoch:
            return super().return_chunk(chunk)
        chunk.sequence.chunks_in_flight -= 1
        return False

    # -- decoding, and the end ------------------------------------------------------------------

    def empty_group(self) -> DecodeGroup:
        """Return a group of decodes without members."""
        if self.reserves and isinstance(self.decoding, Speculation):
            return ReservingGroup(self.decoding, relayed=len(self.slots) > 1)
        return AheadGroup() if self.ahead else super().empty_group()

    def decode_groups(self) -> abc.Iterator[DecodeGroup]:
        """Iterate over all groups of running decodes, ready and in flight."""
        for ready in self.slots:
            yield from ready.groups
        for batch in self.in_flight.values():
            if batch.decodes is not None:
                yield batch.decodes

    def take_decodes(
        self, count: int, order: str, victims: str, named: abc.Sequence[Sequence] = ()
    ) -> DecodeGroup | None:
        """Take `named` ready decodes, or the first; preempt by a rule while pages are too few."""
        group = super().take_decodes(count, order, victims, named)
        if group is not None and self._append_only:
            self._publish_decodes(group)
        return group

    def _publish_decodes(self, group: DecodeGroup) -> None:
        """Make the pages findable that the next step of a group fills, in order of admission.

        Where decodes run ahead, a page is full once its last token is known.
        """
        late = self.late_tokens()
        for number, seq in self.admitted.items():
            if seq in group:
                self._publish_full(seq, group.context_of(seq) + 1 - late[number])

    def _publish_full(self, seq: Sequence, tokens: int) -> None:
        """Make the pages of `tokens` tokens findable if the last of them is full with these."""
        if tokens % self.kv.pool.page_tokens == 0:
            self.kv.publish(seq, tokens)

    def row_key(self, seq: Sequence) -> tuple[int, int]:
        """Order the rows of a batch by the questions they were prompts in, but for `order_rows`."""
        prefilled, rank = self._row_keys.get(seq, (0, 0))
        return (-prefilled if self.newest_first else prefilled), rank

    def order_rows(self, members: abc.Sequence[Sequence]) -> None:
        """Put all decodes of a slot into this order of rows, before those to come."""
        latest = max((self._row_keys[seq][0] for seq in members), default=0)
        for rank, seq in enumerate(members):
            self._row_keys[seq] = latest, rank

    def _rows_of(self, batch: MicroBatch, finished: abc.Sequence[Sequence]) -> list[Sequence]:
        """Return sequences that finish or begin to decode in the order of the rows."""
        begun = [chunk.sequence for chunk in batch.chunks if chunk.last]
        begun = [seq for seq in begun if seq.pages and seq.computed == seq.prompt_tokens]
        return sorted(dict.fromkeys([*begun, *finished]), key=self.row_key)

    def retire(self, seq: Sequence) -> None:
        """End a sequence that has all its output, and keep KV of its last token if it is there."""
        excess = max(seq.generated - seq.request.output_tokens, 0)
        if self._append_only and excess:  # of a step in vain nothing is found again
            self.kv.tokens -= excess
        elif not self.ahead and excess:  # ahead, it is counted
            self.kv.publish(seq, seq.held_tokens)
        if self._append_only or not self.ahead:
            seq.generated -= excess
        super().retire(seq)

    def forget(self, seq: Sequence, held_tokens: int, free: Free) -> None:
        """Remove a sequence that is in no queue and no micro-batch, and its pages, if any."""
        self.promised_pages -= self.most_pages(seq) if seq.pages else 0
        super().forget(seq, held_tokens, free)
        self._row_keys.pop(seq, None)

    def abort(self, seq: Sequence) -> None:
        """End a sequence early: at once, or when what is in flight of it returns."""
        if self.ahead or seq in self.owed:  # no micro-batch computes with its pages
            seq.aborted = True
            self.leave_queues(seq)
            late_tokens = self._recall(seq)
            self.drop(seq)
            seq.generated -= late_tokens
        else:
            super().abort(seq)

    def leave_queues(self, seq: Sequence) -> None:
        """Remove a sequence from the queues it could be scheduled from; it keeps its pages."""
        if seq.decoding:
            for _, group in self.resting:
                if seq in group:
                    group.leave(seq)
            if (ready := self._ready_with(seq)) is not None:
                ready.remove(seq)
        else:
            super().leave_queues(seq)

    def _ready_with(self, seq: Sequence) -> ReadyQueue | None:
        """Return the queue of ready decodes that holds a sequence; None if it is not ready."""
        return next((ready for ready in self.slots if seq in ready), None)

    # -- preemption, also of what is in flight --------------------------------------------------

    def victim(self, rule: str, forming: DecodeGroup | None = None) -> Sequence:
        """Choose a sequence to preempt by one of `victims`; the last two may be in flight."""
        if rule == "lowest_priority":
            return max(filter(self._is_running, self.admitted.values()), key=_priority)
        if rule == "latest_admitted":
            return next(filter(self._is_running, reversed(self.admitted.values())))
        return super().victim(rule, forming)

    def _is_running(self, seq: Sequence) -> bool:
        return not seq.aborted and (seq.decoding or not self._is_forming(seq))

    def _is_forming(self, seq: Sequence) -> bool:
        """Say whether a sequence is in a micro-batch that has not been sent yet."""
        batches = self.in_flight.values()
        if seq.decoding:
            groups = [batch.decodes for batch in batches if batch.decodes is not None]
            groups += (group for _, group in self.resting)
            return self._ready_with(seq) is None and not any(seq in group for group in groups)
        sent = (chunk.sequence is seq for batch in batches for chunk in batch.chunks)
        return sum(sent) < seq.chunks_in_flight

    def preempt(self, seq: Sequence, group: DecodeGroup | None = None) -> None:
        """Free all pages and queue the sequence; its output is part of its next prompt.

        Where its tokens in flight still count on return, the sequence waits for them.
        """
        self.withdraw(seq, group)
        delivers = self.delivers
        if delivers and seq.chunks_in_flight:
            self.owed[seq] = seq.chunks_in_flight
        late_tokens = self._recall(seq, delivers=delivers)
        held_tokens = seq.held_tokens
        if self.ahead:
            seq.generated -= late_tokens
        else:
            held_tokens += late_tokens
        if not (self._late or self._append_only):
            self.kv.publish(seq, held_tokens)
        self.promised_pages -= self.most_pages(seq)
        self.suspend(seq, held_tokens, last=self.preempted_last)

    def _recall(self, seq: Sequence, *, delivers: bool = False) -> int:
        """Remove a sequence from the micro-batches in flight; return its number of tokens there.

        They are lost, or `delivers` later what is in them of output. Where decodes run ahead, the
        sequence has counted them already.
        """
        late_tokens = 0
        for batch in self.in_flight.values():
            group, sent, tokens = batch.decodes, sent_of(batch), 0
            decodes = group is not None and seq in group
            if sent.ahead is not None:
                tokens = int(sent.ahead.pop(seq.request.request_id, None) is not None)
            elif group is not None and decodes:
                group.leave(seq)
                tokens = min(group.stride, seq.request.output_tokens - seq.generated)
            if tokens and decodes and delivers:
                self.owed[seq] += 1
                sent.preempted.append((seq, tokens))
            late_tokens += tokens
        return late_tokens

    def _deliver(
        self, batch: MicroBatch, sent: Sent, stopped: abc.Collection[int]
    ) -> list[Sequence]:
        """Record output of sequences preempted since they were sent; return finished sequences."""
        chunks = (chunk for chunk in batch.chunks if chunk.epoch != chunk.sequence.epoch)
        finished = []
        for seq, tokens in [*sent.preempted, *((c.sequence, int(c.last)) for c in chunks)]:
            self.owed[seq] -= 1
            if not self.owed[seq]:
                del self.owed[seq]
            in_vain = seq.request.request_id not in self.live  # it has ended
            if in_vain or seq.aborted or not tokens or self.is_lost(seq, tokens):
                continue
            seq.prompt_tokens += tokens
            self.waiting_tokens += tokens
            if self.ends_late and seq.generated + tokens >= seq.request.output_tokens:
                seq.generated += tokens
                continue
            ended = [self.token_of_prefill(seq) for _ in range(tokens)][-1]
            if ended or seq.request.request_id in stopped:
                finished.append(seq)
        return finished

    def is_lost(self, seq: Sequence, tokens: int = 1) -> bool:
        """Say whether last tokens are computed again, as the KV for another engine was freed."""
        is_last = seq.generated + tokens >= seq.request.output_tokens
        return is_last and self.keeps_pages and not seq.pages

    # -- decodes that go again before their last token is there ---------------------------------

    def _run_ahead(self, batch: MicroBatch, sent: Sent) -> None:
        """Let sent decodes go on as if they were back, unless their output is at its limit."""
        group, decodes = batch.decodes or AheadGroup(), None
        group.slot = batch.slot
        if batch.decodes is not None:
            assert isinstance(group, AheadGroup)
            batch.decodes = decodes = group.sent(batch)
        sent.last = group.step(self.now_s, [], [])
        sent.ahead = {}
        if decodes is not None:
            tick, going = group.tick, group.members
            sent.ahead = {
                number: (seq, seq.generated + (tick - seq.joined_tick if number in going else 0))
                for number, seq in decodes.members.items()
            }
        for chunk in batch.chunks:
            seq = chunk.sequence
            if chunk.last:
                seq.generated += 1
                sent.ahead[seq.request.request_id] = (seq, seq.generated)
                if seq.generated < seq.request.output_limit:
                    self.start_decoding(seq, group)
                else:
                    sent.last.append(seq)
        if group.members:
            self.resting.append((self.asked + self.ahead, group))

    def _catch_up(
        self, batch: MicroBatch, ahead: dict[int, tuple[Sequence, int]]
    ) -> list[Sequence]:
        """Record the tokens that decodes ran ahead of; return finished sequences."""
        for chunk in batch.chunks:
            self.return_chunk(chunk)
        self._record_tokens([seq for seq, _ in ahead.values()])
        if self._append_only:
            for seq, generated in ahead.values():
                self._publish_full(seq, seq.request.prompt_tokens + generated - 1)
        ended = [seq for seq, count in ahead.values() if count >= seq.request.output_tokens]
        for seq in ended:
            self.leave_queues(seq)
            self._recall(seq)
        return ended

    def _record_tokens(self, sequences: list[Sequence]) -> None:
        """Record a token of each; equal times since the last are counted together."""
        now_s = self.now_s
        for last_s, alike in groupby(sequences, _LAST_TOKEN_S):
            if not last_s <= now_s:  # not a number: these are the first
                for seq in alike:
                    self.record_token(seq)
                continue
            count = 0
            for seq in alike:
                seq.last_token_s = now_s
                count += 1
            self.gap_s.append(now_s - last_s)
            self.gap_count.append(count)

    def ending(self) -> list[Sequence]:
        """Return the decodes that run ahead, with their last allowed token in flight."""
        if not self.ahead:
            return []
        sent = map(sent_of, self.in_flight.values())
        lasts = ((batch.ahead, seq) for batch in sent for seq in batch.last)
        return [seq for ahead, seq in lasts if ahead and seq.request.request_id in ahead]

    def late_tokens(self) -> Counter[int]:
        """Count the tokens in flight of each request, where decodes run ahead of them."""
        if not self.ahead:
            return Counter()
        sent = map(sent_of, self.in_flight.values())
        return Counter(chain(*(batch.ahead or () for batch in sent)))


_LAST_TOKEN_S = attrgetter("last_token_s")
