"""What the recorders of engines share: the engine asked for, random runs, a folder of journals.

Knows no engine, and nothing of Evenflow, which is not installed beside an engine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from random import Random
from typing import Any, NoReturn

Event = dict[str, Any]
Prompts = Mapping[int, Sequence[int]]
SUFFIX = ".jsonl.gz"


def require(package: str, wanted: str, target: str) -> None:
    """Exit with status 2 unless a package is installed in this version."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if found != wanted:
        refuse(
            f"{package} {wanted} is needed, {found} is installed for {sys.executable}; "
            f"make {target} makes an environment with it"
        )


def release(folder: Path) -> str:
    """Return the version of the only package that is unpacked in a folder."""
    (found,) = distributions(path=[str(folder)])
    return found.version


def refuse(reason: str) -> NoReturn:
    """Exit with status 2 and a reason."""
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)


def arguments(words: str, runs: int = 60) -> argparse.ArgumentParser:
    """Return a command line of random runs."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--package", type=Path, metavar="FOLDER", help="a release, unpacked")
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    return parser


def drawn(given: argparse.Namespace, *words: object) -> Iterator[tuple[int, Random]]:
    """Yield each run's number, and what it is drawn from: the seed, `words` and the number."""
    for run in range(given.runs):
        yield run, Random(" ".join(map(str, (given.seed, *words, run))))


def write(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Write a journal, compressed, with the same bytes for the same events."""
    text = "".join(json.dumps(event) + "\n" for event in events)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def write_prompts(path: Path, prompts: Prompts) -> None:
    """Write the tokens of prompts beside the journal of this path, if there are any."""
    if prompts:
        beside = path.with_name(f"{path.name.removesuffix(SUFFIX)}-prompts{SUFFIX}")
        write(beside, ({"id": number, "prompt": ids} for number, ids in prompts.items()))


def read(path: Path) -> list[Event]:
    """Read a journal."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]
