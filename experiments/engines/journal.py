"""What journals of every engine have in common: a file of events, and how far ours are equal."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evenflow.batch import MicroBatch
from evenflow.errors import PolicyError, UsageError
from evenflow.request import Prefix

Event = Mapping[str, Any]


class Outcome(NamedTuple):
    """How many steps a journal has, how many are equal before the first `difference`, and that.

    `timed` requests, of a journal that has times, were simulated too, with times equal to 1 ns.
    """

    steps: int
    equal: int
    difference: str | None = None
    timed: int = 0


class Replayer(Protocol):
    """A Batcher of ours under a journal's load."""

    def feed(self, event: Event, now_s: float) -> str | None:
        """Hand on an event; return what is not as recorded, or None."""


def replayed(events: Sequence[Event], replayer: Replayer) -> Outcome:
    """Hand on what follows a journal's `config` until something is not as recorded."""
    steps = sum(event["kind"] == "ask" for event in events)
    step = 0
    for number, event in enumerate(events[1:]):
        try:
            what = replayer.feed(event, event.get("now_s", event.get("t", float(number))))
        except (PolicyError, ValueError, LookupError) as error:
            what = str(error)
        if what is not None:
            return Outcome(steps, step, f"step {step}: {what}")
        step += event["kind"] == "ask"
    return Outcome(steps, step)


def read(path: Path, fields: Mapping[str, Collection[str]]) -> list[Event]:
    """Return the events of a journal, which have the `fields` of their kind.

    UsageError for a file that cannot be read to its end, and for an event without its fields.
    """
    events = list(lines(path))
    for number, event in enumerate(events, 1):
        kind = str(event.get("kind"))
        if kind not in fields:
            raise UsageError(f"{path}, line {number}: unknown event {kind!r}")
        for name in fields[kind]:
            if name not in event:
                raise UsageError(f"{path}, line {number}: {kind} without {name!r}")
    return events


def refuse(path: Path, config: Event, modelled: Mapping[str, object]) -> None:
    """Raise UsageError for settings that are modelled with one value, and have another."""
    for name, right in modelled.items():
        value = config.get(name)
        if value is not None and value != right:
            raise UsageError(f"{path}: {name}: {json.dumps(value)} is not modelled")


class Contents:
    """What the tokens of each request are: a journal's prompts, and `generated` (known, stop)."""

    def __init__(
        self, path: Path, block_tokens: int, generated: Callable[[int, int], list[int]]
    ) -> None:
        self._prompts = {line["id"]: line["prompt"] for line in lines(_prompts_of(path))}
        self._block_tokens = block_tokens
        self._generated = generated
        self._blocks: dict[tuple[int, ...], int] = {}

    def prefix(self, request_id: int, output_tokens: int) -> Prefix:
        """Return the prefix of a request: its prompt and what it will generate."""
        prompt = self._prompts[request_id]
        stop = len(prompt) + output_tokens
        tokens = [*prompt, *self._generated(len(prompt), stop)]
        starts = range(0, stop, self._block_tokens)
        blocks = [tuple(tokens[start : start + self._block_tokens]) for start in starts]
        numbers = tuple(self._blocks.setdefault(block, len(self._blocks)) for block in blocks)
        return Prefix(numbers, self._block_tokens, stop)


def _prompts_of(path: Path) -> Path:
    """Return the file of prompts beside a journal: NAME-prompts, for a beginning of its name."""
    words = path.name.removesuffix(".jsonl.gz").split("-")
    for count in range(len(words), 0, -1):
        beside = path.with_name("-".join([*words[:count], "prompts.jsonl.gz"]))
        if beside.is_file():
            return beside
    raise UsageError(f"{path}: prefix_caching needs the prompts, {words[0]}-prompts.jsonl.gz")


def tokens_of(batch: MicroBatch | None) -> dict[int, int]:
    """Return how many tokens of each request a micro-batch computes."""
    if batch is None:
        return {}
    tokens = {chunk.sequence.request.request_id: chunk.stop - chunk.start for chunk in batch.chunks}
    decoding = batch.decodes.members if batch.decodes is not None else ()
    return tokens | dict.fromkeys(decoding, 1)


def lines(path: Path) -> Iterator[Event]:
    """Iterate over the events of a file; UsageError when it cannot be read to its end."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                event = json.loads(line)
                if not isinstance(event, dict):
                    raise UsageError(f"{path}, line {number}: no event: {line.strip()[:40]}")
                yield event
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: no JSON: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read to its end: {error}") from None


def first_line(path: Path) -> Event:
    """Return the first event of a file, or an empty one if it has none."""
    return next(lines(path), {})


def differ(name: str, ours: object, theirs: object) -> str:
    """Say of which request a part of an answer is not as recorded, and what is."""
    if isinstance(ours, int | float) or isinstance(theirs, int | float):
        return f"{name}: {ours}, recorded {theirs}"
    assert isinstance(ours, Collection)
    assert isinstance(theirs, Collection)
    request = next((one for one, other in zip(ours, theirs, strict=False) if one != other), None)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        unequal = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        request = unequal[0]
        ours, theirs = ours.get(request, 0), theirs.get(request, 0)
    elif request is None:
        request = next(
            number for number in (*ours, *theirs) if (number in ours) != (number in theirs)
        )
    return f"request {request}, {name}: {ours}, recorded {theirs}"
