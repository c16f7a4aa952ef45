"""The loop of engines that step together, as with data parallelism of attention."""

from __future__ import annotations

from collections import abc, deque
from typing import ClassVar, NamedTuple

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.core.loop import Loop, Owner, Pipeline
from evenflow.core.queues import Queues
from evenflow.engines.loop import EngineLoop
from evenflow.results.recorder import Recorder


class PromptWait(NamedTuple):
    """Steps that waiting prompts are held back, so that all engines prefill in the same step.

    At most `timeout_iters` while an engine has none. Once all have one, and decodes,
    `batching_iters` more to gather further prompts. Source: TensorRT-LLM's `attention_dp_config`
    with `enable_balance`.
    """

    timeout_iters: int
    batching_iters: int


@mypyc_attr(allow_interpreted_subclasses=True)
class LockStep(Loop):
    """Ask all engines at once, and join their micro-batches into one."""

    steps_together: ClassVar[bool] = True

    def __init__(
        self,
        engines: abc.Collection[Batcher],
        pipeline: Pipeline,
        owner: Owner,
        recorder: Recorder,
        *,
        eager: bool = False,
        wait: PromptWait | None = None,
    ) -> None:
        super().__init__(engines, pipeline, owner, recorder, eager=eager)
        self._most = self.engines[0].max_in_flight
        self._together = Together(self.engines, self._ask, wait)

    def _next(self, now_s: float) -> MicroBatch | None:
        """Ask all engines."""
        if len(self.travelling) >= self._most:
            return None
        return self._together.step(now_s, self.travelling)


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineLockStep(EngineLoop):
    """An EngineLoop whose engines step together (data-parallel attention)."""

    steps_together: ClassVar[bool] = True

    def __init__(
        self,
        engines: abc.Collection[Batcher],
        pipeline: Pipeline,
        owner: Owner,
        recorder: Recorder,
        *,
        eager: bool = False,
        wait: PromptWait | None = None,
    ) -> None:
        super().__init__(engines, pipeline, owner, recorder, eager=eager)
        self._together = Together(self.engines, self._ask, wait)

    def _next(self, now_s: float) -> MicroBatch | None:
        """Ask all engines."""
        return self._together.step(now_s, self.travelling)


Parts = list[tuple[Batcher, MicroBatch]]


class Together:
    """Engines that step together.

    An engine with nothing to send takes part in the step and waits for the others. Policies do not
    see prompts that are held back (`PromptWait`). Known errors: a prompt without room counts as one
    that its engine has. A prompt with a computed chunk is not held back.
    """

    def __init__(
        self,
        engines: abc.Sequence[Batcher],
        ask: abc.Callable[[Batcher, float], MicroBatch | None],
        wait: PromptWait | None,
    ) -> None:
        self.engines = engines
        self._ask = ask
        self._wait = wait
        self._without = self._with = 0  # steps that prompts waited for others': not there, there

    def step(self, now_s: float, travelling: deque[Parts]) -> MicroBatch | None:
        """Ask all engines; return what they send as one, which travels."""
        answers = self._ask_all(now_s, hidden=self._prompts_wait())
        parts = [(engine, part) for engine, part in answers if part is not None]
        if not parts:
            return None
        travelling.append(parts)
        batch = JoinedBatch([part for _, part in parts])
        for engine, part in answers:
            if part is None:
                batch.free_pages += engine.pool.free_pages
                batch.kv_tokens += engine.kv.held_tokens
        return batch

    def _ask_all(self, now_s: float, *, hidden: bool) -> list[tuple[Batcher, MicroBatch | None]]:
        """Ask each engine, with waiting prompts `hidden` first; if then none sends, with them."""
        if not hidden:
            return [(engine, self._ask(engine, now_s)) for engine in self.engines]
        waiting = [engine.queues.waiting for engine in self.engines]
        for engine in self.engines:
            engine.queues.waiting = deque()
        answers = self._ask_all(now_s, hidden=False)
        for engine, sequences in zip(self.engines, waiting, strict=True):
            _show_waiting(engine.queues, sequences)
        if any(part is not None for _, part in answers):
            return answers
        return self._ask_all(now_s, hidden=False)

    def _prompts_wait(self) -> bool:
        """Count a step; say whether prompts wait in it. They do not where any has no decodes."""
        if self._wait is None:
            return False
        queues = [engine.queues for engine in self.engines]
        decode = all(one.ready.num_sequences for one in queues)
        if all(one.waiting or one.partials for one in queues):
            self._without = 0
            if decode:
                self._with = (self._with + 1) % (self._wait.batching_iters + 1)
            return decode and self._with > 0
        self._without += 1
        if decode and self._without < self._wait.timeout_iters:
            return True
        self._without = 0
        return False


def _show_waiting(queues: Queues, waiting: deque[Sequence]) -> None:
    """Put waiting sequences back, behind sequences preempted meanwhile."""
    preempted, queues.waiting = queues.waiting, waiting
    for seq in reversed(preempted):
        queues.line_up(seq, last=False)


class JoinedBatch(MicroBatch):
    """Micro-batches, `parts`, sent as one: their sums, without their sequences."""

    def __init__(self, parts: abc.Sequence[MicroBatch]) -> None:
        (scheduled_s,) = {part.scheduled_s for part in parts}
        super().__init__(
            parts[0].batch_id,
            scheduled_s,
            chunks=(),
            decodes=None,
            prefill_tokens=sum(part.prefill_tokens for part in parts),
            decode_tokens=sum(part.decode_tokens for part in parts),
            decode_context=sum(part.decode_context for part in parts),
            sampled_rows=sum(part.sampled_rows for part in parts),
            free_pages=sum(part.free_pages for part in parts),
            output_tokens=sum(part.output_tokens for part in parts),
            kv_tokens=sum(part.kv_tokens for part in parts),
        )
        self.parts = parts

    @property
    def crossing_tokens(self) -> int:
        """Tokens of the largest part: groups have separate GPUs, and links."""
        return max([part.num_tokens for part in self.parts])
