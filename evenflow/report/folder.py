"""The folder that a command writes into: whole or not at all, and nobody else's files touched.

`manifest.json` names the files that evenflow wrote there, with their SHA-256. What it does not
name, or names with another hash, is the user's. Knows nothing of what the files hold.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evenflow.errors import UsageError

MANIFEST = "manifest.json"
CLOCK = "wall_clock.json"
"""Differs from run to run, so the manifest names it without its hash."""
SCRATCH = ".partial-"
RECORDS = "records.blocks"
"""In a scratch folder: what a real run records. Without its owner, that is a killed run's."""
STORE_HEADER = "results.json"
"""In the folder of points that a study keeps."""


@contextmanager
def staged(
    folder: Path, *, force: bool = False, adds: bool = False, reads: Iterable[Path] = ()
) -> Iterator[Path]:
    """Give a scratch folder whose files move into `folder` if all goes well, and vanish otherwise.

    Made before anything is simulated, so that a folder that cannot be written is found at once.
    Each file is replaced as a whole; a file of an earlier run that this one does not write is
    removed, unless it `adds` to them, so that a folder never holds parts of two runs. UsageError as
    for `check_folder`, and when a file of the user's has the name of one that was made: it stays,
    and the results are kept beside it.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    check_folder(folder, force=force, reads=reads)
    scratch = folder / f"{SCRATCH}{secrets.token_hex(4)}"  # known before it is there, to be removed
    try:
        with _held(scratch):
            yield scratch
            _move(scratch, folder, adds)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: cannot write: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


@contextmanager
def _held(scratch: Path) -> Iterator[None]:
    """Make a scratch folder, having removed those beside it whose owners were killed, and lock it.

    Those with records of a real run stay, for `recovery`. A lock ends with its process. UsageError
    when it cannot be made.
    """
    try:
        hold = _locked_new(scratch)
    except OSError as error:
        raise UsageError(f"{scratch.parent}: cannot write there: {error.strerror}") from None
    try:
        yield
    finally:
        os.close(hold)


def _locked_new(scratch: Path) -> int:
    folder = scratch.parent
    folder.mkdir(parents=True, exist_ok=True)
    door = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(door, fcntl.LOCK_EX)  # nobody takes a new one for stale before it is locked
        for path in folder.glob(f"{SCRATCH}*"):
            if path.is_dir() and (stale := _locked(path)) is not None:
                if not (path / RECORDS).is_file():
                    shutil.rmtree(path, ignore_errors=True)
                os.close(stale)
        scratch.mkdir(0o700)
        hold = os.open(scratch, os.O_RDONLY)
        fcntl.flock(hold, fcntl.LOCK_EX)
        return hold
    finally:
        os.close(door)


def unfinished_runs(folder: Path) -> list[Path]:
    """Return the scratch folders of real runs, at a path or in it, whose results are not made."""
    folders = [folder, *sorted(folder.glob(f"{SCRATCH}*"))]
    return [path for path in folders if (path / RECORDS).is_file()]


def killed_runs(folder: Path) -> list[Path]:
    """Return those of the unfinished runs whose owners are gone."""
    holds = {path: _locked(path) for path in unfinished_runs(folder)}
    for hold in holds.values():
        if hold is not None:
            os.close(hold)
    return [path for path, hold in holds.items() if hold is not None]


@contextmanager
def recovery(scratch: Path) -> Iterator[Path]:
    """Have a killed run's scratch folder completed, and give it a name that is seen.

    Gives that name. UsageError when the run is still alive, or the folder cannot be written.
    """
    suffix = scratch.name.removeprefix(SCRATCH)
    folder = scratch.parent / f"recovered-{suffix}"
    try:
        if (hold := _locked(scratch)) is None:
            raise UsageError(f"{scratch}: its run is alive; it writes its results when it ends")
    except OSError as error:
        raise UsageError(f"{scratch}: cannot read it: {error.strerror}") from None
    try:
        yield folder
        (scratch / RECORDS).unlink()
        files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
        made = {path.relative_to(scratch).as_posix(): _digest(path) for path in files}
        _write_manifest(scratch, made)
        shutil.copymode(scratch.parent, scratch)
        os.rename(scratch, folder)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: cannot write: {error.strerror}") from None
    finally:
        os.close(hold)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that locks a folder; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def check_folder(folder: Path, *, force: bool = False, reads: Iterable[Path] = ()) -> None:
    """Raise UsageError for a folder that holds what evenflow did not write, unless `force`.

    And for one in which an earlier run wrote a file that this one `reads`, and for a file.
    """
    if not folder.is_dir():
        if folder.exists():
            raise UsageError(f"{folder}: is a file; give a folder with --out")
        return
    ours = written_files(folder)
    for path in reads:
        if path.resolve() in {(folder / name).resolve() for name in ours}:
            raise UsageError(
                f"{path}: is read by this run, which would replace what is in {folder}; "
                "give another folder with --out"
            )
    others = sorted(_others(folder, folder, ours))
    if others and not force:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UsageError(
            f"{folder}: holds what evenflow did not write or what was changed since "
            f"({others[0]}{more}); give another folder with --out, or --force to write beside it"
        )


def written_files(folder: Path) -> dict[str, str | None]:
    """Return the files in a folder that evenflow wrote and nobody has changed, with their hashes.

    UsageError for a manifest that cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        files = dict(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path}: is no manifest that evenflow wrote") from None
    same = {name: known for name, known in files.items() if _is_same(folder / name, known)}
    return {MANIFEST: None, **same}


def _is_same(path: Path, known: str | None) -> bool:
    return path.is_file() and known in (None, _digest(path))


def _others(folder: Path, root: Path, ours: Mapping[str, str | None]) -> Iterator[str]:
    """Yield what is in a folder and not evenflow's; a folder with a record of its own is."""
    for path in folder.iterdir():
        name = path.relative_to(root).as_posix()
        if path.is_dir() and any(mine.startswith(f"{name}/") for mine in ours):
            yield from _others(path, root, ours)
        elif not (name in ours or path.name.startswith(SCRATCH) or _has_record(path)):
            yield name


def _has_record(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or (folder / STORE_HEADER).is_file()


def _move(scratch: Path, folder: Path, adds: bool) -> None:
    files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != RECORDS]  # they go once the results are there
    made = {path.relative_to(scratch).as_posix(): _digest(path) for path in files}
    ours = written_files(folder)
    in_the_way = [name for name in made if name not in ours and (folder / name).exists()]
    if in_the_way:
        kept = folder / f"results-{scratch.name.removeprefix(SCRATCH)}"
        os.replace(scratch, kept)
        raise UsageError(
            f"{folder / in_the_way[0]}: is not evenflow's and stays; the results are in {kept}"
        )
    for name in () if adds else ours.keys() - made.keys():
        (folder / name).unlink(missing_ok=True)
        _remove_empty((folder / name).parent, folder)
    for name in made:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / name, folder / name)
    _write_manifest(folder, {**ours, **made} if adds else made)


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _write_manifest(folder: Path, files: Mapping[str, str | None]) -> None:
    named = {name: files[name] for name in sorted(files) if name != MANIFEST}
    text = json.dumps({"written_by": "evenflow", "files": named}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _digest(path: Path) -> str | None:
    if path.name == CLOCK:
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
