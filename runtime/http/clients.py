"""The clients of a server as the driver's process knows them; HTTP is in a process of its own.

Words go between both processes as JSON arrays, a name first, those to the front end many at a time.
Knows requests and their tokens; no text and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from evenflow.types import Prefix, Request
from runtime.front import LiveFront
from runtime.http.text import Codec
from runtime.tokens import Text
from runtime.wire import Draw

Word = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served: a model by its name, and what reads and writes for its clients.

    `workers` says what computes: torch, or emulated. The others are those of `Answers`.
    """

    model: str
    codec: Codec
    max_queue: int | None
    workers: str
    max_model_len: int
    by_priority: bool
    origin_s: float


class _Asked:
    """What the driver has to know of a request while it is served."""

    __slots__ = ("end_ids", "left", "stopped", "text")

    def __init__(self, text: Text, most: int, end_ids: frozenset[int]) -> None:
        self.text = text
        self.left = most
        self.end_ids = end_ids
        self.stopped = False


class Clients:
    """Takes requests from a front end at the other end of `channel`, and gives it their tokens.

    `end_ids` end an answer. `knows_prefixes`: a request says what its prompt begins with, for a
    prefix cache. `gauges` are for /metrics. `lost` is called, by another thread, when the front end
    is gone, with why if it could say so.
    """

    def __init__(
        self,
        channel: Connection,
        end_ids: frozenset[int],
        gauges: Callable[[], Mapping[str, float]],
        lost: Callable[[str | None], None],
        *,
        knows_prefixes: bool,
    ) -> None:
        self.front = LiveFront()
        self._channel = channel
        self._end_ids = end_ids
        self._gauges = gauges
        self._lost = lost
        self._knows_prefixes = knows_prefixes
        self._asked: dict[int, _Asked] = {}
        self._news: SimpleQueue[Word | None] = SimpleQueue()

    def start(self) -> None:
        """Hear and tell from now on, each in a thread."""
        for work in (self._hear, self._send):
            Thread(target=work, name=f"clients{work.__name__}", daemon=True).start()

    def tell(self, *word: Any) -> None:
        """Have the front end hear a word, after all before it; any thread may call it."""
        self._news.put(word)

    def stop_telling(self) -> None:
        """Say nothing more."""
        self._news.put(None)

    # -- the driver's thread --------------------------------------------------------------------

    def added(self, request_id: int, refusal: str | None) -> None:
        """Hear that a request is served, or why it never can be."""
        if refusal is not None:
            self._asked.pop(request_id, None)
        self.tell("added", request_id, refusal)

    def given_up(self, request_id: int) -> None:
        """Hear that the policy ended a request before its time."""
        if self._asked.pop(request_id, None) is not None:
            self.tell("given_up", request_id)

    def token(self, request_id: int, token: int) -> bool:
        """Hand out a token; say whether the request ends here, though more might be allowed.

        A stop string is found by the front end: the request ends with the next token after that.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return False
        asked.left -= 1
        ends = asked.stopped or token in asked.end_ids
        if ends or not asked.left:
            self._asked.pop(request_id, None)
        if not asked.stopped:
            self.tell("token", request_id, token)
        return ends

    def text_of(self, request: Request) -> Text:
        """Return what workers compute with: the prompt, and how its tokens are drawn."""
        asked = self._asked.get(request.request_id)
        if asked is None:  # its client has left, and the driver is about to hear of it
            return Text([0] * request.prompt_tokens)
        return asked.text

    # -- threads of their own -------------------------------------------------------------------

    def _send(self) -> None:
        """Send what is told, all that there is at a time, until nothing more is said."""
        words: list[Word | None] = []
        while not words or words[-1] is not None:
            words.append(self._news.get())
            if words[-1] is None or self._news.empty():
                told = [word for word in words if word is not None]
                try:
                    self._channel.send_bytes(json.dumps(told, separators=(",", ":")).encode())
                except OSError:  # it is gone, and whoever hears says so
                    return
                del words[: len(told)]

    def _hear(self) -> None:
        """Apply what the front end says until it is gone."""
        heard: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "withdraw": self._withdraw,
            "stop": self._stop,
            "gauges": lambda ticket: self.tell("gauges", ticket, self._gauges()),
        }
        try:
            while True:
                name, *values = json.loads(self._channel.recv_bytes())
                if name == "broken":
                    return self._lost(*values)
                heard[name](*values)
        except (EOFError, OSError):
            self._lost(None)

    def _submit(
        self, request_id: int, arrival_s: float, asked: Mapping[str, Any], how: list[Any]
    ) -> None:
        ids, most = asked["prompt_ids"], asked["max_tokens"]
        draw = Draw(request_id, *how) if how[0] else None
        end_ids = frozenset[int]() if asked["ignore_eos"] else self._end_ids
        self._asked[request_id] = _Asked(Text(ids, draw), most, end_ids)
        prefix = Prefix(tuple(ids), 1, len(ids)) if self._knows_prefixes else None
        priority = asked["priority"]
        self.front.submit(
            Request(request_id, arrival_s, len(ids), most, prefix=prefix, priority=priority)
        )

    def _withdraw(self, request_id: int) -> None:
        self._asked.pop(request_id, None)
        self.front.withdraw(request_id)

    def _stop(self, request_id: int) -> None:
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.stopped = True
