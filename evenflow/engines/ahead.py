"""Decodes that are sent again before their last token is known."""

from __future__ import annotations

from evenflow.compiled import mypyc_attr
from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import DecodeGroup, Sequence
from evenflow.errors import UsageError

IN_STEP = (
    "async_scheduling: false (vllm_v1), overlap: false (sglang) or disable_overlap_scheduler: true "
    "(trtllm) is right"
)
"""Parameters with which an engine's policy waits for a decode's token before its next step."""


def runs_ahead(policy: str) -> UsageError:
    """Return the UsageError of a policy with async scheduling where decodes cannot run ahead."""
    return UsageError(
        f"policy {policy} lets decodes run ahead, which goes with dispatch: engine_loop, without "
        f"swap, speculative and pools, and with its own prefix_cache; else {IN_STEP}"
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class AheadGroup(DecodeGroup):
    """Group of decodes that advances when it is sent, before its tokens return (async scheduling).

    Sequences keep the times of their tokens. A member decodes up to its output limit. An earlier
    end is known when its token returns, and one more token is in flight by then.
    """

    def limit_of(self, seq: Sequence) -> int:
        """Return the number of output tokens at which a member leaves the group."""
        return seq.request.output_limit

    def last_token_of(self, seq: Sequence) -> float:
        """Return when a member got its last token; before its first, when it was sent."""
        return seq.last_token_s if seq.last_token_s <= self.last_s else self.last_s

    def leave(self, seq: Sequence) -> int:
        """Remove a sequence; return the number of tokens it attends to."""
        last_token_s = seq.last_token_s
        context = super().leave(seq)
        seq.last_token_s = last_token_s
        return context

    def sent(self, batch: MicroBatch) -> AheadGroup:
        """Return the group as it is in a micro-batch: its members now, their length then."""
        copy = AheadGroup()
        copy.members = dict(self.members)
        copy.context, copy.slot = batch.decode_context, batch.slot
        return copy
