"""Stretches in which the same groups of decodes go round, and nobody needs to be asked.

Where nothing waits, nothing ends and nothing comes, a group that returns is sent again as it is. So
only numbers change; whatever else happens ends the stretch, and is left to the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import DecodeGroup
from evenflow.core.kv import KvCache
from evenflow.core.loop import Loop
from evenflow.core.queues import Queues
from evenflow.core.world import World
from evenflow.engines.again import groups_ahead, last_token_s, note_ahead
from evenflow.engines.ahead import AheadGroup
from evenflow.engines.loop import EngineLoop
from evenflow.engines.queues import EngineQueues
from evenflow.schedulers.limits import Policy
from evenflow.sim.clock import SimClock
from evenflow.sim.tandem import Tandem

T = TypeVar("T")


class Coast:
    """Sends groups of decodes again, as the loop would, on from the end of an instant.

    `calls`: those of the pipeline that the clock has queued. `eager`: as the loop is.
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
        self._queues = queues = self._engine.queues
        self._policy = policy
        self._tandem = tandem
        self._returned = returned
        self._eager = eager
        self._ahead = int(isinstance(queues, EngineQueues) and queues.ahead > 0)
        self._late = int(isinstance(loop, EngineLoop) and loop.needs_tokens)
        self.calls = (returned, tandem.freed)

    def go(self) -> None:
        """Serve all rounds up to the first that may be another's business."""
        queues, loop = self._queues, self._loop
        if queues.ready.num_sequences or queues.waiting_tokens or queues.aborted:
            return
        if isinstance(loop, EngineLoop) and not loop.is_round:
            return
        flying = list(queues.in_flight.values())
        for batch in flying:
            if batch.chunks or type(batch.decodes) not in (DecodeGroup, AheadGroup):
                return
        back_s, until_s = self._clock.due(self._returned)
        if len(back_s) != len(flying) - self._late:
            return
        groups = [batch.decodes for batch in flying if batch.decodes is not None]
        last_s: list[float] = []
        if self._ahead:
            assert isinstance(queues, EngineQueues)
            groups = groups_ahead(queues, flying)
            last_s = [last_token_s(group) for group in groups]
        if groups:
            rounds = self._go_round(flying, groups, last_s, back_s, until_s)
            if rounds:
                self._move_on(flying, groups, last_s, back_s, rounds)

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
        depth, ahead, late = self._engine.depth, self._ahead, self._late
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
            due = len(group.page_at[tick]) if tick in group.page_at else 0
            if due > pool.free_pages or not policy.sends_whole(rows, queues.running_decodes, depth):
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
                group.step(returned_s, queues.gap_s, queues.gap_count)
            if due:
                group.grow(pool.allocate(due), pool.page_tokens)
            queues.now_s = now_s
            self._choose(batch, group)
            if ahead:
                group.step(now_s, [], [])
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
        queues, loop = self._queues, self._loop
        flying = _turned(flying, rounds)
        queues.in_flight.clear()
        for batch in flying:
            queues.in_flight[batch.batch_id] = batch
        if isinstance(loop, EngineLoop):
            loop.go_round(flying, rounds)
        else:
            loop.travelling.rotate(-rounds)
        if self._ahead:
            note_ahead(flying, _turned(groups, rounds), _turned(last_s, rounds))
        self._clock.move(self._returned, _turned(back_s, rounds), min(rounds, len(back_s)))


def coast_of(
    clock: SimClock,
    world: World,
    loop: Loop,
    pipeline: object,
    returned: Callable[[float], None],
) -> Coast | None:
    """Return what serves a loop's stretches of decodes; None where they could go another way."""
    engine = loop.engines[0]
    queues, policy = engine.queues, engine.scheduler
    in_turns = type(loop) is EngineLoop and loop.goes_round
    if (
        not (type(loop) is Loop or in_turns)
        or len(loop.engines) > 1
        or type(engine) is not Batcher
        or type(queues.kv) is not KvCache
        or (queues.kv.keeps and type(queues) is not Queues)  # an engine's decodes change its cache
        or type(pipeline) is not Tandem
        or not isinstance(policy, Policy)
        or "sends_whole" not in vars(type(policy))
    ):
        return None
    eager = in_turns or world.dispatch == "eager"
    return Coast(clock, loop, policy, pipeline, returned, eager=eager)


def _turned(items: list[T], rounds: int) -> list[T]:
    """Return a list that begins with what is first after `rounds` of its items' turns."""
    first = rounds % len(items)
    return items[first:] + items[:first]
