"""Single iterations by part, the deployments they are of, and stalls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evenflow.costs import Work, decode_work, prefill_work
from experiments.figures.axes import served
from experiments.figures.iterations import (
    REFERENCE,
    in_chunks,
    iteration,
    joined,
    parts_of,
    prompts,
    roofline_of,
    world_of,
)
from experiments.figures.make import FOLDER
from experiments.figures.schema import load_plan
from experiments.figures.series import stalls
from experiments.figures.study import Study
from experiments.run_file.build import load_workload
from experiments.run_file.run import load_config
from experiments.runs import Job, run_job
from experiments.study.points import Store


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def study_of(name: str, folder: Path, executor: ThreadPoolExecutor, *overrides: str) -> Study:
    plan = load_plan(FOLDER / f"{name}.yaml", overrides, quick=True)
    return Study(plan, Store(folder / "points"), executor)


AFFINE = ("costs={kind: affine, base_s: 0.01, per_token_s: 0.001}", "kv={pages: 1000}")


def test_parts_add_up_and_the_linear_one_is_its_formula(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    cost = roofline_of(study_of("sarathi_4", tmp_path, threads))
    for work in (prefill_work(300, 100), decode_work(8, 8192), REFERENCE, prompts(2, 64)):
        parts = parts_of(cost, work)
        assert sum(parts) == pytest.approx(sum(cost.times(work)))
        assert min(parts) >= 0
    # 4096 tokens are bound by arithmetic: two operations a weight of a layer, whole tiles
    gpu, layers = cost.deployment.gpu, 32
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    by_hand_s = layers * 2 * weights * 4096 / gpu.flops_per_s
    assert parts_of(cost, prefill_work(4096)).linear == pytest.approx(by_hand_s)
    assert parts_of(cost, prefill_work(4096)).all_reduce == 0


def test_an_iteration_is_stages_links_and_cpu(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    study = study_of("sarathi_11", tmp_path, threads, *AFFINE, "stages=2", "tensor_parallel=1")
    layers = {
        "model": "Mistral-7B",
        "max_model_len": 100,
        "link": {"bandwidth_gb_s": 8.192, "latency_us": 100},  # 4096 values of 2 bytes: 1 us
        "runtime": {"schedule_s": 0.5, "prepare_share": 0.1},
    }
    seconds = iteration(world_of(study, layers))
    assert seconds(prefill_work(10)) == pytest.approx(0.5 + 1.1 * 2 * 0.02 + 100e-6 + 10e-6)
    hidden = layers | {"runtime": {"schedule_s": 0.5, "prepare_share": 0.1, "overlapped": True}}
    assert iteration(world_of(study, hidden))(prefill_work(10)) == pytest.approx(0.54011)


def test_chunks_cover_a_prompt_and_only_the_last_samples() -> None:
    chunks = in_chunks(600, 256)
    assert [(c.chunks[0].start, c.chunks[0].stop, c.sampled_rows) for c in chunks] == [
        (0, 256, 0),
        (256, 512, 0),
        (512, 600, 1),
    ]
    both = joined(decode_work(3, 30), chunks[2])
    assert both == Work(chunks[2].chunks, 88, 3, 30, 4)


def test_the_published_limits_or_multiples_of_the_predicted_iteration(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    known = {each.label: each for each in served(study_of("sarathi_11", tmp_path, threads))}
    llama = known["LLaMA2-70B TP4-PP2"]
    assert (llama.slo_s["strict"], llama.budgets["relaxed"]) == (1.0, 1536)
    assert llama.keys["gpu"] == "A40"
    by_hand = study_of("sarathi_10", tmp_path, threads, *AFFINE, "model=Qwen2.5-7B")
    (own,) = served(by_hand)
    assert own.label == "Qwen2.5-7B"
    assert own.slo_s == pytest.approx({"strict": 5 * 0.042, "relaxed": 25 * 0.042})


def test_what_is_set_by_hand_holds_in_every_deployment(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    study = study_of("sarathi_11", tmp_path, threads, "gpu=H100", "costs.tile_tokens=64")
    assert {each.keys["gpu"] for each in served(study)} == {"H100"}
    assert all(each.keys["costs"] == {"tile_tokens": 64} for each in served(study))


def test_a_stall_is_a_prompt_among_decodes(tmp_path: Path) -> None:
    """A prompt of 50 tokens takes 0.51 s, in which the first request gets no token; the pause
    before the third request, with nobody there, is no stall."""
    (tmp_path / "trace.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,60\n0.5,50,2\n60,1,2\n"
    )
    (tmp_path / "run.yaml").write_text(
        "stages: 1\nkv: {pages: 100}\ncosts: {kind: affine, base_s: 0.01, per_token_s: 0.01}\n"
        f"scheduler: vllm\nworkload: {{trace: {tmp_path / 'trace.csv'}}}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    found = stalls(run_job(Job(config, load_workload(config, tmp_path), tmp_path)))
    assert found["longest_stall_s"] == pytest.approx(0.51)
    assert found["tokens"][-1] <= 64
    assert len(found["tokens"]) == len(found["returned_s"])
