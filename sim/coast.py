"""Stretches of a run in which only decodes go round, simulated without asking the policy.

While no request waits, ends or arrives, a group of decodes that returns is sent again as it is:
only token counts and times change. Any other event ends the stretch, and the loop goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import DecodeGroup, Sequence
from evenflow.core.loop import Loop
from evenflow.schedulers.limits import Policy
from evenflow.sim.clock import SimClock
from evenflow.sim.tandem import Tandem

T = TypeVar("T")
NONE: Final[list[Sequence]] = []


class Coast:
    """Sends returned groups of decodes again as the loop would, many rounds at a time.

    `calls`: the pipeline's own events in the clock's queue. `eager`: as in the loop. For
    engines, `engine_coast` sets the `kind` of groups, whether these run `ahead` by a step, and
    whether they are sent one return `late`.
    """

    def __init__(
        self,
        clock: SimClock,
        loop: Loop,
        policy: Policy,
        tandem: Tandem,
        returned: Callable[[float], None],
        *,
        eager: bool,
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._engine = loop.engines[0]
        self._queues = self._engine.queues
        self._policy = policy
        self._tandem = tandem
        self._returned = returned
        self._eager = eager
        self.calls = (returned, tandem.freed)
        self.kind: type[DecodeGroup] = DecodeGroup
        self.ahead = self.late = 0

    def go(self) -> None:
        """Serve rounds up to the first with any event besides decodes."""
        queues = self._queues
        if queues.ready.num_sequences or queues.waiting_tokens or queues.aborted:
            return
        flying = list(queues.in_flight.values())
        for batch in flying:
            if batch.chunks or type(batch.decodes) is not self.kind:
                return
        back_s, until_s = self._clock.due(self._returned)
        if len(back_s) != len(flying) - self.late:
            return
        groups, last_s = self.groups(flying)
        if groups:
            rounds = self._go_round(flying, groups, last_s, back_s, until_s)
            if rounds:
                self._move_on(flying, groups, last_s, back_s, rounds)

    def groups(self, flying: list[MicroBatch]) -> tuple[list[DecodeGroup], list[float]]:
        """Return the groups that `flying` decode in turn, none where the next return changes them.

        Where they run ahead, also when their last tokens came.
        """
        return [batch.decodes for batch in flying if batch.decodes is not None], []

    def turn(
        self,
        flying: list[MicroBatch],
        groups: list[DecodeGroup],
        last_s: list[float],
        rounds: int,
    ) -> None:
        """Bring the loop's micro-batches in flight into their order after `rounds` returns."""
        self._loop.travelling.rotate(-rounds)

    def _go_round(
        self,
        flying: list[MicroBatch],
        groups: list[DecodeGroup],
        last_s: list[float],
        back_s: list[float],
        until_s: float,
    ) -> int:
        """Send in turn what is in flight, back at `back_s`, which is updated; return how often.

        The `groups` of decodes take turns, too. Where they run ahead, `last_s` is when their last
        tokens came, and is updated.
        """
        queues, policy, tandem, pool = self._queues, self._policy, self._tandem, self._engine.pool
        depth, ahead, late = self._engine.depth, self.ahead, self.late
        size, sent, kinds = len(flying), len(back_s), len(groups)
        rounds = 0
        while True:
            place = rounds % sent
            returned_s = back_s[place]
            now_s = returned_s if self._eager else max(returned_s, tandem.free_s)
            if now_s >= until_s or (sent > 1 and back_s[(rounds + 1) % sent] <= now_s):
                break
            group = groups[(rounds + ahead) % kinds]
            if group.tick + 1 in group.finish_at:
                break
            tick, rows = group.tick + 1 - ahead, len(group.members)
            due = len(group.page_at.get(tick, NONE))
            if due >= pool.free_pages or not policy.sends_whole(
                rows, queues.running_decodes, depth
            ):
                break
            batch = flying[rounds % size]
            if late:
                unsent = flying[(rounds - 1) % size]
                unsent.scheduled_s = now_s
                back_s[place] = tandem.send(unsent)
            if ahead:
                queues.gap_s.append(returned_s - last_s[rounds % kinds])
                queues.gap_count.append(len(groups[rounds % kinds].members))
                last_s[rounds % kinds] = returned_s
            else:
                group.advance(returned_s, queues.gap_s, queues.gap_count)
            if due:
                group.grow(pool.allocate(due), pool.page_tokens)
            queues.now_s = now_s
            self._choose(batch, group)
            if ahead:
                group.advance(now_s, [], [])
            if not late:
                back_s[place] = tandem.send(batch)
            rounds += 1
        return rounds

    def _choose(self, batch: MicroBatch, group: DecodeGroup) -> None:
        """Make a micro-batch of the next step of a group, as the Batcher would."""
        queues, kv = self._queues, self._queues.kv
        rows = len(group.members)
        kv.tokens += rows
        batch.batch_id = queues.batches
        batch.slot = group.slot = queues.batches % queues.num_slots
        batch.scheduled_s = batch.chosen_s = queues.now_s
        batch.decode_tokens = batch.sampled_rows = batch.output_tokens = rows
        batch.decode_context = group.context
        batch.num_active = len(queues.admitted)
        batch.free_pages = kv.pool.free_pages
        batch.kv_tokens = kv.held_tokens
        queues.batches += 1

    def _move_on(
        self,
        flying: list[MicroBatch],
        groups: list[DecodeGroup],
        last_s: list[float],
        back_s: list[float],
        rounds: int,
    ) -> None:
        """Bring the order of what is in flight, and the clock, up to date."""
        queues = self._queues
        flying = _turned(flying, rounds)
        queues.in_flight.clear()
        for batch in flying:
            queues.in_flight[batch.batch_id] = batch
        self.turn(flying, _turned(groups, rounds), last_s and _turned(last_s, rounds), rounds)
        self._clock.move(self._returned, _turned(back_s, rounds), min(rounds, len(back_s)))


def _turned(items: list[T], rounds: int) -> list[T]:
    """Return a list that begins with what is first after `rounds` of its items' turns."""
    first = rounds % len(items)
    return items[first:] + items[:first] if first else items
