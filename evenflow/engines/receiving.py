"""An engine that only decodes: requests get pages, and their KV comes from another engine."""

from __future__ import annotations

from collections import abc, deque
from typing import Any, NamedTuple

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.scheduling import Action
from evenflow.engines.queues import EngineQueues
from evenflow.engines.view import DecodeRow, EnginePrompt, EngineView


class Agreed(NamedTuple):
    """Ids of requests that all stages know: retracted ones, new ones, and those with KV `there`."""

    retracted: abc.Collection[int]
    new: abc.Collection[int]
    there: abc.Collection[int]


class ReceivingQueues(EngineQueues):
    """Queues of requests whose KV comes from another engine, in `transfer_s` seconds.

    A waiting request gets pages; while `arriving`, its KV is on its way, until the given time. Once
    it has `arrived` it joins the slot that is asked next, of `most_rows` at most, with its first
    token. Requests that `ended` with that token are the loop's to take. Retracted ones have their
    KV on the host, and arrive as soon as they have pages.
    """

    def __init__(self, *args: Any, most_rows: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most_rows = most_rows
        self.transfer_s = 0.0
        self.arriving: dict[Sequence, float] = {}
        self.arrived: deque[Sequence] = deque()
        self.ended: list[Sequence] = []
        self.last: MicroBatch | None = None
        self._rows: dict[int, int] = {}  # sent last, by slot

    def begin(self) -> None:
        """Count a question; what has arrived joins the next slot, beside what it sent last."""
        super().begin()
        self.last = None
        group = self.empty_group()
        group.slot = self.slot
        for _ in range(min(self.most_rows - self._rows.pop(self.slot, 0), len(self.arrived))):
            seq = self.arrived.popleft()
            self._row_keys[seq] = self.asked, 0
            if not seq.generated and self.token_of_prefill(seq):
                self.retire(seq)
                self.ended.append(seq)
            else:
                self.start_decoding(seq, group)
        if group.members:
            self.ready.append(group)

    def sent(self, batch: MicroBatch) -> None:
        """Put a micro-batch in flight."""
        super().sent(batch)
        self.last = batch
        self._rows[self.slot] = len(batch.decodes or ())

    def receive(self, seq: Sequence) -> None:
        """Give a waiting request pages for all its tokens but the last of its output."""
        self.waiting_tokens -= seq.remaining
        seq.prompt_tokens = seq.computed = kv_tokens(seq)
        seq.pages = self.kv.pool.allocate(self.kv.pool.pages_for(seq.computed))
        self.admit(seq)
        if seq.epoch:
            self.arrived.append(seq)
        else:
            self.arriving[seq] = self.now_s + self.transfer_s

    def arrive(self, request_ids: abc.Collection[int]) -> None:
        """Let these of the arriving requests join decodes from now on."""
        for seq in [*self.arriving]:
            if seq.request.request_id in request_ids:
                del self.arriving[seq]
                self.arrived.append(seq)

    def leave_queues(self, seq: Sequence) -> None:
        """Remove a sequence from the queues it could be scheduled from; it keeps its pages."""
        super().leave_queues(seq)
        self.arriving.pop(seq, None)
        if seq in self.arrived:
            self.arrived.remove(seq)


def kv_tokens(seq: Sequence) -> int:
    """Return the tokens of a waiting request's KV."""
    return seq.request.prompt_tokens + max(seq.generated - 1, 0)


class ReceivingView(EngineView):
    """View of an engine that only decodes."""

    def __init__(self, queues: ReceivingQueues, depth: int) -> None:
        super().__init__(queues, depth)
        self._receiving = queues

    @property
    def retracted(self) -> list[EnginePrompt]:
        """Requests that were retracted, the first of them first."""
        return [EnginePrompt(seq) for seq in self._receiving.waiting if seq.epoch]

    @property
    def new(self) -> list[EnginePrompt]:
        """Requests that have had no pages yet, in the order of arrival."""
        return [EnginePrompt(seq) for seq in self._receiving.waiting if not seq.epoch]

    @property
    def arriving(self) -> int:
        """Requests whose KV is on its way."""
        return len(self._receiving.arriving)

    @property
    def arrived(self) -> int:
        """Requests that join the next decodes."""
        return len(self._receiving.arrived)

    def paged(self, tokens: int) -> int:
        """Return the tokens of as many whole pages as `tokens` fill."""
        return self.pages_for(tokens) * self.page_tokens

    @property
    def last_rows(self) -> list[DecodeRow]:
        """Rows of the micro-batch in answer to the last question."""
        last = self._receiving.last
        group = None if last is None else last.decodes
        if group is None:
            return []
        return [DecodeRow(seq.request, group.generated_by(seq)) for seq in group.sequences()]


class Receive(Action):
    """An order to give a waiting request pages for its KV."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id

    def apply(self, batcher: Batcher) -> None:
        """Carry it out on the Batcher."""
        queues = batcher.queues
        assert isinstance(queues, ReceivingQueues)
        queues.receive(queues.live[self.request_id])


def act_on(batcher: Batcher, agreed: Agreed, now_s: float) -> bool:
    """Let the policy resume requests and give pages, then let what is there join decodes.

    Return whether anything changed.
    """
    queues = batcher.queues
    assert isinstance(queues, ReceivingQueues)
    queues.now_s = now_s
    before = len(queues.waiting), len(queues.arriving)
    for order in batcher.scheduler.take_in(batcher.view, agreed):  # type: ignore[attr-defined]
        order.apply(batcher)
    queues.arrive(agreed.there)
    return before != (len(queues.waiting), len(queues.arriving))
