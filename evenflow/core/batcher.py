"""The serving state machine: queues, pages and the micro-batches in flight. Three verbs drive it.

`add` takes an arrival, `next` asks the policy and carries out its plan, `complete` takes a
micro-batch back; where clients may leave, `abort` ends a request, and where KV moves between
engines, `release`, `reserve` and `adopt` follow it. The Batcher has no clock and decides nothing:
mechanism is here, in `queues` and in `kv`, policy in `evenflow.schedulers`. One thread or process
owns it.
"""

from __future__ import annotations

import os
import traceback
from collections import abc
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import Chunk, MicroBatch, padded_work, rectangle
from evenflow.core.decodes import DecodeGroup, Sequence, Speculation
from evenflow.core.kv import KvCache, PagePool
from evenflow.core.queues import Queues
from evenflow.core.request import Handover, Request
from evenflow.core.scheduling import Order, Plan, Prefill, Prompt, Scheduler, Upkeep, View
from evenflow.costs.base import work_of
from evenflow.errors import PolicyError, StallError, UsageError, instead_of
from evenflow.user_code import end_copy, shown, words_of

ORDERS = frozenset(get_args(Order))

MOST_WAKES = 10_000
"""How often in a row a policy may send nothing while requests wait, with nothing in flight or at
one instant: a poll each millisecond of 10 s in which nothing else happens."""


def place_of(error: BaseException) -> str:
    """Return the file, line and source of what raised, the last not of this package's own core.

    Of an attribute that is none, also which ones there are.
    """
    frames = traceback.extract_tb(error.__traceback__)
    core = str(Path(__file__).parent)
    own = [frame for frame in frames if not frame.filename.startswith(core)] or frames
    hint = ""
    if isinstance(error, AttributeError) and isinstance(error.obj, View | Prompt | Plan):
        known = [name for name in dir(error.obj) if not name.startswith("_")]
        hint = f"; {instead_of(error.name, known)}"
    last = own[-1]
    return f" ({Path(last.filename).name}:{last.lineno}: {last.line}){hint}"


@mypyc_attr(allow_interpreted_subclasses=True)
class Batcher:
    """Serves requests with one engine; validates and carries out what its policy plans.

    Parameters: the pages, a pool or a KvCache, which may keep what is preempted; `depth` pipeline
    stages; at most `max_in_flight` micro-batches at once (None: no cap); `max_model_len` tokens of
    prompt and output; `pipelined_chunks` overrides the policy's own; `speculation` lets a decode
    step yield several tokens; `keeps_pages`: a finished request's pages stay until `release`, for
    another engine to fetch; `asks_again`: a policy that only preempted is asked again at once.
    Raises UsageError when a step could yield more tokens than a page holds.
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
        speculation: Speculation | None = None,
        keeps_pages: bool = False,
        asks_again: bool = True,
    ) -> None:
        if pipelined_chunks is None:
            pipelined_chunks = getattr(scheduler, "pipelined_chunks", False)
        self.scheduler = scheduler
        self.kv = kv if isinstance(kv, KvCache) else KvCache(kv)
        self.pool = self.kv.pool
        ahead = getattr(scheduler, "decodes_ahead", None)
        slotted = bool(getattr(scheduler, "slotted", False))
        self.queues = Queues(
            self.kv,
            pipelined_chunks=pipelined_chunks,
            speculation=speculation,
            ahead={None: 0, "question": 1, "round": depth}[ahead],
            num_slots=(max_in_flight or depth) if slotted else 1,
            delivers=getattr(scheduler, "preempts_in_flight", False),
            preempted_last=getattr(scheduler, "preempted_last", False),
            newest_first=getattr(scheduler, "newest_first", False),
            by_priority=getattr(scheduler, "by_priority", False),
            keeps_pages=keeps_pages,
        )
        self.view = View(self.queues, depth)
        self.depth = depth
        self.max_in_flight = max_in_flight if max_in_flight is not None else 1 << 60
        self.max_model_len = max_model_len
        self.keeps_pages = keeps_pages
        self.wake_at_s: float | None = None
        self.given_up: list[Sequence] = []  # that a policy has ended early; whoever asks takes them
        self.in_turns = bool(ahead) or slotted  # what is ready depends on how often it was asked
        self._padded = getattr(scheduler, "padded", False)
        self._leaves_out = getattr(scheduler, "leaves_out", False)
        self._refuse = getattr(scheduler, "refuse", None)
        self._asks_again = asks_again
        self._verified_tokens = 1 if speculation is None else speculation.verified_tokens
        self._charges = self.kv.keeps or self._padded
        self._late, self._publishes = self.kv.late, self.kv.append_only
        self._batches = 0
        self._process = os.getpid()
        self._answer = ""  # the policy's, to the last question: why it sends nothing
        self._wakes = 0  # answers in a row to wait, with nothing in flight or at one instant
        self._waited_at: tuple[int, float | None] = (0, None)  # so many micro-batches, and when
        self._require_fitting(slotted=slotted)

    def _require_fitting(self, *, slotted: bool) -> None:
        """Raise UsageError where the policy, the pages and the dispatch do not go together."""
        queues, kv = self.queues, self.kv
        known_early = kv.keeps and not (kv.late or kv.append_only)
        out_of_place = self._asks_again or known_early or self.keeps_pages
        if queues.ahead and (out_of_place or queues.speculation is not None):
            raise UsageError(
                f"policy {self.policy_name} lets decodes run ahead, which goes with dispatch: "
                "engine_loop, without swap, speculative and pools, and with its own prefix_cache"
            )
        if slotted and self._asks_again:
            raise UsageError(
                f"policy {self.policy_name} gives slots their turn, which goes with dispatch: "
                "engine_loop"
            )
        if self._verified_tokens > self.pool.page_tokens:
            raise UsageError(
                f"speculative: a step of k + 1 = {self._verified_tokens} tokens needs pages of at "
                f"least as many, not {self.pool.page_tokens}"
            )

    # -- the three verbs ------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queue an arrival; return None, or why it can never be served (it is then not queued)."""
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
        nothing is sent, `wake_at_s` when the policy wants to be asked again. Raises PolicyError for
        a plan that cannot be carried out, StallError for one that would never send anything.
        """
        queues = self.queues
        self.wake_at_s = None
        queues.now_s = now_s
        if self.in_turns:
            queues.take_turn()
        while self.can_send():
            preemptions = queues.preemptions
            plan = self._ask(self.scheduler.schedule, self.view)
            chunks: list[Chunk] = []
            if type(plan) is Plan:
                group = self._carry_out(plan, chunks)
            else:
                plan, group = self._carry_out_parts(plan, chunks)
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
        queues = self.queues
        if queues.in_flight.pop(batch.batch_id, None) is not batch:
            raise ValueError(f"micro-batch {batch.batch_id} is not in flight")
        group = batch.decodes
        finished: list[Sequence] = []
        if batch.ahead is not None:
            group, finished = None, queues.catch_up(batch, now_s)
        else:
            if group is not None:
                finished = group.step(now_s, queues.gap_s, queues.gap_count)
            if batch.chunks:
                group = self._return_chunks(batch, group, finished, now_s)
        if queues.owed:
            finished += queues.deliver(batch, now_s, stopped)
        if stopped or queues.aborted:
            finished = queues.end_early(finished, batch.chunks, group, stopped)
        for seq in queues.rows_of(batch, finished) if self._late else finished:
            if seq in finished:
                queues.retire(seq, now_s)
            else:
                self.kv.publish(seq, seq.prompt_tokens)
        if group is not None and group.members:
            queues.slots[batch.slot].append(group)
        return finished

    def _return_chunks(
        self,
        batch: MicroBatch,
        group: DecodeGroup | None,
        finished: list[Sequence],
        now_s: float,
    ) -> DecodeGroup | None:
        """Take chunks back; add what ends to `finished`, return the group of what decodes now."""
        queues = self.queues
        for chunk in batch.chunks:
            if not queues.return_chunk(chunk):
                continue
            if queues.token_of_prefill(chunk.sequence, now_s) or chunk.sequence.aborted:
                finished.append(chunk.sequence)
            else:
                if group is None:
                    group = queues.empty_group()
                    group.rectangle = rectangle(batch.chunks) if self._padded else None
                queues.start_decoding(chunk.sequence, group)
        return group

    def abort(self, request_id: int) -> Sequence:
        """End a request before its time, wherever it is; return it, `generated` up to date.

        Its pages are free at once or, while micro-batches compute with them and decodes do not run
        ahead, when the last of these has returned; so long it counts as running. Raises ValueError
        for a request that is not being served.
        """
        queues = self.queues
        seq = queues.live.get(request_id)
        if seq is None or seq.aborted:
            raise ValueError(f"request {request_id} is not being served")
        return self._end_early(seq)

    def _end_early(self, seq: Sequence) -> Sequence:
        queues, request_id = self.queues, seq.request.request_id
        seq.aborted = True
        queues.leave_queues(seq)
        if queues.ahead:
            late_tokens = queues.recall(seq)
            queues.forget(seq, seq.held_tokens)
            seq.generated -= late_tokens
            return seq
        sent = (batch.decodes for batch in queues.in_flight.values())
        group = next((group for group in sent if group is not None and seq in group), None)
        if group is not None:
            group.settle(seq)
        if group is not None or (seq.chunks_in_flight and not seq.owed):
            queues.aborted.add(request_id)
        else:
            queues.forget(seq, seq.held_tokens)
        return seq

    # -- KV that leaves for another engine, or arrives from one ---------------------------------

    def release(self, request_id: int) -> None:
        """Free the pages that a finished request kept: its KV is elsewhere, or of no more use."""
        seq = self.queues.moving.pop(request_id)
        self.kv.release(seq, seq.held_tokens)

    def has_room(self, context_tokens: int, spare_pages: int) -> bool:
        """Say whether the KV of so many tokens may come: what waits here goes first.

        `spare_pages` stay free for what runs here to grow into, if anything does.
        """
        queues, pool = self.queues, self.pool
        spare = spare_pages if queues.admitted or queues.moving else 0
        return not queues.waiting and pool.pages_for(context_tokens) + spare <= pool.free_pages

    def reserve(self, handover: Handover) -> None:
        """Take pages for KV that sets out for here; ask `has_room` first."""
        request, tokens = handover.request, handover.context_tokens
        seq = Sequence(
            request,
            tokens,
            computed=tokens,
            generated=handover.generated,
            epoch=handover.preemptions,
            first_scheduled_s=handover.first_scheduled_s,
            first_token_s=handover.first_token_s,
            last_token_s=handover.last_token_s,
            pages=self.pool.allocate(self.pool.pages_for(tokens)),
        )
        self.kv.tokens += tokens
        self.queues.moving[request.request_id] = seq

    def adopt(self, request_id: int) -> None:
        """Put a request whose KV has arrived among the ready decodes: it arrives here with it."""
        queues = self.queues
        seq = queues.moving.pop(request_id)
        queues.enter(seq)
        queues.admitted[request_id] = seq
        group = queues.empty_group()
        queues.start_decoding(seq, group)
        queues.ready.append(group)

    # -- what is in the way ---------------------------------------------------------------------

    def can_send(self) -> bool:
        """Say whether the cap allows a micro-batch and there is anything to put into it."""
        queues = self.queues
        return len(queues.in_flight) < self.max_in_flight and (
            queues.ready.num_sequences > 0 or bool(queues.waiting or queues.partials)
        )

    @property
    def wait_reason(self) -> str:
        """Why nothing is sent (one of WAIT_REASONS): the policy's answer, or what is in the way.

        Nothing the policy could send is the policy's doing if work waits (behind the cap, or behind
        an earlier chunk), or if it has put the running decodes, enough for every stage, into fewer
        micro-batches than there are stages. Otherwise there is too little work.
        """
        if self._answer and self.can_send():
            return self._answer
        if self.queues.waiting_tokens or self.queues.running_decodes >= self.depth:
            return "policy"
        return "work"

    # -- carrying out a plan --------------------------------------------------------------------

    def refusal(self, request: Request) -> str | None:
        """Return why a request can never be served, or None."""
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > self.max_model_len:
            return f"{tokens} tokens exceed max_model_len {self.max_model_len}"
        pages = self.pool.pages_for(tokens)
        if pages > self.pool.total_pages:
            return f"{pages} KV pages exceed the pool's {self.pool.total_pages}"
        if self._refuse is None:
            return None
        sizes = request.prompt_tokens, request.output_limit
        reason: str | None = self._ask(self._refuse, *sizes, self.pool)
        return reason

    @property
    def policy_name(self) -> str:
        return type(self.scheduler).__name__

    def _carry_out_parts(
        self, parts: object, chunks: list[Chunk]
    ) -> tuple[Plan, DecodeGroup | None]:
        """Carry out each part of an answer before the policy goes on; return the last plan too."""
        if not isinstance(parts, abc.Iterator):
            raise self._broken(f"returned {shown(parts)}, not a Plan")
        group, plan = None, Plan()
        while True:
            part = self._ask(next, parts, None)
            if part is None:
                return plan, group
            if type(part) is Upkeep:
                self._keep_up(part)
                continue
            if type(part) is not Plan:
                raise self._broken(f"returned {shown(part)}, not a Plan")
            if part.decodes and group is not None:
                raise self._broken("takes decodes in two parts of a plan")
            plan = part
            group = self._carry_out(plan, chunks) or group

    def _keep_up(self, upkeep: Upkeep) -> None:
        if upkeep.give_up is not None:
            self.given_up.append(self._end_early(self._preemptible(upkeep.give_up)))
        if upkeep.waiting:
            self.queues.reorder(upkeep.waiting)
        self._resume(upkeep.hold)
        self.pool.make_room(upkeep.empty_pages)

    def _carry_out(self, plan: tuple[Any, ...], chunks: list[Chunk]) -> DecodeGroup | None:
        """Add the chunks of a plan to `chunks`; return its decodes.

        It is a Plan, in which a user's policy may have put anything.
        """
        prefills, decodes, order, victims, preempt, _, _ = plan
        for request_id in preempt:
            self.queues.preempt(self._preemptible(request_id))
        if prefills:
            self._check_kinds(prefills)
            if self.kv.keeps:
                self._resume(prefill.request_id for prefill in prefills)
            for prefill in prefills:
                chunks.append(self._place(prefill))
        if not decodes:
            return None
        group = self._take_decodes(decodes, order, victims)
        if self._publishes and group is not None:
            self.queues.publish_decodes(group)
        return group

    def _check_kinds(self, prefills: Any) -> None:
        """Raise PolicyError for what is no order: a pair in place of a Prefill, half a token."""
        if type(prefills) is not list and not isinstance(prefills, abc.Sequence):
            raise self._no(prefills, "the prefills", "a list of Prefill(request_id, tokens)")
        for prefill in prefills:
            kind = type(prefill)
            if kind is not Prefill:
                raise self._no(prefill, "a prefill", "Prefill(request_id, tokens)")
            if type(prefill.tokens) is not int and not isinstance(prefill.tokens, Integral):
                what = f"the tokens to prefill of request {prefill.request_id}"
                raise self._no(prefill.tokens, what, "a whole number")

    def _no(self, value: object, what: str, right: str) -> PolicyError:
        return self._broken(f"plans {shown(value)} as {what}; {right} is right")

    def _send(self, chunks: list[Chunk], group: DecodeGroup | None) -> MicroBatch:
        prefill_tokens = prompts = decode_tokens = decode_context = decoded = 0
        for chunk in chunks:
            prefill_tokens += chunk.stop - chunk.start
            prompts += chunk.last
        if group is not None:
            size = len(group.members)
            decode_tokens = size * self._verified_tokens
            decode_context = group.context
            decoded = size if group.stride == 1 else group.next_tokens
        queues, kv = self.queues, self.kv
        kv.tokens += prefill_tokens + decoded
        batch = MicroBatch(
            self._batches,
            queues.now_s,
            chunks,
            group,
            prefill_tokens,
            decode_tokens,
            decode_context,
            prompts + decode_tokens,
            self.pool.free_pages,
            prompts + decoded,
            kv.tokens,
            queues.slot,
        )
        self._answer = ""
        if self._charges:
            self._charge(batch)
        queues.in_flight[self._batches] = batch
        self._batches += 1
        if queues.ahead:
            queues.run_ahead(batch)
        return batch

    def _charge(self, batch: MicroBatch) -> None:
        """Work out what a micro-batch costs and holds where that differs from what it computes."""
        batch.kv_tokens = self.kv.held_tokens
        rows, pages = self.kv.take_copies()
        if self._padded:
            batch.charged = padded_work(batch.chunks, batch.decodes, self._verified_tokens)
        if rows:
            work = batch.charged or work_of(batch)
            batch.charged = work._replace(swapped_rows=rows, swapped_pages=pages)

    def _resume(self, request_ids: abc.Iterable[int]) -> None:
        """Give sequences what is kept of them, before pages for others push cached ones out."""
        for request_id in dict.fromkeys(request_ids):
            seq = self.queues.live.get(request_id)
            if seq is not None and not seq.pages:
                self.queues.resume(seq)

    def _place(self, prefill: Prefill) -> Chunk:
        seq = self._prefillable(prefill)
        stop = seq.computed + prefill.tokens
        if prefill.ends and stop < seq.prompt_tokens:
            if not self._leaves_out:
                raise self._broken("ends its prefill early, and does not say leaves_out", seq)
            self.queues.cut(seq, stop)
        pool = self.pool
        need = pool.pages_for(max(stop, prefill.hold_tokens)) - len(seq.pages)
        if need > 0:
            if need > pool.free_pages:
                raise self._broken(f"needs {need} pages of {pool.free_pages} free", seq)
            seq.pages += pool.allocate(need)
        return self.queues.schedule_chunk(seq, stop)

    def _prefillable(self, prefill: Prefill) -> Sequence:
        seq = self.queues.live.get(prefill.request_id)
        if seq is None or seq.aborted or seq.decoding:
            what = "is not being served" if seq is None or seq.aborted else "decodes"
            raise self._broken(f"prefills request {prefill.request_id}, which {what}")
        if not 1 <= prefill.tokens <= seq.remaining:
            raise self._broken(f"prefills {prefill.tokens} of {seq.remaining} tokens left", seq)
        if seq.owed:
            raise self._broken("prefills while an output of it is in flight", seq)
        if seq.chunks_in_flight and not self.queues.pipelined_chunks:
            raise self._broken("prefills while an earlier chunk is in flight", seq)
        return seq

    def _take_decodes(self, decodes: Any, order: Any, victims: Any) -> DecodeGroup | None:
        if type(decodes) is not int:
            if not isinstance(decodes, Integral):
                raise self._no(decodes, "the decodes to take", "how many")
            decodes = int(decodes)
        ready, count = self.queues.ready, decodes
        if not 0 < count <= ready.num_sequences:
            raise self._broken(f"takes {count} decodes of {ready.num_sequences} ready")
        if order not in ORDERS:
            raise self._broken(f"asks for the order {shown(order)}")
        group = ready.take(count, order)
        if group.stride == 1 and group.tick not in group.page_at:
            return group
        pool, due = self.pool, group.due_pages()
        while len(due) > pool.free_pages:
            if victims == "latest_admitted" and not self.queues.delivers:
                raise self._broken("does not say preempts_in_flight")
            self.queues.preempt(self.queues.victim(victims, group), group)
            group = ready.top_up(group, count, order)
            due = group.due_pages()
        if due:
            group.grow(pool.allocate(len(due)), pool.page_tokens)
        return group if group.members else None

    def _preemptible(self, request_id: int) -> Sequence:
        seq = self.queues.live.get(request_id)
        ahead = seq is not None and self.queues.ahead and seq.decoding
        sent_too = self.queues.delivers or ahead
        running = request_id in self.queues.admitted
        if seq is None or not running or (seq.chunks_in_flight and not sent_too):
            what = "which holds no pages or is in flight"
            raise self._broken(f"preempts request {request_id}, {what}")
        if seq.decoding and not self.queues.delivers and self.queues.ready_with(seq) is None:
            raise self._broken("preempts it while it is in flight", seq)
        if seq.aborted or (self.queues.delivers and self.queues.is_forming(seq)):
            raise self._broken("preempts it after it was aborted or planned", seq)
        return seq

    # -- waiting and errors ---------------------------------------------------------------------

    def _wait(self, plan: Plan) -> None:
        queues = self.queues
        idle = not queues.in_flight and not queues.moving
        waited_at = self._batches, None if idle else queues.now_s
        self._wakes = self._wakes + 1 if waited_at == self._waited_at else 1
        self._waited_at = waited_at
        waits = not idle or plan.wake_at_s is not None or not self._asks_again
        if not waits or self._wakes >= MOST_WAKES:
            raise self._stalled()
        self.wake_at_s = plan.wake_at_s
        self._answer = "kv" if plan.kv_limited else "policy"

    def _stalled(self) -> StallError:
        queues = self.queues
        flying, moving = len(queues.in_flight), len(queues.moving)
        busy = f"{flying} micro-batches and the KV of {moving} requests are under way"
        seq = next(iter(queues.live.values()))
        times = f" when asked {self._wakes} times" if self._wakes > 1 else ""
        prompts = len(queues.waiting) + len(queues.partials)
        return StallError(
            f"policy {self.policy_name} stalls at {queues.now_s:.6g} s: "
            f"{busy if flying or moving else 'nothing is in flight'}, "
            f"{len(queues.live)} requests wait (request {seq.request.request_id} first), "
            f"and it sends nothing{times}; ready and not taken: {queues.ready.num_sequences} "
            f"decodes, {prompts} prompts, with {self.pool.free_pages} of "
            f"{self.pool.total_pages} pages free"
        )

    def _ask(self, method: abc.Callable[..., Any], *given: Any) -> Any:
        """Call what is the policy's; PolicyError for whatever it raises but Ctrl-C."""
        try:
            answer = method(*given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            end_copy(self._process, self.policy_name)
            raise self._broken(f"raised {words_of(error)}{place_of(error)}") from error
        if os.getpid() != self._process:
            end_copy(self._process, self.policy_name)
        return answer

    def _broken(self, what: str, seq: Sequence | None = None) -> PolicyError:
        of = "" if seq is None else f", request {seq.request.request_id}:"
        return PolicyError(f"policy {self.policy_name}{of} {what}")
