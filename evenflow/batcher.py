"""The serving state machine: queues, pages and the micro-batches in flight. Three verbs drive it.

`add` takes an arrival, `next` asks the policy and carries out its plan, `complete` takes a
micro-batch back; where clients may leave, `abort` ends a request. The Batcher has no clock and
decides nothing: mechanism is here and in `evenflow.rows`, policy in `evenflow.schedulers`. One
thread or process owns it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

from evenflow.costs.base import work_of
from evenflow.errors import PolicyError, StallError, UsageError
from evenflow.groups import DecodeGroup, Row
from evenflow.kv import PagePool
from evenflow.padding import padded_work, rectangle
from evenflow.rows import Rows
from evenflow.speculation import Speculation
from evenflow.types import Chunk, MicroBatch, Order, Plan, Prefill, Request, Scheduler
from evenflow.view import View

ORDERS = frozenset(get_args(Order))


class Batcher(Rows):
    """Serves requests with one engine; validates and carries out what its policy plans.

    Parameters: `depth` pipeline stages; at most `max_in_flight` micro-batches at once (None: no
    cap); `max_model_len` tokens of prompt and output; `pipelined_chunks` overrides the policy's
    own; `speculation` lets a decode step yield several tokens; `keeps_pages`: a finished request's
    pages stay until `release`, for another engine to fetch; `swap`: a preempted request's pages are
    copied to the host, and back instead of being recomputed. A pool that is a PrefixCache shares
    the pages of common prefixes. Raises UsageError when a step could yield more tokens than a page
    holds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: PagePool,
        *,
        depth: int,
        max_in_flight: int | None,
        max_model_len: int,
        pipelined_chunks: bool | None = None,
        speculation: Speculation | None = None,
        keeps_pages: bool = False,
        swap: bool = False,
    ) -> None:
        if pipelined_chunks is None:
            pipelined_chunks = getattr(scheduler, "pipelined_chunks", False)
        super().__init__(
            pool,
            pipelined_chunks=pipelined_chunks,
            speculation=speculation,
            keeps_pages=keeps_pages,
            swap=swap,
        )
        self.scheduler = scheduler
        self.depth = depth
        self.max_in_flight = max_in_flight if max_in_flight is not None else 1 << 60
        self.max_model_len = max_model_len
        self._padded = getattr(scheduler, "padded", False)
        self._verified_tokens = 1 if speculation is None else speculation.verified_tokens
        if self._verified_tokens > pool.page_tokens:
            raise UsageError(
                f"speculative: a step of k + 1 = {self._verified_tokens} tokens needs pages of at "
                f"least as many, not {pool.page_tokens}"
            )
        self._charges = self.keeper.active or self._padded
        self.wake_at_s: float | None = None
        self.in_flight: dict[int, MicroBatch] = {}
        self._batches = 0
        self._answer = ""  # the policy's, to the last question: why it sends nothing
        self._view = View(self)

    # -- the three verbs ------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queue an arrival; return None, or why it can never be served (it is then not queued)."""
        reason = self.refusal(request)
        if reason is not None:
            return reason
        if request.request_id in self.live:
            raise ValueError(f"request {request.request_id} is already being served")
        self.enqueue(request)
        return None

    def next(self, now_s: float) -> MicroBatch | None:
        """Ask the policy for a micro-batch and put it in flight; None means wait.

        The policy is asked only when there is something it could send. `wait_reason` then says why
        nothing is sent, `wake_at_s` when the policy wants to be asked again. Raises PolicyError for
        a plan that cannot be carried out, StallError for one that would never send anything.
        """
        self.wake_at_s = None
        self.now_s = now_s
        while self.can_send:
            preemptions = self.preemptions
            try:
                plan = self.scheduler.schedule(self._view)
            except Exception as error:
                what = f"raised {type(error).__name__}: {error}"
                raise PolicyError(f"policy {self.policy_name} {what}") from error
            batch = self._carry_out(plan)
            if batch is not None:
                self._answer = ""
                return batch
            if self.preemptions == preemptions:
                self._wait(plan)
                return None
        return None

    def complete(self, batch: MicroBatch, now_s: float, stopped: Collection[int] = ()) -> list[Row]:
        """Take back a micro-batch that left the last stage at `now_s`; return the finished rows.

        `stopped` names requests that ended before their limit (an end-of-sequence token).
        """
        if self.in_flight.pop(batch.batch_id, None) is not batch:
            raise ValueError(f"micro-batch {batch.batch_id} is not in flight")
        group = batch.decodes
        finished: list[Row] = []
        if group is not None:
            finished = group.step(now_s, self.gap_s, self.gap_count)
        for chunk in batch.chunks:
            self.return_chunk(chunk)
            if not chunk.last:
                continue
            if self.token_of_prefill(chunk.row, now_s) or chunk.row.aborted:
                finished.append(chunk.row)
            else:
                group = group if group is not None else self._group_of(batch)
                self.start_decoding(chunk.row, group)
        if stopped or self.aborted:
            finished = self.end_early(finished, batch.chunks, group, stopped)
        for row in finished:
            self.retire(row, now_s)
        if group is not None and group.members:
            self.ready.append(group)
        return finished

    def abort(self, request_id: int) -> Row:
        """End a request before its time, wherever it is; return its row, `generated` up to date.

        Its pages are free at once or, while micro-batches compute with them, when the last of these
        has returned; so long it counts as running. Raises ValueError for a request that is not
        being served.
        """
        row = self.live.get(request_id)
        if row is None or row.aborted:
            raise ValueError(f"request {request_id} is not being served")
        row.aborted = True
        self.leave_queues(row)
        sent = (batch.decodes for batch in self.in_flight.values())
        group = next((group for group in sent if group is not None and row in group), None)
        if group is not None:
            group.settle(row)
        if group is not None or row.chunks_in_flight:
            self.aborted.add(request_id)
        else:
            self.give_up(row)
        return row

    # -- what is in the way ---------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether the cap allows a micro-batch and there is anything to put into it."""
        return len(self.in_flight) < self.max_in_flight and bool(
            self.ready.rows or self.waiting or self.partials
        )

    @property
    def wait_reason(self) -> str:
        """Why nothing is sent (one of WAIT_REASONS): the policy's answer, or what is in the way.

        Nothing the policy could send is the policy's doing if work waits (behind the cap, or behind
        an earlier chunk), or if it has put the running decodes, enough for every stage, into fewer
        micro-batches than there are stages. Otherwise there is too little work.
        """
        if self._answer and self.can_send:
            return self._answer
        if self.waiting_tokens or self.running_decodes >= self.depth:
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
        refuse = getattr(self.scheduler, "refuse", None)
        if refuse is None:
            return None
        reason: str | None = refuse(request.prompt_tokens, request.output_tokens, self.pool)
        return reason

    @property
    def policy_name(self) -> str:
        return type(self.scheduler).__name__

    def _carry_out(self, plan: Plan) -> MicroBatch | None:
        if type(plan) is not Plan:
            raise PolicyError(f"policy {self.policy_name} returned {plan!r}, not a Plan")
        for request_id in plan.preempt:
            self.preempt(self._preemptible(request_id))
        if self._keeps and plan.prefills:
            self._resume(plan.prefills)
        chunks: list[Chunk] = []
        prefill_tokens = output = decode_tokens = decode_context = 0
        for prefill in plan.prefills:
            chunk = self._place(prefill)
            chunks.append(chunk)
            prefill_tokens += prefill.tokens
            output += chunk.last
        group = self._take_decodes(plan) if plan.decodes else None
        if group is None and not chunks:
            return None
        sampled = output
        if group is not None:
            rows = len(group.members)
            decode_tokens = rows * self._verified_tokens
            decoded = rows if group.stride == 1 else group.next_tokens
            sampled += decode_tokens
            output += decoded
            decode_context = group.context
            self.kv_tokens += decoded
        self.kv_tokens += prefill_tokens
        batch = MicroBatch(
            self._batches,
            self.now_s,
            chunks,
            group,
            prefill_tokens,
            decode_tokens,
            decode_context,
            sampled,
            self.pool.free_pages,
            output,
            self.kv_tokens,
        )
        if self._charges:
            self._charge(batch)
        self._batches += 1
        self.in_flight[batch.batch_id] = batch
        return batch

    def _charge(self, batch: MicroBatch) -> None:
        """Say what a micro-batch costs and holds where that is not just what its rows do."""
        batch.kv_tokens -= self.pool.saved_pages * self.pool.page_tokens
        rows, pages = self.keeper.take_copies()
        if self._padded:
            batch.charged = padded_work(batch.chunks, batch.decodes, self._verified_tokens)
        if rows:
            work = batch.charged or work_of(batch)
            batch.charged = work._replace(swapped_rows=rows, swapped_pages=pages)

    def _resume(self, prefills: Sequence[Prefill]) -> None:
        """Give rows what is kept of them, before pages for others push cached ones out."""
        for request_id in dict.fromkeys(prefill.request_id for prefill in prefills):
            row = self.live.get(request_id)
            if row is not None and not row.pages:
                self.keeper.resume(self.looked_up(row))

    def _place(self, prefill: Prefill) -> Chunk:
        row = self._prefillable(prefill)
        stop = row.computed + prefill.tokens
        need = self.pool.pages_for(max(stop, prefill.hold_tokens)) - len(row.pages)
        if need > 0:
            if need > self.pool.free_pages:
                raise self._broken(row, f"needs {need} pages of {self.pool.free_pages} free")
            row.pages += self.pool.allocate(need)
        return self.schedule_chunk(row, stop)

    def _prefillable(self, prefill: Prefill) -> Row:
        row = self.live.get(prefill.request_id)
        if row is None or row.aborted or row.decoding:
            what = "is not being served" if row is None or row.aborted else "decodes"
            raise PolicyError(
                f"policy {self.policy_name} prefills request {prefill.request_id}, which {what}"
            )
        if not 1 <= prefill.tokens <= row.remaining:
            raise self._broken(row, f"prefills {prefill.tokens} of {row.remaining} tokens left")
        if row.chunks_in_flight and not self.pipelined_chunks:
            raise self._broken(row, "prefills while an earlier chunk is in flight")
        return row

    def _take_decodes(self, plan: Plan) -> DecodeGroup | None:
        if not 0 < plan.decodes <= self.ready.rows:
            raise PolicyError(
                f"policy {self.policy_name} takes {plan.decodes} decodes of {self.ready.rows} ready"
            )
        if plan.order not in ORDERS:
            raise PolicyError(f"policy {self.policy_name} asks for the order {plan.order!r}")
        group = self.ready.take(plan.decodes, plan.order)
        if group.stride == 1 and group.tick not in group.page_at:
            return group
        due = group.due_pages()
        while len(due) > self.pool.free_pages:
            self.preempt(self.victim(plan.victims, group), group)
            group = self.ready.top_up(group, plan.decodes, plan.order)
            due = group.due_pages()
        if due:
            group.grow(self.pool.allocate(len(due)), self.pool.page_tokens)
        return group if group.members else None

    def _preemptible(self, request_id: int) -> Row:
        row = self.live.get(request_id)
        if row is None or row.chunks_in_flight or not row.pages:
            raise PolicyError(
                f"policy {self.policy_name} preempts request {request_id}, which holds no pages "
                "or is in flight"
            )
        if row.decoding and row not in self.ready:
            raise self._broken(row, "preempts it while it is in flight")
        return row

    def _group_of(self, batch: MicroBatch) -> DecodeGroup:
        group = self.empty_group()
        if self._padded:
            group.rectangle = rectangle(batch.chunks)
        return group

    # -- waiting and errors ---------------------------------------------------------------------

    def _wait(self, plan: Plan) -> None:
        if not self.in_flight and not self.moving and plan.wake_at_s is None:
            row = next(iter(self.live.values()))
            raise StallError(
                f"policy {self.policy_name} stalls at {self.now_s:.6g} s: nothing is in flight, "
                f"{len(self.live)} requests wait (request {row.request.request_id} first), "
                "and it sends nothing"
            )
        self.wake_at_s = plan.wake_at_s
        self._answer = "kv" if plan.kv_limited else "policy"

    def _broken(self, row: Row, what: str) -> PolicyError:
        return PolicyError(f"policy {self.policy_name}, request {row.request.request_id}: {what}")
