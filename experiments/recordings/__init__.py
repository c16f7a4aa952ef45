"""Recorded decisions of real engines, replayed through our own Batcher.

Here: which engine wrote a journal, and what `evenflow replay` replays at a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

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

FORMS: Mapping[str, Form] = {form.FACTS.mark: form for form in (vllm, sglang, trtllm, gllm)}
"""Readers of journals, by a key that the config of theirs has."""


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
            form, version, warning = form_of(path, assumed)
            outcome = replay(path, form, version, scheduler)
            yield path, outcome._replace(warning=warning)
        except UsageError as error:
            yield path, error


def form_of(path: Path, assumed: str | None = None) -> tuple[Form, str, str]:
    """Return what reads a journal, the version whose rules it has, and a warning for a later one.

    A journal may say its `engine` and version, or else its folder by its name, as vllm-0.33.0.
    `assumed` goes before that. A later version has the latest rules. UsageError for another
    version, and for an unknown engine.
    """
    first = first_line(path)
    form = next((form for mark, form in FORMS.items() if mark in first), None)
    if first.get("kind") != "config" or form is None:
        raise UsageError(
            f"{path}: neither a journal of evenflow run nor of an engine that it knows"
        )
    known = form.FACTS.versions
    named = [each for each in known if path.parent.name.endswith(f"-{each}")]
    version = assumed or version_of(first) or [*named, *known][0]
    if version in known:
        return form, version, ""
    words, last = f"{path}: a journal of {form.FACTS.name} {version}", known[-1]
    if _numbers(version) <= _numbers(last):
        rules = f"the rules of {' and '.join(known)} are known"
        raise UsageError(f"{words}; {rules}, and --assume-version {last} takes them")
    return form, last, f"{words}, compared with the rules of {last}: what differs may be new"


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]
