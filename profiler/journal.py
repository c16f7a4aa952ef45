"""Measurements as they come, a line each, so that an interrupted profile goes on where it was.

Knows lines of JSON; not what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from evenflow.errors import UsageError


class Shot(NamedTuple):
    """One timed run: of which shape, the seconds by operator, and the seconds it took in all.

    `disturbed`: other processes had the CPU meanwhile.
    """

    shape: int
    seconds: dict[str, float]
    wall_s: float
    disturbed: bool = False


def undisturbed(shots: Sequence[Shot], at_least: int = 3) -> Sequence[Shot]:
    """Return the shots that were not disturbed, or all where fewer than `at_least` remain."""
    quiet = [shot for shot in shots if not shot.disturbed]
    return quiet if len(quiet) >= at_least else shots


class Journal:
    """The shots of one profile, on disk from the moment they are taken.

    `facts` say what is measured: a journal of something else is refused. `plan` is what the first
    start decided and later ones keep.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.shots: list[Shot] = []
        self.plan: dict[str, Any] = {}
        if path.exists():
            self._resume(json.loads(json.dumps(dict(facts))))
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        if not path.stat().st_size:
            self._write({"facts": dict(facts)})

    @property
    def spent_s(self) -> float:
        """Seconds that the shots so far took."""
        return sum(shot.wall_s for shot in self.shots)

    def decide(self, **plan: Any) -> None:
        """Keep what was decided for all later starts."""
        self.plan.update(plan)
        self._write({"plan": plan})

    def add(self, shot: Shot) -> None:
        self.shots.append(shot)
        self._write({"shot": shot})

    def remove(self) -> None:
        """Delete the file: its shots are in a profile now."""
        self._file.close()
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _resume(self, facts: dict[str, Any]) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the interruption came in the middle of a line
            self.path.write_text(whole, encoding="utf-8")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines and lines[0]["facts"] != facts:
                raise UsageError(
                    f"{self.path}: an interrupted profile of something else; "
                    "delete it, or give another --out"
                )
            for line in lines[1:]:
                self.plan.update(line.get("plan", {}))
                if "shot" in line:
                    self.shots.append(Shot(*line["shot"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self.path}: not a profile's journal; delete it") from None
