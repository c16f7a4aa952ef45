"""Decodes that run ahead and go again unchanged: what is to be known before, and set after.

In step a micro-batch returns, its group takes a token and is sent again. Ahead a group has another
micro-batch on its way by then, or about to be sent, so that one more is in flight than there are
groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import DecodeGroup
from evenflow.engines.ahead import AheadGroup
from evenflow.engines.queues import EngineQueues, sent_of


def groups_ahead(queues: EngineQueues, flying: Sequence[MicroBatch]) -> list[DecodeGroup]:
    """Return the groups that `flying` decode in turn, in order; none where one of them changes.

    So it is where a token on its way ends a request, or where a group's last ones came at two
    times.
    """
    groups = [group for _, group in queues.resting]
    if not groups or len(groups) != len(flying) - 1:
        return []
    groups = groups[-1:] + groups[:-1]
    for index, batch in enumerate(flying):
        members, ahead = groups[index % len(groups)].members, sent_of(batch).ahead
        if not ahead or ahead.keys() != members.keys():
            return []
    for group in groups:
        last_s = last_token_s(group)
        for seq in group.members.values():
            if seq.last_token_s != last_s or seq.request.max_new_tokens is not None:
                return []
    return groups


def last_token_s(group: DecodeGroup) -> float:
    """Return when the first member of a group got its last token."""
    return next(iter(group.members.values())).last_token_s


def note_ahead(
    flying: Sequence[MicroBatch],
    groups: Sequence[DecodeGroup],
    last_s: Sequence[float],
) -> None:
    """Note in micro-batches in flight what is late, and when members of `groups` got a token."""
    for group, at_s in zip(groups, last_s, strict=True):
        for seq in group.members.values():
            seq.last_token_s = at_s
    for index, batch in enumerate(flying):
        group = groups[index % len(groups)]
        assert isinstance(group, AheadGroup)
        later = (len(flying) - 1 - index) // len(groups)
        sent_of(batch).ahead = {
            number: (seq, group.generated_by(seq) - later) for number, seq in group.members.items()
        }
        batch.decodes = group.sent(batch)
