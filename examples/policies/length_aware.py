"""A policy that names its decodes, so that micro-batches attend to even shares of the context."""

from dataclasses import dataclass

from evenflow.core.scheduling import Plan, View
from evenflow.schedulers.limits import Fraction
from evenflow.schedulers.token_throttling import TokenThrottling


@dataclass(kw_only=True, eq=False)
class LengthAware(TokenThrottling):
    """Token Throttling's prompts, and ready decodes that attend to a stage's share of all tokens.

    Within `slack` of the share all that are ready go. Beyond it those that waited longest go first,
    of these the longest, as far as each still fits; the rest goes with the next micro-batch.
    """

    slack: Fraction = 0.1
    """The part of its share that a micro-batch may have in addition."""

    def schedule(self, view: View) -> Plan:
        plan = super().schedule(view)
        return plan._replace(decodes=self.named(view)) if plan.decodes else plan

    def named(self, view: View) -> list[int]:
        """Return the requests of the decodes to take."""
        ready = sorted(view.decodes, key=lambda one: (-one.idle_s, -one.context_tokens))
        left = view.decode_context_tokens / view.depth
        if sum(one.context_tokens for one in ready) <= (1 + self.slack) * left:
            return [one.request_id for one in ready]
        taken: list[int] = []
        for one in ready:
            if not taken or one.context_tokens <= 2 * left:
                taken.append(one.request_id)
                left -= one.context_tokens
        return taken
