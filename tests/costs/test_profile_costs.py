"""Costs from a profile: exact where measured, stepwise at tiles, never falling, honest beyond."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.batch import Span
from evenflow.costs import RooflineCost, Work, decode_work, prefill_work
from evenflow.costs.profile.cost import check_device, check_units, profile_cost
from evenflow.costs.profile.file import Profile, ProfilePoint
from evenflow.costs.tables import Curve, Surface, never_falling
from evenflow.errors import UsageError
from evenflow.profiler.importers import import_files
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import LinkSpec, gpu
from evenflow.specs.hybrids import unlike_layers
from evenflow.specs.model import model
from tests.command_line import mistake
from tests.profiles import SIZES, TINY, decode_s, point, points, prefill_s, profile

FACTOR = 2 + 1 + 4 + 3 + 2 * 0.5 + 0.25 + 0.25 + 0.125
"""Of all operators of a layer, two norms."""


def roofline(ranks: int = 1, fabric: LinkSpec | None = None) -> RooflineCost:
    return RooflineCost(Deployment(TINY, gpu("L20"), (4,), ranks), fabric)


# ---- curves and surfaces


def test_a_curve_is_exact_steps_at_tiles_and_is_straight_inside_one() -> None:
    curve = Curve([100, 128, 300, 384], [1.0, 2.0, 6.0, 8.0], tile=128)
    assert [curve(size) for size in (100, 128, 300, 384)] == [1.0, 2.0, 6.0, 8.0]
    assert curve(114) == pytest.approx(1.5)  # one tile: straight
    assert curve(129) == curve(256) == pytest.approx(4.0)  # the second of three tiles
    assert curve(257) == 6.0
    assert curve(342) == pytest.approx(7.0)


def test_a_curve_goes_on_by_the_slope_of_its_upper_half() -> None:
    curve = Curve([1, 128, 256], [1.0, 1.0, 3.0], tile=128)
    assert curve(257) == curve(384) == pytest.approx(5.0)
    assert not curve.covers(257)
    assert curve.estimate(257).unmeasured_s == curve(257)
    assert curve.estimate(256).unmeasured_s == 0.0
    falling = Curve([1, 2], [3.0, 1.0])
    assert falling(5) == 1.0


def test_times_that_fall_are_averaged() -> None:
    assert never_falling([1.0, 4.0, 2.0, 3.0, 5.0]) == [1.0, 3.0, 3.0, 3.0, 5.0]


def test_a_chunk_longer_than_any_measured_counts_as_several() -> None:
    surface = Surface({(n, c): prefill_s(n, c) for n in (64, 128) for c in (0, 1024, 4096)})
    pieces = sum(surface.prefill(128, start)[0] for start in (0, 128))
    assert surface.prefill(320, 0) == (pieces + surface.prefill(64, 256)[0], False)


def test_more_rows_than_measured_take_as_several_batches() -> None:
    surface = Surface({(n, c): decode_s(n, n * c) for n in (4, 8) for c in (16, 64)})
    assert surface.decode(16, 16 * 64) == (2 * decode_s(8, 8 * 64), False)


noise = st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9)


@given(noise, st.integers(1, 900), st.integers(0, 5000), st.integers(1, 5000))
def test_attention_never_falls_when_the_context_grows(
    factors: list[float], tokens: int, context: int, more: int
) -> None:
    sizes = [(tokens, context) for tokens in (16, 128, 512) for context in (0, 128, 1024)]
    times = {size: prefill_s(*size) * factor for size, factor in zip(sizes, factors, strict=True)}
    surface = Surface(times)
    for look_up in (surface.prefill, surface.decode):
        less, larger = look_up(tokens, context)[0], look_up(tokens, context + more)[0]
        assert 0 < less <= larger * (1 + 1e-9)


# ---- a whole profile


def test_a_prediction_is_the_sum_of_its_operators() -> None:
    cost = profile_cost(profile(), TINY, (1, 3))
    work = Work((Span(0, 128), Span(128, 256)), 256, 1, 1024, 2)
    attention = prefill_s(128, 0) + prefill_s(128, 128) + decode_s(1, 1024)
    # 257 tokens are measured; head and sampling of 2 rows lie between 1 and 16.
    layer = FACTOR * 357e-6 + attention
    first, last = cost.times(work)
    assert first == pytest.approx(layer + 0.1 * 357e-6, rel=1e-12)
    assert last == pytest.approx(3 * layer + 6 * 102e-6, rel=1e-12)
    assert cost.extrapolated_share == 0.0
    assert cost.transfer_bytes(work) == 257 * 64 * 2


def test_layers_of_several_kinds_add_up_their_own_operators() -> None:
    """A dense layer, then three of experts: each stage has the seconds of its own layers."""
    shapes = {"num_experts": 8, "experts_per_token": 2, "expert_intermediate_size": 32}
    spec = dataclasses.replace(TINY, **shapes)
    spec = spec.of_layers(unlike_layers([False, True, True, True], [False] * 4))
    own = [
        point(operator, tokens, seconds=factor * (100 + tokens) * 1e-6)
        for operator, factor in (("router", 0.5), ("experts", 9.0))
        for tokens in SIZES
    ]
    made = profile([*points(), *own], spec=spec)
    first, last = profile_cost(made, spec, (2, 2)).times(prefill_work(128))
    dense_s = FACTOR * 228e-6 + prefill_s(128, 0)
    mixture_s = dense_s + (0.5 + 9 - 4 - 3 - 0.25) * 228e-6  # no MLP beside the experts
    assert first == pytest.approx(dense_s + mixture_s + 0.1 * 228e-6, rel=1e-12)
    assert last == pytest.approx(2 * mixture_s + 6 * 101e-6, rel=1e-12)
    with pytest.raises(UsageError, match="p: lacks router, experts; measure them"):
        profile_cost(profile(spec=spec), spec, (4,), name="p")
    whole = RooflineCost(Deployment(spec, gpu("L20"), (4,)))
    filled = profile_cost(profile(spec=spec), spec, (4,), fill=whole)
    assert filled.times(prefill_work(128))[0] > 0
    assert 0 < filled.extrapolated_share < 0.5


def test_contexts_beyond_a_window_cost_as_one_of_it() -> None:
    """Every second layer sees all; of the others, points beyond the window are its points."""
    spec = dataclasses.replace(TINY, sliding_window=201)
    spec = spec.of_layers(unlike_layers([True] * 4, [False, True] * 2))
    within = [
        each._replace(operator=f"{each.operator}_window")
        for each in points()
        if each.operator.startswith("attention") and (each.context_tokens or 0) <= 256 * 8
    ]
    within += [point("attention_decode_window", 8, 8 * 4096, seconds=decode_s(8, 8 * 256))]
    made = profile([*points(), *within], spec=spec)
    cost = profile_cost(made, spec, (1, 1))
    windowed, whole = cost.times(decode_work(8, 8 * 200))
    ends_s = 0.1 * 108e-6 - 6 * 108e-6  # the embedding is on the first stage, the head on the last
    within_s = decode_s(8, 8 * 256) - decode_s(8, 8 * 200)
    assert windowed - whole == pytest.approx(within_s + ends_s)
    assert cost.extrapolated_share == 0.0
    assert cost.times(decode_work(8, 8 * 9000))[0] == windowed
    assert 0 < cost.extrapolated_share < 1, "of the layer that sees all"
    assert cost.times(decode_work(8, 8 * 9000))[1] > whole
    near = [each for each in within if each.operator.startswith("attention_prefill")]
    near += [
        point("attention_decode_window", rows, rows * each, seconds=decode_s(rows, rows * each))
        for rows in (1, 8)
        for each in (8, 16)
    ]
    short = profile_cost(profile([*points(), *near], spec=spec), spec, (1, 1))
    assert short.times(decode_work(8, 8 * 200))[0] == short.times(decode_work(8, 8 * 9000))[0]
    of_window, beyond = (cost.times(prefill_work(300, context)) for context in (200, 9000))
    assert beyond[0] == of_window[0]
    assert beyond[1] > of_window[1]


@pytest.mark.parametrize("tokens", [16, 128, 512])
@pytest.mark.parametrize("context", [0, 128, 1024])
def test_measured_points_come_out_exactly(tokens: int, context: int) -> None:
    cost = profile_cost(profile(), TINY, (4,))
    expected = 4 * (FACTOR * (100 + tokens) * 1e-6 + prefill_s(tokens, context))
    ends = 0.1 * (100 + tokens) * 1e-6 + 6 * 101e-6
    assert cost.times(prefill_work(tokens, context))[0] == pytest.approx(expected + ends, rel=1e-12)


def test_what_no_measurement_surrounds_is_counted() -> None:
    cost = profile_cost(profile(), TINY, (4,))
    cost.times(decode_work(8, 8 * 256))
    inside = cost.times(decode_work(8, 8 * 256))[0]
    assert cost.extrapolated_share == 0.0
    beyond = cost.times(decode_work(8, 8 * 4096))[0]
    far = 4 * decode_s(8, 8 * 4096)
    assert beyond - inside == pytest.approx(4e-9 * 8 * (4096 - 256), rel=1e-9)
    assert cost.extrapolated_share == pytest.approx(far / (2 * inside + beyond), rel=1e-9)


def test_a_whole_layer_says_what_its_operators_do_not() -> None:
    extra = [
        point("layer", tokens, seconds=FACTOR * (100 + tokens) * 1e-6 + prefill_s(tokens, 0) + 7e-5)
        for tokens in (1, 512)
    ]
    plain = profile_cost(profile(), TINY, (4,))
    whole = profile_cost(profile([*points(), *extra]), TINY, (4,))
    for work in (prefill_work(128), decode_work(8, 99), prefill_work(4096)):
        assert whole.times(work)[0] - plain.times(work)[0] == pytest.approx(4 * 7e-5, rel=0.2)


def test_ranks_have_points_of_their_own_and_reduce_twice_a_layer() -> None:
    reduces = [
        point("all_reduce", None, None, size, seconds=1e-5 + size * 1e-11, ranks=2)
        for size in (128, 10**6)
    ]
    both = profile([*points(), *points(2), *reduces])
    cost = profile_cost(both, TINY, (4,), 2)
    alone = profile_cost(both, TINY, (4,))
    work = prefill_work(256)
    added = cost.times(work)[0] - alone.times(work)[0]
    assert added == pytest.approx(4 * 2 * (1e-5 + 256 * 64 * 2 * 1e-11), rel=1e-6)


def test_missing_operators_are_named_or_filled_in() -> None:
    some = kept(lambda each: each.operator not in ("head", "rope"))
    with pytest.raises(UsageError, match=r"p: lacks rope, head; measure them, or say \"fill: roof"):
        profile_cost(some, TINY, (4,), name="p")
    filled = profile_cost(some, TINY, (4,), fill=roofline())
    chunk, complete = prefill_work(128), profile_cost(profile(), TINY, (4,))
    assert 0 < filled.times(chunk)[0] < complete.times(chunk)[0]
    assert 0 < filled.extrapolated_share < 0.05
    with pytest.raises(UsageError, match=r"lacks .*all_reduce for 2 ranks"):
        profile_cost(profile(), TINY, (4,), 2)
    ring = LinkSpec(10, 5)
    assert profile_cost(profile(), TINY, (4,), 2, roofline(2, ring)).times(prefill_work(8))[0] > 0


def kept(keep: Callable[[ProfilePoint], bool]) -> Profile:
    """Return the profile of only these points."""
    return profile([each for each in points() if keep(each)])


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            profile(spec=dataclasses.replace(TINY, hidden_size=128)),
            "measured for other layer shapes than tiny's: hidden_size 128, not 64",
        ),
        (profile(dtype="float32"), "measured in float32, but tiny has 2 bytes a parameter"),
        (
            kept(lambda each: each.operator != "norm" or each.tokens == 1),
            "norm has 1 point; it needs at least 2 sizes",
        ),
        (
            kept(lambda each: each.operator != "attention_prefill" or each.context_tokens == 0),
            "attention_prefill needs at least 2 values of context_tokens",
        ),
    ],
)
def test_profiles_that_do_not_fit(made: Profile, told: str) -> None:
    assert mistake(lambda: profile_cost(made, TINY, (4,), name="p")).startswith(f"p: {told}")


@pytest.mark.parametrize("kind", ["cuda", "other"])
def test_milliseconds_are_told_from_seconds_on_every_gpu(kind: str) -> None:
    spec = model("Llama-3.1-8B")
    for name, ranks in (("L20", 1), ("H200", 1), ("H200", 2)):
        bandwidth, flops = gpu(name).bytes_per_s, gpu(name).flops_per_s
        inputs, outputs = spec.linear_shapes(ranks)[0]
        for tokens in (1, 4096):
            taken_s = inputs * outputs * max(2 / bandwidth, 2 * tokens / flops)
            for seconds in (taken_s, 20 * taken_s):
                check_units(qkv_profile(tokens, seconds, ranks, kind), spec, "p")
            with pytest.raises(UsageError, match="times in another unit"):
                check_units(qkv_profile(tokens, 1000 * taken_s, ranks, kind), spec, "p")
    check_units(qkv_profile(1, 9e-2, 1, "cpu"), spec, "p")
    with pytest.raises(UsageError, match="bytes a second of weights: times in another unit"):
        profile_cost(qkv_profile(1, 3e-8, 1, kind), spec, (32,))


def qkv_profile(tokens: int, seconds: float, ranks: int, kind: str) -> Profile:
    spec = model("Llama-3.1-8B")
    found = [point("linear_qkv", tokens, seconds=seconds, ranks=ranks)]
    return profile(found, spec=spec, device_kind=kind)


def test_a_profile_of_another_device_is_refused() -> None:
    check_device(profile(), "L20", "p")
    check_device(profile(device="NVIDIA A100-SXM4-80GB"), "A100-80G", "p")
    assert mistake(lambda: check_device(profile(), "L40S", "p")) == (
        'p: measured on "NVIDIA L20", but the run\'s gpu is L40S; profile that GPU, or change gpu'
    )


# ---- the measured L20, through the importer


@pytest.fixture(scope="module")
def l20(shared: Path) -> Profile:
    path = shared / "profiles" / "tdpipe_L20-Qwen2.5-32B.csv"
    return import_files([path], model("Qwen2.5-32B"), "L20", "bfloat16").profile


def test_total_lengths_come_out_as_measured(l20: Profile) -> None:
    spec = model("Qwen2.5-32B")
    whole = RooflineCost(Deployment(spec, gpu("L20"), (spec.num_layers,)))
    with pytest.raises(UsageError, match="lacks attention_prefill, attention_decode, embedding"):
        profile_cost(l20, spec, (64,))
    cost = profile_cost(l20, spec, (64,), fill=whole)
    for measured in l20.points[::37]:
        predicted = cost.times(prefill_work(measured.tokens))[0]
        assert predicted == pytest.approx(measured.median_s, rel=1e-9)
    # The tile's edge is measured, so it is a step in the prediction, too.
    assert cost.times(prefill_work(513))[0] / cost.times(prefill_work(512))[0] > 1.08
    assert cost.times(decode_work(8, 8 * 512))[0] < whole.times(decode_work(8, 8 * 512))[0]
