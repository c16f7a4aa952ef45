"""Rules of serving engines, for policies that follow one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from evenflow.core.decodes import ONE_TOKEN, Decoding
from evenflow.core.kv import KvCache, PagePool
from evenflow.core.queues import Queues
from evenflow.core.rules import Rules, rules_of
from evenflow.core.scheduling import View
from evenflow.engines.ahead import runs_ahead
from evenflow.engines.append_only import AppendOnlyCache
from evenflow.engines.queues import EngineQueues
from evenflow.engines.radix import RadixCache
from evenflow.engines.receiving import ReceivingQueues, ReceivingView
from evenflow.engines.view import EngineView
from evenflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EngineRules(Rules):
    """Rules of an engine that differ from the plain `Rules`.

    `ahead`: a decode may go again before its last token is there. It does with the next question
    (one stage) or after as many as there are stages. `slotted`: each micro-batch that may be in
    flight has a slot. Slots are asked in turn, and a request decodes in the slot of its last chunk.
    `delivers`: what is in flight may be preempted. Its pages are free at once, its output still
    counts when it returns, and until then the request waits. With `ends_late` its last token comes
    with the one after it, once all is computed again. `preempted_last`: preempted requests wait
    last, not first; with `by_arrival`, where they were. `newest_first`: rows are in the order in
    which their prompts ended, the last first. `by_priority`: requests wait by `Request.priority`,
    then by arrival, preempted or not. `by_admission`: the order "arrival" is that in which they
    began to run. `cuts`: a prefill may end before the whole prompt (after a preemption also the
    output) is computed; a real model's output would then differ. `cache`: the prefix cache, a
    `PrefixCache`, an `AppendOnlyCache` or a `RadixCache`. Pages of the second are found as soon as
    decodes fill them. `none`: it is refused, as swap and speculation. `waits_first`: the loop sees
    nothing new between a choice and the end of the micro-batch before it on stage 0. `reserves`:
    with speculation, a decode holds pages for two steps. `prefills`: prompts only, for another
    engine (`PrefillLoop`), which with `admits_late` agrees on what comes, too. `receives`: most
    decodes in a slot, with KV from another engine (`DecodeLoop`); 0: the engine computes prompts.
    `looks_every`: steps of decodes from one look for requests that came to the next (`Looks`).
    `unspeculative`: why it does not go with speculation, if so.
    """

    ahead: Literal["question", "round"] | None = None
    slotted: bool = False
    delivers: bool = False
    preempted_last: bool = False
    by_arrival: bool = False
    newest_first: bool = False
    by_priority: bool = False
    by_admission: bool = False
    cuts: bool = False
    ends_late: bool = False
    cache: Literal["plain", "append_only", "radix", "none"] = "plain"
    waits_first: bool = False
    reserves: bool = False
    prefills: bool = False
    admits_late: bool = False
    receives: int = 0
    looks_every: int = 1
    unspeculative: str = ""

    @classmethod
    def of(cls, policy: object) -> EngineRules:
        """Return the rules of a policy, those of no engine where it declares none."""
        rules = rules_of(policy)
        return rules if isinstance(rules, EngineRules) else cls()

    @property
    def in_turns(self) -> bool:
        """Whether the policy goes only with the loop that asks in turns, `EngineLoop`."""
        return self.slotted or self.waits_first or self.ahead is not None

    def cap(self, depth: int) -> int | None:
        """Return the cap on micro-batches in flight where the deployment sets none."""
        return super().cap(depth) if self.ahead is None else depth + 1

    def prefix_cache(self, total_pages: int, page_tokens: int) -> PagePool:
        """Return a page pool with a prefix cache."""
        if self.cache == "radix":
            return RadixCache(total_pages, page_tokens)
        if self.cache == "append_only":
            return AppendOnlyCache(total_pages, page_tokens)
        return super().prefix_cache(total_pages, page_tokens)

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
        if self.cache == "none" and (kv.keeps or decoding is not ONE_TOKEN):
            raise UsageError(f"policy {policy} goes without kv.prefix_cache, kv.swap, speculative")
        if self.unspeculative and decoding is not ONE_TOKEN:
            raise UsageError(self.unspeculative)
        if isinstance(kv.pool, RadixCache):
            kv.pool.pairs = decoding is not ONE_TOKEN
        known_early = kv.keeps and not isinstance(kv.pool, RadixCache | AppendOnlyCache)
        out_of_place = asks_again or known_early or decoding is not ONE_TOKEN
        if self.ahead is not None and out_of_place:
            raise runs_ahead(policy)
        if (self.slotted or self.waits_first) and asks_again:
            what = "gives slots their turn" if self.slotted else "waits for stage 0"
            raise UsageError(f"policy {policy} {what}, which goes with dispatch: engine_loop")
        options: dict[str, Any] = {"most_rows": self.receives} if self.receives else {}
        return (ReceivingQueues if self.receives else EngineQueues)(
            kv,
            decoding,
            self.pipelined_chunks,
            max_in_flight or depth,
            ahead={None: 0, "question": 1, "round": depth}[self.ahead],
            slotted=self.slotted,
            delivers=self.delivers,
            preempted_last=self.preempted_last,
            by_arrival=self.by_arrival,
            newest_first=self.newest_first,
            by_priority=self.by_priority,
            by_admission=self.by_admission,
            cuts=self.cuts,
            ends_late=self.ends_late,
            reserves=self.reserves,
            prefills=self.prefills,
            **options,
        )

    def view(self, queues: Queues, depth: int) -> View:
        """Return the policy's view of the queues."""
        assert isinstance(queues, EngineQueues)
        if isinstance(queues, ReceivingQueues):
            return ReceivingView(queues, depth)
        return EngineView(queues, depth)
