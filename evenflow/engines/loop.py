"""The loop of an engine that alternates between asking and waiting, as vLLM's does."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import ClassVar

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import UNCAPPED, Batcher
from evenflow.core.loop import Loop, Owner, Pipeline, num_live
from evenflow.core.request import Request
from evenflow.engines.queues import EngineQueues
from evenflow.engines.rules import EngineRules
from evenflow.errors import UsageError
from evenflow.results.recorder import Recorder

PROMPT_WEIGHT = 1000
"""What a step with prompts counts for, beside one of decodes, towards the next look."""


class Looks:
    """Turns at which a loop of slots looks for requests that came (SGLang's SchedulerRecvSkipper).

    Each turn counts what the last micro-batch of its slot weighs; at `every` the loop looks. Where
    it `idles` it always does, as its turns take no time.
    """

    def __init__(self, every: int, slots: int) -> None:
        self._every = every
        self._weights = [1] * slots
        self._count = 0
        self.idles = True

    def due(self, slot: int) -> bool:
        """Count a slot's turn; return whether the loop looks now."""
        self._count += self._weights[slot]
        looks = self.idles or self._count >= self._every
        if looks:
            self._count = 0
        return looks

    def note(self, slot: int, batch: MicroBatch | None) -> None:
        """Note a slot's answer; in a pipeline an empty one leaves the weight of the last."""
        if batch is not None:
            self.idles = False
            self._weights[slot] = PROMPT_WEIGHT if batch.prefill_tokens else 1
        elif len(self._weights) == 1:
            self._weights[slot] = 1


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineLoop(Loop):
    """Alternate between asking the policy and waiting for its oldest micro-batch.

    Answers are in a queue of as many places as micro-batches may be in flight. While there is work
    and a place, the policy is asked, and an empty answer takes a place too. Then the loop waits for
    the oldest answer; what arrives meanwhile is seen after it. Three kinds of micro-batches are
    sent only after that wait. With more slots than stages, the last chosen (SGLang's
    `pp_async_batch_depth`). With speculation and slots, decodes alone, as stages need to know what
    was accepted (`SGLANG_ENABLE_PP_SPEC`). Where decodes run ahead by a round of stages, one behind
    an answer with tokens, which are its inputs on stage 0 (vLLM's `PPHandler`). Where the policy's
    rules wait for stage 0, the loop sends and goes on once stage 0 is free. Where it `goes_round`,
    decodes that go again bring the same answers in turn.
    """

    asks_again: ClassVar[bool] = False

    def __init__(
        self,
        engines: Collection[Batcher],
        pipeline: Pipeline,
        owner: Owner,
        recorder: Recorder,
        *,
        eager: bool = False,
    ) -> None:
        super().__init__(engines, pipeline, owner, recorder, eager=eager)
        if self._others and not self.steps_together:
            raise UsageError("dispatch: engine_loop is the loop of one engine; virtual_engines: 1")
        engine = self.engines[0]
        queues = engine.queues
        self._num_places = engine.max_in_flight if engine.max_in_flight < UNCAPPED else engine.depth
        self._answers: deque[MicroBatch | None] = deque()
        self._back: deque[Collection[int]] = deque()  # what stopped in each that is back
        self.unseen: list[Request] = []
        self._waits = False
        rules = EngineRules.of(engine.scheduler)
        slots = len(queues.slots) if isinstance(queues, EngineQueues) and queues.slotted else 0
        self._looks = Looks(rules.looks_every, slots or 1) if rules.looks_every > 1 else None
        self._sends_late = slots > engine.depth
        self._verifies_late = slots > 1 and queues.decoding.row_tokens > 1
        self.needs_tokens = rules.ahead == "round" and engine.depth > 1
        self._unsent: MicroBatch | None = None
        self._waits_first = rules.waits_first
        self._holds = False  # until stage 0 is free
        self._ahead = queues.ahead if isinstance(queues, EngineQueues) else 0
        self.goes_round = not (slots or self._waits_first or self._looks is not None)

    @property
    def is_round(self) -> bool:
        """Whether it waits for a micro-batch, and the next returns bring the same questions."""
        if not self._waits or self._back or self.unseen or self._answers[0] is None:
            return False
        last = self._answers[-1]
        return self._unsent is last is not None if self.needs_tokens else self._unsent is None

    def go_round(self, flying: Sequence[MicroBatch], rounds: int) -> None:
        """Turn the places by as many returns; `flying` are what is in flight then, in order.

        A place without a micro-batch takes a question, too. Where decodes run ahead of a round, the
        last place is again that of the first group.
        """
        size = self._ahead or len(self._answers)
        taken = [at for at, batch in enumerate(self._answers) if batch is not None and at < size]
        shift = taken[rounds % len(taken)]
        places = sorted([(at - shift) % size for at in taken])
        queues = self.engines[0].queues
        if isinstance(queues, EngineQueues):
            queues.asked += rounds // len(taken) * size + shift
            if self._ahead:
                places.append(size)
                queues.resting.rotate(-rounds)
                groups = [group for _, group in queues.resting]
                ready_at = [queues.asked + at for at in places[1:]]
                queues.resting = deque(zip(ready_at, groups, strict=True))
        self._answers = deque([None] * len(self._answers))
        for at, batch in zip(places, flying, strict=True):
            self._answers[at] = batch
        self._unsent = flying[-1] if self.needs_tokens else None
        self.travelling.rotate(-rounds)

    def _add(self, request: Request) -> str | None:
        """Take an arrival, which the engine sees when it does not wait."""
        if not (self._waits or self._holds or self._looks is not None):
            return super()._add(request)
        reason = self.engines[0].refusal(request)
        if reason is None:
            self.unseen.append(request)
        return reason

    def returned(self, now_s: float, stopped: Collection[int] = ()) -> None:
        """Note that the micro-batch that was sent first is back."""
        self._back.append(stopped)
        self._changed(now_s)

    def settle(self, now_s: float) -> None:
        """Ask and take back in turns, until the loop has to wait or there is no work."""
        while self._go_on(now_s):
            pass
        self._record_wait(now_s)

    def _go_on(self, now_s: float) -> bool:
        """Take the loop's next step; return whether there is more to do at this instant."""
        if self._holds:
            return self._await_stage0(now_s)
        return self._take_oldest(now_s) if self._waits else self._fill_place(now_s)

    def _fill_place(self, now_s: float) -> bool:
        """Ask, and fill a place; return whether there is more to do at this instant."""
        slot = self._look()
        live = self._has_work
        if live:
            preemptions, batch = self._preemptions, self._next(now_s)
            if self._looks is not None:
                self._looks.note(slot, batch)
            if batch is not None:
                self._unsent = batch
            elif not self._will_change() and self._is_held_up(preemptions):
                return False
            self._answers.append(batch)
        elif not self._answers:
            queues = self.engines[0].queues
            self._next(now_s)  # in vain: the engine is idle, and its journal says so
            while isinstance(queues, EngineQueues) and queues.slot < len(queues.slots) - 1:
                self._next(now_s)  # a round of the slots ends before the next begins
            return self._idle()
        self._waits = len(self._answers) >= self._num_places or not live
        if self._waits_first:
            self._holds = True
        elif not (self._waits and self._is_late):
            self._send(now_s)
        return True

    def _look(self) -> int:
        """See what came if it is time to; return the slot of the next question."""
        queues = self.engines[0].queues
        if self._looks is None or not isinstance(queues, EngineQueues):
            return 0
        slot = (queues.slot + 1) % len(queues.slots)
        if self._looks.due(slot):
            self._see_arrivals()
        return slot

    def _idle(self) -> bool:
        """Look for requests at each turn from now on; return whether some came."""
        if self._looks is None:
            return False
        self._looks.idles = True
        return bool(self.unseen)

    @property
    def _has_work(self) -> bool:
        return any(engine.queues.live for engine in self.engines)

    @property
    def _is_late(self) -> bool:
        """Whether what was chosen is only sent once the oldest answer is back."""
        batch, oldest = self._unsent, self._answers[0]
        if batch is oldest:  # in the only place
            return False
        verifies = self._verifies_late and batch is not None and not batch.prefill_tokens
        needs_tokens = self.needs_tokens and oldest is not None and oldest.sampled_rows > 0
        return self._sends_late or verifies or needs_tokens

    @property
    def _preemptions(self) -> int:
        return sum(engine.queues.preemptions for engine in self.engines)

    def _will_change(self) -> bool:
        """Say whether the next question may find more, without an arrival."""
        queues = [engine.queues for engine in self.engines]
        return any(
            one.in_flight or (isinstance(one, EngineQueues) and one.resting) for one in queues
        )

    def _is_held_up(self, preemptions: int) -> bool:
        """Say whether a policy asks to be woken, or KV moves and none was preempted meanwhile."""
        if any(engine.wake_at_s is not None for engine in self.engines):
            return True
        under_way = any(engine.under_way for engine in self.engines)
        return under_way and self._preemptions == preemptions

    def _send(self, now_s: float) -> None:
        batch, self._unsent = self._unsent, None
        if batch is not None:
            batch.scheduled_s = now_s
            if not self.needs_tokens:
                batch.chosen_s = now_s
            self._pipeline.submit(batch)

    def _await_stage0(self, now_s: float) -> bool:
        """Send what was chosen once stage 0 is free; return whether it is."""
        if not self._pipeline.is_free(now_s):
            self._pipeline.call_when_free()
            return False
        self._holds = False
        self._see_arrivals()
        self._send(now_s)
        return True

    def _see_arrivals(self) -> None:
        while not self._waits and self.unseen:
            super()._add(self.unseen.pop(0))

    def _take_oldest(self, now_s: float) -> bool:
        """Take back the oldest answer if it is there; return whether it is."""
        if self._answers[0] is not None and not self._back:
            return False
        self._waits = False
        if self._looks is None:
            self._see_arrivals()
        self._send(now_s)
        if self._answers.popleft() is not None:
            self._complete(now_s, self._back.popleft())
        return True

    @property
    def outstanding(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self.unseen) + sum(map(num_live, self.engines))
