"""The rules that a policy declares: `rules = Rules(...)`, of its class or by its constructor."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

from evenflow.core.decodes import Decoding
from evenflow.core.kv import KvCache, PagePool, PrefixCache
from evenflow.core.queues import Queues
from evenflow.core.scheduling import View
from evenflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules that a policy sets for its queues; the defaults are as in papers.

    `pipelined_chunks`: consecutive chunks of a prompt may be in flight at once. `uncapped`: the
    policy limits the micro-batches in flight itself. `predictor` fills in `predicted_output_tokens`
    before the run. The rules of an engine are a subclass, which makes other queues.
    """

    pipelined_chunks: bool = False
    uncapped: bool = False
    predictor: str | abc.Mapping[str, Any] | None = None

    def cap(self, depth: int) -> int | None:
        """Return the cap on micro-batches in flight where the deployment sets none."""
        return None if self.uncapped else depth

    def prefix_cache(self, total_pages: int, page_tokens: int) -> PagePool:
        """Return a page pool with a prefix cache."""
        return PrefixCache(total_pages, page_tokens)

    def queues(
        self,
        kv: KvCache,
        decoding: Decoding,
        *,
        policy: str,
        depth: int,
        max_in_flight: int | None,
        asks_again: bool,
    ) -> Queues:
        """Return empty queues; UsageError where the rules of a `policy` do not go with the rest."""
        return Queues(kv, decoding, self.pipelined_chunks, max_in_flight or depth)

    def view(self, queues: Queues, depth: int) -> View:
        """Return the policy's view of the queues."""
        return View(queues, depth)


def rules_of(policy: object) -> Rules:
    """Return the rules of a policy, by default the plain ones; UsageError for other types."""
    name, rules = type(policy).__name__, getattr(policy, "rules", None)
    if not isinstance(rules, Rules | None):
        raise UsageError(f"policy {name}: rules = {rules!r}; rules = Rules(...) is right")
    return rules or Rules()
