"""The messages between driver and workers, their bytes, and the sockets that carry them.

A message is a JSON array of fixed fields. Times are seconds of the system-wide monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args, get_origin, get_type_hints

from evenflow.errors import WorkerError

if TYPE_CHECKING:
    import zmq

    Context = zmq.Context[zmq.Socket[bytes]]

SEND_LIMIT_S = 10.0

RECONNECT_MS = 5
"""How often a socket looks for one that is not there yet."""


class Piece(NamedTuple):
    """Tokens [start, stop) of a request; `last`: they end its prompt or are its newest, and yield a
    token.

    On the wire `pages` are those after the request's known ones. A worker's page table gives all of
    them, enough for `stop` tokens.
    """

    request_id: int
    start: int
    stop: int
    last: bool
    pages: list[int]


class Growth(NamedTuple):
    """Pages that a decoding row gets."""

    request_id: int
    new_pages: list[int]


class Shared(NamedTuple):
    """Pages of a row that replace its pages from `start` on; other rows may share them, at the same
    place. `tokens` of a row that begins with them are computed.
    """

    request_id: int
    start: int
    pages: list[int]
    tokens: int


class Draw(NamedTuple):
    """Sampling of a request's tokens.

    `temperature` 0 is greedy. Else the `top_k` likeliest tokens (0: all), of them the fewest that
    hold `top_p` of the probability. A request's tokens follow from its `seed` and their positions
    alone, whatever else is in the micro-batch.
    """

    request_id: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


class Step(NamedTuple):
    """A micro-batch as it is sent to every stage when scheduled.

    `decodes` are request ids. `dropped` rows gave their pages back since the last step (they ended
    or were preempted). That comes before any new page. `activation_bytes` cross each hop. Emulated
    workers compute for `work_s` seconds by stage, and hop k to stage k + 1 is busy for `hops_s[k]`.
    `tokens` are the input ids, of pieces and decodes in this order; only stage 0 gets them. `draws`
    are those of last pieces, where they are not greedy. Both are empty for emulated workers.
    `adopted` rows have come from another pool, each with its number of tokens in KV; they decode.
    `shared` pages, of a prefix cache, come before the others of their rows.
    """

    batch_id: int
    dropped: list[int]
    pieces: list[Piece]
    decodes: list[int]
    grown: list[Growth]
    activation_bytes: int
    work_s: list[float]
    hops_s: list[float]
    tokens: list[int]
    draws: list[Draw]
    adopted: list[Piece]
    shared: Sequence[Shared] = ()


class Move(NamedTuple):
    """The keys and values of `pages` move to the worker at `address`.

    They are of layers [start, stop) of a stage; they go into `to_pages`, in layers from `to_start`
    on.
    """

    start: int
    stop: int
    to_start: int
    pages: list[int]
    to_pages: list[int]
    address: str


class Cached(NamedTuple):
    """Keys and values for `pages`, in layers from `start` on; their bytes are a frame behind it."""

    start: int
    pages: list[int]


class Arrived(NamedTuple):
    """A worker has written the keys and values that it was sent."""


class Activation(NamedTuple):
    """An activation for the next stage; `times`: (available, start, end) of each stage so far."""

    batch_id: int
    times: list[float]
    num_bytes: int


class Free(NamedTuple):
    """Stage 0 has computed a micro-batch and can take the next one."""

    batch_id: int


class Returned(NamedTuple):
    """The last stage is done: a token for each last piece and each decode, in the step's order."""

    batch_id: int
    times: list[float]
    tokens: list[int]


class Ready(NamedTuple):
    """The first message on every connection, and a worker's report that all of them are up."""

    worker: int


class Beat(NamedTuple):
    """A heartbeat: a worker's process runs, whatever its stage computes."""

    worker: int


class Failed(NamedTuple):
    """A worker gives up, and why."""

    worker: int
    reason: str


class Stop(NamedTuple):
    """The driver asks a worker to end."""


Message = (
    Step | Activation | Free | Returned | Ready | Beat | Failed | Stop | Move | Cached | Arrived
)
KINDS: tuple[type[Message], ...] = get_args(Message)
FIELDS = {
    kind: tuple(get_origin(hint) or hint for hint in get_type_hints(kind).values())
    for kind in KINDS
}


def encode(message: Message) -> bytes:
    return json.dumps([KINDS.index(type(message)), *message], separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Return the message in these bytes; WorkerError if they hold none."""
    try:
        number, *values = json.loads(data)
        kind = KINDS[number]
        fits = all(map(isinstance, values, FIELDS[kind])) and len(values) == len(FIELDS[kind])
        if not fits:
            raise ValueError(f"fields of {kind.__name__} of the wrong number or type")
        if kind is Step:
            step = Step(*values)
            return step._replace(
                pieces=[Piece(*piece) for piece in step.pieces],
                grown=[Growth(*growth) for growth in step.grown],
                draws=[Draw(*draw) for draw in step.draws],
                adopted=[Piece(*piece) for piece in step.adopted],
                shared=[Shared(*pages) for pages in step.shared],
            )
        message: Message = kind(*values)
        return message
    except (ValueError, TypeError, IndexError) as error:
        raise WorkerError(f"a message that is none: {data[:60]!r}: {error}") from None


def driver_address(folder: str) -> str:
    """Return the address at which the driver receives from workers."""
    return f"ipc://{folder}/driver"


def step_address(folder: str, worker: int) -> str:
    """Return the address at which a worker receives from the driver."""
    return f"ipc://{folder}/steps-{worker}"


def hop_address(folder: str, worker: int) -> str:
    """Return the address at which a worker receives from the previous stage."""
    return f"ipc://{folder}/hop-{worker}"


def open_socket(context: Context, kind: int, address: str) -> zmq.Socket[bytes]:
    """Return a socket that never outlives its messages' use; PULL binds, PUSH connects."""
    import zmq

    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.SNDTIMEO, int(SEND_LIMIT_S * 1000))
    for queue_limit in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(queue_limit, 0)  # none: what is in flight is the driver's to limit
    try:
        (socket.bind if kind == zmq.PULL else socket.connect)(address)
    except zmq.ZMQError as error:
        raise WorkerError(f"no socket at {address}: {error.strerror}") from None
    return socket
