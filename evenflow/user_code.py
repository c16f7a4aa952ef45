"""Calls of user code, such as a policy: what it raises is one error; the process is unchanged.

Ctrl-C is the user's and goes on.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenflow.errors import UsageError, instead_of

PROCESS = [os.getpid()]
"""The id of this process, also in a copy of it. Asking the system takes 4 % of a compiled run."""


def _copied() -> None:
    PROCESS[0] = os.getpid()


os.register_at_fork(after_in_child=_copied)


def words_of(error: BaseException) -> str:
    """Return the type of an error and what it says, on a line, even if it cannot say it."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(shown(error, str).split()))))


def reason_of(error: BaseException) -> str:
    """Return what a UsageError says on a line; of any other error, its type first."""
    return " ".join(str(error).split()) if isinstance(error, UsageError) else words_of(error)


def shown(value: object, form: Callable[[object], str] = repr) -> str:
    """Return a value as text, or its type where its own code makes none."""
    try:
        return form(value)
    except Exception:
        return f"<{type(value).__name__}>"


def place_of(error: BaseException, *others: str) -> str:
    """Return the file, line and source of an error, the last not of this package or `others`.

    Of an attribute that an object of ours lacks, also the ones that it has.
    """
    frames = traceback.extract_tb(error.__traceback__)
    packages = str(Path(__file__).parent), "evenflow/", *others  # compiled code has the short name
    theirs = [frame for frame in frames if not frame.filename.startswith(packages)] or frames
    hint = ""
    if isinstance(error, AttributeError) and type(error.obj).__module__.startswith("evenflow."):
        known = [name for name in dir(error.obj) if not name.startswith("_")]
        hint = f"; {instead_of(error.name, known)}"
    if not theirs:  # it was made and never raised
        return hint
    last = theirs[-1]
    return f" ({Path(last.filename).name}:{last.lineno}: {last.line}){hint}"


def imported(kind: str, name: str) -> tuple[object, str]:
    """Return what `module:name` names, or None, and the name of its module, which is imported.

    UsageError, in the words of a kind of code, for a module that cannot be.
    """
    module_name, _, inner = name.partition(":")
    cannot = f"{kind} {name!r}: cannot import {module_name!r}"
    with user_code(module_name, lambda words: UsageError(f"{cannot} ({words})")):
        whole = sys.modules.get(module_name) if module_name.endswith(".py") else None
        module = whole or importlib.import_module(module_name)  # waits for whoever imports it
    return getattr(module, inner, None), module_name


def next_part(parts: Iterator[object], end: object) -> object:
    """Return the next part of an answer, the last being what a generator returns; or `end`."""
    try:
        return next(parts)
    except StopIteration as stop:
        return end if stop.value is None else stop.value


def end_copy(process: int, name: str) -> None:
    """End this process, with a line, if it is a copy of `process`: both would write its files."""
    if PROCESS[0] != process:
        os.write(2, f"error: {name} forked this process; the copy ends here\n".encode())
        os._exit(1)


@contextmanager
def user_code(name: str, error_of: Callable[[str], UsageError]) -> Iterator[None]:
    """Raise `error_of` its words for whatever code called `name` raises in this block."""
    process = PROCESS[0]
    try:
        with working_directory():
            yield
    except (KeyboardInterrupt, UsageError):
        end_copy(process, name)
        raise
    except BaseException as error:
        end_copy(process, name)
        raise error_of(words_of(error)) from error
    end_copy(process, name)


@contextmanager
def working_directory() -> Iterator[None]:
    """Go back to the working directory at the end, and say so: paths are relative to it."""
    before = working_folder()
    try:
        yield
    finally:
        after = working_folder()
        if before is not None and after != before:
            print(f"note: a policy went to {after!a}; paths stay those of before", file=sys.stderr)
            with suppress(OSError):
                os.chdir(before)


def working_folder() -> str | None:
    """Return the working directory; None where it has been removed."""
    with suppress(OSError):
        return os.getcwd()
    return None
