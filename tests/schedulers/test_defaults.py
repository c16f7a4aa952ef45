"""Defaults of a RUN.yaml against those of the engines' own servers, as their sources have them.

`defaults.csv`: `same` is the value of our key that means the engine's default, on H100 where it
goes by the card, empty where no one does; `said` is what a launch line says of ours.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenflow.config.build import build
from evenflow.config.pools import defaults
from evenflow.config.run import configured, with_
from evenflow.config.yaml_file import Document
from evenflow.core.world import World
from evenflow.study.deployments import launch_lines
from tests.places import ROOT

FILE = ROOT / "tests" / "schedulers" / "defaults.csv"
ROWS = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines()))
POLICIES = {
    "vLLM": "vllm_v1",
    "SGLang": "sglang",
    "TensorRT-LLM": "trtllm",
    "gLLM": "token_throttling",
}
OF_NO_ENGINE = {
    *("version", "max_model_len"),
    *("use_wt", "use_ut", "coupled", "victim", "reserve", "variant"),
}
"""A release, what the run says, and the paper's ablations of gLLM."""


def run_of(engine: str) -> Any:
    """Return the run that names a model, a GPU and the engine's policy, and nothing else."""
    keys = {"model": "Llama-3.1-8B", "gpu": "H100", "stages": 1, "scheduler": POLICIES[engine]}
    workload = {"trace": "azure-conv-sample"}
    return configured(Document("a.yaml", {**keys, "workload": workload}, {}))


def ours(row: dict[str, str]) -> Any:
    """Return what a run has where it says nothing."""
    section, _, name = row["key"].partition(".")
    if not name:
        return POLICIES[row["engine"]]
    run = run_of(row["engine"])
    if section == "kv":
        return {**run.kv.model_dump(), "memory_utilization": run.memory_utilization}[name]
    return {**defaults(POLICIES[row["engine"]]), **run.limits}[name]


def differs(row: dict[str, str]) -> bool:
    return not row["same"] or yaml.safe_load(row["same"]) != ours(row)


def test_the_table_says_where_a_run_is_not_set_as_the_engine_s_server() -> None:
    text = (ROOT / "docs" / "run-as-engine.md").read_text(encoding="utf-8")
    heads = "| engine | setting | its default | here |\n|---|---|---|---|\n"
    table = "".join(
        f"| {row['engine']} | `{row['setting']}` | {row['default']} | "
        f"`{row['key'].rpartition('.')[2]}: {yaml.safe_dump(ours(row)).splitlines()[0]}` |\n"
        for row in ROWS
        if differs(row)
    )
    assert heads + table + "\n" in text


@pytest.mark.parametrize("engine", POLICIES)
def test_each_parameter_of_an_engine_s_policy_is_compared(engine: str) -> None:
    keys = {row["key"].partition(".")[2] for row in ROWS if row["engine"] == engine}
    assert {"page_tokens", "prefix_cache", "memory_utilization"} <= keys
    assert {*defaults(POLICIES[engine])} - OF_NO_ENGINE <= keys


@pytest.mark.parametrize("engine", POLICIES)
def test_a_launch_line_says_what_the_engine_would_do_otherwise(engine: str) -> None:
    """All of it but gLLM's limit on decodes, which the reading of its paper does not have."""
    (line,) = (each for each in launch_lines(run_of(engine)) if each.startswith(f"{engine}: "))
    for row in ROWS:
        if row["engine"] == engine:
            assert row["said"] in line
            assert row["said"] or not differs(row) or row["setting"] == "maxd"


SMALL, LARGE, LARGEST = (2048, 256), (8192, 1024), (16384, 1024)


@pytest.mark.parametrize(
    ("card", "of_vllm", "of_sglang"),
    [
        ("T4", SMALL, 2048),
        ("RTX-4090", SMALL, 4096),
        ("A100-40G", SMALL, 4096),
        ("L40S", SMALL, 4096),
        ("A100-80G", SMALL, 8192),
        ("A100-80G-PCIe", SMALL, 8192),
        ("A800-80G", LARGE, 8192),
        ("H100", LARGE, 8192),
        ("RTX-PRO-6000", LARGE, 8192),
        ("GB10", SMALL, 8192),
        ("H200", LARGE, 8192),
        ("B200", LARGEST, 16384),
        ("MI300X", LARGEST, 16384),
    ],
)
def test_limits_go_by_the_card(card: str, of_vllm: tuple[int, int], of_sglang: int) -> None:
    """As vLLM 0.33's get_batch_defaults and SGLang 0.5.23's handle_gpu_memory_settings have it."""
    made = [made_by(gpu=card, scheduler=name) for name in ("vllm_v1", "sglang")]
    assert (made[0].max_num_batched_tokens, made[0].max_num_seqs) == of_vllm
    assert made[1].chunked_prefill_size == of_sglang


def made_by(**keys: Any) -> Any:
    run = {"model": "Qwen3-0.6B", "stages": 1, "workload": {"trace": "azure-conv-sample"}, **keys}
    built = build(configured(Document("a.yaml", run, {})), Path())
    assert isinstance(built.world, World)
    return built.world.make_scheduler()


def test_a_given_limit_wins_and_no_more_requests_run_than_a_step_has_tokens() -> None:
    given = {"name": "vllm_v1", "max_num_batched_tokens": 512}
    few = made_by(gpu="H100", scheduler=given)
    assert (few.max_num_batched_tokens, few.max_num_seqs) == (512, 512)
    assert made_by(gpu="H100", scheduler={**given, "max_num_seqs": 100}).max_num_seqs == 100
    whole = made_by(gpu="H100", scheduler={"name": "sglang", "chunked_prefill_size": None})
    assert whole.chunked_prefill_size is None
    assert made_by(gpu="B200", scheduler="vllm").max_num_seqs == 256  # V0's, of its papers
    none = {"costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 0.0}, "kv": {"pages": 9}}
    assert made_by(**none, scheduler="vllm_v1").max_num_batched_tokens == 2048


def test_the_first_line_says_which_limits_nobody_chose() -> None:
    limits = "max_num_batched_tokens 8192 and max_num_seqs 1024 (default)"
    assert f", {limits}, memory_utilization 0.92 (default), " in run_of("vLLM").setup()
    assert "chunked_prefill_size 8192 (default)" in run_of("SGLang").setup()
    assert "max_num" not in run_of("gLLM").setup()
    assert "memory_utilization" not in with_(run_of("vLLM"), {"kv.pages": 9}).setup()


def test_what_a_run_was_made_from_has_the_share_in_it() -> None:
    shares = [run_of(engine).resolved()["kv"]["memory_utilization"] for engine in POLICIES]
    assert shares == [0.92, 0.829, 0.9, 0.9]


def test_a_share_that_nobody_gave_is_only_said_to_its_engine() -> None:
    """SGLang's share is one of other memory: with vLLM's 0.92 an H100 has no room for a step."""
    lines = launch_lines(run_of("vLLM"))
    assert [line.split(":")[0] for line in lines if "0.92" in line] == ["vLLM"]
    given = launch_lines(with_(run_of("vLLM"), {"kv.memory_utilization": 0.8}))
    assert any("--mem-fraction-static 0.8" in line for line in given)
