"""Messages: what goes in comes out, and what is no message is refused."""

from __future__ import annotations

import pickle
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.errors import WorkerError
from evenflow.runtime.wire import KINDS, Free, Message, Step, decode, encode

PLAIN = {int: st.integers(0, 10**9), float: st.floats(0, 1e6), str: st.text(), bool: st.booleans()}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Draw a value of a message's field, or a message, or what one is made of."""
    if hint in PLAIN:
        return PLAIN[hint]
    if inner := get_args(hint):
        return st.lists(values(*inner), max_size=3)
    return st.builds(hint, *map(values, get_type_hints(hint).values()))


@given(st.one_of(*map(values, KINDS)))
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_decode_that_goes_on_costs_its_id() -> None:
    decodes = list(range(1000, 1256))
    size = len(encode(Step(7, [], [], decodes, [], 1 << 20, [0.02] * 4, [0.0] * 3, [], [], [])))
    assert size < 6 * len(decodes)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"[99]",
        b"[0, 1]",
        b'[2, "seven"]',
        b"[2, 1, 1]",
        b"\xff\xfe",
        b"[0,1,[],[[1]],[],[],0,[],[],[],[],[]]",
        b"[0,1,[],[],[],[],0,[],[],[],[[1]],[]]",
        b"[0,1,[],[],[],[],0,[],[],[],[],[[1]]]",
        pickle.dumps(Free(1)),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WorkerError, match="a message that is none"):
        decode(data)
