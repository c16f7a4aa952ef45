"""A configuration becomes a deployment, costs and links: what each key does, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.build import Workload, build
from evenflow.config.run import RunConfig
from evenflow.costs import RooflineCost, decode_work
from evenflow.sim import World, simulate
from evenflow.specs.gpu import link
from evenflow.types import Request

BASE: dict[str, Any] = {
    "model": "Qwen2.5-32B",
    "gpu": "L20",
    "stages": 4,
    "link": "pcie-l20",
    "scheduler": "sarathi",
    "workload": {"trace": "sharegpt-sample"},
}
HERE = Path()
REQUESTS = [Request(0, 0.0, 600, 20)]
STEP = decode_work(8, 8000)


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(BASE | changes)


def world(**changes: Any) -> World:
    return build(config(**changes), HERE, Workload(REQUESTS, {})).world


def roofline(**changes: Any) -> RooflineCost:
    return world(**changes).costs


TP4 = {"stages": 1, "tensor_parallel": 4}
SIZE_BYTES = 100 * 5120 * 2


def ring_s(spec: Any, ranks: int) -> float:
    return float(2 * 2 * (ranks - 1) * spec.transfer_s(SIZE_BYTES / ranks))


def test_ranks_reduce_over_their_own_link_or_that_of_the_stages_or_as_measured() -> None:
    """Six steps of 256 kB, twice a layer; over PCIe 5 us and 14.7 GB/s each, or what was given."""
    assert roofline(**TP4).all_reduce_s(100) == pytest.approx(12 * (5e-6 + 256e3 / 14.7e9))
    faster = {"name": "pcie-l20", "bandwidth_gb_s": 25.6}
    assert roofline(**TP4, link=faster).all_reduce_s(100) == pytest.approx(12 * (5e-6 + 1e-5))
    slower = {"name": "pcie-l20", "latency_us": 100}
    assert roofline(**TP4, link=slower).all_reduce_s(1) > 12 * 100e-6
    given = {"bandwidth_gb_s": 25.6, "latency_us": 7}
    assert roofline(**TP4, link=given).all_reduce_s(100) == pytest.approx(12 * (7e-6 + 1e-5))
    over = {"kind": "roofline", "all_reduce": "pcie-l20"}
    assert roofline(**TP4 | {"link": given}, costs=over).all_reduce_s(100) == pytest.approx(
        12 * (5e-6 + 256e3 / 14.7e9)
    )
    own = {"kind": "roofline", "all_reduce": "allreduce-l20"}
    own_s = roofline(**TP4, costs=own).all_reduce_s(100)
    assert own_s == pytest.approx(ring_s(link("allreduce-l20"), 4))
    points = {"kind": "roofline", "all_reduce": {"points": [[SIZE_BYTES, 50], [1e9, 5e6]]}}
    assert roofline(**TP4, costs=points).all_reduce_s(100) == pytest.approx(2 * 50e-6)


def test_a_stage_that_spans_nodes_reduces_over_the_link_between_them() -> None:
    nodes = {"gpus": 2, "link": "socket-73g"}
    one_ring_s = roofline(**TP4, nodes=nodes).all_reduce_s(100)
    assert one_ring_s == pytest.approx(ring_s(link("socket-73g"), 4))
    levels = roofline(**TP4, nodes=nodes | {"all_reduce": "hierarchical"}).all_reduce_s(100)
    between = 2 * 2 * link("socket-73g").transfer_s(SIZE_BYTES / 2)
    within = 2 * 2 * (5e-6 + 512e3 / 14.7e9)
    assert levels == pytest.approx(within + between)
    whole = nodes | {"gpus": 4}
    assert roofline(**TP4, nodes=whole).all_reduce_s(100) == roofline(**TP4).all_reduce_s(100)


def test_only_hops_between_nodes_take_their_link() -> None:
    def latencies(**changes: Any) -> list[float]:
        return [round(hop.latency_s, 9) for hop in world(**changes).hops]

    slow = {"gpus": 2, "link": {"bandwidth_gb_s": 1, "latency_us": 500}}
    assert latencies(nodes=slow) == [10e-6, 500e-6, 10e-6]
    assert latencies(nodes=slow | {"gpus": 1}) == [500e-6] * 3
    assert latencies(nodes=slow, stages=2, tensor_parallel=2) == [500e-6]
    assert latencies(nodes=slow | {"gpus": 4}, stages=2, tensor_parallel=2) == [10e-6]
    assert latencies() == [10e-6] * 3


def test_a_run_over_two_nodes_waits_for_the_slow_hop_only() -> None:
    slow = {"gpus": 2, "link": {"bandwidth_gb_s": 20.79, "latency_us": 5010}}
    near, far = simulate(world()), simulate(world(nodes=slow))
    crossed = far.available_s[0] - near.available_s[0]
    assert crossed.tolist() == pytest.approx([0, 0, 5e-3, 5e-3])
    exact = simulate(world(nodes=slow), pipeline="processes")
    assert exact.end_s.tobytes() == far.end_s.tobytes()


def test_a_balanced_split_takes_layers_off_the_last_stage() -> None:
    even, balanced = (roofline(model="Qwen2.5-7B", split=split) for split in ("even", "balanced"))
    layers = balanced.deployment.layers_per_stage
    assert sum(layers) == 28
    assert layers[-1] < 7
    assert max(balanced.times(STEP)) < max(even.times(STEP))


def test_expert_parallel_reaches_deployment_and_costs() -> None:
    costs = {"kind": "roofline", "expert_imbalance": 1.3}
    built = roofline(**TP4, model="Qwen3-30B-A3B", expert_parallel=True, costs=costs)
    assert built.deployment.expert_parallel
    assert built.expert_imbalance == 1.3
    even = roofline(**TP4, model="Qwen3-30B-A3B", expert_parallel=True)
    assert built.experts_s(10_000) > 1.2 * even.experts_s(10_000)


def test_speculation_shortens_a_run_and_its_draft_costs() -> None:
    free = {"k": 3, "acceptance": 0.8, "draft_cost_share": 0}
    shared = free | {"draft_cost_share": 0.05}
    drafted = {"k": 3, "acceptance": 0.8, "draft_model": "Qwen2.5-0.5B"}
    ends = {
        name: float(simulate(world(speculative=given)).returned_s[-1])
        for name, given in (("no", None), ("free", free), ("share", shared), ("model", drafted))
    }
    assert ends["free"] < ends["share"] < ends["no"]
    assert ends["free"] < ends["model"] < ends["no"]
    assert world(speculative=drafted).total_pages < world(speculative=free).total_pages


def test_with_data_parallelism_a_module_of_its_own_serves_all_groups() -> None:
    run = {
        "model": "DeepSeek-V3",
        "gpu": "H200",
        "stages": 1,
        "data_parallel": 8,
        "expert_parallel": True,
        "costs": {"kind": "roofline"},
    }
    free = {"k": 1, "acceptance": 0.8, "draft_cost_share": 0}
    mtp = {"k": 1, "acceptance": 0.8, "draft_model": "mtp"}
    plain, drafted = (world(**run, speculative=given).costs for given in (free, mtp))
    step = decode_work(2 * 64, 64_000)
    added_s = drafted.times(step)[0] - plain.times(step)[0]
    layer_s = plain.times(decode_work(8, 8_000))[0] / 61
    head_s = 129_280 * 7168 * 2 / 4.8e12  # whole in each group, as its matrix is read
    assert layer_s + head_s < added_s < 1.2 * (layer_s + head_s)


def test_each_proposal_passes_one_of_several_modules_and_all_take_memory(tmp_path: Path) -> None:
    keys = {"model_type": "glm4_moe", "num_hidden_layers": 8, "n_routed_experts": 16}
    keys |= {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "vocab_size": 151552,
        "dtype": "bfloat16",
    }
    drafted = {"k": 3, "acceptance": 0.8, "draft_model": "mtp"}

    def made(modules: int) -> World:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(keys | {"num_nextn_predict_layers": modules}))
        return world(model=str(file), stages=1, speculative=drafted)

    one, three = made(1), made(3)
    assert three.costs.times(STEP) == one.costs.times(STEP)
    assert three.total_pages < one.total_pages


def test_a_draft_share_is_of_a_plain_decode_step() -> None:
    given = {"k": 2, "acceptance": 0.5, "draft_cost_share": 0.1}
    verified = decode_work(24, 8000)  # 8 rows
    plain = roofline()
    added = world(speculative=given).costs.times(verified)[3] - plain.times(verified)[3]
    assert added == pytest.approx(2 * 0.1 * sum(plain.times(decode_work(8, 8000))))


def test_a_float32_model_is_served_in_16_bits_on_a_gpu(tmp_path: Path) -> None:
    """As vLLM's `dtype: auto` does; workers of torch compute in the file's own."""
    file = tmp_path / "config.json"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    spec = {"model_type": "llama", "max_position_embeddings": 512, **shape, **heads}
    for said in ({}, {"torch_dtype": "float32"}, {"dtype": "bfloat16"}):
        file.write_text(json.dumps(spec | said), encoding="utf-8")
        assert token_bytes(model=str(file)) == 4 * 2 * 2 * 16 * 2
    file.write_text(json.dumps(spec), encoding="utf-8")
    assert token_bytes(model=str(file), workers={"kind": "torch"}) == 4 * 2 * 2 * 16 * 4


def token_bytes(**changes: Any) -> int:
    return roofline(**changes).deployment.model.kv_bytes_per_token()
