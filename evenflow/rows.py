"""The requests an engine serves, as rows: where each is, the pages it holds, and what moves it.

A row waits, is prefilled in chunks, decodes in a group, and ends; preempted, it waits again. The
counters follow. Knows no policy and no micro-batch in flight: `evenflow.batcher` says what happens.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence

from evenflow.groups import DecodeGroup, Row
from evenflow.keeping import Keeper
from evenflow.kv import PagePool
from evenflow.ready import ReadyQueue
from evenflow.speculation import Speculation, SpeculativeGroup
from evenflow.types import Chunk, Handover, Request, Victim


def _by_arrival(row: Row) -> int:
    return row.order


def _by_pages(row: Row) -> tuple[int, int]:
    return len(row.pages), row.order


class Rows:
    """The rows of one engine. `Batcher` explains the parameters, which it takes.

    `kv_tokens` are computed and held by rows, shared ones once for each row; `gap_s` has each gap
    between tokens, for `gap_count` requests each.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        pipelined_chunks: bool,
        speculation: Speculation | None,
        keeps_pages: bool,
        swap: bool,
    ) -> None:
        self.pool = pool
        self.pipelined_chunks = pipelined_chunks
        self.speculation = speculation
        self.keeps_pages = keeps_pages
        self.swap = swap
        self.now_s = 0.0
        self.waiting: deque[Row] = deque()
        self.partials: list[Row] = []  # partly scheduled and free to go on, by arrival
        self.ready = ReadyQueue(pool.page_tokens)
        self.live: dict[int, Row] = {}
        self.moving: dict[int, Row] = {}  # hold pages while their KV leaves or arrives
        self.aborted: set[int] = set()  # of the live: end when their micro-batches return
        self.waiting_tokens = 0
        self.running = 0
        self.running_decodes = 0
        self.preemptions = 0
        self.completed = 0
        self.completed_tokens = 0  # the output of those
        self.kv_tokens = 0
        self.gap_s: list[float] = []
        self.gap_count: list[int] = []
        self.keeper = Keeper(pool, swap)
        self._keeps = self.keeper.active
        self._added = 0

    # -- waiting, and prefilled in chunks -------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Let a request wait."""
        row = Row(request, self._added, request.prompt_tokens)
        self._added += 1
        self.live[request.request_id] = row
        self.keeper.look_up(row)
        self.waiting.append(row)
        self.waiting_tokens += row.remaining

    def looked_up(self, row: Row) -> Row:
        """Return a row that waits after looking what is kept of it now."""
        before = row.remaining
        self.keeper.look_up(row)
        self.waiting_tokens += row.remaining - before
        return row

    def schedule_chunk(self, row: Row, stop: int) -> Chunk:
        """Send the tokens of a row up to `stop`, for which it holds pages."""
        start = row.computed
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
        self.waiting_tokens -= stop - start
        if self._keeps:
            self.keeper.publish(row, stop)
        return Chunk(row, start, stop, last, row.epoch)

    def return_chunk(self, chunk: Chunk) -> None:
        """Take a chunk back; unless it was the last, the row may go on."""
        if chunk.epoch != chunk.row.epoch:
            raise ValueError(f"stale chunk of request {chunk.row.request.request_id}")
        chunk.row.chunks_in_flight -= 1
        if not (chunk.last or self.pipelined_chunks or chunk.row.aborted):
            insort(self.partials, chunk.row, key=_by_arrival)

    def _leave_queue(self, row: Row) -> None:
        if self.waiting[0] is row:
            self.waiting.popleft()
        else:
            self.waiting.remove(row)

    # -- decoding -------------------------------------------------------------------------------

    def token_of_prefill(self, row: Row, now_s: float) -> bool:
        """Record the token a last chunk yields; return whether it is the request's last."""
        if row.generated:
            self.gap_s.append(now_s - row.last_token_s)
            self.gap_count.append(1)
        else:
            row.first_token_s = now_s
        row.last_token_s = now_s
        row.generated += 1
        return row.generated >= row.request.output_tokens

    def empty_group(self) -> DecodeGroup:
        """Return a group of decodes without members."""
        if self.speculation is None:
            return DecodeGroup()
        return SpeculativeGroup(self.speculation.tokens_per_step)

    def start_decoding(self, row: Row, group: DecodeGroup) -> None:
        """Let a row whose prompt is computed join a group of decodes."""
        row.decoding = True
        group.join(row, row.prompt_tokens, self.pool.page_tokens)
        self.running_decodes += 1

    def retire(self, row: Row, now_s: float) -> None:
        """End a row; its pages are free unless another engine is to fetch them."""
        row.completion_s = now_s
        self.keeper.publish(row, row.held_tokens)
        if self.keeps_pages:
            self.moving[row.request.request_id] = row
        else:
            self._free(row)
        self.running -= 1
        if row.decoding:
            self.running_decodes -= 1
        self.completed += 1
        self.completed_tokens += row.generated
        del self.live[row.request.request_id]

    def _free(self, row: Row) -> None:
        self.kv_tokens -= row.held_tokens
        self.pool.free(row.pages)
        row.pages = []

    # -- a client that leaves -------------------------------------------------------------------

    def leave_queues(self, row: Row) -> None:
        """Take a row out of where it could be scheduled from; it still holds its pages."""
        if row.decoding:
            if row in self.ready:
                self.ready.remove(row)
            return
        self.waiting_tokens -= row.remaining
        if not row.pages:
            self._leave_queue(row)
        elif row in self.partials:
            self.partials.remove(row)

    def end_early(
        self,
        finished: list[Row],
        chunks: Sequence[Chunk],
        group: DecodeGroup | None,
        stopped: Collection[int],
    ) -> list[Row]:
        """Take those that stopped or were aborted out of what a micro-batch brought back.

        Return all that finished; aborted ones did not.
        """
        if group is not None:
            ended = {*stopped, *self.aborted}
            rows = [row for row in group.rows() if row.request.request_id in ended]
            for row in rows:
                group.leave(row)
            finished += rows
        gone = [row for row in finished if row.aborted]
        gone += (chunk.row for chunk in chunks if chunk.row.aborted)
        for row in dict.fromkeys(gone):
            if not row.chunks_in_flight:
                self.aborted.remove(row.request.request_id)
                self.give_up(row)
        return [row for row in finished if not row.aborted]

    def give_up(self, row: Row) -> None:
        """Forget a row that is in no queue and no micro-batch any more; its pages are free."""
        if row.pages:  # else it has only waited
            self.kv_tokens -= row.held_tokens if row.decoding else row.computed
            self.pool.free(row.pages)
            row.pages = []
            self.running -= 1
            self.running_decodes -= row.decoding
        del self.live[row.request.request_id]

    # -- preemption -----------------------------------------------------------------------------

    def victim(self, rule: Victim, forming: DecodeGroup | None = None) -> Row:
        """Choose among what is not in flight: ready decodes, those `forming`, partials by arrival.

        Of rows that returned together, the last one is the last returned.
        """
        groups = [*self.ready.groups, forming] if forming is not None else self.ready.groups
        if rule == "last_returned":
            members = [(group.last_token_of(row), row) for group in groups for row in group.rows()]
            return max(reversed(members), key=lambda member: member[0])[1]
        rows = [row for group in groups for row in group.rows()]
        if rule == "most_pages":
            return max(rows, key=_by_pages)
        rows += [row for row in self.partials if not row.chunks_in_flight]
        return max(rows, key=_by_arrival)

    def preempt(self, row: Row, group: DecodeGroup | None = None) -> None:
        """Free all pages and queue the row first; its output so far is part of its next prompt.

        `group` is what is forming, which may hold the row.
        """
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
        self.keeper.suspend(row, held_tokens)
        self.kv_tokens -= held_tokens
        self.pool.free(row.pages)
        row.pages = []
        row.prompt_tokens = row.request.prompt_tokens + row.generated
        row.computed = row.kept_tokens
        row.epoch += 1
        self.preemptions += 1
        self.running -= 1
        self.keeper.look_up(row)
        self.waiting.appendleft(row)
        self.waiting_tokens += row.remaining

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
        self.moving[request.request_id] = row

    def adopt(self, request_id: int) -> None:
        """Put a request whose KV has arrived among the ready decodes: it arrives here with it."""
        row = self.moving.pop(request_id)
        row.order = self._added
        self._added += 1
        self.live[request_id] = row
        self.running += 1
        group = self.empty_group()
        self.start_decoding(row, group)
        self.ready.append(group)
