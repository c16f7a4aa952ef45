"""vLLM's scheduler, which carries out what our Batcher plans.

vLLM's own `schedule` still hands out blocks and writes its workers' messages. Here it only sees
what is planned. Preemptions are made before, admitted requests wait first, and all others are given
no tokens. Knows no policy, no clock and no pages.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, Protocol

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.errors import PolicyError


class BatcherOwner(Protocol):
    """The owner of the Batcher: asks it, and takes micro-batches back.

    `ask` returns the next micro-batch, or None; `returned` takes one back with vLLM's outputs.
    """

    def ask(self) -> MicroBatch | None: ...
    def returned(self, batch: MicroBatch, outputs: list[Any]) -> None: ...


class PolicyScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler for vLLM's option `scheduler_cls`; `attach` gives it its Batcher.

    Raises PolicyError for what is planned and vLLM does not schedule.
    """

    def attach(self, batcher: Batcher, owner: BatcherOwner) -> None:
        """Ask `owner` from now on; a request's id is that of `batcher` as a string."""
        self._batcher = batcher
        self._owner = owner
        self._sent: deque[MicroBatch] = deque()
        self._planned: Counter[str] = Counter()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Return our Batcher's plan, in the form that vLLM's workers take."""
        batch = self._owner.ask()
        self._planned = _tokens_of(batch)
        self._refuse_too_many()
        self._preempt()
        self._move_to_front()
        output = super().schedule(throttle_prefills)
        if output.num_scheduled_tokens != self._planned:
            raise PolicyError(
                f"policy {self._batcher.policy_name}: vLLM schedules "
                f"{output.num_scheduled_tokens}, planned {dict(self._planned)}"
            )
        if batch is not None:
            self._sent.append(batch)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take a step's tokens; our Batcher takes the micro-batch back."""
        answer = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens:
            outputs = [output for part in answer.values() for output in part.outputs]
            self._owner.returned(self._sent.popleft(), outputs)
        return answer

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens a request is given; `schedule` asks for that last."""
        return min(self._planned[request.request_id], int(num_new_tokens))

    def _refuse_too_many(self) -> None:
        limits = (
            ("max_num_batched_tokens", self._planned.total(), self.max_num_scheduled_tokens),
            ("max_num_seqs", len(self._batcher.queues.admitted), self.max_num_running_reqs),
        )
        for key, planned, most in limits:
            if planned > most:
                raise PolicyError(
                    f"policy {self._batcher.policy_name} plans {planned}, which "
                    f"workers.{key}: {most} does not allow; at least {planned} is right"
                )

    def _preempt(self) -> None:
        """Preempt the requests that our Batcher preempted since the last call."""
        live = self._batcher.queues.live
        for request in reversed(self.running.copy()):
            seq = live.get(int(request.request_id))
            if seq is not None and seq.epoch > request.num_preemptions:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())

    def _move_to_front(self) -> None:
        """Move planned waiting requests before the others, in the order of the plan."""
        waiting = {request.request_id: request for request in self.waiting}
        planned = [waiting[number] for number in self._planned if number in waiting]
        self.waiting.remove_requests(planned)
        for request in reversed(planned):
            self.waiting.prepend_request(request)


def _tokens_of(batch: MicroBatch | None) -> Counter[str]:
    """Return how many tokens of each request a micro-batch computes, by vLLM's ids."""
    tokens: Counter[str] = Counter()
    if batch is None:
        return tokens
    for chunk in batch.chunks:
        tokens[str(chunk.sequence.request.request_id)] += chunk.stop - chunk.start
    for seq in batch.decodes.sequences() if batch.decodes is not None else ():
        tokens[str(seq.request.request_id)] += 1
    return tokens
