"""Exchanges between the GPUs of a stage, by hand, and what must hold for every message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.config.build import build
from evenflow.config.links import Wires, link_spec
from evenflow.config.run import configured, load_config
from evenflow.config.yaml_file import Document
from evenflow.costs import AllReduceTimes, Fabric, Ring, TwoLevel
from evenflow.costs.silicon.tables import load_tables
from evenflow.errors import UsageError
from evenflow.specs.gpu import LinkSpec, link
from tests.command_line import refused

FAST = LinkSpec(100, 2)
SLOW = LinkSpec(10, 30)
RING = Ring(FAST)
DIRECT = Ring(LinkSpec(100, 2, direct=True))
POINTS = AllReduceTimes([(1e3, 10e-6), (1e6, 100e-6), (2e6, 180e-6)], RING)


def test_ranks_that_share_a_wire_have_a_part_of_it_each() -> None:
    """100 GB/s and 2 us a step, of 4 ranks that send 1 MB each at once; two of them have half."""
    shared = Ring(LinkSpec(100, 2, shared_by=4))
    assert shared.all_reduce_s(4e6, 4) == pytest.approx(6 * (2e-6 + 1e6 / 25e9), rel=1e-12)
    assert shared.all_reduce_s(2e6, 2) == pytest.approx(2 * (2e-6 + 1e6 / 50e9), rel=1e-12)
    assert shared.all_to_all_s(3e6, 4) == pytest.approx(3 * (2e-6 + 1e6 / 25e9), rel=1e-12)
    assert shared.all_reduce_s(4e6, 1) == 0.0


def test_hops_over_a_shared_wire_queue_for_it_and_it_has_to_be_all_of_the_pipelines(
    folder: Path,
) -> None:
    network = "machine={name: gllm-sockets, network: {name: socket-73g, shared_by: %d}}"
    four = ["stages=4", "model=Qwen2.5-14B", "gpu=A100-40G", "costs=roofline", network % 4]
    assert build(load_config(folder / "RUN.yaml", four), folder).world.shares_link
    with pytest.raises(UsageError, match=r"link\.shared_by: 3 of the 4 GPUs of the pipeline; 1 or"):
        build(load_config(folder / "RUN.yaml", [*four, network % 3]), folder)


def test_an_all_to_all_sends_a_message_to_each_other_rank() -> None:
    assert RING.all_to_all_s(3e6, 4) == pytest.approx(3 * (2e-6 + 1e6 / 100e9), rel=1e-12)
    assert RING.all_to_all_s(3e6, 1) == 0.0


@pytest.mark.parametrize(
    ("size", "ranks", "expected_us"),
    [
        (0.0, 8, 2.0),  # one shot, however many ranks
        (1e5, 4, 2.0 + 3.0),
        (4e6, 4, 4.0 + 60.0),  # two shots: a quarter each, read and shared
        (1e5, 2, 2.0 + 1.0),
    ],
)
def test_ranks_that_read_each_others_memory_need_no_ring(
    size: float, ranks: int, expected_us: float
) -> None:
    assert DIRECT.all_reduce_s(size, ranks) == pytest.approx(expected_us * 1e-6, rel=1e-12)
    assert DIRECT.all_reduce_s(size, ranks) <= RING.all_reduce_s(size, ranks)


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("a100_sxm", "nvlink-a100"),
        ("h100_sxm", "nvlink-h100"),
        ("h200_sxm", "nvlink-h100"),
        ("b200_sxm", "nvlink-b200"),
        ("gb200", "nvlink-b200"),
    ],
)
def test_all_reduces_over_nvlink_are_near_those_measured(system: str, name: str) -> None:
    """Engines' own kernels and NCCL, 256 bytes to 64 MB; the bandwidth is of one point of each."""
    pytest.importorskip("aiconfigurator_core")
    ratios = [
        Ring(link(name)).all_reduce_s(size, ranks) / seconds
        for framework in ("vllm", "sglang", "trtllm")
        for ranks, points in load_tables(system, framework).all_reduce.items()
        for size, seconds in points.items()
        if size <= 2**26
    ]
    assert 0.8 < np.median(ratios) < 1.4
    assert np.quantile(ratios, 0.05) > 0.4
    assert np.quantile(ratios, 0.95) < 2


@pytest.mark.parametrize(
    ("name", "system", "most_bytes"),
    [("pcie-gen5", "rtx_pro_6000_server", 2**26), ("pcie-gen4", "l40s", 2**15)],
)
def test_all_reduces_over_pcie_are_near_those_measured(
    name: str, system: str, most_bytes: int
) -> None:
    """From 4 ranks of one GPU and engine to all; L40S's larger ones differ by the host."""
    pytest.importorskip("aiconfigurator_core")
    fabric = Wires(link=name).fabric(2)
    assert fabric is not None
    ratios = [
        fabric.all_reduce_s(size, ranks) / seconds
        for framework in ("vllm", "sglang", "trtllm")
        for ranks, points in load_tables(system, framework).all_reduce.items()
        for size, seconds in points.items()
        if size <= most_bytes
    ]
    assert 0.85 < np.median(ratios) < 1.15
    assert np.quantile(ratios, 0.05) > 0.5
    assert np.quantile(ratios, 0.95) < 1.6


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
        AllReduceTimes(points)


def test_experts_need_a_link_beside_measured_points() -> None:
    with refused("the all-to-all of experts needs a link besides"):
        AllReduceTimes([(1, 1.0)]).all_to_all_s(1, 2)
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


# -- what nccl-tests and nvidia-smi print ---------------------------------------------------------

NCCL = """\
# nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) validation: 1 graph: 0
#
#                                                              out-of-place        in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
           0             0     float     sum      -1     4.10    0.00    0.00      0     4.00
     1048576        262144     float     sum      -1    62.10   16.89   25.33      0    61.70
       32768          8192     float     sum      -1    18.60    1.76    2.64      0    17.90
       32768          8192     float     sum      -1    18.80    1.76    2.64      0    17.90
# Avg bus bandwidth    : 20.0
"""


def of_file(all_reduce: Any) -> Any:
    data = {"model": "Qwen3-8B", "gpu": "H100", "stages": 1, "tensor_parallel": 4}
    data |= {"workload": {"trace": "azure-conv-sample"}, "scheduler": "sarathi"}
    costs = {"costs": {"kind": "roofline", "all_reduce": all_reduce}}
    return configured(Document("RUN.yaml", data | costs, {})).costs.all_reduce


def test_the_table_of_nccl_tests_is_points_out_of_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nccl.txt").write_text(NCCL)
    points = [[32768, pytest.approx(18.7)], [1048576, 62.1]]
    assert of_file("nccl.txt").points == points
    both = of_file({"name": "pcie-gen5", "points": "./nccl.txt"})
    assert (both.name, both.points) == ("pcie-gen5", points)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NCCL.replace("sum", "none"), "is of another collective: it adds nothing up"),
        (NCCL.replace("62.10", "n/a"), "has n/a where microseconds are right"),
        (NCCL.partition("           0")[0], "has no row of bytes and microseconds"),
        ("a,b\n1,2\n", "has no columns size and time"),
        (None, "no such file"),
    ],
)
def test_what_is_no_table_of_nccl_tests(text: str | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl.txt"
    if text is not None:
        path.write_text(text)
    with refused(f"costs.all_reduce: {path}: {told}; the table that nccl-tests'"):
        of_file(str(path))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NV4", "4 NVLinks of 25 GB/s each, 50 on B200 (bandwidth_gb_s: 100)"),
        ("PHB", "PCIe; pcie-gen4 and pcie-gen5 are links"),
        ("SYS", "PCIe through the CPU; give the bandwidth_gb_s"),
    ],
)
def test_the_words_of_nvidia_smi_are_told_what_link_to_give(name: str, told: str) -> None:
    with refused(f'link "{name}": in nvidia-smi topo -m, {told}'):
        link_spec(name)
