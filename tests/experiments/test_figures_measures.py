"""What figures compute by hand: measures of runs, and single iterations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenflow.config.build import load_workload
from evenflow.config.run import load_config
from evenflow.costs import Work, decode_work, prefill_work
from evenflow.costs.estimates import REFERENCE, joined
from evenflow.experiments.figures.iterations import (
    in_chunks,
    iteration,
    parts_of,
    prompts,
    roofline_of,
    world_of,
)
from evenflow.experiments.figures.measures import (
    busy_over_time,
    known_in_advance,
    mean_over_max,
    micro_batches,
    phases,
    seat_use,
    shares,
    stalls,
    within,
)
from evenflow.experiments.figures.micro_batches import communication
from evenflow.experiments.figures.scenarios import steps_of_prompt
from evenflow.experiments.figures.schema import load_plan
from evenflow.results.outcome import Outcome
from evenflow.study.runs import Job, run_job
from evenflow.types import Request
from tests.command_line import write_trace
from tests.figure_studies import outcome, study_of
from tests.places import ROOT


def late_pair(depth: int = 2) -> Outcome:
    """Two requests of 10 + 3 tokens from 5 s on: a prefill, two decode steps, 1 s each a stage."""
    return outcome([Request(0, 5.0, 10, 3), Request(1, 5.0, 10, 3)], depth)


def test_busy_stages_over_time() -> None:
    # One stage of two is busy at any time from 5 s to 11 s.
    busy = busy_over_time(late_pair().result, np.array([0.0, 5.0, 5.5, 8.25, 11.0]))
    assert busy.tolist() == pytest.approx([0, 0.5, 0.5, 0.5])
    assert busy_over_time(late_pair(1).result, np.array([5.0, 6.5, 8.0])).tolist() == [1, 1]


def test_phases_are_runs_of_one_kind() -> None:
    """Prompts of a page at 0 and 20 s, one stage: a prefill, two decodes, then the same again."""
    run = outcome([Request(0, 0.0, 16, 3), Request(1, 20.0, 16, 3)], depth=1)
    found = phases(run, ["decode_tokens"])
    assert found["phases"] == 2
    assert found["kind"] == ["prefill", "decode", "prefill", "decode"]
    assert (found["first_step"], found["steps"]) == ([0, 1, 3, 4], [1, 2, 1, 2])
    assert found["start_s"] == [0.0, 1.0, 20.0, 21.0]
    held = run.result.free_pages.tolist()
    used = [round(1 - pages / 1000, 4) for pages in held]
    assert found["kv_before"] == [0.0, used[0], used[2], used[3]]
    assert found["kv_after"] == [used[0], used[2], used[3], used[5]]
    assert found["decode_tokens"] == [0, 1, 1, 0, 1, 1]


def test_reserving_the_known_length_fills_half_of_the_output() -> None:
    assert known_in_advance(np.array([10]), np.array([20])) == pytest.approx(1 / 3)


def test_the_steps_of_the_last_prompt() -> None:
    run = outcome([Request(0, 0.0, 4, 30), Request(1, 5.0, 10, 2)], depth=1, token_budget=6)
    part = steps_of_prompt(run.result)
    assert run.result.prefill_tokens[part].tolist() == [5, 5]


def test_attainment_counts_requests_within_both_limits() -> None:
    """Two stages of a second: TTFT 2 s for both, TPOT 2 s for the one with three tokens."""
    run = outcome([Request(0, 0.0, 10, 3), Request(1, 0.0, 10, 1)])
    found = within(run, [(2500, 2500), (2500, 1500), (1500, 2500)])
    assert found["attained"] == [1.0, 0.5, 0.0]


def test_shares_of_stage_time_add_up() -> None:
    found = shares(outcome([Request(0, 0.0, 10, 1)]))
    drawn = load_plan(ROOT / "examples/studies/idle_causes.yaml").keys.plot["panels"][0]["y"]
    assert sum(found[name] for name in drawn) == pytest.approx(1.0)
    assert found["busy"] == pytest.approx(0.5)  # two stages, one after the other


def test_seats_that_work() -> None:
    # Two of four seats get a token in each of three micro-batches.
    run = outcome([Request(0, 0.0, 10, 3), Request(1, 0.0, 10, 3)], depth=1)
    assert seat_use(run, 4)["seat_use"] == 0.5
    # Batches of two: 1 + 3 tokens in 3 steps, 2 tokens in 2 steps, a seat empty.
    assert mean_over_max(np.array([1, 3, 2]), 2) == 6 / (2 * 5)


def test_the_middle_of_a_run() -> None:
    run = outcome([Request(0, 0.0, 10, 5)], depth=1)
    found = micro_batches(run, ["batch", "decode_tokens"], batches=3, bins=2)
    assert found["batch"] == [1, 2, 3]
    assert found["decode_tokens"] == [1, 1, 1]
    assert found["mean_change"] == 0
    assert found["busy"] == pytest.approx([1.0, 1.0])
    found = micro_batches(outcome([Request(0, 0.0, 10, 3)]), ["start_s"], first=1, batches=1)
    assert found["start_s"] == [[2.0, 3.0]]


def test_a_stall_is_a_prompt_among_decodes(tmp_path: Path) -> None:
    """A prompt of 50 tokens takes 0.51 s, in which the first request gets no token; the pause
    before the third request, with nobody there, is no stall."""
    write_trace(tmp_path / "trace.csv", "0,1,60", "0.5,50,2", "60,1,2")
    (tmp_path / "run.yaml").write_text(
        "stages: 1\nkv: {pages: 100}\ncosts: {kind: affine, base_s: 0.01, per_token_s: 0.01}\n"
        f"scheduler: vllm\nworkload: {{trace: {tmp_path / 'trace.csv'}}}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    found = stalls(run_job(Job(config, load_workload(config, tmp_path), tmp_path)))
    assert found["longest_stall_s"] == pytest.approx(0.51)
    assert found["tokens"][-1] <= 64
    assert len(found["tokens"]) == len(found["returned_s"])


AFFINE = ("costs={kind: affine, base_s: 0.01, per_token_s: 0.001}", "kv={pages: 1000}")


def test_parts_add_up_and_the_linear_one_is_its_formula(tmp_path: Path) -> None:
    cost = roofline_of(study_of("sarathi_4", tmp_path))
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


def test_an_iteration_is_stages_links_and_cpu(tmp_path: Path) -> None:
    study = study_of("sarathi_11", tmp_path, *AFFINE, "stages=2", "tensor_parallel=1")
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


def test_free_messages_are_free_of_a_named_machine_too(tmp_path: Path) -> None:
    table = communication(study_of("tdpipe_6", tmp_path, "study.all_tokens=[2048]"))
    shares = table[table.gpus > 1].set_index(["pair", "gpus"]).share.round(3)
    assert shares["L20 + Llama-30B"].to_dict() == {2: 0.259, 4: 0.504}
    assert shares["A100-80G-PCIe + Llama-30B"].to_dict() == {2: 0.416, 4: 0.674}


def test_chunks_cover_a_prompt_and_only_the_last_samples() -> None:
    chunks = in_chunks(600, 256)
    assert [(c.chunks[0].start, c.chunks[0].stop, c.sampled_rows) for c in chunks] == [
        (0, 256, 0),
        (256, 512, 0),
        (512, 600, 1),
    ]
    both = joined(decode_work(3, 30), chunks[2])
    assert both == Work(chunks[2].chunks, 88, 3, 30, 4)
