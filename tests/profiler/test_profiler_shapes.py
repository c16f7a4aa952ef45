"""The micro-batches that are timed: the grid of a profile, and random ones off it."""

from __future__ import annotations

import numpy as np
import pytest

from evenflow.errors import UsageError
from evenflow.profiler.profile import TILES, tile_of
from evenflow.profiler.shapes import LEVELS, Limits, Shape, grid, ladder, random_shapes
from evenflow.profiler.timed_runs import point

LIMITS = Limits(max_tokens=512, max_rows=32, max_context=1024, max_total_context=8192)


def test_a_shape_is_told_to_cost_models_in_their_terms() -> None:
    shape = Shape(((8, 0), (4, 100)), (10, 20))
    assert (shape.tokens, shape.rows) == (14, 4)
    assert shape.lengths() == [8, 104, 11, 21]
    work = shape.work()
    assert [(span.start, span.stop) for span in work.chunks] == [(0, 8), (100, 104)]
    assert (work.prefill_tokens, work.decode_tokens, work.decode_context) == (12, 2, 30)
    assert work.sampled_rows == 4


@pytest.mark.parametrize("tiles", [(), TILES])
@pytest.mark.parametrize("level", range(LEVELS))
def test_a_grid_stays_within_its_limits_and_reaches_them(
    level: int, tiles: tuple[int, ...]
) -> None:
    shapes = grid(LIMITS, level, tiles)
    assert len(shapes) == len(set(shapes))
    assert all(LIMITS.allow(shape) for shape in shapes)
    assert max(sum(tokens for tokens, _ in shape.chunks) for shape in shapes) == 512
    assert max(len(shape.decodes) for shape in shapes) == 32
    assert {shape.lengths()[0] for shape in shapes if shape.chunks} >= {1024}
    assert 8192 in {sum(shape.lengths()) for shape in shapes}


def test_denser_levels_have_more_points() -> None:
    sizes = [len(grid(LIMITS, level)) for level in range(LEVELS)]
    assert sizes == sorted(set(sizes))


def test_a_grid_has_a_point_on_each_side_of_tile_edges() -> None:
    tokens = {shape.tokens for shape in grid(LIMITS, 4, TILES) if shape.chunks}
    assert tokens >= {*range(64, 513, 64), *range(65, 512, 64)}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("tile", [1, *TILES])
def test_the_times_of_a_grid_tell_the_tile(tile: int, level: int) -> None:
    """A product reads its matrix, or computes whole tiles; 2 % of noise."""
    limits = Limits(4096, 256, 8192, 65536)
    rng = np.random.default_rng(0)
    points = []
    for operator, flat_s in (("linear_qkv", 300), ("linear_up", 200)):
        for tokens in sorted({shape.tokens for shape in grid(limits, level, TILES)}):
            seconds = 1e-6 * max(flat_s, -(-tokens // tile) * tile)
            key = operator, tokens, None, None
            points.append(point(key, [seconds * rng.normal(1, 0.02) for _ in range(15)]))
    assert tile_of(points) == tile
    assert tile_of(points, ()) == 1


def test_every_chunk_size_of_the_attention_grid_meets_its_longest_context() -> None:
    longest: dict[int, int] = {}
    for shape in grid(LIMITS, 0):
        for tokens, context in shape.chunks:
            longest[tokens] = max(longest.get(tokens, 0), context)
    assert all(longest[tokens] == 1024 - tokens for tokens in ladder(16, 512, 0.5))


def test_tiny_limits_still_give_a_grid() -> None:
    assert grid(Limits(2, 1, 4, 4), 0)


def test_a_ladder_has_both_ends_and_even_steps() -> None:
    assert ladder(1, 64, 1) == [1, 2, 4, 8, 16, 32, 64]
    assert ladder(16, 100, 0.5) == [16, 100]
    assert ladder(16, 10, 1) == [10]


def test_random_shapes_stay_within_the_limits_and_are_of_all_kinds() -> None:
    shapes = random_shapes(LIMITS, 200, np.random.default_rng(0))
    assert all(LIMITS.allow(shape) and shape.rows for shape in shapes)
    assert all(sum(tokens for tokens, _ in shape.chunks) <= 512 for shape in shapes)
    kinds = {(bool(shape.chunks), bool(shape.decodes)) for shape in shapes}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert shapes == random_shapes(LIMITS, 200, np.random.default_rng(0))
    assert shapes != random_shapes(LIMITS, 200, np.random.default_rng(1))


def test_limits_of_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="max_rows"):
        Limits(1, 0, 1, 1)
