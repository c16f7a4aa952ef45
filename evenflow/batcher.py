"""The serving state machine: queues, pages and the micro-batches in flight. Three verbs drive it.

`add` takes an arrival, `next` asks the policy and carries out its plan, `complete` takes a
micro-batch back. The Batcher has no clock and decides nothing: mechanism is here, policy in
`evenflow.schedulers`. One thread or process owns it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import get_args

from evenflow.costs.base import work_of
from evenflow.errors import PolicyError, StallError, UsageError
from evenflow.groups import DecodeGroup, Row
from evenflow.keeping import Keeper
from evenflow.kv import PagePool
from evenflow.padding import padded_work, rectangle
from evenflow.ready import ReadyQueue
from evenflow.speculation import Speculation, SpeculativeGroup
from evenflow.types import (
    Chunk,
    Handover,
    MicroBatch,
    Order,
    Plan,
    Prefill,
    Request,
    Scheduler,
    Victim,
)
from evenflow.view import DecodeLengths, Prompt, View

ORDERS = frozenset(get_args(Order))


def _by_arrival(row: Row) -> int:
    return row.order


def _by_pages(row: Row) -> tuple[int, int]:
    return len(row.pages), row.order


class Batcher:
    """Owns the state of one serving engine; validates and carries out what its policy plans.

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
        self.scheduler = scheduler
        self.pool = pool
        self.keeps_pages = keeps_pages
        self.depth = depth
        self.max_in_flight = max_in_flight if max_in_flight is not None else 1 << 60
        self.max_model_len = max_model_len
        if pipelined_chunks is None:
            pipelined_chunks = getattr(scheduler, "pipelined_chunks", False)
        self.pipelined_chunks = pipelined_chunks
        self._padded = getattr(scheduler, "padded", False)
        self.speculation = speculation
        self._verified_tokens = 1 if speculation is None else speculation.verified_tokens
        if self._verified_tokens > pool.page_tokens:
            raise UsageError(
                f"speculative: a step of k + 1 = {self._verified_tokens} tokens needs pages of at "
                f"least as many, not {pool.page_tokens}"
            )
        self.now_s = 0.0
        self.waiting: deque[Row] = deque()
        self.partials: list[Row] = []  # partly scheduled and free to go on, by arrival
        self.ready = ReadyQueue(pool.page_tokens)
        self.in_flight: dict[int, MicroBatch] = {}
        self.live: dict[int, Row] = {}
        self.moving: dict[int, Row] = {}  # hold pages while their KV leaves or arrives
        self.waiting_tokens = 0
        self.running = 0
        self.running_decodes = 0
        self.preemptions = 0
        self.kv_tokens = 0  # computed and held by rows, shared ones once for each row
        self.swap = swap
        self._keeper = Keeper(pool, swap)
        self._keeps = self._keeper.active
        self._charges = self._keeper.active or self._padded
        self.gap_s: list[float] = []
        self.gap_count: list[int] = []
        self._answer = ""  # the policy's, to the last question: why it sends nothing
        self.wake_at_s: float | None = None
        self._added = 0
        self._batches = 0
        self._completed = 0
        self._completed_tokens = 0  # the output of those
        self._view = View(self)

    # -- the three verbs ------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queue an arrival; return None, or why it can never be served (it is then not queued)."""
        reason = self.refusal(request)
        if reason is not None:
            return reason
        if request.request_id in self.live:
            raise ValueError(f"request {request.request_id} is already being served")
        row = Row(request, self._added, request.prompt_tokens)
        self._added += 1
        self.live[request.request_id] = row
        self._keeper.look_up(row)
        self.waiting.append(row)
        self.waiting_tokens += row.remaining
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
            if chunk.epoch != chunk.row.epoch:
                raise ValueError(f"stale chunk of request {chunk.row.request.request_id}")
            chunk.row.chunks_in_flight -= 1
            if not chunk.last:
                if not self.pipelined_chunks:
                    insort(self.partials, chunk.row, key=_by_arrival)
            elif self._token_of_prefill(chunk.row, now_s):
                finished.append(chunk.row)
            else:
                group = group if group is not None else self._new_group(batch)
                self._start_decoding(chunk.row, group)
        if stopped and group is not None:
            finished += self._stop(group, stopped)
        for row in finished:
            self._retire(row, now_s)
        if group is not None and group.members:
            self.ready.append(group)
        return finished

    # -- KV that leaves for another engine, or arrives from one ----------------------------------

    def release(self, request_id: int) -> None:
        """Free the pages that a finished request kept: its KV is elsewhere, or of no more use."""
        self._free(self.moving.pop(request_id))

    def has_room(self, context_tokens: int, spare_pages: int) -> bool:
        """Say whether the KV of so many tokens may come: what waits here goes first.

        `spare_pages` stay free for what runs here to grow into, if anything does.
        """
        spare = spare_pages if self.running or self.moving else 0
        pages = self.pool.pages_for(context_tokens)
        return not self.waiting and pages + spare <= self.pool.free_pages

    def reserve(self, handover: Handover) -> None:
        """Take pages for KV that sets out for here; ask `has_room` first."""
        request = handover.request
        row = Row(request, self._added, handover.context_tokens, handover.context_tokens)
        row.generated = handover.generated
        row.first_token_s, row.last_token_s = handover.first_token_s, handover.last_token_s
        row.epoch = handover.preemptions
        row.first_scheduled_s = handover.first_scheduled_s
        row.pages = self.pool.allocate(self.pool.pages_for(row.prompt_tokens))
        self.kv_tokens += row.held_tokens
        self._added += 1
        self.moving[request.request_id] = row

    def adopt(self, request_id: int) -> None:
        """Put a request whose KV has arrived among the ready decodes."""
        row = self.moving.pop(request_id)
        self.live[request_id] = row
        self.running += 1
        group = self._empty_group()
        self._start_decoding(row, group)
        self.ready.append(group)

    # -- what a view reads ----------------------------------------------------------------------

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

    def prompts(self) -> Iterator[Prompt]:
        for row in self.partials:
            yield row.prompt
        yield from self.waiting_prompts()

    def waiting_prompts(self) -> Iterator[Prompt]:
        if not self._keeps:
            return (row.prompt for row in self.waiting)
        return (self._looked_up(row).prompt for row in self.waiting)

    def _looked_up(self, row: Row) -> Row:
        before = row.remaining
        self._keeper.look_up(row)
        self.waiting_tokens += row.remaining - before
        return row

    def decode_pages(self, count: int, order: str) -> int:
        return self.ready.due_pages(count, order)

    def decode_lengths(self) -> Iterator[DecodeLengths]:
        sent = (batch.decodes for batch in self.in_flight.values() if batch.decodes is not None)
        for group in (*self.ready.groups, *sent):
            yield from group.lengths()

    def expected_output_tokens(self) -> float:
        mean = self._completed_tokens / self._completed if self._completed else 0.0
        return sum(
            max((mean if predicted is None else predicted) - generated, 0)
            for _, generated, predicted in self.decode_lengths()
        )

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
            self._preempt(self._preemptible(request_id))
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
        rows, pages = self._keeper.take_copies()
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
                self._keeper.resume(self._looked_up(row))

    def _place(self, prefill: Prefill) -> Chunk:
        row = self._prefillable(prefill)
        pool, start = self.pool, row.computed
        stop = start + prefill.tokens
        need = pool.pages_for(max(stop, prefill.hold_tokens)) - len(row.pages)
        if need > 0:
            if need > pool.free_pages:
                raise self._broken(row, f"needs {need} pages of {pool.free_pages} free")
            row.pages += pool.allocate(need)
        last = stop == row.prompt_tokens
        goes_on = self.pipelined_chunks and not last
        if start == row.kept_tokens:
            self._leave_queue(row)
            if not row.epoch:
                row.first_scheduled_s = self.now_s
            self.running += 1
            self.kv_tokens += start
            if goes_on:
                insort(self.partials, row, key=_by_arrival)
        elif not goes_on:
            self.partials.remove(row)
        row.computed = stop
        row.chunks_in_flight += 1
        self.waiting_tokens -= prefill.tokens
        if self._keeps:
            self._keeper.publish(row, stop)
        return Chunk(row, start, stop, last, row.epoch)

    def _prefillable(self, prefill: Prefill) -> Row:
        row = self.live.get(prefill.request_id)
        if row is None or row.decoding:
            raise PolicyError(
                f"policy {self.policy_name} prefills request {prefill.request_id}, "
                f"which {'decodes' if row else 'is not being served'}"
            )
        if not 1 <= prefill.tokens <= row.remaining:
            raise self._broken(row, f"prefills {prefill.tokens} of {row.remaining} tokens left")
        if row.chunks_in_flight and not self.pipelined_chunks:
            raise self._broken(row, "prefills while an earlier chunk is in flight")
        return row

    def _leave_queue(self, row: Row) -> None:
        if self.waiting[0] is row:
            self.waiting.popleft()
        else:
            self.waiting.remove(row)

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
            self._preempt(self._victim(group, plan.victims), group)
            due = group.due_pages()
        if due:
            group.grow(self.pool.allocate(len(due)), self.pool.page_tokens)
        return group if group.members else None

    # -- preemption -----------------------------------------------------------------------------

    def _victim(self, group: DecodeGroup, rule: Victim) -> Row:
        """Choose among what is not in flight: the forming group, ready decodes, partials."""
        if rule == "last_returned":
            return list(group.rows())[-1]
        rows: list[Row] = [*group.rows(), *self.ready]
        if rule == "most_pages":
            return max(rows, key=_by_pages)
        rows += [row for row in self.partials if not row.chunks_in_flight]
        return max(rows, key=_by_arrival)

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

    def _preempt(self, row: Row, group: DecodeGroup | None = None) -> None:
        """Free all pages and queue the row first; its output so far is part of its next prompt."""
        if row.decoding:
            if group is not None and row in group:
                group.leave(row)
            else:
                self.ready.remove(row)
            self.running_decodes -= 1
            row.decoding = False
            held_tokens = row.held_tokens
        else:
            self.partials.remove(row)
            self.waiting_tokens -= row.remaining
            held_tokens = row.computed
        self._keeper.suspend(row, held_tokens)
        self.kv_tokens -= held_tokens
        self.pool.free(row.pages)
        row.pages = []
        row.prompt_tokens = row.request.prompt_tokens + row.generated
        row.computed = row.kept_tokens
        row.epoch += 1
        self.preemptions += 1
        self.running -= 1
        self._keeper.look_up(row)
        self.waiting.appendleft(row)
        self.waiting_tokens += row.remaining

    # -- results of a micro-batch ---------------------------------------------------------------

    def _token_of_prefill(self, row: Row, now_s: float) -> bool:
        """Record the token a last chunk yields; return whether it is the request's last."""
        if row.generated:
            self.gap_s.append(now_s - row.last_token_s)
            self.gap_count.append(1)
        else:
            row.first_token_s = now_s
        row.last_token_s = now_s
        row.generated += 1
        return row.generated >= row.request.output_tokens

    def _free(self, row: Row) -> None:
        self.kv_tokens -= row.held_tokens
        self.pool.free(row.pages)
        row.pages = []

    def _empty_group(self) -> DecodeGroup:
        if self.speculation is None:
            return DecodeGroup()
        return SpeculativeGroup(self.speculation.tokens_per_step)

    def _new_group(self, batch: MicroBatch) -> DecodeGroup:
        group = self._empty_group()
        if self._padded:
            group.rectangle = rectangle(batch.chunks)
        return group

    def _start_decoding(self, row: Row, group: DecodeGroup) -> None:
        row.decoding = True
        group.join(row, row.prompt_tokens, self.pool.page_tokens)
        self.running_decodes += 1

    def _stop(self, group: DecodeGroup, stopped: Collection[int]) -> list[Row]:
        rows = [row for row in group.rows() if row.request.request_id in stopped]
        for row in rows:
            group.leave(row)
        return rows

    def _retire(self, row: Row, now_s: float) -> None:
        row.completion_s = now_s
        self._keeper.publish(row, row.held_tokens)
        if self.keeps_pages:
            self.moving[row.request.request_id] = row
        else:
            self._free(row)
        self.running -= 1
        if row.decoding:
            self.running_decodes -= 1
        self._completed += 1
        self._completed_tokens += row.generated
        del self.live[row.request.request_id]

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
