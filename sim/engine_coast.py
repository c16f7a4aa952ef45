"""Stretches of decodes alone in an EngineLoop, with or without async scheduling."""

from __future__ import annotations

from collections.abc import Callable

from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import DecodeGroup
from evenflow.core.loop import Loop
from evenflow.engines.ahead import AheadGroup
from evenflow.engines.loop import EngineLoop
from evenflow.engines.queues import EngineQueues, sent_of
from evenflow.schedulers.limits import Policy
from evenflow.sim.clock import SimClock
from evenflow.sim.coast import Coast
from evenflow.sim.tandem import Tandem


class EngineCoast(Coast):
    """Coast in an EngineLoop, whose queue of answers is rotated, too."""

    def groups(self, flying: list[MicroBatch]) -> tuple[list[DecodeGroup], list[float]]:
        loop = self._loop
        assert isinstance(loop, EngineLoop)
        return super().groups(flying) if loop.is_round else ([], [])

    def turn(
        self,
        flying: list[MicroBatch],
        groups: list[DecodeGroup],
        last_s: list[float],
        rounds: int,
    ) -> None:
        loop = self._loop
        assert isinstance(loop, EngineLoop)
        loop.go_round(flying, rounds)


class AheadCoast(EngineCoast):
    """EngineCoast where decodes run ahead (async scheduling).

    In step a micro-batch returns, its group takes a token and is sent again. Ahead a group has
    another micro-batch on its way by then: one more is in flight than there are groups.
    """

    def groups(self, flying: list[MicroBatch]) -> tuple[list[DecodeGroup], list[float]]:
        """Return none where a token in flight ends a request, or last tokens came apart."""
        loop, queues = self._loop, self._queues
        assert isinstance(loop, EngineLoop)
        assert isinstance(queues, EngineQueues)
        groups = [group for _, group in queues.resting]
        if not loop.is_round or not groups or len(groups) != len(flying) - 1:
            return [], []
        groups = groups[-1:] + groups[:-1]
        for index, batch in enumerate(flying):
            members, ahead = groups[index % len(groups)].members, sent_of(batch).ahead
            if not ahead or ahead.keys() != members.keys():
                return [], []
        last_s = [next(iter(group.members.values())).last_token_s for group in groups]
        for group, at_s in zip(groups, last_s, strict=True):
            for seq in group.members.values():
                if seq.last_token_s != at_s or seq.request.max_new_tokens is not None:
                    return [], []
        return groups, last_s

    def turn(
        self,
        flying: list[MicroBatch],
        groups: list[DecodeGroup],
        last_s: list[float],
        rounds: int,
    ) -> None:
        super().turn(flying, groups, last_s, rounds)
        for group, at_s in zip(groups, last_s, strict=True):
            for seq in group.members.values():
                seq.last_token_s = at_s
        for index, batch in enumerate(flying):
            group = groups[index % len(groups)]
            assert isinstance(group, AheadGroup)
            later = (len(flying) - 1 - index) // len(groups)
            sent_of(batch).ahead = {
                number: (seq, group.generated_by(seq) - later)
                for number, seq in group.members.items()
            }
            batch.decodes = group.sent(batch)


def engine_coast(
    clock: SimClock,
    loop: Loop,
    policy: Policy,
    tandem: Tandem,
    returned: Callable[[float], None],
) -> EngineCoast | None:
    """Return the Coast of an EngineLoop; None where the loop could decide otherwise."""
    if type(loop) is not EngineLoop or not loop.goes_round:
        return None
    queues = loop.engines[0].queues
    if not (isinstance(queues, EngineQueues) and queues.ahead):
        return EngineCoast(clock, loop, policy, tandem, returned, eager=True)
    coast = AheadCoast(clock, loop, policy, tandem, returned, eager=True)
    coast.kind, coast.ahead, coast.late = AheadGroup, 1, int(loop.needs_tokens)
    return coast
