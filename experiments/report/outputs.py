"""Write what a run produced: summary.json, the tables, the timeline, the report.

It knows file names and formats, not how results come about or what they mean.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.report.tables import is_number, write_rows

Save = Literal["summary", "requests", "all"]


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
