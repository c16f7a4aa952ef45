"""What Sarathi-Serve's figures compute: iterations by part, deployments, capacities, stalls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from evenflow.costs import Work, decode_work, prefill_work
from evenflow.errors import UsageError
from experiments.figures.capacities import capacities, tbt_slo
from experiments.figures.capacity_bars import best_ratio, with_budget
from experiments.figures.deployments import served
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
from experiments.figures.make import FOLDER, maker
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


def test_only_sarathi_gets_the_budget(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    study = study_of("sarathi_10", tmp_path, threads)
    one = served(study)[0]
    keys = {label: with_budget(study, label, one, "relaxed") for label in study.plan.keys.systems}
    assert keys["Sarathi-Serve"]["scheduler"]["token_budget"] == 2048
    assert "token_budget" not in keys["vLLM"]["scheduler"]
    assert keys["vLLM"]["scheduler"]["max_num_seqs"] == 128
    capped = study_of("sarathi_10", tmp_path, threads, "scheduler.max_num_seqs=7")
    for label in capped.plan.keys.systems:
        assert with_budget(capped, label, one, "strict")["scheduler"]["max_num_seqs"] == 7


def test_capacities_that_are_none_and_deployments_that_do_not_fit(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    study = study_of("sarathi_10", tmp_path, threads, "study.seeds=[3]")
    trace = {"trace": "sharegpt-sample", "requests": 20}
    sized = {"scheduler": "sarathi", "workload": trace, "max_model_len": 2048}
    easy = {**sized, "model": "Mistral-7B", "costs": {"kind": "affine", **SLOW}}
    large = {**sized, "model": "Falcon-180B"}
    cases = {
        ("met",): (study.config(easy), tbt_slo(10.0, 1000.0)),
        ("never",): (study.config(easy), tbt_slo(1e-6, 2.0)),
        ("too large",): (study.config(large), tbt_slo(1.0, 2.0)),
    }
    table = capacities(study, cases, ("case",)).set_index("case")
    assert table.capacity["never"] == 0
    assert table.status["met"] in ("found", "too_short")
    assert "does not fit" in table.error["too large"]
    assert list(table.seed) == [3, 3, 3]
    assert study.facts()["runs"] > 0
    with pytest.raises(UsageError, match="does not fit"):
        capacities(study, {("too large",): cases["too large",]}, ("case",))


SLOW = {"base_s": 0.01, "per_token_s": 1e-4}


def test_the_best_ratio_is_over_what_is_not_fixed() -> None:
    rows = [
        ("A", "chat", "strict", "vLLM", 1.0),
        ("A", "chat", "strict", "Sarathi-Serve", 2.0),
        ("A", "chat", "strict", "vLLM", 3.0),  # another seed: the mean is 2
        ("A", "chat", "relaxed", "vLLM", 1.0),
        ("A", "chat", "relaxed", "Sarathi-Serve", 3.0),
        ("B", "chat", "strict", "vLLM", 0.0),
        ("B", "chat", "strict", "Sarathi-Serve", 3.0),
    ]
    table = pd.DataFrame(rows, columns=["deployment", "dataset", "slo", "system", "capacity"])
    assert best_ratio(table, "vLLM", deployment="A") == 3
    assert best_ratio(table, "vLLM", deployment="A", slo="strict") == 1
    assert best_ratio(table, "vLLM", deployment="B") is None
    assert best_ratio(table, "Orca", deployment="A") is None


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


TINY = {
    "sarathi_1": ("study.requests=10", "study.rates=[0.5]", "study.seeds=[0]"),
    "sarathi_3": (),
    "sarathi_4": (),
    "sarathi_5": (),
    "sarathi_6": (),
    "sarathi_9": (),
    "sarathi_10": ("model=Mistral-7B", *(SHORT := ("study.requests=40", "study.seeds=[0]"))),
    "sarathi_12": ("model=Mistral-7B", "study.limits=1", *SHORT),
    "sarathi_13": SHORT,
    "sarathi_14": (),
    "sarathi_table3": (),
    "sarathi_table4": ("study.capacity_requests=60", "study.loads=[0.5]", *SHORT),
}


@pytest.mark.parametrize("name", TINY)
def test_every_figure_is_made(name: str, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    study = study_of(name, tmp_path, threads, *TINY[name])
    drawing = maker(study.plan)(study)
    assert len(drawing.table)
    assert set(drawing.shown or ()) <= set(drawing.table)
    json.dumps(dict(drawing.claims))
    plt.close(drawing.figure)
