"""Messages: what goes in comes out, and what is no message is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.errors import WorkerError
from runtime.wire import (
    KINDS,
    Activation,
    Arrived,
    Beat,
    Cached,
    Draw,
    Failed,
    Free,
    Growth,
    Message,
    Move,
    Piece,
    Ready,
    Returned,
    Step,
    Stop,
    decode,
    encode,
)

counts = st.integers(0, 10**9)
ids = st.lists(counts, max_size=4)
seconds = st.lists(st.floats(0, 1e6), max_size=4)
messages = st.one_of(
    st.builds(
        Step,
        counts,
        ids,
        st.lists(st.builds(Piece, counts, counts, counts, st.booleans(), ids), max_size=3),
        ids,
        st.lists(st.builds(Growth, counts, ids), max_size=3),
        counts,
        seconds,
        seconds,
        ids,
        st.lists(st.builds(Draw, counts, st.floats(0, 9), counts, st.floats(0, 1), counts)),
        st.lists(st.builds(Piece, counts, counts, counts, st.booleans(), ids), max_size=3),
    ),
    st.builds(Move, counts, counts, counts, ids, ids, st.text()),
    st.builds(Cached, counts, ids),
    st.just(Arrived()),
    st.builds(Activation, counts, seconds, counts, st.text()),
    st.builds(Free, counts),
    st.builds(Returned, counts, seconds, ids),
    st.builds(Ready, counts),
    st.builds(Beat, counts),
    st.builds(Failed, counts, st.text()),
    st.just(Stop()),
)


@given(messages)
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


def test_every_kind_is_drawn_above() -> None:
    kinds = {Step, Activation, Free, Returned, Ready, Beat, Failed, Stop, Move, Cached, Arrived}
    assert kinds == set(KINDS)
