"""The folder that a command writes into: whole or not at all, without touching the user's files.

`manifest.json` names the files that evenflow wrote there, with their SHA-256. What it does not
name, or names with another hash, is the user's. Knows nothing of what the files hold.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

from evenflow.errors import UsageError, shortened
from evenflow.files import is_begun
from evenflow.report import manifest
from evenflow.report.manifest import NAME as MANIFEST
from evenflow.report.manifest import RECORDS, SCRATCH, Manifest

STORE_HEADER = "results.json"
"""In the folder of points that a study keeps."""

_HELD: ContextVar[frozenset[Path]] = ContextVar("_HELD", default=frozenset())
"""The folders that this command has claimed."""


@contextmanager
def staged(
    folder: Path, *, force: bool = False, adds: bool = False, reads: Iterable[Path] = ()
) -> Iterator[Path]:
    """Give a scratch folder whose files move into `folder` if all goes well, and vanish otherwise.

    Made before anything is simulated, so that a folder that cannot be written is found at once. A
    file of an earlier run that this one does not write is removed, but with `adds`. So a folder
    never holds parts of two runs. UsageError as for `claimed`, and when a file of the user's has
    the name of one that was made. It stays, and the results are kept beside it.
    """
    with claimed(folder, force=force, reads=reads), _writing(folder):
        scratch = manifest.scratch_in(folder)  # known before it is there, to be removed
        try:
            manifest.begin(scratch)
            yield scratch
            manifest.move(scratch, folder, adds=adds)
        finally:
            found = manifest.read(folder)
            if found is None or found.moving != scratch.name:
                manifest.remove(scratch)


@contextmanager
def claimed(folder: Path, *, force: bool = False, reads: Iterable[Path] = ()) -> Iterator[None]:
    """Hold a folder, so that no other command writes there; one command may claim it repeatedly.

    An interrupted move is finished first, and what else killed commands left is removed, but for
    records of real runs. UsageError while another command holds it, and as for `check_folder`.
    """
    held = _HELD.get()
    with _writing(folder):
        place = Path(os.path.realpath(folder))
        is_file = folder.exists() and not folder.is_dir()
    if place in held or is_file:
        check_folder(folder, force=force, reads=reads)
        yield
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    token = _HELD.set(held | {place})
    try:
        with _locked(folder):
            try:
                with _writing(folder):
                    manifest.finish(folder)
                    for path in folder.glob(f"{SCRATCH}*"):
                        if manifest.is_scratch(path) and not (path / RECORDS).is_file():
                            manifest.remove(path)
                    check_folder(folder, force=force, reads=reads)
                yield
            finally:
                manifest.remove_empty(missing)
    finally:
        _HELD.reset(token)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = shortened(str(error.filename or folder))
        raise UsageError(f"{place}: cannot write: {error.strerror}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if need be, until the block or the process ends."""
    with _opened(folder) as door:
        try:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder}: another command writes there; wait for it, or give another --out"
            ) from None
        if _is_at(folder, door):
            yield
            return
    with _locked(folder):  # another command had made it, and has removed it since
        yield


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        door = os.open(folder, os.O_RDONLY)
    except FileExistsError:
        raise UsageError(f"{folder}: is a link to nothing; a folder is right") from None
    except OSError as error:
        raise UsageError(f"{folder}: cannot write there: {error.strerror}") from None
    try:
        yield door
    finally:
        os.close(door)


def _is_at(folder: Path, door: int) -> bool:
    try:
        return os.path.samestat(os.fstat(door), folder.stat())
    except FileNotFoundError:
        return False


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Have a block read what one run wrote to a folder, or to one above; finish its move first.

    UsageError when another run moved in meanwhile.
    """
    above = _written(folder)
    if above is not None and above[1].moving is not None:
        with _locked(above[0]), _writing(above[0]):
            manifest.finish(above[0])
        above = _written(folder)
    yield
    if _written(folder) != above:
        raise UsageError(f"{folder}: another run was written there meanwhile; read it again")


def _written(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the nearest manifest of evenflow's at a folder or above it, and where it is."""
    for path in (folder, *folder.absolute().parents):
        with suppress(UsageError):
            if (found := manifest.read(path)) is not None:
                return path, found
    return None


def unfinished_runs(folder: Path) -> list[Path]:
    """Return the scratch folders of real runs, at a path or in it, that have no results yet."""
    with reading(folder):
        folders = [folder, *sorted(folder.glob(f"{SCRATCH}*"))]
        return [path for path in folders if (path / RECORDS).is_file()]


def killed_runs(folder: Path) -> list[Path]:
    """Return the unfinished runs of processes that have ended."""
    return [path for path in unfinished_runs(folder) if not _is_held(path.parent)]


def _is_held(folder: Path) -> bool:
    try:
        with _locked(folder):
            return False
    except UsageError:
        return True


@contextmanager
def recovery(scratch: Path) -> Iterator[Path]:
    """Let a block complete a killed run's scratch folder, then give it a visible name.

    Yields that name. UsageError when the run is still alive or the folder cannot be written. So it
    is for a link in it, which no run makes.
    """
    if _is_held(scratch.parent):
        raise UsageError(f"{scratch}: its run is alive; it writes its results when it ends")
    for path in scratch.rglob("*"):
        manifest.inside(scratch, path.relative_to(scratch).as_posix())
    folder = scratch.parent / f"recovered-{scratch.name.removeprefix(SCRATCH)}"
    with _locked(scratch.parent), _writing(folder):
        yield folder
        manifest.keep(scratch, folder)


def check_folder(folder: Path, *, force: bool = False, reads: Iterable[Path] = ()) -> None:
    """Raise UsageError for a folder that holds what evenflow did not write, unless `force`.

    And for one in which an earlier run wrote a file that this one `reads`, and for a file.
    """
    if not folder.is_dir():
        if folder.exists():
            raise UsageError(f"{folder}: is a file; give a folder with --out")
        return
    known = manifest.read(folder)
    ours = {} if known is None else {MANIFEST: None, **manifest.unchanged(folder, known.files)}
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


def _others(folder: Path, root: Path, ours: Collection[str]) -> Iterator[str]:
    """Yield the paths in a folder that are not evenflow's.

    Folders with a record, and empty folders, are.
    """
    folders = {str(above) for name in ours for above in PurePosixPath(name).parents}
    for path in folder.iterdir():
        name = path.relative_to(root).as_posix()
        if name in folders and path.is_dir() and not path.is_symlink():
            yield from _others(path, root, ours)
        elif not (name in ours or _has_record(path) or manifest.is_scratch(path)):
            yield name


def _has_record(folder: Path) -> bool:
    """Return whether a folder has a record of its results or points, or is still empty.

    In a scratch folder, the records of a real run count.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    heads = (RECORDS,) if folder.name.startswith(SCRATCH) else (MANIFEST, STORE_HEADER)
    if any((folder / name).is_file() for name in heads):
        return True
    return all(is_begun(path) for path in folder.iterdir())
