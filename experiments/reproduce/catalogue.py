"""The catalogue of measured runs: a YAML each, and where its data lies.

Knows the schema and the folders; what is in the data is `measured`'s business.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evenflow.errors import UsageError, instead_of
from evenflow.keys import Count, Keys, Positive
from experiments.reproduce.measured import Measured, read_results
from experiments.run_file.yaml_file import checked, read

FOLDER = Path(__file__).parent
DATA = "EVENFLOW_SHARED"
Text = Annotated[str, Field(min_length=1)]


class SourceKeys(Keys):
    """Where the original is: a repository, a commit of it, and a path in that."""

    repository: Text
    commit: Text
    path: Text

    def words(self) -> str:
        return f"https://{self.repository}, commit {self.commit}, {self.path}"


class EntryKeys(Keys):
    """A set of measured runs that one RUN.yaml describes, each from a file, or from a row of one.

    `files` are patterns below the folder of the data: of the form that this catalogue was made
    with, and of the original; `sha256` are the hashes of files that were read. Of a file with many
    rows those are taken whose facts are among those of `where`, or of one of several. `metrics` are
    compared, with the largest error that is aimed at (null: none). `spread` is the run-to-run
    spread by metric, of runs whose names end so. `run` holds RUN.yaml's keys; lengths, arrivals and
    layout come from the file where it says them; `by_lengths` holds those that differ by the row's
    lengths, "prompt/output", and goes before both. A closed loop serves `rounds` requests a client,
    of lengths drawn uniformly from the `shortest` share of what is stated to all of it. `sequence`:
    the runs, by how their names end, were made one after the other on one server, with the same
    prompts at these requests a second (null: all at once). `assumed` is what nothing measured says,
    `misses` why what misses does.
    """

    title: Text
    source: SourceKeys
    engine: Text | None = None
    files: Annotated[list[Text], Field(min_length=1)]
    sha256: dict[str, Text] = Field(default_factory=dict)
    where: dict[str, list[Any]] | list[dict[str, list[Any]]] = Field(default_factory=dict)
    metrics: dict[str, Positive | None]
    spread: dict[str, dict[str, Positive]] = Field(default_factory=dict)
    rounds: Count = 5
    shortest: Annotated[float, Field(gt=0, le=1)] = 1.0
    sequence: dict[str, Positive | None] = Field(default_factory=dict)
    assumed: list[Text]
    misses: Text | None = None
    run: dict[str, Any]
    by_lengths: dict[str, dict[str, Any]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the catalogue, by name."""

    name: str
    keys: EntryKeys

    def files(self, folder: Path) -> list[Path]:
        """Return the files below a folder, of the first pattern that has any.

        The shared folder keeps measured runs in `measured`; who has only this entry's files may
        give their own folder.
        """
        for pattern in self.keys.files:
            for below in (pattern, f"measured/{pattern}", pattern.rpartition("/")[2]):
                if found := sorted(path for path in folder.glob(below) if path.is_file()):
                    return found
        return []

    def measured(self, folder: Path) -> list[Measured]:
        """Return the runs that lie below a folder; none where there are none."""
        runs = (run for path in self.files(folder) for run in read_results(path))
        return [run for run in runs if self._is_meant(run)]

    def _is_meant(self, run: Measured) -> bool:
        where = self.keys.where
        return any(
            all(run.facts.get(name) in values for name, values in each.items())
            for each in (where if isinstance(where, list) else [where])
        )

    def others(self, folder: Path) -> list[Path]:
        """Return those files below a folder that are none of those that the catalogue has read."""
        known = set(self.keys.sha256.values())
        return [path for path in self.files(folder) if _sha256(path) not in known]

    def where_from(self) -> str:
        """Say where the data is to be had."""
        return f"it is at {self.keys.source.words()}, to be given with --data DIR"


def entries() -> dict[str, Entry]:
    """Return the catalogue, by name."""
    paths = sorted(FOLDER.glob("*.yaml"))
    return {path.stem: load_entry(path) for path in paths}


def load_entry(path: Path) -> Entry:
    """Read one YAML of the catalogue, or of a user's; UsageError naming the line and the key."""
    return Entry(path.stem, checked(EntryKeys, read(path, "title, source, files, run")))


def chosen(names: Sequence[str]) -> list[Entry]:
    """Return the entries asked for, all where none is: by name, beginning of a name, or a YAML."""
    known = entries()
    return list(known.values()) if not names else [e for n in names for e in _named(n, known)]


def _named(name: str, known: Mapping[str, Entry]) -> Iterator[Entry]:
    if name.endswith(".yaml"):
        yield load_entry(Path(name))
        return
    if name in known:
        yield known[name]
        return
    found = [entry for key, entry in known.items() if key.startswith(name)]
    if not found:
        raise UsageError(f"reproduce {name}: no such entry; {instead_of(name, known)}")
    yield from found


def data_folder(given: Path | None) -> Path:
    """Return the folder that holds the data: as given, or as the environment says.

    UsageError where neither names a folder.
    """
    folder = given or Path(os.environ.get(DATA, "../shared"))
    if not folder.is_dir():
        where = "--data" if given else DATA
        raise UsageError(
            f"{where}: no folder {folder}; give the data's with --data DIR or {DATA}; what it "
            "should hold: evenflow reproduce --list"
        )
    return folder


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
