"""Exchanges between the GPUs of a stage, by hand, and what must hold for every message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.costs import Fabric, Measured, Ring, TwoLevel
from evenflow.costs.silicon.tables import load_tables
from evenflow.specs.gpu import LinkSpec, link
from tests.command_line import refused

FAST = LinkSpec(100, 2)
SLOW = LinkSpec(10, 30)
RING = Ring(FAST)
DIRECT = Ring(LinkSpec(100, 2, direct=True))
POINTS = Measured([(1e3, 10e-6), (1e6, 100e-6), (2e6, 180e-6)], RING)


def test_an_all_to_all_sends_a_message_to_each_other_rank() -> None:
    assert RING.all_to_all_s(3e6, 4) == pytest.approx(3 * (2e-6 + 1e6 / 100e9), rel=1e-12)
    assert RING.all_to_all_s(3e6, 1) == 0.0


@pytest.mark.parametrize(
    ("size", "ranks", "expected_us"),
    [
        (0.0, 8, 4.0),  # one shot: a barrier before and after, however many ranks
        (1e5, 4, 4.0 + 3.0),
        (4e6, 4, 8.0 + 60.0),  # two shots: a quarter each, read and shared
        (1e5, 2, 4.0 + 1.0),  # of two ranks all three are one
    ],
)
def test_ranks_that_read_each_others_memory_need_no_ring(
    size: float, ranks: int, expected_us: float
) -> None:
    assert DIRECT.all_reduce_s(size, ranks) == pytest.approx(expected_us * 1e-6, rel=1e-12)
    assert DIRECT.all_reduce_s(size, ranks) <= RING.all_reduce_s(size, ranks)


@pytest.mark.parametrize("ranks", [4, 8])
def test_small_messages_over_nvlink_are_near_those_measured(ranks: int) -> None:
    """Published tables: about 10 us; of vLLM's kernels 5 to 22 us from 256 bytes to 1 MB."""
    pytest.importorskip("aiconfigurator_core")
    measured = load_tables("a100_sxm", "vllm").all_reduce[ranks]
    fabric = Ring(link("nvlink-a100"))
    for size, seconds in measured.items():
        if size <= 2**20:
            assert 0.6 < fabric.all_reduce_s(size, ranks) / seconds < 2.2


@pytest.mark.parametrize(
    ("name", "table", "least"),
    [
        ("pcie-gen4", "l40s/comm/nccl/2.27.3", 0.75),
        ("pcie-gen5", "rtx_pro_6000_server/comm/nccl/2.29.2", 0.75),
        ("pcie-l20", "l40s/comm/nccl/2.27.3", 0.75),  # measured by gLLM on a card of the same bus
        ("nvlink-h100", "h100_sxm/comm/nccl/2.29.2", 0.3),  # nominal: a hop is twice too fast
    ],
)
def test_a_hop_takes_what_two_gpus_need_to_exchange_as_much(
    name: str, table: str, least: float
) -> None:
    """A rank of two sends half of an all-to-all's 2-byte elements: `message_size` bytes."""
    core = pytest.importorskip("aiconfigurator_core")
    path = Path(core.__file__).parent / "systems/data" / table / "nccl_perf.parquet"
    rows = pd.read_parquet(path).query("num_gpus == 2 and op_name == 'alltoall'")
    rows = rows[(rows.nccl_dtype == "half") & rows.message_size.between(2**12, 2**26)]
    assert len(rows) > 10
    ratios = [
        link(name).transfer_s(row.message_size) / (row.latency * 1e-3) for row in rows.itertuples()
    ]
    assert least < min(ratios)
    assert max(ratios) < 1.4


def test_two_levels_reduce_within_the_nodes_and_between_them() -> None:
    fabric = TwoLevel(FAST, SLOW, 4)
    within = 2 * 3 * (2e-6 + 8e6 / 4 / 100e9)
    between = 2 * 1 * (30e-6 + 8e6 / 2 / 10e9)
    assert fabric.all_reduce_s(8e6, 8) == pytest.approx(within + between, rel=1e-12)
    assert fabric.all_reduce_s(8e6, 8) < Ring(SLOW).all_reduce_s(8e6, 8)
    assert fabric.all_reduce_s(8e6, 4) == RING.all_reduce_s(8e6, 4)
    assert fabric.all_reduce_s(8e6, 1) == fabric.all_to_all_s(8e6, 1) == 0.0


def test_two_levels_send_what_leaves_a_node_over_its_one_link() -> None:
    fabric = TwoLevel(FAST, SLOW, 2)
    # 3 destinations: one in the node gets 1e6, two outside get 1e6 each, from both ranks.
    expected = (2e-6 + 1e6 / 100e9) + (30e-6 + 4e6 / 10e9)
    assert fabric.all_to_all_s(3e6, 4) == pytest.approx(expected, rel=1e-12)


def test_measured_points_are_met_and_joined_by_straight_lines() -> None:
    seconds = [POINTS.all_reduce_s(size, 4) for size in (10, 1e3, 1e6, 1.5e6, 2e6, 4e6)]
    expected = [10e-6, 10e-6, 100e-6, 140e-6, 180e-6, 360e-6]
    assert seconds == pytest.approx(expected, rel=1e-12)
    assert POINTS.all_reduce_s(1e6, 1) == 0.0
    assert POINTS.all_to_all_s(3e6, 4) == RING.all_to_all_s(3e6, 4)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "all_reduce: points holds no [bytes, microseconds]; give at least one"),
        ([(0, 1.0)], "all_reduce: points: bytes is 0; it must be a finite number above 0"),
        ([(1, float("nan"))], "all_reduce: points: microseconds is nan"),
        ([(8, 1.0), (8, 2.0)], "8 bytes come after 8; sizes must grow, and times must not fall"),
        ([(8, 2.0), (9, 1.0)], "9 bytes come after 8; sizes must grow, and times must not fall"),
    ],
)
def test_wrong_points_are_refused(points: Any, message: str) -> None:
    with refused(message):
        Measured(points)


def test_experts_need_a_link_beside_measured_points() -> None:
    with refused("the all-to-all of experts needs a link besides"):
        Measured([(1, 1.0)]).all_to_all_s(1, 2)
    with refused("all_reduce: ranks_per_node is 0"):
        TwoLevel(FAST, SLOW, 0)


fabrics = st.sampled_from(
    [
        RING,
        Ring(LinkSpec(100, 2, direct=True)),
        Ring(SLOW),
        TwoLevel(FAST, SLOW, 2),
        TwoLevel(FAST, SLOW, 4),
    ]
)
sizes = st.floats(1, 1e9)


@given(st.one_of(fabrics, st.just(POINTS)), sizes, sizes, st.sampled_from([1, 2, 4, 8]))
def test_more_bytes_are_never_faster(fabric: Fabric, size: float, more: float, ranks: int) -> None:
    for seconds in (fabric.all_reduce_s, fabric.all_to_all_s):
        assert seconds(size, ranks) <= seconds(size + more, ranks) * (1 + 1e-12)


@given(fabrics, sizes, st.sampled_from([1, 2, 4, 8]))
def test_more_ranks_are_never_faster(fabric: Fabric, size: float, ranks: int) -> None:
    fewer, more = fabric.all_reduce_s(size, ranks), fabric.all_reduce_s(size, 2 * ranks)
    assert fewer <= more * (1 + 1e-12)
