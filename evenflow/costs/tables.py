"""Seconds from tables of measured operators: how they are interpolated, and add up to stages.

Over one size they are a curve, over tokens and context a surface. They are plain lists with
bisection, as a look-up is on the hot path. Knows no file and no GPU; counts how much rests on no
measurement.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from evenflow.costs.base import BatchShape
from evenflow.specs.modelspec import QK_NORM_BYTES, ModelSpec
from evenflow.sums import plain_sum


class Estimate(NamedTuple):
    """Predicted seconds, and the part of them without a measurement (extrapolated, filled in)."""

    seconds: float
    unmeasured_s: float


class Curve:
    """Piecewise function from one size to seconds, exact at the measured `sizes`.

    `sizes`: at least one, ascending. `tile`: a kernel's tile, in units of size; a partly filled
    tile takes as long as a full one. Between two sizes the function is linear in whole tiles (in
    units for a `tile` of 1). Below the first size it is constant. Above the last it has the slope
    of the upper half of the sizes.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], tile: int = 1) -> None:
        self._sizes = list(sizes)
        self._seconds = list(seconds)
        self.tile = tile
        half = max(bisect_right(self._sizes, self._sizes[-1] / 2) - 1, 0)
        wide = self._padded(self._sizes[-1]) - self._padded(self._sizes[half])
        rise_s = max(self._seconds[-1] - self._seconds[half], 0.0)
        self._growth_s = rise_s / wide if wide else 0.0

    @classmethod
    def of(cls, times: Mapping[int, float], tile: int = 1) -> Curve:
        """Return the curve through size -> seconds."""
        sizes = sorted(times)
        return cls(sizes, [times[size] for size in sizes], tile)

    @classmethod
    def sum(cls, curves: Sequence[Curve]) -> Curve:
        """Return the curve of the sums of curves with the same sizes and tile."""
        rows = zip(*(curve._seconds for curve in curves), strict=True)
        return cls(curves[0]._sizes, [plain_sum(row) for row in rows], curves[0].tile)

    @property
    def sizes(self) -> list[int]:
        """The measured sizes, in order."""
        return self._sizes

    def covers(self, size: int) -> bool:
        """Say whether a size lies between measured ones."""
        return self._sizes[0] <= size <= self._sizes[-1]

    def __call__(self, size: int) -> float:
        """Return the seconds at a size."""
        sizes, seconds = self._sizes, self._seconds
        if size >= sizes[-1]:
            return seconds[-1] + self._growth_s * (self._padded(size) - self._padded(sizes[-1]))
        right = bisect_right(sizes, size)
        if right == 0:
            return seconds[0]
        low, high = sizes[right - 1], sizes[right]
        start, stop = self._padded(low), self._padded(high)
        share = (
            (self._padded(size) - start) / (stop - start)
            if start < stop
            else (size - low) / (high - low)
        )
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

    def estimate(self, size: int) -> Estimate:
        """Return the seconds at a size; all are unmeasured where the curve does not cover it."""
        seconds = self(size)
        return Estimate(seconds, 0.0 if self.covers(size) else seconds)

    def _padded(self, size: int) -> int:
        return -(-size // self.tile) * self.tile


class _Line:
    """Piecewise linear function from context to seconds, for one number of tokens.

    `calm`: monotonic, by averaging neighbours that fall.
    """

    def __init__(self, points: Mapping[float, float], *, calm: bool) -> None:
        self.contexts = sorted(points)
        seconds = [points[context] for context in self.contexts]
        self.seconds = never_falling(seconds) if calm else seconds
        pairs = zip(self.contexts, self.seconds, strict=True)
        below = next(pairs)
        self.slopes: list[float] = []
        for above in pairs:
            self.slopes.append((above[1] - below[1]) / (above[0] - below[0]))
            below = above
        # Beyond the last context: the slope of the upper half, steadier than that of two points.
        half = max(bisect_right(self.contexts, self.contexts[-1] / 2) - 1, 0)
        wide = self.contexts[-1] - self.contexts[half]
        self.slopes.append((self.seconds[-1] - self.seconds[half]) / wide if wide else 0.0)

    def __call__(self, context: float) -> float:
        at = bisect_right(self.contexts, context) - 1
        if at < 0:
            return self.seconds[0]
        return self.seconds[at] + self.slopes[at] * (context - self.contexts[at])


class Surface:
    """Function from (tokens, context) to seconds of attention, interpolated in measured points.

    `calm`: monotonic in the context, measured times that fall are averaged; otherwise exact at all
    points. Numbers of tokens may differ in their measured contexts.
    """

    def __init__(
        self,
        points: Mapping[tuple[int, float], float] | Mapping[tuple[int, int], float],
        *,
        calm: bool = True,
    ) -> None:
        by_tokens: dict[int, dict[float, float]] = {}
        for (tokens, context), seconds in points.items():
            by_tokens.setdefault(tokens, {})[context] = seconds
        self._tokens = sorted(by_tokens)
        self._lines = [_Line(by_tokens[tokens], calm=calm) for tokens in self._tokens]

    def decode(self, rows: int, context_tokens: int) -> tuple[float, bool]:
        """Return the seconds of a step of `rows` rows, and whether measured points surround it.

        The second axis is the context of one row. Between measured rows the seconds follow a
        straight line; more rows than measured take as long as several batches.
        """
        context = context_tokens / rows
        last = self._tokens[-1]
        if rows > last:
            return self._lines[-1](context) * rows / last, False
        right = bisect_left(self._tokens, rows)
        above = self._lines[right]
        inside = above.contexts[0] <= context <= above.contexts[-1]
        if self._tokens[right] == rows or right == 0:
            return above(context), inside and self._tokens[right] == rows
        low, high = self._tokens[right - 1], self._tokens[right]
        below = self._lines[right - 1]
        start_s = below(context)
        seconds = start_s + (above(context) - start_s) * (rows - low) / (high - low)
        return seconds, inside and below.contexts[0] <= context <= below.contexts[-1]

    def prefill(self, tokens: int, context: int) -> tuple[float, bool]:
        """Return the seconds of one causal chunk, and whether measured points surround it.

        Between measured chunks the seconds follow the number of (query, key) pairs. A chunk longer
        than any measured one counts as several, each after the others.
        """
        last = self._tokens[-1]
        if tokens > last:
            seconds = 0.0
            while tokens > last:
                seconds += self._lines[-1](context)
                tokens -= last
                context += last
            return seconds + self.prefill(tokens, context)[0], False
        right = bisect_left(self._tokens, tokens)
        above = self._lines[right]
        inside = above.contexts[0] <= context <= above.contexts[-1]
        if self._tokens[right] == tokens or right == 0:
            return above(context), inside and self._tokens[right] == tokens
        low, high = self._tokens[right - 1], self._tokens[right]
        below = self._lines[right - 1]
        start_s, stop_s = below(context), above(context)
        share = (tokens - low) / (high - low)
        if stop_s > start_s:  # else noise, and a weight that moves with the context could fall
            share *= (context + (tokens + low) / 2) / (context + (high + low) / 2)
        inside = inside and below.contexts[0] <= context <= below.contexts[-1]
        return start_s + (stop_s - start_s) * share, inside


def never_falling(values: Sequence[float]) -> list[float]:
    """Return the isotonic regression of values: falling neighbours are averaged."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            above = blocks.pop()
            total, count = total + above[0], count + above[1]
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


BySize = Callable[[int], Estimate]
"""Tokens, rows or bytes -> seconds."""

Attention = Callable[[int, int], tuple[float, bool]]
"""(tokens, context) -> seconds in one layer, and whether measured points surround it."""


class Attending(NamedTuple):
    """Attention of a micro-batch in one layer on one rank: of each chunk, and of all decodes.

    `launch_s`: seconds that one kernel for all chunks of a micro-batch spends once.
    """

    prefill: Attention
    decode: Attention
    launch_s: float = 0.0

    def __call__(self, batch: BatchShape) -> tuple[float, float]:
        """Return the seconds of a micro-batch, and how many of them no measurement surrounds."""
        total_s = unmeasured_s = 0.0
        if batch.decode_tokens:
            total_s, measured = self.decode(batch.decode_tokens, batch.decode_context)
            if not measured:
                unmeasured_s = total_s
        chunks = batch.chunks
        for chunk in chunks:
            seconds, measured = self.prefill(chunk.stop - chunk.start, chunk.start)
            total_s += seconds
            if not measured:
                unmeasured_s += seconds
        if len(chunks) > 1:
            total_s -= self.launch_s * (len(chunks) - 1)
        return total_s, unmeasured_s


class Layers(NamedTuple):
    """Layers of one kind: their number on each stage, and the seconds of one.

    Those of attention follow from chunks and contexts. The others, all-reduces included, follow
    from tokens. `alone`: the others in a micro-batch of decodes alone; None: the same.
    """

    layer: BySize
    attention: Attending
    counts: Sequence[int]
    alone: BySize | None = None


def unmeasured(seconds_at: Callable[[int], float]) -> BySize:
    """Return a size's estimates by a formula, all of whose seconds count as unmeasured."""

    def estimate(size: int) -> Estimate:
        seconds = seconds_at(size)
        return Estimate(seconds, seconds)

    return estimate


def added(parts: Sequence[BySize]) -> BySize:
    """Return the sum of functions from the same size to estimates."""
    if len(parts) == 1:
        return parts[0]

    def total(size: int) -> Estimate:
        estimates = [part(size) for part in parts]
        return Estimate(
            plain_sum(estimate.seconds for estimate in estimates),
            plain_sum(estimate.unmeasured_s for estimate in estimates),
        )

    return total


def beside(one: BySize, other: BySize, most: int) -> BySize:
    """Return estimates of two operators that overlap up to size `most`, and are added beyond."""
    both = added([one, other])

    def estimate(size: int) -> Estimate:
        return both(size) if size > most else max(one(size), other(size))

    return estimate


def all_reduces(model: ModelSpec, once: BySize, count: int, *, attention: bool = True) -> BySize:
    """Return estimates by tokens of `count` all-reduces of hidden states; `once`: one, by bytes.

    `attention`: also the all-reduce of norms of queries and keys over all heads, if there are any.
    """
    bytes_per_token = model.hidden_size * model.dtype_bytes

    def seconds(tokens: int) -> Estimate:
        taken = once(tokens * bytes_per_token)
        return Estimate(count * taken.seconds, count * taken.unmeasured_s)

    if attention and model.qk_norm_over_heads:
        return added([seconds, lambda tokens: once(tokens * QK_NORM_BYTES)])

    return seconds


class TableCost:
    """Stage costs as sums of operators in tables; functions of tokens alone are cached.

    `embedding`: by tokens. `head`, with sampling: by sampled rows. `transfer_bytes_per_token`:
    bytes from stage to stage. Kinds of layers with the same attention look it up once.
    """

    def __init__(
        self,
        kinds: Sequence[Layers],
        embedding: BySize,
        head: BySize,
        transfer_bytes_per_token: float,
    ) -> None:
        self._kinds = list(kinds)
        self._embedding = embedding
        self._head = head
        self._transfer_bytes_per_token = transfer_bytes_per_token
        self.depth = len(kinds[0].counts)
        """Number of pipeline stages."""
        alike: dict[Attending, list[Sequence[int]]] = {}
        for kind in kinds:
            alike.setdefault(kind.attention, []).append(kind.counts)
        sums = {each: [*map(sum, zip(*of, strict=True))] for each, of in alike.items()}
        self._attentions = [(each, counts, sum(counts)) for each, counts in sums.items()]
        self._by_tokens: dict[int, tuple[list[float], float]] = {}
        apart = any(kind.alone is not None for kind in kinds)
        self._by_decodes = {} if apart else self._by_tokens
        self._by_rows: dict[int, Estimate] = {0: Estimate(0.0, 0.0)}
        self._predicted_s = 0.0
        self._unmeasured_s = 0.0

    @property
    def extrapolated_share(self) -> float:
        """Share of all predicted seconds so far that are outside of the measured points."""
        return self._unmeasured_s / self._predicted_s if self._predicted_s else 0.0

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        tokens = batch.prefill_tokens + batch.decode_tokens
        kept = self._by_tokens if batch.prefill_tokens else self._by_decodes
        known = kept.get(tokens)
        if known is None:
            alone = not batch.prefill_tokens
            known = kept[tokens] = self._without_attention(tokens, alone=alone)
        times, unmeasured_s = known
        for attention, counts, total in self._attentions:
            seconds, of_them_s = attention(batch)
            times = [own_s + count * seconds for own_s, count in zip(times, counts, strict=True)]
            unmeasured_s += total * of_them_s
        head = self._by_rows.get(batch.sampled_rows)
        if head is None:
            head = self._by_rows[batch.sampled_rows] = self._head(batch.sampled_rows)
        times[-1] += head.seconds
        self._predicted_s += plain_sum(times)
        self._unmeasured_s += unmeasured_s + head.unmeasured_s
        return times

    def _without_attention(self, tokens: int, *, alone: bool) -> tuple[list[float], float]:
        """Return the seconds of each stage that follow from tokens, and the unmeasured part."""
        embedding = self._embedding(tokens)
        times, unmeasured_s = [0.0] * self.depth, embedding.unmeasured_s
        for kind in self._kinds:
            layer = ((alone and kind.alone) or kind.layer)(tokens)
            times = [own_s + n * layer.seconds for own_s, n in zip(times, kind.counts, strict=True)]
            unmeasured_s += sum(kind.counts) * layer.unmeasured_s
        times[0] += embedding.seconds
        return times, unmeasured_s

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes of the hidden states that cross from one stage to the next."""
        return self._transfer_bytes_per_token * (batch.prefill_tokens + batch.decode_tokens)


class LayerParts(Protocol):
    """Estimates for a layer of one kind, the embedding and the LM head, from any source."""

    def layer(self) -> BySize: ...
    def alone(self) -> BySize | None:
        """Return a layer without attention in a micro-batch of decodes alone; None: as `layer`."""
        return None

    def attending(self) -> Attending: ...
    def embedding(self) -> BySize: ...
    def head(self) -> BySize: ...


def table_cost(
    model: ModelSpec, layers_per_stage: Sequence[int], parts_of: Callable[[ModelSpec], LayerParts]
) -> TableCost:
    """Return the costs of a model on stages of `layers_per_stage` layers, from the parts of each
    kind.

    Kinds of layers with the same window, heads and mixer attend alike.
    """
    kinds, attends = [], dict[tuple[object, ...], Attending]()
    for kind, counts in model.kinds_by_stage(layers_per_stage).items():
        parts = parts_of(kind)
        layer = parts.layer()
        heads = kind.num_heads, kind.num_kv_heads, kind.head_dim
        alike = (kind.sliding_window, kind.mixer, *heads)
        if alike not in attends:
            attends[alike] = parts.attending()
        kinds.append(Layers(layer, attends[alike], counts, parts.alone()))
    bytes_per_token = model.hidden_size * model.dtype_bytes
    return TableCost(kinds, parts.embedding(), parts.head(), bytes_per_token)
