"""The journal of a real run as a file, a line an entry; and the tokens that it gave.

Does not know what an entry means to a Batcher: that is `evenflow.replay`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import evenflow
from evenflow.errors import UsageError
from evenflow.replay import Aborted, Added, Asked, Completed, Decision, Entry
from evenflow.types import Request
from experiments.run_file.run import RunConfig

NAME = "decisions.jsonl.gz"


@contextmanager
def journal_written(
    path: Path, config: RunConfig, beside: Path, on_loss: Callable[[str], None]
) -> Iterator[Callable[[Entry], None]]:
    """Give a function that appends an entry to a new file.

    The first line says what a Batcher is made from: the resolved configuration, and the folder
    that its relative paths start from. A journal that cannot be written on, on a full disk, stops
    no run: it is removed, which makes room for the results, and `on_loss` hears why.
    """
    head = {
        "evenflow_version": evenflow.__version__,
        "config": config.resolved(),
        "folder": str(beside.resolve()),
    }
    file = gzip.open(path, "wt", compresslevel=1, encoding="ascii")  # noqa: SIM115
    failures: list[OSError] = []

    def write(entry: Entry) -> None:
        if not failures:
            attempt(lambda: file.write(json.dumps(_line(entry), separators=(",", ":")) + "\n"))

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            failures.append(error)

    attempt(lambda: file.write(json.dumps(head) + "\n"))
    try:
        yield write
    finally:
        attempt(file.close)
        if failures:
            path.unlink()
            on_loss(f"{path.name} is left out: cannot write: {failures[0].strerror}")


def write_tokens(path: Path, tokens: Mapping[int, list[int]]) -> None:
    """Write a line a request, in order of request id: the ids of the tokens it got."""
    with gzip.open(path, "wt", encoding="ascii") as file:
        for request_id in sorted(tokens):
            line = {"request_id": request_id, "tokens": tokens[request_id]}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_head(path: Path) -> tuple[RunConfig, Path]:
    """Return the configuration of a recorded run, and the folder of its relative paths."""
    head = next(_lines(path), None)
    if not isinstance(head, dict):
        raise UsageError(f"{path}: no first line with a configuration; evenflow run writes one")
    try:
        config = RunConfig.model_validate_json(json.dumps(head["config"]))
        return config, Path(head["folder"])
    except (KeyError, TypeError, ValueError) as error:
        version = head.get("evenflow_version")
        raise UsageError(f"{path}: a configuration of evenflow {version}: {error}") from None


def read_entries(path: Path) -> Iterator[Entry]:
    """Iterate over the entries of a file; UsageError for a line that is none."""
    for number, line in enumerate(_lines(path), start=1):
        if number > 1:
            try:
                yield _entry(line)
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{path}:{number}: no entry of a journal: {error}") from None


def _lines(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            for number, text in enumerate(file, start=1):
                try:
                    yield json.loads(text, parse_constant=_no_number)
                except ValueError:
                    raise UsageError(f"{path}:{number}: not a line of JSON") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot read it: {reason}") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _line(entry: Entry) -> list[Any]:
    if isinstance(entry, Added):
        request = entry.request
        numbers = (request.request_id, request.arrival_s, request.prompt_tokens)
        outputs = (request.output_tokens, request.predicted_output_tokens)
        return ["add", *numbers, *outputs, entry.refusal]
    if isinstance(entry, Asked):
        return ["next", *entry]
    if isinstance(entry, Completed):
        return ["complete", *entry]
    if isinstance(entry, Aborted):
        return ["abort", *entry]
    raise ValueError(f"a journal of one pipeline has no {type(entry).__name__}")


def _entry(line: Any) -> Entry:
    match line:
        case ["add", int(), int() | float(), int(prompt), int(output), *_, refusal] as request:
            if min(prompt, output) < 1:
                raise ValueError(f"a request of {prompt} prompt and {output} output tokens")
            return Added(Request(*request[1:-1]), refusal)
        case ["next", int() | float() as now_s, None]:
            return Asked(now_s, None)
        case ["next", int() | float() as now_s, [chunks, decodes]]:
            return Asked(now_s, Decision(tuple(map(tuple, chunks)), tuple(decodes)))
        case ["complete", int() | float() as now_s, int(batch_id), [*stopped], [*finished]]:
            return Completed(now_s, batch_id, tuple(stopped), tuple(finished))
        case ["abort", int(request_id)]:
            return Aborted(request_id)
    raise ValueError(f"{str(line)[:60]}")
