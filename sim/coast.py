"""Stretches in which the same groups of decodes go round, and nobody needs to be asked.

Where nothing waits, nothing ends and nothing comes, a group that returns is sent again as it is. So
only numbers change; whatever else happens ends the stretch, and is left to the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import DecodeGroup
from evenflow.core.kv import KvCache
from evenflow.core.loop import Loop
from evenflow.core.queues import Queues
from evenflow.core.world import World
from evenflow.schedulers.limits import Policy
from evenflow.sim.clock import SimClock
from evenflow.sim.tandem import Tandem


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
        self._engine = loop.engines[0]
        self._queues = self._engine.queues
        self._policy = policy
        self._tandem = tandem
        self._travelling = loop.travelling
        self._returned = returned
        self._eager = eager
        self.calls = (returned, tandem.freed)

    def go(self) -> None:
        """Serve all rounds up to the first that may be another's business."""
        queues = self._queues
        if queues.ready.num_sequences or queues.waiting_tokens or queues.aborted:
            return
        flying = list(queues.in_flight.values())
        if not flying or not all(_decodes(batch) for batch in flying):
            return
        back_s, until_s = self._clock.due(self._returned)
        if len(back_s) != len(flying):
            return
        rounds = self._go_round(flying, back_s, until_s)
        if rounds:
            self._move_on(flying, back_s, rounds)

    def _go_round(self, flying: list[MicroBatch], back_s: list[float], until_s: float) -> int:
        """Send in turn what is in flight, back at `back_s`, which is updated; return how often."""
        queues, policy, tandem, kv = self._queues, self._policy, self._tandem, self._queues.kv
        pool, depth = kv.pool, self._engine.depth
        rounds = place = 0
        last = len(flying) - 1
        while True:
            then = place + 1 if place < last else 0
            returned_s = back_s[place]
            now_s = returned_s if self._eager else max(returned_s, tandem.free_s)
            if now_s >= until_s or (last and back_s[then] <= now_s):
                break
            batch = flying[place]
            group = batch.decodes
            assert group is not None
            tick, size = group.tick + 1, len(group.members)
            if tick in group.finish_at:
                break
            due = len(group.page_at[tick]) if tick in group.page_at else 0
            if due > pool.free_pages or not policy.sends_whole(size, queues.running_decodes, depth):
                break
            group.step(returned_s, queues.gap_s, queues.gap_count)
            if due:
                group.grow(pool.allocate(due), pool.page_tokens)
            kv.tokens += size
            batch.batch_id = queues.batches
            batch.slot = group.slot = queues.batches % queues.num_slots
            batch.scheduled_s = batch.chosen_s = now_s
            batch.decode_context = group.context
            batch.num_active = len(queues.admitted)
            batch.free_pages = pool.free_pages
            batch.kv_tokens = kv.held_tokens
            queues.batches += 1
            back_s[place] = tandem.send(batch)
            place = then
            rounds += 1
        return rounds

    def _move_on(self, flying: list[MicroBatch], back_s: list[float], rounds: int) -> None:
        """Bring the order of what is in flight, and the clock, up to date."""
        queues, first = self._queues, rounds % len(flying)
        queues.in_flight.clear()
        for batch in flying[first:] + flying[:first]:
            queues.in_flight[batch.batch_id] = batch
        queues.now_s = max([batch.scheduled_s for batch in flying])
        self._travelling.rotate(-rounds)
        back_s = back_s[first:] + back_s[:first]
        self._clock.move(self._returned, back_s, min(rounds, len(flying)))


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
    if (
        type(loop) is not Loop
        or len(loop.engines) > 1
        or type(engine) is not Batcher
        or type(queues.kv) is not KvCache
        or (queues.kv.keeps and type(queues) is not Queues)  # an engine's decodes change its cache
        or type(pipeline) is not Tandem
        or not isinstance(policy, Policy)
        or "sends_whole" not in vars(type(policy))
    ):
        return None
    return Coast(clock, loop, policy, pipeline, returned, eager=world.dispatch == "eager")


def _decodes(batch: MicroBatch) -> bool:
    return not batch.chunks and type(batch.decodes) is DecodeGroup
