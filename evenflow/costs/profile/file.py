"""Read and write the profile file: measured seconds of operators, with where they come from.

Knows the format (docs/profiling.md) and its checks; does not interpolate and runs nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.errors import UsageError, instead_of
from evenflow.files import require_file, write_new, write_whole
from evenflow.specs.modelspec import ModelSpec
from evenflow.specs.precision import DTYPE_BYTES

VERSION = 1
DEVICE_KINDS = ("cpu", "cuda", "other")

MAX_SECONDS = 3600.0
"""A longer time is a mistake of units: no operator takes an hour."""

SIZE_COLUMNS = ("tokens", "context_tokens", "bytes")
TIME_COLUMNS = ("median_s", "p10_s", "p90_s")
COLUMNS = ("operator", *SIZE_COLUMNS, "ranks", *TIME_COLUMNS, "repeats")

BY_SIZES = {
    ("tokens",): "linear_qkv linear_q_up linear_kv_up linear_o linear_up linear_down norm rope "
    "activation router experts kv_write layer embedding head sample model_prefill "
    "cpu_message cpu_schedule cpu_prepare cpu_sample cpu_detokenise cpu_prompt",
    ("tokens", "context_tokens"): "attention_prefill attention_decode attention_decode_uneven "
    "attention_prefill_window attention_decode_window",
    ("bytes",): "all_reduce transfer device_copy",
}
OPERATORS = {name: sizes for sizes, names in BY_SIZES.items() for name in names.split()}
"""Operator -> the sizes it is measured against."""


class Cells(NamedTuple):
    """Texts of a file by column or key, and where they stand: "file, line number"."""

    texts: Mapping[str, str]
    place: str

    def count(self, key: str, least: int = 0) -> int:
        """Return a whole number; UsageError names the place of another value."""
        number = self.number(key)
        if not number.is_integer() or number < least:
            raise self.wrong(key, f"a whole number from {least}")
        return int(number)

    def number(self, key: str) -> float:
        """Return a text's number if it is 0 or more and finite, else NaN."""
        try:
            number = float(self.texts.get(key, ""))
        except ValueError:
            return math.nan
        return number if 0 <= number < math.inf else math.nan

    def wrong(self, key: str, right: str) -> UsageError:
        """Return what to raise where something else would be right."""
        return UsageError(
            f'{self.place}: {key} is "{self.texts.get(key, "")}"; it should be {right}'
        )


class ProfilePoint(NamedTuple):
    """One measured point: sizes (None where the operator has none of that kind), seconds, repeats.

    `ranks`: the operator has the shape of one of that many tensor-parallel shards.
    """

    operator: str
    tokens: int | None
    context_tokens: int | None
    size_bytes: int | None
    ranks: int
    median_s: float
    p10_s: float
    p90_s: float
    repeats: int

    @property
    def mean_s(self) -> float:
        """About what repeats take on average: Swanson's mean, of P10, median and P90."""
        return 0.3 * self.p10_s + 0.4 * self.median_s + 0.3 * self.p90_s

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """Key of the point, by which the file is ordered."""
        sizes = (self.tokens or 0, self.context_tokens or 0, self.size_bytes or 0)
        return (self.operator, self.ranks, *sizes)


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """The shapes that a profile was measured for, in the terms of `ModelSpec`.

    Those with a default are in a file only where they differ from it.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated_mlp: bool
    attention_bias: bool
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    dense_layers: int = 0
    sliding_window: int = 0
    full_every: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    quantization: str = ""

    @classmethod
    def of(cls, spec: ModelSpec) -> LayerShapes:
        """Return the shapes of a model."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(cls)})

    def unlike(self, other: LayerShapes) -> list[str]:
        """Return "key: mine, not theirs" for each shape that differs."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [
            f"{name} {mine}, not {getattr(other, name)}"
            for name, mine in pairs
            if mine != getattr(other, name)
        ]


@dataclass(frozen=True, slots=True)
class Header:
    """Origin of a profile; docs/profiling.md explains each key."""

    device: str
    device_kind: str
    driver: str
    libraries: str
    dtype: str
    date: str
    threads: int
    grid: str
    tile_tokens: int
    source: str
    model: str
    shapes: LayerShapes
    checked: str = "no"


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile file: its header and its points, sorted."""

    header: Header
    points: tuple[ProfilePoint, ...]

    def of(self, operator: str, ranks: int = 1) -> list[ProfilePoint]:
        """Return the points of one operator for one degree of tensor parallelism, in order."""
        return [
            point for point in self.points if point.operator == operator and point.ranks == ranks
        ]


def write_profile(path: str | Path, profile: Profile, *, over: bool = False) -> None:
    """Write a profile, gzipped when the name ends in .gz; the file appears whole or not at all.

    UsageError for a profile that `read_profile` refuses and, unless `over`, for an existing file.
    """
    target = Path(path)
    text = io.StringIO()
    for key, value in _header_lines(profile):
        text.write(f"# {key}: {value}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point in sorted(profile.points, key=lambda point: point.key):
        sizes = ["" if size is None else size for size in point[1:4]]
        times = [repr(float(seconds)) for seconds in point[5:8]]
        writer.writerow([point.operator, *sizes, point.ranks, *times, point.repeats])
    parse_profile(text.getvalue(), str(target))
    data = text.getvalue().encode()
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    (write_whole if over else write_new)(target, data)


def read_profile(path: str | Path) -> Profile:
    """Read and check a profile; UsageError names the file, the line, and what would be right."""
    source = Path(path)
    require_file(source)
    try:
        data = source.read_bytes()
        if source.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode()
    except FileNotFoundError:
        raise UsageError(f"{source}: no such file; `evenflow profile` writes one") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: not a readable profile ({error})") from None
    return parse_profile(text, str(source))


def parse_profile(text: str, name: str) -> Profile:
    """Return the profile that a file's text describes; `name` is the file's, for messages."""
    lines = text.splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    given = dict(_header_pairs(lines[:count], name))
    header, announced = _header(given, name)
    if count == len(lines) or tuple(lines[count].split(",")) != COLUMNS:
        raise UsageError(
            f"{name}, line {count + 1}: the columns should be {','.join(COLUMNS)} "
            "(times are seconds)"
        )
    points = tuple(_read_points(lines[count + 1 :], count + 2, name))
    if len(points) != announced:
        raise UsageError(
            f"{name}: holds {len(points)} points, its header says {announced}: truncated or edited"
        )
    return Profile(header, tuple(sorted(points, key=lambda point: point.key)))


def _header_lines(profile: Profile) -> Iterator[tuple[str, object]]:
    yield "evenflow-profile", VERSION
    for field in fields(Header):
        if field.name != "shapes":
            yield field.name, str(getattr(profile.header, field.name)).replace("\n", " ")
    for field in fields(LayerShapes):
        if (shape := getattr(profile.header.shapes, field.name)) != field.default:
            yield field.name, str(shape).lower()
    yield "points", len(profile.points)


def _header_pairs(lines: Sequence[str], name: str) -> Iterator[tuple[str, str]]:
    if not lines or not lines[0].startswith("# evenflow-profile:"):
        raise UsageError(
            f"{name}, line 1: not a profile file (it should begin with "
            f'"# evenflow-profile: {VERSION}"); other formats: evenflow profile import'
        )
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        key, colon, value = line[1:].strip().partition(":")
        if not colon or key in seen:
            what = f'"{key}" a second time' if colon else "no key: value"
            raise UsageError(f"{name}, line {number}: {what}")
        seen.add(key)
        yield key, value.strip()


def _header(given: dict[str, str], name: str) -> tuple[Header, int]:
    if given.pop("evenflow-profile") != str(VERSION):
        raise UsageError(f"{name}, line 1: another version of the format; this reads {VERSION}")
    kinds = {field.name: str(field.type) for field in (*fields(Header), *fields(LayerShapes))}
    kinds.pop("shapes")
    kinds["points"] = "int"
    for key in given:
        if key not in kinds:
            raise UsageError(f'{name}: unknown header key "{key}"; {instead_of(key, kinds)}')
    optional = {field.name for field in fields(LayerShapes) if field.default is not MISSING}
    cells, values = Cells(given, name), dict[str, Any]()
    for key, kind in kinds.items():
        if key in given:
            values[key] = _header_value(key, kind, cells)
        elif key not in optional:
            raise UsageError(f'{name}: the header key "{key}" is missing')
    named = [field.name for field in fields(LayerShapes) if field.name in values]
    shapes = LayerShapes(**{key: values.pop(key) for key in named})
    announced = values.pop("points")
    return Header(**values, shapes=shapes), announced


def _header_value(key: str, kind: str, cells: Cells) -> Any:
    if kind == "int":
        return cells.count(key, 0 if key in ("threads", "points") else 1)
    text = cells.texts[key]
    choices = {"dtype": tuple(DTYPE_BYTES), "device_kind": DEVICE_KINDS}
    known = ("true", "false") if kind == "bool" else choices.get(key, (text,))
    if text not in known:
        raise cells.wrong(key, " or ".join(known))
    return text == "true" if kind == "bool" else text


# -- the lines of points ------------------------------------------------------------------------


def _read_points(lines: Iterable[str], first: int, name: str) -> Iterator[ProfilePoint]:
    seen: dict[tuple[str, int, int, int, int], int] = {}
    for number, cells in enumerate(csv.reader(lines), first):
        place = f"{name}, line {number}"
        if len(cells) != len(COLUMNS):
            raise UsageError(f"{place}: {len(cells)} columns, not {len(COLUMNS)}: truncated?")
        point = _point(Cells(dict(zip(COLUMNS, cells, strict=True)), place))
        if point.key in seen:
            raise UsageError(f"{place}: the same point as in line {seen[point.key]}")
        seen[point.key] = number
        yield point


def _point(cells: Cells) -> ProfilePoint:
    texts, place = cells
    operator = texts["operator"]
    if operator not in OPERATORS:
        hint = instead_of(operator, OPERATORS)
        raise UsageError(f'{place}: unknown operator "{operator}"; {hint}')
    needed = OPERATORS[operator]
    for column in SIZE_COLUMNS:
        if (texts[column] != "") != (column in needed):
            what = "lacks" if column in needed else "has no"
            raise UsageError(f"{place}: {operator} {what} {column}; sizes: {', '.join(needed)}")
    tokens, context_tokens, size_bytes = (
        cells.count(column, 0 if column == "context_tokens" else 1) if column in needed else None
        for column in SIZE_COLUMNS
    )
    median_s, p10_s, p90_s = (_seconds(cells, column) for column in TIME_COLUMNS)
    if not p10_s <= median_s <= p90_s:
        raise UsageError(f"{place}: p10_s <= median_s <= p90_s does not hold")
    ranks, repeats = cells.count("ranks", 1), cells.count("repeats", 1)
    sizes = (tokens, context_tokens, size_bytes)
    return ProfilePoint(operator, *sizes, ranks, median_s, p10_s, p90_s, repeats)


def _seconds(cells: Cells, column: str) -> float:
    seconds = cells.number(column)
    if not 0 < seconds < MAX_SECONDS:  # NaN compares false
        raise cells.wrong(column, "seconds above 0 and below an hour")
    return seconds
