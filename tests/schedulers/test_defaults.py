"""Defaults of a RUN.yaml against those of the engines' own servers, as their sources have them.

`defaults.csv`: `same` is the value of our key that means the engine's default, empty where no
one does; `said` is what a launch line says of ours.
"""

from __future__ import annotations

import csv
from typing import Any

import pytest
import yaml

from evenflow.config.pools import defaults
from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
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
    if section == "kv":
        return getattr(run_of(row["engine"]).kv, name)
    return defaults(POLICIES[row["engine"]])[name]


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
