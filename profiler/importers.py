"""Make a profile file of what other tools measured: Vidur's CSVs, and times against total length.

Knows those layouts (times in milliseconds) and nothing of how they are used. Vidur: one row a
point, `time_stats.<operator>.median`; mlp.csv, attention.csv, all_reduce.csv and send_recv.csv are
told apart by their columns. Total length: `Total Length` (tokens of one prompt), `Execute Time`
(whole model).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from evenflow.costs.profile.cost import check_units
from evenflow.costs.profile.file import Header, LayerShapes, Point, Profile
from evenflow.errors import UsageError
from evenflow.specs.model import ModelSpec

Row = dict[str, str]

LINEARS = {
    "attn_pre_proj": "linear_qkv",
    "attn_post_proj": "linear_o",
    "mlp_up_proj": "linear_up",
    "mlp_down_proj": "linear_down",
    "attn_rope": "rope",
    "mlp_act": "activation",
    "emb": "embedding",
}
"""Vidur's operator -> ours, where one is one."""

SHAPES = {
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_q_head": "num_heads",
    "n_kv_head": "num_kv_heads",
    "n_expanded_embd": "intermediate_size",
}
"""Vidur's column -> the key of the layer shapes that it must equal."""


class Measured(NamedTuple):
    """One row of a foreign file as one of ours; several of a kind are merged by their median."""

    operator: str
    tokens: int | None
    context_tokens: int | None
    size_bytes: int | None
    ranks: int
    seconds: float


class Imported(NamedTuple):
    """A profile made of foreign files, and how many times of 0 were left out.

    Such times are below the resolution of the other tool's clock.
    """

    profile: Profile
    zeros: int


def import_files(
    paths: Sequence[Path], spec: ModelSpec, device: str, dtype: str, tile_tokens: int = 128
) -> Imported:
    """Read foreign files of one device into one profile for a model.

    UsageError names the file and the line: unknown layout, other layer shapes, times that are
    negative or no numbers, another unit than milliseconds.
    """
    found: list[Measured] = []
    for path in paths:
        columns, rows = _read(path)
        found += _reader_of(columns, path)(path, rows, spec)
    merged: dict[Measured, list[float]] = {}
    for measured in found:
        if measured.seconds > 0:
            merged.setdefault(measured._replace(seconds=0.0), []).append(measured.seconds)
    points = [_point(alike, times) for alike, times in merged.items()]
    header = Header(
        device=device,
        device_kind="other",
        driver="unknown",
        libraries="unknown",
        dtype=dtype,
        date="unknown",
        threads=0,
        grid="as in the imported files",
        tile_tokens=tile_tokens,
        source="imported from " + ", ".join(path.name for path in paths),
        model=spec.name,
        shapes=LayerShapes.of(spec),
    )
    profile = Profile(header, tuple(sorted(points, key=lambda point: point.key)))
    check_units(profile, spec, ", ".join(map(str, paths)))
    return Imported(profile, sum(measured.seconds == 0 for measured in found))


def _point(alike: Measured, times: Sequence[float]) -> Point:
    seconds = median(times)
    return Point(*alike[:5], seconds, seconds, seconds, len(times))


def _read(path: Path) -> tuple[list[str], list[Row]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not a readable table ({error})") from None
    if not rows:
        raise UsageError(f"{path}: holds no rows")
    return list(reader.fieldnames or ()), rows


Reader = Callable[[Path, list[Row], ModelSpec], list[Measured]]


def _reader_of(columns: Sequence[str], path: Path) -> Reader:
    readers: dict[str, Reader] = {
        "time_stats.attn_pre_proj.median": _mlp,
        "time_stats.attn_prefill.median": _attention,
        "time_stats.all_reduce.median": _collective,
        "time_stats.send_recv.median": _collective,
        "Total Length": _total_length,
    }
    for column, reader in readers.items():
        if column in columns:
            return reader
    raise UsageError(
        f"{path}: no layout that can be imported; it should have one of the columns "
        f"{', '.join(readers)}"
    )


def _mlp(path: Path, rows: list[Row], spec: ModelSpec) -> list[Measured]:
    found = []
    for place, row in _of_model(path, rows, spec):
        tokens = _count(row, "num_tokens", place)
        ranks = _count(row, "num_tensor_parallel_workers", place)
        for theirs, ours in LINEARS.items():
            found.append(Measured(ours, tokens, None, None, ranks, _seconds(row, theirs, place)))
        norms = [
            _seconds(row, name, place) for name in ("input_layernorm", "post_attention_layernorm")
        ]
        added_s = _seconds(row, "add", place) if "time_stats.add.median" in row else 0.0
        norm_s = sum(norms) / 2 + added_s
        found.append(Measured("norm", tokens, None, None, ranks, norm_s))
    return found


def _attention(path: Path, rows: list[Row], spec: ModelSpec) -> list[Measured]:
    found = []
    for place, row in _of_model(path, rows, spec):
        ranks = _count(row, "num_tensor_parallel_workers", place)
        context = _count(row, "kv_cache_size", place)
        batch = _count(row, "batch_size", place)
        if row.get("is_prefill", "").lower() == "true":
            if batch > 1:
                continue  # several prompts at once: not one of our points
            tokens = _count(row, "prefill_chunk_size", place)
            seconds = _seconds(row, "attn_prefill", place)
            found.append(Measured("attention_prefill", tokens, context, None, ranks, seconds))
        else:
            tokens = batch
            seconds = _seconds(row, "attn_decode", place)
            total = context * batch
            found.append(Measured("attention_decode", tokens, total, None, ranks, seconds))
        if row.get("time_stats.attn_kv_cache_save.median"):
            saved_s = _seconds(row, "attn_kv_cache_save", place)
            found.append(Measured("kv_write", tokens, None, None, ranks, saved_s))
    return found


def _collective(path: Path, rows: list[Row], spec: ModelSpec) -> list[Measured]:
    """Read all-reduces or sends; of several placements, the one with most GPUs a node."""
    operator = "all_reduce" if "time_stats.all_reduce.median" in rows[0] else "send_recv"
    placed = "devices_per_node" in rows[0]
    most: dict[int, int] = {}
    for place, row in _placed(path, rows):
        ranks = _count(row, "num_workers", place)
        here = _count(row, "devices_per_node", place) if placed else 0
        most[ranks] = max(most.get(ranks, 0), here)
    found = []
    for place, row in _placed(path, rows):
        ranks = _count(row, "num_workers", place)
        if placed and _count(row, "devices_per_node", place) != most[ranks]:
            continue
        size, seconds = _count(row, "size", place), _seconds(row, operator, place)
        if operator == "all_reduce":
            found.append(Measured("all_reduce", None, None, size, ranks, seconds))
        elif ranks == 2:
            found.append(Measured("transfer", None, None, size, 1, seconds))
    return found


def _total_length(path: Path, rows: list[Row], spec: ModelSpec) -> list[Measured]:
    return [
        Measured(
            "model_prefill",
            _count(row, "Total Length", place),
            None,
            None,
            1,
            _milliseconds(row, "Execute Time", place),
        )
        for place, row in _placed(path, rows)
    ]


def _placed(path: Path, rows: list[Row]) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UsageError(f"{path}, line {number}: not as many cells as columns: truncated?")
        yield f"{path}, line {number}", row


def _of_model(path: Path, rows: list[Row], spec: ModelSpec) -> Iterator[tuple[str, Row]]:
    """Return the rows of a model's layer shapes; UsageError when there are none."""
    columns = {theirs: ours for theirs, ours in SHAPES.items() if theirs in rows[0]}
    there = set()
    matched = False
    for place, row in _placed(path, rows):
        shapes = {ours: _count(row, theirs, place) for theirs, ours in columns.items()}
        there.add(", ".join(f"{key} {value}" for key, value in shapes.items()))
        if all(getattr(spec, key) == value for key, value in shapes.items()):
            matched = True
            yield place, row
    if not matched:
        raise UsageError(
            f"{path}: not for the layers of {spec.name}; it has {'; '.join(sorted(there)[:3])}"
        )


def _count(row: Row, column: str, place: str) -> int:
    value = _number(row, column)
    if not value.is_integer():
        raise UsageError(_wrong(row, column, place, "a whole number from 0"))
    return int(value)


def _seconds(row: Row, operator: str, place: str) -> float:
    return _milliseconds(row, f"time_stats.{operator}.median", place)


def _milliseconds(row: Row, column: str, place: str) -> float:
    value = _number(row, column)
    if math.isnan(value):
        raise UsageError(_wrong(row, column, place, "milliseconds, not negative"))
    return value / 1000


def _number(row: Row, column: str) -> float:
    """Return a cell's number if it is 0 or more and finite, else NaN."""
    try:
        value = float(row.get(column, ""))
    except ValueError:
        return math.nan
    return value if 0 <= value < math.inf else math.nan


def _wrong(row: Row, column: str, place: str, right: str) -> str:
    return f'{place}: {column} is "{row.get(column, "")}"; it should be {right}'
