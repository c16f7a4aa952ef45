"""Recorded decisions of real engines, replayed through our own Batcher.

Here: which engine wrote a journal, and what `evenflow replay` replays at a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evenflow.errors import UsageError
from evenflow.experiments.recordings import gllm, sglang, trtllm, vllm
from evenflow.experiments.recordings.journal import (
    Form,
    ReplayOutcome,
    first_line,
    replay,
    version_of,
)
from evenflow.runtime.journal import NAME, journals_in
from evenflow.runtime.real import replay_folder


class RecordedEngine(NamedTuple):
    """An engine: our policy for it, with the rules of these versions, and its journals' form."""

    name: str
    versions: tuple[str, ...]
    policy: str
    form: Form


ENGINES = {
    vllm.MARK: RecordedEngine("vLLM V1", ("0.32.0", "0.33.0"), "vllm_v1", vllm),
    sglang.MARK: RecordedEngine("SGLang", ("0.5.23",), "sglang", sglang),
    trtllm.MARK: RecordedEngine("TensorRT-LLM", ("1.2",), "trtllm", trtllm),
    gllm.MARK: RecordedEngine("gLLM", ("0.0.6.post1",), "token_throttling, variant: code", gllm),
}
"""By a key that the config of their journals has."""


def of_engines(path: Path) -> list[Path]:
    """Return the journals of engines at a path: a file, or those below a folder.

    None for what evenflow run wrote, a folder or the journal in it.
    """
    if path.is_file():
        return [] if path.name == NAME else [path]
    if journals_in(path):
        return []
    return [
        file
        for file in sorted(path.rglob("*.jsonl.gz"))
        if file.is_file() and file.name != NAME and "prompts." not in file.name
    ]


def replay_run(path: Path, scheduler: str | None) -> tuple[str | None, str | None]:
    """Replay a recorded run of evenflow; return the first difference, or None.

    Beside it, what is missing of the record of a run that was killed.
    """
    if scheduler is not None:
        raise UsageError(f"--scheduler: {path} says itself which policy it ran with")
    return replay_folder(path.parent if path.is_file() else path)


def replay_engines(
    paths: list[Path], scheduler: str | None, assumed: str | None = None
) -> Iterator[tuple[Path, ReplayOutcome | UsageError]]:
    """Replay journals of engines; for a journal that cannot be replayed, give the reason.

    `assumed` is the version that all are taken to be of, whatever they say.
    """
    for path in paths:
        try:
            engine, warning = engine_of(path, assumed)
            outcome = replay(path, engine.form, engine.versions[0], scheduler)
            yield path, outcome._replace(warning=warning)
        except UsageError as error:
            yield path, error


def engine_of(path: Path, assumed: str | None = None) -> tuple[RecordedEngine, str]:
    """Return the engine that wrote a journal, in its version, and a warning for a later one.

    A journal may say its `engine` and version, or else its folder by its name, as vllm-0.33.0;
    `assumed` goes before that. A later version has the latest rules. UsageError for another
    version, and for an engine that is none of ours.
    """
    first = first_line(path)
    for mark, engine in ENGINES.items():
        if first.get("kind") == "config" and mark in first:
            named = [each for each in engine.versions if path.parent.name.endswith(f"-{each}")]
            version = assumed or version_of(first) or [*named, *engine.versions][0]
            if version in engine.versions:
                return engine._replace(versions=(version,)), ""
            return engine._replace(versions=engine.versions[-1:]), _doubt(path, engine, version)
    raise UsageError(f"{path}: neither a journal of evenflow run nor of an engine that it knows")


def _doubt(path: Path, engine: RecordedEngine, version: str) -> str:
    """Return a warning that a version is later than all whose rules are known."""
    words, last = f"{path}: a journal of {engine.name} {version}", engine.versions[-1]
    if _numbers(version) <= _numbers(last):
        known = f"the rules of {' and '.join(engine.versions)} are known"
        raise UsageError(f"{words}; {known}, and --assume-version {last} takes them")
    return f"{words}, compared with the rules of {last}: what differs may be new"


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]
