"""The page pool, step by step against a set of held pages."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from evenflow.kv import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Allocates and frees at random; every page is free or held, once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(37)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 40))
    def allocate(self, count: int) -> None:
        if count > self.pool.free_pages:
            with pytest.raises(ValueError, match=f"{count} pages asked"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(pages) == count
        self.held.append(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        self.pool.check_integrity([page for pages in self.held for page in pages])


TestPool = PoolMachine.TestCase


def test_integrity_finds_a_page_that_is_lost_or_held_twice() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 free, 1 held, 4 in all"):
        pool.check_integrity(pages[:1])
    with pytest.raises(AssertionError):
        pool.check_integrity([pages[0], pages[0]])


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, page_tokens=16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("pages", "tokens"), [(0, 16), (-1, 16), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{pages} x {tokens}"):
        PagePool(pages, tokens)
