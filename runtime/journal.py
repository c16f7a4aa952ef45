"""The journal of a real run as a file, a line an entry.

Does not know what an entry means to a Batcher: that is `evenflow.core.replay`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import evenflow
from evenflow.config.run import RunConfig
from evenflow.core.replay import Added, Asked, Call, Completed, Decision, Entry
from evenflow.engines.handover import Handover
from evenflow.errors import UsageError
from evenflow.types import Prefix, Request

NAME = "decisions.jsonl.gz"

END = ["end"]
"""The last line of a journal that was closed."""
FIRST_BYTE = b"\x1f"  # of a member of gzip


def journals_in(folder: Path) -> list[Path]:
    """Return the journal of the run in a folder, or those of its pools."""
    if (folder / NAME).is_file():
        return [folder / NAME]
    return sorted(folder.glob(f"*/**/{NAME}")) if (folder / "summary.json").is_file() else []


class Lines:
    """Lines of JSON for a new gzip file, passed to the system once flushed.

    Each flush writes a separate member. A killed process leaves a file that any tool reads, but for
    what it had not flushed. A file that cannot be written on, on a full disk, stops no run. It is
    removed, which makes room for the results, and at the end `on_loss` gets why.
    """

    def __init__(self, path: Path, on_loss: Callable[[str], None]) -> None:
        self._path = path
        self._on_loss = on_loss
        self._lines: list[str] = []
        self._failure: OSError | None = None
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, line: Any) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        if self._lines and self._failure is None:
            data = memoryview(gzip.compress("".join(self._lines).encode("ascii"), 1, mtime=0))
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError as error:
                self._failure = error
                self._path.unlink()
        self._lines.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._failure is not None:
            why = f"cannot write: {self._failure.strerror}"
            self._on_loss(f"{self._path.name} is left out: {why}")


class Journal:
    """A new journal; `on_loss` is called if it cannot be kept. `write` appends an entry.

    The first line says what a Batcher is made from. That is the resolved configuration, and the
    folder that its relative paths start from. The last one says that it is the last. `pool` names
    the journal's pool, in a system of pools. Of requests, prefixes are written where there is a
    cache for them.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        beside: Path,
        on_loss: Callable[[str], None],
        pool: str | None = None,
    ) -> None:
        self._lines = Lines(path, on_loss)
        self._prefixes = config.kv.prefix_cache
        self.flush = self._lines.flush
        self._lines.write(
            {
                "evenflow_version": evenflow.__version__,
                "config": config.resolved(),
                "folder": str(beside.resolve()),
                "ends": True,
                **({} if pool is None else {"pool": pool}),
            }
        )

    def write(self, entry: Entry) -> None:
        self._lines.write(_line(entry, self._prefixes))

    def close(self) -> None:
        self._lines.write(END)
        self._lines.close()


GONE = ("cuda_graph_sizes", "faults", "graph_layer_overhead_s")
"""Keys that older journals have, and that change no decision."""


def _kept(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _kept(value) for key, value in config.items() if key not in GONE}


def read_head(path: Path) -> tuple[RunConfig, Path, str | None]:
    """Return a recorded run's configuration, the folder of its relative paths, and the pool."""
    try:
        head = next(_lines(path), None)
    except EOFError as error:
        raise UsageError(f"{path}: cannot read it: {error}") from None
    if not isinstance(head, dict):
        raise UsageError(f"{path}: no first line with a configuration; evenflow run writes one")
    try:
        config = RunConfig.model_validate_json(json.dumps(_kept(head["config"])))
        return config, Path(head["folder"]), head.get("pool")
    except (KeyError, TypeError, ValueError) as error:
        version = head.get("evenflow_version")
        raise UsageError(f"{path}: a configuration of evenflow {version}: {error}") from None


class Entries:
    """The entries of a journal; UsageError, as they are read, for another line.

    Once read, `cut` says whether the journal has no end, because its driver was killed. `last_s` is
    when its last entry was made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut = False
        self.last_s = 0.0

    def __iter__(self) -> Iterator[Entry]:
        try:
            for number, line in enumerate(_lines(self._path), start=1):
                if number == 1:
                    self.cut = "ends" in line
                elif line == END:
                    self.cut = False
                else:
                    yield self._entry(number, line)
        except EOFError:
            self.cut = True

    def _entry(self, number: int, line: Any) -> Entry:
        try:
            entry = _entry(line)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self._path}:{number}: no entry of a journal: {error}") from None
        self.last_s = getattr(entry, "now_s", self.last_s)
        return entry


def _lines(path: Path) -> Iterator[Any]:
    """Iterate over the lines of a journal; EOFError where it is cut."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            for number, text in enumerate(file, start=1):
                try:
                    yield json.loads(text, parse_constant=_no_number)
                except (ValueError, RecursionError):
                    raise UsageError(f"{path}:{number}: not a line of JSON") from None
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        if str(error).endswith(f"({FIRST_BYTE!r})"):  # and no second one
            raise EOFError from None
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot read it: {reason}") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _line(entry: Entry, prefixes: bool) -> list[Any]:
    if isinstance(entry, Added):
        return ["add", *_numbers(entry.request, prefixes), entry.refusal]
    if isinstance(entry, Asked | Completed):
        return ["next" if isinstance(entry, Asked) else "complete", *entry]
    if isinstance(entry.argument, Handover):
        request, *rest = entry.argument
        return [entry.verb, _numbers(request, prefixes), *(None if isnan(v) else v for v in rest)]
    return [*entry]


def _numbers(request: Request, prefixes: bool) -> list[Any]:
    numbers = (request.request_id, request.arrival_s, request.prompt_tokens)
    outputs = (request.output_tokens, request.predicted_output_tokens)
    more = [request.prefix if prefixes else None, request.max_new_tokens]
    more += [request.priority] * bool(request.priority)
    return [*numbers, *outputs, *(more if any(each is not None for each in more) else ())]


def _request(numbers: Sequence[Any]) -> Request:
    known = list(numbers)
    if known[5:] and known[5] is not None:
        blocks, block_tokens, tokens = known[5]
        known[5] = Prefix(tuple(map(int, blocks)), int(block_tokens), int(tokens))
    return Request(*known)


def _entry(line: Any) -> Entry:
    match line:
        case ["add", int(), int() | float(), int(prompt), int(output), *_, refusal] as request:
            if min(prompt, output) < 1:
                raise ValueError(f"a request of {prompt} prompt and {output} output tokens")
            return Added(_request(request[1:-1]), refusal)
        case ["next", int() | float() as now_s, None]:
            return Asked(now_s, None)
        case ["next", int() | float() as now_s, [chunks, decodes]]:
            return Asked(now_s, Decision(tuple(map(tuple, chunks)), tuple(decodes)))
        case ["complete", int() | float() as now_s, int(batch_id), [*stopped], [*finished]]:
            return Completed(now_s, batch_id, tuple(stopped), tuple(finished))
        case ["abort" | "release" | "adopt" as verb, int(request_id)]:
            return Call(verb, request_id)
        case ["restart", None]:
            return Call("restart", None)
        case [
            "reserve" | "take" as verb,
            [int(), int() | float(), *_] as request,
            int(tokens),
            *rest,
        ]:
            first_s, last_s, preemptions, scheduled_s = rest
            times = _time(first_s), _time(last_s), int(preemptions), _time(scheduled_s)
            return Call(verb, Handover(_request(request), tokens, *times))
    raise ValueError(f"{str(line)[:60]}")


def _time(seconds: float | None) -> float:
    """Return the time that a journal has; null: it is still to come."""
    return nan if seconds is None else float(seconds)
