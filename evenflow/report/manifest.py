"""The manifest of a results folder: the files that evenflow wrote, moved there as one step.

While files move in from a scratch folder it names that folder. The next command that opens the
results finishes the move. It is not trusted, so it names nothing but files of its folder, by their
content. Knows no locks.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from evenflow.errors import UsageError

NAME = "manifest.json"
CLOCK = "wall_clock.json"
"""Differs from run to run, so the manifest names it without its hash."""
SCRATCH = ".partial-"
RECORDS = "records.blocks"
"""In a scratch folder: what a real run records. Without its owner, that is a killed run's."""
MARK = ".evenflow"
"""In a scratch folder from first to last: the name alone would not tell it from the user's."""
JOURNAL = f"{MARK}-move"
"""In a scratch folder: the manifest that the folder has while files move."""


def plain(name: str) -> str:
    """Return a name of a file below a folder; ValueError for one that leads elsewhere."""
    pure = PurePosixPath(name)
    odd = pure.is_absolute() or ".." in pure.parts or "\0" in name
    if odd or str(pure) != name or name in (".", NAME):
        raise ValueError("should be the name of a file below the folder, without ..")
    return name


def _hashed(files: dict[str, str | None]) -> dict[str, str | None]:
    for name, known in files.items():
        if known is None and PurePosixPath(name).name != CLOCK:
            raise ValueError(f"{name!r} should have its SHA-256; only {CLOCK} has none")
    return files


Plain: TypeAlias = Annotated[str, AfterValidator(plain)]
Sha256: TypeAlias = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Files: TypeAlias = Annotated[dict[Plain, Sha256 | None], AfterValidator(_hashed)]
Scratch: TypeAlias = Annotated[str, StringConstraints(pattern=r"^\.partial-[0-9a-f]{8}$")]


class Manifest(BaseModel):
    """The files of a folder with their SHA-256; while they move, from where, and what they replace.

    Files written by evenflow and changed since are not among them: they are the user's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    written_by: Literal["evenflow"]
    files: Files
    moving: Scratch | None = None
    replaced: Files = {}


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, None where there is none; UsageError for an invalid one."""
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    try:
        if not path.is_symlink() and path.is_file():
            return Manifest.model_validate_json(path.read_bytes())
        what = "should be a file"
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = [f"{part!r:.80}" for part in first["loc"] if part != "[key]"]
        what = ": ".join((*where, first["msg"].removeprefix("Value error, ")))
    except OSError as error:
        what = str(error.strerror)
    raise UsageError(f"{path}: is no manifest that evenflow wrote: {what}")


def write(path: Path, manifest: Manifest) -> None:
    """Write a manifest that is on disk when this returns."""
    text = manifest.model_dump_json(indent=1, exclude_defaults=True)
    path.write_text(text + "\n", encoding="utf-8")
    _sync(path)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a plain name in a folder; UsageError where a link is on the way."""
    path = folder / name
    for part in (path, *path.parents)[: len(PurePosixPath(name).parts)]:
        if part.is_symlink():
            raise UsageError(f"{part}: is a link; evenflow changes only what lies in {folder}")
    return path


def unchanged(folder: Path, files: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the files that exist with their known content."""
    paths = {name: inside(folder, name) for name in files}
    there = [name for name, path in paths.items() if path.is_file()]
    return {name: files[name] for name in there if files[name] in (None, _digest(paths[name]))}


def _digest(path: Path) -> str | None:
    if path.name == CLOCK:
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def scratch_in(folder: Path) -> Path:
    """Return the path of a scratch folder that is not there yet."""
    return folder / f"{SCRATCH}{secrets.token_hex(4)}"


def begin(scratch: Path) -> None:
    scratch.mkdir(0o700)
    (scratch / MARK).touch()


def is_scratch(path: Path) -> bool:
    """Say whether a path is a scratch folder: by its name and its mark, or nothing in it."""
    if not re.fullmatch(r"\.partial-[0-9a-f]{8}", path.name) or path.is_symlink():
        return False
    return path.is_dir() and ((path / MARK).is_file() or not any(path.iterdir()))


def remove(scratch: Path) -> None:
    """Remove a scratch folder, its mark last; what cannot go stays for the next command."""
    with suppress(OSError):
        for path in scratch.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()
        (scratch / MARK).unlink(missing_ok=True)
        scratch.rmdir()


def keep(scratch: Path, folder: Path) -> None:
    """Make a results folder of a scratch folder, under a name that is seen."""
    write(scratch / NAME, Manifest(written_by="evenflow", files=_made(scratch)))
    shutil.copymode(scratch.parent, scratch)
    os.rename(scratch, folder)
    for name in (RECORDS, MARK):  # gone only when the results are there
        (folder / name).unlink(missing_ok=True)


def _made(scratch: Path) -> dict[str, str | None]:
    """Write the files of a scratch folder to disk; return them with their hashes."""
    paths = sorted(path for path in scratch.rglob("*") if path.is_file())
    names = {path: path.relative_to(scratch).as_posix() for path in paths}
    made = {path: name for path, name in names.items() if name not in (RECORDS, MARK, NAME)}
    for path in made:
        _sync(path)
    return {name: _digest(path) for path, name in made.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(scratch: Path, folder: Path, *, adds: bool) -> None:
    """Move what was made into a folder, in place of what evenflow had written, or to `adds` to it.

    UsageError where a file of the user's is in the way: the results are kept beside it. So it is
    where the scratch folder was removed meanwhile, with some of the results perhaps.
    """
    if not is_scratch(scratch):
        raise UsageError(
            f"{folder}: was removed while the command ran, and has no results; run it again"
        )
    manifest, made = read(folder), _made(scratch)
    ours = {} if manifest is None else unchanged(folder, manifest.files)
    if (other := next(_in_the_way(folder, made, ours), None)) is not None:
        kept = folder / f"results-{scratch.name.removeprefix(SCRATCH)}"
        keep(scratch, kept)
        raise UsageError(f"{other}: is not evenflow's and stays; the results are in {kept}")
    files = dict(sorted({**(ours if adds else {}), **made}.items()))
    after = Manifest(written_by="evenflow", files=files)
    write(scratch / NAME, after)
    write(scratch / JOURNAL, after.model_copy(update={"moving": scratch.name, "replaced": ours}))
    os.replace(scratch / JOURNAL, folder / NAME)
    _sync(folder)
    finish(folder)


def finish(folder: Path) -> None:
    """Finish the move recorded in a folder's manifest, if any; check all before any change."""
    manifest = read(folder)
    if manifest is None or manifest.moving is None:
        return
    scratch = inside(folder, manifest.moving)
    places = {name: inside(folder, name) for name in manifest.files}
    names = [name for name in places if inside(scratch, name).is_file()]
    old = unchanged(folder, manifest.replaced)
    if (other := next(_in_the_way(folder, names, old), None)) is not None:
        raise UsageError(f"{other}: was changed while results moved to {folder}; move it elsewhere")
    if not (is_scratch(scratch) and inside(scratch, NAME).is_file()):
        raise UsageError(f"{scratch}: should have the rest of the results of {folder}, and has not")
    for name in manifest.replaced.keys() - manifest.files.keys():
        if name in old:
            (folder / name).unlink()
        remove_empty(folder / above for above in PurePosixPath(name).parents[:-1])
    for name in names:
        places[name].parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch / name, places[name])
    (scratch / RECORDS).unlink(missing_ok=True)  # what they are for is there
    os.replace(scratch / NAME, folder / NAME)
    remove(scratch)


def _in_the_way(folder: Path, names: Iterable[str], ours: Container[str]) -> Iterator[Path]:
    """Yield the paths, not ours, in the way of files of these names or of their folders."""
    for name in names:
        for part in (name, *map(str, PurePosixPath(name).parents[:-1])):
            path = folder / part
            is_folder = part != name and path.is_dir() and not path.is_symlink()
            if os.path.lexists(path) and part not in ours and not is_folder:
                yield path


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that are empty, one after the other."""
    for path in folders:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
