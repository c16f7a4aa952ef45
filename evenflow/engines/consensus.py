"""Loops of SGLang's disaggregation on a pipeline: ranks agree on requests round a ring."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.engines.loop import EngineLoop
from evenflow.engines.queues import EngineQueues
from evenflow.engines.receiving import Agreed, ReceivingQueues, act_on
from evenflow.engines.rules import EngineRules

VAIN_ROUNDS = 4
"""Rounds of our recordings (`tools/sglang_scheduler.py`) without work; SGLang polls on in real
time.
"""


class RingLoop(EngineLoop):
    """Loop of stages that agree on requests by messages round a ring, and poll KV transfers.

    Turns without a micro-batch take no time, but look up prompts in the prefix cache. After
    `VAIN_ROUNDS` of them in all slots the loop waits for the next event, as in the recordings.
    """

    _vain_turns = 0

    def _add(self, request: Request) -> str | None:
        self._vain_turns = -1
        return super()._add(request)

    def _next(self, now_s: float) -> MicroBatch | None:
        batch = super()._next(now_s)
        self._vain_turns = self._vain_turns + 1 if batch is None else 0
        return batch

    def _is_held_up(self, preemptions: int) -> bool:
        queues = self.engines[0].queues
        assert isinstance(queues, EngineQueues)
        vain = self._vain_turns >= VAIN_ROUNDS * len(queues.slots)
        if vain:
            self._vain_turns = -1
        return vain


class PrefillLoop(RingLoop):
    """Compute prompts for another server, and end a request once all stages agree.

    Source: SGLang 0.5.23's `event_loop_pp_disagg_prefill`. One token of each request is computed
    here; its KV is then on its way for `transfer_s`. In each turn rank 0 lists what is there. The
    list passes from stage to stage with the turns. Stages - 1 turns later these requests end, and
    their pages are free. With `EngineRules.admits_late`, a request that comes goes round a
    ring, too, before it may be admitted. Turns with nothing in flight take no time.
    """

    def __init__(self, *given: Any, transfer_s: float = 0.0, **options: Any) -> None:
        super().__init__(*given, **options)
        engine = self.engines[0]
        assert isinstance(engine.queues, EngineQueues)
        self._queues = engine.queues
        self._end, self._finished = self._finished, self._send_kv
        self._admits_late = EngineRules.of(engine.scheduler).admits_late
        self._transfer_s = transfer_s
        self._came: list[Request] = []
        self._sent: deque[tuple[float, Sequence]] = deque()  # KV on its way, and until when
        self._rounds: deque[list[Request | Sequence]] = deque(maxlen=engine.depth)

    def _add(self, request: Request) -> str | None:
        """Take an arrival, of which one token is asked."""
        limit = None if request.max_new_tokens is None else 1
        request = replace(request, output_tokens=1, max_new_tokens=limit)
        if not self._admits_late:
            return super()._add(request)
        reason = self.engines[0].refusal(request)
        if reason is None:
            self._came.append(request)
        return reason

    def _send_kv(self, sequences: list[Sequence], now_s: float) -> None:
        """Send the KV of computed prompts; requests that were given up end at once."""
        for seq in sequences:
            if seq.request.request_id in self._queues.leaving:
                self._sent.append((now_s + self._transfer_s, seq))
            else:
                self._end([seq], now_s)

    @property
    def _has_work(self) -> bool:
        under_way = self._queues.leaving or self._came or any(self._rounds)
        return super()._has_work or bool(under_way)

    def _fill_place(self, now_s: float) -> bool:
        """Begin a round with the requests that are ready, then call the policy."""
        ready: list[Request | Sequence] = [*self._came]
        self._came.clear()
        while self._sent and self._sent[0][0] <= now_s:
            ready.append(self._sent.popleft()[1])
        self._rounds.append(ready)
        return super()._fill_place(now_s)

    def _is_held_up(self, preemptions: int) -> bool:
        """Say whether KV is on its way, for which turns have been in vain."""
        return bool(self._queues.leaving) and super()._is_held_up(preemptions)

    def _take_oldest(self, now_s: float) -> bool:
        """Take back the oldest answer, then act on the round that comes back with it."""
        taken = super()._take_oldest(now_s)
        if taken and len(self._rounds) == self._rounds.maxlen:
            agreed = self._rounds[0]
            self._rounds[0] = []
            for one in agreed:
                self._act_on(one, now_s)
        return taken

    def _act_on(self, one: Request | Sequence, now_s: float) -> None:
        if isinstance(one, Request):
            super()._add(one)
            return
        self._queues.let_go(one)
        one.first_token_s = one.last_token_s = one.completion_s = now_s
        self._end([one], now_s)

    def settle(self, now_s: float) -> None:
        """Turn until the loop has to wait: for a micro-batch, or for KV on its way."""
        super().settle(now_s)
        if self._sent and not self._queues.in_flight:
            self._wake(self._sent[0][0])

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        rounds = sum(isinstance(one, Request) for ready in self._rounds for one in ready)
        return super().outstanding + len(self._came) + rounds + len(self._queues.leaving)


class DecodeLoop(RingLoop):
    """Decode what another server has computed, once all stages agree on pages and on KV.

    Source: SGLang 0.5.23's `event_loop_pp_disagg_decode`. In each turn rank 0 lists retracted
    requests, new ones, and those whose KV is there. A retracted one is listed in the turns of the
    slot that saw it first. The list is back stages - 1 turns later, after that turn's wait and
    before its result is processed. KV takes `transfer_s` from when it has pages.
    """

    def __init__(self, *given: Any, transfer_s: float = 0.0, **options: Any) -> None:
        super().__init__(*given, **options)
        queues = self.engines[0].queues
        assert isinstance(queues, ReceivingQueues)
        self._queues = queues
        queues.transfer_s = transfer_s
        self._rounds: deque[Agreed] = deque(maxlen=self.engines[0].depth)
        self._seen_by: dict[Sequence, int] = {}  # slot, of retracted requests

    def _fill_place(self, now_s: float) -> bool:
        """Begin a round, then call the policy; requests that end with their first token leave."""
        self._rounds.append(self._listed(now_s))
        more = super()._fill_place(now_s)
        if self._queues.ended:
            self._finished(self._queues.ended, now_s)
            self._queues.ended = []
        return more

    def _listed(self, now_s: float) -> Agreed:
        """Return the ids that rank 0 lists in the turn of the next slot."""
        queues = self._queues
        slot = (queues.slot + 1) % len(queues.slots)
        retracted = [seq for seq in queues.waiting if seq.epoch]
        self._seen_by = {seq: self._seen_by.get(seq, slot) for seq in retracted}
        return Agreed(
            [seq.request.request_id for seq, seen_by in self._seen_by.items() if seen_by == slot],
            [seq.request.request_id for seq in queues.waiting if not seq.epoch],
            [seq.request.request_id for seq, at_s in queues.arriving.items() if at_s <= now_s],
        )

    def _take_oldest(self, now_s: float) -> bool:
        """Act on the round that is back, then take back the oldest answer."""
        if self._answers[0] is not None and not self._back:
            return False
        is_back = len(self._rounds) == self._rounds.maxlen
        if is_back and act_on(self.engines[0], self._rounds[0], now_s):
            self._vain_turns = 0
        return super()._take_oldest(now_s)

    def settle(self, now_s: float) -> None:
        """Turn until the loop has to wait: for a micro-batch, or for KV on its way."""
        super().settle(now_s)
        there_s = next(iter(self._queues.arriving.values()), now_s)
        if there_s > now_s and not self._queues.in_flight:
            self._wake(there_s)
