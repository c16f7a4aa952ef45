"""Make a profile file of what other tools measured: Vidur's CSVs, and times against total length.

Knows those layouts (times in milliseconds) and nothing of how they are used. Vidur: one row a
point, `time_stats.<operator>.median`; mlp.csv, attention.csv, all_reduce.csv and send_recv.csv are
recognised by their columns. Total length: `Total Length` (tokens of one prompt), `Execute Time`
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
from evenflow.costs.profile.file import Cells, Header, LayerShapes, Profile, ProfilePoint
from evenflow.errors import UsageError
from evenflow.specs.modelspec import ModelSpec

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


Key = tuple[str, int | None, int | None, int | None, int]
"""Operator, tokens, context_tokens, bytes, ranks: rows of a kind are merged by their median."""
Measured = tuple[Key, float]
"""One row of a foreign file as one of ours, in seconds."""


class Imported(NamedTuple):
    """A profile made of foreign files, and how many times of 0 (below their clock) it lacks."""

    profile: Profile
    zeros: int


def import_files(
    paths: Sequence[Path], spec: ModelSpec, device: str, dtype: str, tile_tokens: int = 128
) -> Imported:
    """Read foreign files of one device into one profile for a model.

    UsageError names the file and the line of a mistake. Those are an unknown layout, other layer
    shapes, times below 0 or no numbers, and another unit than milliseconds.
    """
    merged: dict[Key, list[float]] = {}
    zeros = 0
    for path in paths:
        rows = _read(path)
        for key, seconds in _reader_of(rows[0], path)(path, rows, spec):
            zeros += not seconds
            if seconds:
                merged.setdefault(key, []).append(seconds)
    points = []
    for key, times in merged.items():
        seconds = median(times)
        points.append(ProfilePoint(*key, seconds, seconds, seconds, len(times)))
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
    return Imported(profile, zeros)


def _median_s(row: Cells, operator: str) -> float:
    """Return the median time that Vidur has of an operator."""
    return _from_milliseconds(row, f"time_stats.{operator}.median")


def _from_milliseconds(row: Cells, column: str) -> float:
    """Return a cell's milliseconds in seconds; UsageError if it holds no time."""
    milliseconds = row.number(column)
    if math.isnan(milliseconds):
        raise row.wrong(column, "milliseconds, not negative")
    return milliseconds / 1000


def _read(path: Path) -> list[Cells]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not a readable table ({error})") from None
    if not lines:
        raise UsageError(f"{path}: holds no rows")
    return [Cells(cells, f"{path}, line {number}") for number, cells in enumerate(lines, 2)]


Reader = Callable[[Path, list[Cells], ModelSpec], Iterator[Measured]]


def _reader_of(first: Cells, path: Path) -> Reader:
    readers: dict[str, Reader] = {
        "time_stats.attn_pre_proj.median": _mlp,
        "time_stats.attn_prefill.median": _attention,
        "time_stats.all_reduce.median": _collective,
        "time_stats.send_recv.median": _collective,
        "Total Length": _total_length,
    }
    for column, reader in readers.items():
        if column in first.texts:
            return reader
    raise UsageError(
        f"{path}: no layout that can be imported; it should have one of the columns "
        f"{', '.join(readers)}"
    )


def _mlp(path: Path, rows: list[Cells], spec: ModelSpec) -> Iterator[Measured]:
    for row in _of_model(path, rows, spec):
        tokens, ranks = row.count("num_tokens"), row.count("num_tensor_parallel_workers")
        for theirs, ours in LINEARS.items():
            yield (ours, tokens, None, None, ranks), _median_s(row, theirs)
        norms_s = _median_s(row, "input_layernorm") + _median_s(row, "post_attention_layernorm")
        added_s = _median_s(row, "add") if "time_stats.add.median" in row.texts else 0.0
        yield ("norm", tokens, None, None, ranks), norms_s / 2 + added_s


def _attention(path: Path, rows: list[Cells], spec: ModelSpec) -> Iterator[Measured]:
    for row in _of_model(path, rows, spec):
        ranks = row.count("num_tensor_parallel_workers")
        context, batch = row.count("kv_cache_size"), row.count("batch_size")
        if row.texts.get("is_prefill", "").lower() != "true":
            tokens, seconds = batch, _median_s(row, "attn_decode")
            yield ("attention_decode", tokens, context * batch, None, ranks), seconds
        elif batch > 1:
            continue  # several prompts at once: not one of our points
        else:
            tokens, seconds = row.count("prefill_chunk_size"), _median_s(row, "attn_prefill")
            yield ("attention_prefill", tokens, context, None, ranks), seconds
        if row.texts.get("time_stats.attn_kv_cache_save.median"):
            seconds = _median_s(row, "attn_kv_cache_save")
            yield ("kv_write", tokens, None, None, ranks), seconds


def _collective(path: Path, rows: list[Cells], spec: ModelSpec) -> Iterator[Measured]:
    """Read all-reduces or sends; of several placements, the one with most GPUs a node."""
    reduces = "time_stats.all_reduce.median" in rows[0].texts
    placed = "devices_per_node" in rows[0].texts
    most: dict[int, int] = {}
    for row in _whole(rows):
        ranks = row.count("num_workers")
        most[ranks] = max(most.get(ranks, 0), row.count("devices_per_node") if placed else 0)
    for row in rows:
        ranks = row.count("num_workers")
        if placed and row.count("devices_per_node") != most[ranks]:
            continue
        seconds = _median_s(row, "all_reduce" if reduces else "send_recv")
        size_bytes = row.count("size")
        if reduces:
            yield ("all_reduce", None, None, size_bytes, ranks), seconds
        elif ranks == 2:
            yield ("transfer", None, None, size_bytes, 1), seconds


def _total_length(path: Path, rows: list[Cells], spec: ModelSpec) -> Iterator[Measured]:
    for row in _whole(rows):
        tokens = row.count("Total Length")
        yield ("model_prefill", tokens, None, None, 1), _from_milliseconds(row, "Execute Time")


def _whole(rows: list[Cells]) -> Iterator[Cells]:
    """Iterate over rows; UsageError for one with more or fewer cells than there are columns."""
    for row in rows:
        if None in row.texts or None in row.texts.values():
            raise UsageError(f"{row.place}: not as many cells as columns: truncated?")
        yield row


def _of_model(path: Path, rows: list[Cells], spec: ModelSpec) -> Iterator[Cells]:
    """Iterate over the rows of a model's layer shapes; UsageError when there are none."""
    columns = {theirs: ours for theirs, ours in SHAPES.items() if theirs in rows[0].texts}
    shapes_there = set()
    matched = False
    for row in _whole(rows):
        shapes = {ours: row.count(theirs) for theirs, ours in columns.items()}
        shapes_there.add(", ".join(f"{key} {size}" for key, size in shapes.items()))
        if all(getattr(spec, key) == size for key, size in shapes.items()):
            matched = True
            yield row
    if not matched:
        told = "; ".join(sorted(shapes_there)[:3])
        raise UsageError(f"{path}: not for the layers of {spec.name}; it has {told}")
