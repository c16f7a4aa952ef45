"""The serving state machine of one engine, with three verbs.

`add` takes an arrival, `next` asks the policy and carries out its plan, `complete` takes a
micro-batch back. The Batcher has no clock and decides nothing: mechanism is in `queues` and `kv`,
policy in `evenflow.schedulers`. One thread or process owns it.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from math import inf
from numbers import Real
from typing import Any

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import Chunk, MicroBatch
from evenflow.core.decodes import ONE_TOKEN, DecodeGroup, Decoding, Sequence
from evenflow.core.kv import KvCache, PagePool
from evenflow.core.request import Request
from evenflow.core.rules import rules_of
from evenflow.core.scheduling import ORDERS, Action, Plan, Prefill, Scheduler
from evenflow.errors import PolicyError, StallError, UsageError, is_whole
from evenflow.user_code import PROCESS, end_copy, next_part, place_of, shown, words_of

Fields = tuple[Any, int, int, Any]  # of a Prefill, with whole numbers
EMPTY = Plan()
UNCAPPED = 1 << 60
"""Micro-batches in flight without a cap."""

MOST_WAKES = 10_000
"""How often in a row a policy may send nothing, with nothing in flight or at one instant."""

MOST_PARTS = 1_000_000  # of one answer


@mypyc_attr(allow_interpreted_subclasses=True)
class Batcher:
    """Serves requests with one engine; validates and carries out the plans of its policy.

    Parameters: the pages (a pool or a KvCache), `depth` pipeline stages. `max_in_flight`: the most
    micro-batches at once (None: no cap). `max_model_len`: tokens of prompt and output.
    `pipelined_chunks` overrides the policy's rules. `decoding`: how a decode step goes.
    `asks_again`: a policy that only preempted is asked again at once. Raises UsageError when a step
    could yield more tokens than a page holds, and where the policy's rules do not go with the rest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KvCache | PagePool,
        *,
        depth: int,
        max_in_flight: int | None,
        max_model_len: int,
        pipelined_chunks: bool | None = None,
        decoding: Decoding = ONE_TOKEN,
        asks_again: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.policy_name = type(scheduler).__name__
        self.rules = rules_of(scheduler)
        if pipelined_chunks is not None:
            self.rules = replace(self.rules, pipelined_chunks=pipelined_chunks)
        self.kv = kv if isinstance(kv, KvCache) else KvCache(kv)
        self.pool = self.kv.pool
        if decoding.row_tokens > self.pool.page_tokens:
            raise UsageError(
                f"speculative: a step of k + 1 = {decoding.row_tokens} tokens needs pages of at "
                f"least as many, not {self.pool.page_tokens}"
            )
        self.queues = self.rules.queues(
            self.kv,
            decoding,
            policy=self.policy_name,
            depth=depth,
            max_in_flight=max_in_flight,
            asks_again=asks_again,
        )
        self.view = self.rules.view(self.queues, depth)
        self.depth = depth
        self.max_in_flight = UNCAPPED if max_in_flight is None else max_in_flight
        self.max_model_len = max_model_len
        self.wake_at_s: float | None = None
        self.given_up: list[Sequence] = []  # by the policy; the loop takes them
        self._asks_again = asks_again
        self._row_tokens = decoding.row_tokens
        self._refuse = getattr(scheduler, "refuse", None)
        self._process = PROCESS[0]
        self._answer = ""  # to the last question: why nothing is sent
        self._wakes = 0  # answers in a row to wait, with nothing in flight or at one instant
        self._waited_at: tuple[int, float | None] = (0, None)  # so many micro-batches, and when

    # -- the three verbs ------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queue an arrival; return None, or why it can never be served."""
        reason = self.refusal(request)
        if reason is not None:
            return reason
        if request.request_id in self.queues.live:
            raise ValueError(f"request {request.request_id} is already being served")
        self._wakes = 0
        self.queues.enqueue(request)
        return None

    def next(self, now_s: float) -> MicroBatch | None:
        """Ask the policy for a micro-batch and put it in flight; None means wait.

        The policy is asked only when there is something it could send. `wait_reason` then says why
        nothing is sent, `wake_at_s` when to ask again. Raises PolicyError for a plan that cannot be
        carried out, StallError for one that would never send anything.
        """
        queues = self.queues
        self.wake_at_s = None
        queues.now_s = now_s
        queues.begin()
        while self.can_send():
            preemptions = queues.preemptions
            chunks: list[Chunk] = []
            plan, group = self._ask(chunks)
            if chunks or group is not None:
                return self._send(chunks, group)
            if queues.preemptions == preemptions:
                self._wait(plan)
                return None
            if not self._asks_again:
                return None
        return None

    def complete(
        self, batch: MicroBatch, now_s: float, stopped: abc.Collection[int] = ()
    ) -> list[Sequence]:
        """Take back a micro-batch that left the last stage at `now_s`; return what finished.

        `stopped` names requests that ended before their limit (an end-of-sequence token).
        """
        if self.queues.in_flight.pop(batch.batch_id, None) is not batch:
            raise ValueError(f"micro-batch {batch.batch_id} is not in flight")
        self.queues.now_s = now_s
        return self.queues.take_back(batch, stopped)

    def abort(self, request_id: int) -> Sequence:
        """End a request early, wherever it is; return it, `generated` up to date.

        Raises ValueError for a request that is not being served.
        """
        seq = self.queues.live.get(request_id)
        if seq is None or seq.aborted:
            raise ValueError(f"request {request_id} is not being served")
        self.queues.abort(seq)
        return seq

    def can_send(self) -> bool:
        """Say whether the cap allows a micro-batch and there is anything to put into it."""
        queues = self.queues
        return len(queues.in_flight) < self.max_in_flight and (
            queues.ready.num_sequences > 0 or bool(queues.waiting or queues.partials)
        )

    @property
    def under_way(self) -> str:
        """Description of the work under way that will change the View; "" when idle."""
        flying = len(self.queues.in_flight)
        return f"{flying} micro-batches are under way" if flying else ""

    @property
    def wait_reason(self) -> str:
        """Reason that nothing is sent (one of WAIT_REASONS): the policy's answer, or a limit.

        It is the policy if work waits behind the cap or an earlier chunk, or if running decodes,
        enough for every stage, are in fewer micro-batches than there are stages.
        """
        if self._answer and self.can_send():
            return self._answer
        if self.queues.waiting_tokens or self.queues.running_decodes >= self.depth:
            return "policy"
        return "work"

    def refusal(self, request: Request) -> str | None:
        """Return why a request can never be served, or None."""
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > self.max_model_len:
            return f"{tokens} tokens exceed max_model_len {self.max_model_len}"
        pages = self.pool.pages_for(tokens)
        if pages > self.pool.total_pages:
            return f"{pages} KV pages exceed the pool's {self.pool.total_pages}"
        sizes = request.prompt_tokens, request.output_limit
        why = None if self._refuse is None else self._call(self._refuse, *sizes, self.pool)
        if why is None or isinstance(why, str):
            return why
        raise self._broken(f"refuses with {shown(why)}; a reason, or None, is right")

    # -- carrying out an answer -----------------------------------------------------------------

    def _ask(self, chunks: list[Chunk]) -> tuple[Plan, DecodeGroup | None]:
        """Ask the policy and carry out its answer, adding `chunks`; return its plan and decodes."""
        answer = self._call(self.scheduler.schedule, self.view)
        if type(answer) is Plan:
            return answer, self._carry_out(answer, chunks)
        parts = answer if hasattr(answer, "__next__") else iter((answer,))
        plan, group, count = EMPTY, None, 0
        while (part := self._call(next_part, parts, EMPTY)) is not EMPTY:
            if (count := count + 1) > MOST_PARTS:
                raise self._broken(f"answers in more than {MOST_PARTS} parts")
            if type(part) is Plan:
                taken = self._carry_out(part, chunks)
                if taken is not None and group is not None:
                    raise self._broken("takes decodes in two parts of a plan")
                plan, group = part, taken or group
            elif isinstance(part, Action):
                part.apply(self)
            else:
                raise self._broken(f"returned {shown(part)}, not a Plan")
        return plan, group

    def _carry_out(self, plan: tuple[Any, ...], chunks: list[Chunk]) -> DecodeGroup | None:
        """Add the chunks of a Plan to `chunks`; return its decodes. The plan is unchecked."""
        prefills, decodes, order, victims, preempt, _, _ = plan
        if type(preempt) is not tuple and not isinstance(preempt, abc.Iterable):
            raise self._no(preempt, "the requests to preempt", "a list of their ids")
        for request_id in preempt:
            self.queues.preempt(self.preemptible(request_id))
        if type(prefills) is not tuple or prefills:
            checked = self._checked(prefills)
            if self.kv.keeps:
                self.queues.resume(self.served(request_id) for request_id, _, _, _ in checked)
            for fields in checked:
                chunks.append(self._place(fields))
        return self._take_decodes(decodes, order, victims)

    def _place(self, fields: Fields) -> Chunk:
        request_id, tokens, hold_tokens, ends = fields
        seq = self._prefillable(request_id, tokens, hold_tokens)
        stop = seq.computed + tokens
        if ends and stop < seq.prompt_tokens and not self.queues.cut(seq, stop):
            raise self._broken("ends its prefill early, which its rules do not allow", seq)
        need = self.pool.pages_for(max(stop, hold_tokens)) - len(seq.pages)
        if need > 0:
            if need > self.pool.free_pages:
                raise self._broken(f"needs {need} pages of {self.pool.free_pages} free", seq)
            seq.pages += self.pool.allocate(need)
        return self.queues.schedule_chunk(seq, stop)

    def _take_decodes(self, decodes: Any, order: Any, victims: Any) -> DecodeGroup | None:
        named, count = ((), decodes) if type(decodes) is int else self._named(decodes)
        if not (count or named):
            return None
        if not (ready := self.queues.ready.num_sequences) >= count >= 0:
            raise self._broken(f"takes {count} decodes of {ready} ready")
        if order not in ORDERS:
            raise self._no(order, "the order", f"one of {', '.join(ORDERS)}")
        if victims not in self.queues.victims:
            raise self._broken(f"asks for the victims {shown(victims)}; its rules lack them")
        return self.queues.take_decodes(count, order, victims, named)

    def _send(self, chunks: list[Chunk], group: DecodeGroup | None) -> MicroBatch:
        prefill_tokens = prompts = decode_tokens = decode_context = decoded = 0
        for chunk in chunks:
            prefill_tokens += chunk.stop - chunk.start
            prompts += chunk.last
        queues, kv = self.queues, self.kv
        if group is not None:
            decoded = len(group.members)
            decode_tokens = decoded * self._row_tokens
            decode_context = group.context
            if group.stride > 1:
                decoded = group.next_tokens
        kv.tokens += prefill_tokens + decoded
        batch = MicroBatch(
            queues.batches,
            queues.now_s,
            chunks,
            group,
            prefill_tokens,
            decode_tokens,
            decode_context,
            prompts + decode_tokens,
            self.pool.free_pages,
            prompts + decoded,
            kv.held_tokens,
        )
        self._answer = ""
        queues.sent(batch)
        return batch

    def _checked(self, prefills: Any) -> list[Fields]:
        """Return the fields of prefills; PolicyError for a pair in place of one, half a token."""
        if type(prefills) is not list and not isinstance(prefills, abc.Sequence):
            raise self._no(prefills, "the prefills", "a list of Prefill(request_id, tokens)")
        checked: list[Fields] = []
        for prefill in prefills:
            kind: Any = type(prefill)  # which tells the compiler nothing of its fields
            if kind is not Prefill:
                raise self._no(prefill, "a prefill", "Prefill(request_id, tokens)")
            fields: tuple[Any, Any, Any, Any] = prefill
            request_id, tokens, hold_tokens, ends = fields
            for count in (tokens, hold_tokens):
                if type(count) is not int and not is_whole(count):
                    what = f"the tokens to prefill of request {request_id}"
                    raise self._no(count, what, "a whole number")
            checked.append((request_id, int(tokens), int(hold_tokens), ends))
        return checked

    def served(self, request_id: Any) -> Sequence | None:
        """Return the request of an id that is being served; None for anything else."""
        may_be = type(request_id) is int or is_whole(request_id)
        seq = self.queues.live.get(request_id) if may_be else None
        return None if seq is None or seq.aborted else seq

    def _prefillable(self, request_id: Any, tokens: int, hold_tokens: int) -> Sequence:
        seq = self.served(request_id)
        if seq is None or seq.decoding:
            what = "is not being served" if seq is None else "decodes"
            raise self._broken(f"prefills request {shown(request_id)}, which {what}")
        if not 1 <= tokens <= seq.remaining:
            raise self._broken(f"prefills {tokens} of {seq.remaining} tokens left", seq)
        negative = "" if hold_tokens >= 0 else f"holds {hold_tokens} tokens"
        if why := negative or self.queues.may_prefill(seq):
            raise self._broken(why, seq)
        return seq

    def preemptible(self, request_id: Any) -> Sequence:
        """Return a request that may be preempted now; PolicyError for one that may not."""
        seq = self.served(request_id)
        why = "which is not being served" if seq is None else self.queues.may_preempt(seq)
        if seq is None or why:
            raise self._broken(f"preempts request {shown(request_id)}, {why}")
        return seq

    def _named(self, decodes: Any) -> tuple[abc.Sequence[Sequence], int]:
        """Return the ready decodes that a plan names, or how many it takes."""
        if is_whole(decodes):
            return (), int(decodes)
        if not isinstance(decodes, list | tuple):
            raise self._no(decodes, "the decodes to take", "a list of request ids, or how many")
        named: dict[Sequence, None] = {}
        for request_id in decodes:
            seq = self.served(request_id)
            if seq is None or seq in named or seq not in self.queues.ready:
                why = "is there twice" if seq in named else "is not ready to decode"
                raise self._broken(f"takes the decode of request {shown(request_id)}, which {why}")
            named[seq] = None
        return tuple(named), 0

    def _wait(self, plan: Any) -> None:
        """Record why nothing is sent; StallError if nothing ever would be."""
        queues, idle, wake_at_s = self.queues, not self.under_way, plan.wake_at_s
        is_time = isinstance(wake_at_s, Real) and not isinstance(wake_at_s, bool)
        if wake_at_s is not None and not (is_time and queues.now_s < wake_at_s < inf):
            raise self._no(wake_at_s, "the time to be asked again", f"after {queues.now_s:.6g} s")
        waited_at = queues.batches, None if idle else queues.now_s
        self._wakes = self._wakes + 1 if waited_at == self._waited_at else 1
        self._waited_at = waited_at
        waits = not idle or wake_at_s is not None or not self._asks_again
        if not waits or self._wakes >= MOST_WAKES:
            seq = next(iter(queues.live.values()))
            times = f" when asked {self._wakes} times" if self._wakes > 1 else ""
            prompts = len(queues.waiting) + len(queues.partials)
            raise StallError(
                f"policy {self.policy_name} stalls at {queues.now_s:.6g} s: "
                f"{self.under_way or 'nothing is in flight'}, {len(queues.live)} requests wait "
                f"(request {seq.request.request_id} first), and it sends nothing{times}; ready "
                f"and not taken: {queues.ready.num_sequences} decodes, {prompts} prompts, with "
                f"{self.pool.free_pages} of {self.pool.total_pages} pages free"
            )
        self.wake_at_s = None if wake_at_s is None else float(wake_at_s)
        self._answer = "kv" if plan.kv_limited else "policy"

    def _no(self, value: object, what: str, right: str) -> PolicyError:
        return self._broken(f"plans {shown(value)} as {what}; {right} is right")

    def _call(self, method: abc.Callable[..., Any], *given: Any) -> Any:
        """Call code of the policy; PolicyError for whatever it raises but Ctrl-C."""
        try:
            answer = method(*given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            end_copy(self._process, self.policy_name)
            raise self._broken(f"raised {words_of(error)}{place_of(error)}") from error
        if PROCESS[0] != self._process:
            end_copy(self._process, self.policy_name)
        return answer

    def _broken(self, what: str, seq: Sequence | None = None) -> PolicyError:
        of = "" if seq is None else f", request {seq.request.request_id}:"
        return PolicyError(f"policy {self.policy_name}{of} {what}")
