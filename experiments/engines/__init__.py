"""Recorded decisions of real engines, replayed through our own Batcher.

Here: which journal is whose, and what `evenflow replay` replays at a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenflow.errors import UsageError
from experiments.engines import gllm, sglang, vllm
from experiments.engines.journal import Outcome, first_line
from experiments.real import replay_folder
from experiments.validation.journal import NAME

ENGINES = {vllm.MARK: vllm.replay, gllm.MARK: gllm.replay, sglang.MARK: sglang.replay}
"""How to replay the journals whose config has such a key."""


def of_engines(path: Path) -> list[Path]:
    """Return the journals of engines at a path: itself, or those of a folder.

    None for what evenflow run wrote, a folder or the journal in it.
    """
    if path.is_file():
        return [] if path.name == NAME else [path]
    if (path / NAME).is_file():
        return []
    return [file for file in sorted(path.glob("*.jsonl.gz")) if "prompts." not in file.name]


def replay_run(path: Path, scheduler: str | None) -> tuple[str | None, str | None]:
    """Replay a recorded run of evenflow; return the first difference, or None.

    Beside it, what is missing of the record of a run that was killed.
    """
    if scheduler is not None:
        raise UsageError(f"--scheduler: {path} says itself which policy it ran with")
    return replay_folder(path.parent if path.is_file() else path)


def replay_engines(
    paths: list[Path], scheduler: str | None
) -> Iterator[tuple[Path, Outcome | UsageError]]:
    """Replay journals of engines; of those that cannot be, give the reason."""
    for path in paths:
        try:
            yield path, _replay(path, scheduler)
        except UsageError as error:
            yield path, error


def _replay(path: Path, scheduler: str | None) -> Outcome:
    first = first_line(path)
    for mark, replay in ENGINES.items():
        if first.get("kind") == "config" and mark in first:
            return replay(path, scheduler)
    raise UsageError(f"{path}: neither a journal of evenflow run nor of an engine that it knows")
