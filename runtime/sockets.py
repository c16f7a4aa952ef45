"""The sockets between the driver and the stages: where they are, and how they behave.

Knows no messages.
"""

from __future__ import annotations

import zmq

from runtime.errors import WorkerError

SEND_LIMIT_S = 10.0

RECONNECT_MS = 5
"""How often a socket looks for one that is not there yet."""

Context = zmq.Context[zmq.Socket[bytes]]


def driver_address(folder: str) -> str:
    """Return where the driver hears from the workers."""
    return f"ipc://{folder}/driver"


def step_address(folder: str, stage: int) -> str:
    """Return where a stage hears from the driver."""
    return f"ipc://{folder}/steps-{stage}"


def hop_address(folder: str, stage: int) -> str:
    """Return where a stage hears from the stage before it."""
    return f"ipc://{folder}/hop-{stage}"


def open_socket(context: Context, kind: int, address: str) -> zmq.Socket[bytes]:
    """Return a socket that never outlives its messages' use; PULL binds, PUSH connects."""
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
