"""Prefix cache, swap and KV accounting: at every step of a run, and against an independent cache.

The cache machine keeps, beside the pool, a plain list of what every page was given to hold.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evenflow.core.decodes import DecodeGroup, Sequence
from evenflow.core.kv import Holder, KvCache, PrefixCache
from evenflow.core.world import World
from evenflow.engines.rules import EngineRules
from evenflow.engines.speculation import ReservingGroup
from evenflow.engines.swap import SwapCache
from evenflow.sim.driver import SimDriver
from evenflow.sim.tandem import Tandem
from evenflow.types import MicroBatch, Prefix, Request
from tests.amounts import many
from tests.worlds import AuditedBatcher, check_integrity, worlds

PAGE = 4

Content = tuple[int, ...]
"""What a page holds, and all pages before it: the block of each token from the start on."""


def asking(tokens: list[int]) -> Holder:
    """Return what holds the pages of a request with these tokens, each of them a block."""
    prefix = Prefix(tuple(tokens), 1, len(tokens))
    return Holder(Request(0, 0.0, len(tokens), 1, prefix=prefix))


def content(holder: Holder, index: int) -> Content:
    """Return what a request's page of this index holds."""
    return holder.request.prefix.blocks[: (index + 1) * PAGE]


class CacheMachine(RuleBasedStateMachine):
    """Requests come, look up what is cached, publish what they compute, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PrefixCache(9, PAGE)
        self.running: list[Holder] = []
        self.holds: dict[int, Content] = {}  # what each page was last given to hold
        self.waiting: Holder | None = None

    @precondition(lambda self: self.waiting is None)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def arrive(self, tokens: list[int]) -> None:
        self.waiting = asking(tokens)

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def look_up(self) -> None:
        """A hit is exactly the full pages that the tokens have in common with what is cached."""
        holder = self.waiting
        self.pool.find(holder.chain, holder.request.prefix, holder.request.prompt_tokens - 1)
        expected = 0
        while (expected + 1) * PAGE < holder.request.prompt_tokens:
            if content(holder, expected) not in self.cached():
                break
            expected += 1
        assert len(holder.chain) == expected
        assert [self.holds[node.page] for node in holder.chain] == [
            content(holder, index) for index in range(expected)
        ]

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def admit(self) -> None:
        self.look_up()
        holder = self.waiting
        in_use = {page for other in self.running for page in other.pages}
        hit = {node.page for node in holder.chain}
        need = self.pool.pages_for(holder.request.prompt_tokens) - len(hit & in_use)
        if need > self.pool.free_pages:
            return
        holder.pages = self.pool.hold(holder.chain)
        new = self.pool.allocate(self.pool.pages_for(holder.request.prompt_tokens) - len(hit))
        assert not set(new) & (in_use | hit), "a page in use was given away"
        for index, page in enumerate(new, start=len(holder.pages)):
            self.holds[page] = content(holder, index)
        holder.pages += new
        self.running.append(holder)
        self.waiting = None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.running))
        tokens = data.draw(st.integers(0, holder.request.prompt_tokens))
        free_before, known_before = self.pool.free_pages, self.cached()
        self.pool.publish(holder, holder.request.prefix, tokens)
        published = {content(holder, index) for index in range(tokens // PAGE)}
        assert self.cached() == known_before | published
        assert self.pool.free_pages >= free_before, "sharing never costs a page"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.running))
        self.running.remove(holder)
        cached = self.cached()
        self.pool.free(holder.pages)
        assert self.cached() == cached, "pages stay findable until they are evicted"

    def cached(self) -> set[Content]:
        return {self.holds[page] for page in self.pages_in_tree()}

    def pages_in_tree(self) -> list[int]:
        found: list[int] = []
        nodes = [self.pool._root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            found += [child.page for child in node.children.values()]
        return found

    @invariant()
    def every_page_is_counted_once(self) -> None:
        check_integrity(self.pool, [page for holder in self.running for page in holder.pages])
        in_tree = self.pages_in_tree()
        assert len(self.cached()) == len(in_tree), "the same content is there twice"
        used = {page for holder in self.running for page in holder.pages}
        assert self.pool.free_pages == self.pool.total_pages - len(used)
        for holder in self.running:
            contents = [content(holder, index) for index in range(len(holder.pages))]
            assert [self.holds[page] for page in holder.pages] == contents


CacheMachine.TestCase.settings = settings(
    max_examples=many(100), stateful_step_count=40, deadline=None
)
TestCache = CacheMachine.TestCase


def gain(group: DecodeGroup, seq: Sequence) -> int:
    """Return the tokens that a member of a group gains in a step."""
    if isinstance(group, ReservingGroup):
        return min(group._gain(seq), seq.request.output_tokens - seq.generated)
    return min(group.stride, seq.finish_tick - group.tick)


class CheckedBatcher(AuditedBatcher):
    """Counts the tokens of what it sends anew, too."""

    def next(self, now_s: float) -> MicroBatch | None:
        batch = super().next(now_s)
        if batch is not None:
            assert batch.kv_tokens == sum(self.tokens_by_page().values())
        return batch

    def tokens_by_page(self) -> dict[int, int]:
        """Return the filled slots of each page, a shared page once."""
        page_tokens = self.pool.page_tokens
        flying = [
            batch.decodes for batch in self.queues.in_flight.values() if batch.decodes is not None
        ]
        context = {seq.order: seq.computed for seq in self.queues.live.values()}
        for group in self.queues.decode_groups():
            for seq in group.sequences():
                gained = gain(group, seq) if group in flying else 0
                context[seq.order] = group.context_of(seq) + gained
        return {
            page: min(max(context[seq.order] - index * page_tokens, 0), page_tokens)
            for seq in self.queues.live.values()
            for index, page in enumerate(seq.pages)
        }


@settings(max_examples=many(200), deadline=None)
@given(worlds(), st.booleans(), st.booleans(), st.sampled_from([16, 17, 20, 24]))
def test_pages_and_tokens_at_every_step(
    world: World, prefix_cache: bool, swap: bool, total_pages: int
) -> None:
    # Decodes that run ahead are never swapped, and this count knows one token on its way, not two.
    assume(not EngineRules.of(world.make_scheduler()).ahead)
    kv = SwapCache if swap else KvCache
    world = replace(world, prefix_cache=prefix_cache, kv=kv, total_pages=total_pages)
    driver = SimDriver(world, Tandem, batcher=CheckedBatcher)
    result = driver.run()
    assert len(result.request_id) == len(world.requests)
    for engine in driver.engines:
        check_integrity(engine.pool, [])
