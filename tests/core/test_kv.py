"""The page pool: what it allocates, frees and refuses.

Every page is free or held, once, at each step of the runs of properties/test_kv_properties.py.
"""

from __future__ import annotations

import pytest

from evenflow.core.kv import PagePool
from tests.worlds import check_integrity


def test_pages_are_allocated_while_there_are_any_and_come_back() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    check_integrity(pool, pages)
    with pytest.raises(ValueError, match="2 pages asked"):
        pool.allocate(2)
    assert pool.allocate(0) == []
    pool.free(pages)
    assert pool.allocate(0) == []
    check_integrity(pool, [])
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_integrity_finds_a_page_that_is_lost_or_held_twice() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="2 free, 1 held, 4 in all"):
        check_integrity(pool, pages[:1])
    with pytest.raises(AssertionError):
        check_integrity(pool, [pages[0], pages[0]])


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, page_tokens=16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_one_page_of_one_token_is_a_pool() -> None:
    assert PagePool(1, 1).allocate(1) == [0]


@pytest.mark.parametrize(("pages", "tokens"), [(0, 16), (-1, 16), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{pages} x {tokens}"):
        PagePool(pages, tokens)
