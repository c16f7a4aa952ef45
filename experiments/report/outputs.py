"""Write what a run produced: summary.json, the tables, the timeline, the report.

It knows file names and formats, not how results come about or what they mean.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evenflow.errors import UsageError
from experiments.report.tables import is_number, write_rows

Save = Literal["summary", "requests", "all"]


RUN_FILES = (
    "capacity.json",
    "capacity.png",
    "capacity.svg",
    "checks.csv",
    "comparison.csv",
    "counterfactuals.csv",
    "summary.json",
    "rates.csv",
    "requests.csv",
    "transfers.csv",
    "batches.csv",
    "stages.csv",
    "bubbles.csv",
    "timeline.json.gz",
    "decisions.jsonl.gz",
    "tokens.jsonl.gz",
    "validation.json",
    "sweep.json",
    "points.csv",
    "points.parquet",
    "summary.csv",
    "main_effects.png",
    "main_effects.svg",
    "sensitivity.png",
    "sensitivity.svg",
    "pareto_front.png",
    "pareto_front.svg",
    "tune.json",
    "tune.png",
    "tune.svg",
    "tuned.yaml",
    "trials.csv",
    "validation.md",
    "validation.png",
    "validation.svg",
    "report.html",
    "wall_clock.json",
)
POOL_FOLDERS = ("prefill", "mixed", "decode")
"""Where a system of pools puts the tables of each."""


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Give a scratch folder whose files move into `folder` if all goes well, and vanish otherwise.

    Made before anything is simulated, so that a folder that cannot be written is found at once:
    UsageError. Each file is replaced as a whole; a file of an earlier run that this one does not
    write is removed, so that a folder never holds parts of two runs.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as error:
        raise UsageError(f"{folder}: cannot write there: {error.strerror}") from None
    try:
        yield scratch
        _move(scratch, folder)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: cannot write: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _move(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    _clear(target)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _move(path, target / path.name)
        else:
            os.replace(path, target / path.name)


def _clear(folder: Path) -> None:
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for name in POOL_FOLDERS:
        below = folder / name
        if below.is_dir():
            _clear(below)
            if not any(below.iterdir()):
                below.rmdir()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as JSON; a number that is not finite becomes null, which JSON can say."""
    text = json.dumps(_plain(data), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_tokens(path: Path, tokens: Mapping[int, list[int]]) -> None:
    """Write a line a request, in order of request id: the ids of the tokens it got."""
    with gzip.open(path, "wt", encoding="ascii") as file:
        for request_id in sorted(tokens):
            line = {"request_id": request_id, "tokens": tokens[request_id]}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def write_summaries(path: Path, label: str, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the numbers of several summaries, a row each; the first column names them."""
    rows = [
        {label: name, **{key: value for key, value in summary.items() if is_number(value)}}
        for name, summary in summaries.items()
    ]
    write_rows(path, rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
