"""Figures: their YAML, the layers of a run, the claims' verdicts, and the files of one of them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_line import evenflow

from evenflow.errors import UsageError
from experiments.figures.claims import Claim, answers, load_claims, load_misses, worst
from experiments.figures.make import FOLDER, chosen, make, maker, names, write_claims
from experiments.figures.schema import load_plan
from experiments.figures.study import Study, layered
from experiments.study.points import Store


@pytest.mark.parametrize("name", names())
def test_every_figure_has_keys_that_fit_and_a_module(name: str) -> None:
    plan = load_plan(FOLDER / f"{name.replace('-', '_')}.yaml")
    assert callable(maker(plan))
    assert set(plan.keys.quick) <= set(plan.keys.study), "quick replaces numbers of the study"


def test_layers_merge_and_another_kind_replaces() -> None:
    under = {"scheduler": {"name": "sarathi", "token_budget": 512}, "kv": {"pages": 10}}
    assert layered(under, {"scheduler": {"token_budget": 64}, "kv": {"page_tokens": 1}}) == {
        "scheduler": {"name": "sarathi", "token_budget": 64},
        "kv": {"pages": 10, "page_tokens": 1},
    }
    assert layered(under, {"scheduler": "vllm"})["scheduler"] == "vllm"
    assert layered({"scheduler": "vllm"}, {"scheduler": {"max_num_seqs": 3}}) == {
        "scheduler": {"name": "vllm", "max_num_seqs": 3}
    }


def test_a_system_goes_with_the_number_of_gpus(tmp_path: Path) -> None:
    plan = load_plan(FOLDER / "gllm_12.yaml", ("stages=8", "gpu=A100-40G"))
    study = Study(plan, Store(tmp_path), ThreadPoolExecutor(1))
    assert study.gpus == 8
    assert study.system("SGLang", 2)["tensor_parallel"] == 2
    assert study.system("gLLM", 2)["stages"] == 2
    assert study.plan.run.data["gpu"] == "A100-40G"


def test_a_number_set_by_hand_holds_in_a_coarse_pass_too() -> None:
    path = FOLDER / "gllm_10.yaml"
    assert load_plan(path, quick=True).study["requests"] == 1000
    assert load_plan(path, ("study.requests=7",), quick=True).study["requests"] == 7


def claim(kind: Any, value: Any) -> Claim:
    return Claim("id", "paper", "1", kind, "speed", value)


@pytest.mark.parametrize(
    ("kind", "paper", "ours", "verdict"),
    [
        ("exact", 2.24, 2.24, "exact"),
        ("exact", 2.24, 2.25, "wrong"),
        ("exact", {"a": [1, 2]}, {"a": [1, 2]}, "exact"),
        ("ratio", 2.0, 2.19, "within 10 %"),
        ("ratio", 2.0, 1.6, "within 25 %"),
        ("ratio", 2.0, 1.1, "right order"),
        ("ratio", 2.0, 0.9, "wrong"),
        ("ratio", [1.0, 2.0, 4.0], [1.0, 1.9, 2.0], "right order"),
        ("ratio", [1.0, 2.0, 4.0], [1.0, 1.9], "not run"),
        ("ratio", "<= 0.02", 0.01, "holds"),
        ("ratio", "<= 0.02", 0.024, "within 25 %"),
        ("ratio", "<= 0.02", 0.2, "wrong"),
        ("absolute", 10.0, 14.0, "wrong"),
        ("absolute", {"a": 10.0, "b": 1.0}, {"a": 10.0}, "not run"),
        ("absolute", 10.0, float("nan"), "not run"),
        ("order", ["a", "b"], ["a", "b"], "exact"),
        ("order", ["a", "b"], ["b", "a"], "wrong"),
    ],
)
def test_verdicts(kind: str, paper: Any, ours: Any, verdict: str) -> None:
    assert worst(answers(claim(kind, paper), ours)) == verdict


def test_misses_are_of_claims_that_there_are() -> None:
    assert set(load_misses()) <= {each.id for each in load_claims()}


def test_a_figure_writes_its_files_and_its_claims(tmp_path: Path) -> None:
    plan = load_plan(
        FOLDER / "gllm_12.yaml", ("study.requests=20", "study.seeds=[0]", "stages=2"), quick=True
    )
    with ThreadPoolExecutor(1) as executor:
        make(plan, tmp_path, Store(tmp_path / "points"), executor)
    assert {path.suffix for path in tmp_path.glob("gllm-12.*")} == {".png", ".svg", ".csv", ".json"}
    facts = json.loads((tmp_path / "gllm-12.json").read_text())["facts"]
    assert facts["requests"] == 20
    assert facts["kv_pages"]
    found = {answer.claim.id: answer for answer in write_claims(tmp_path)}
    assert found["gllm-scaling-l20-14b"].verdict == "not run"  # four GPUs were not asked for
    text = (tmp_path / "claims.md").read_text()
    assert text.count("\n|") == 1 + len(load_claims())
    assert "a coarse pass, --set study.requests" in text, "whoever reads a claim knows of both"


def test_names_choose_one_or_a_whole_paper() -> None:
    assert [plan.name for plan in chosen(["gllm-12"], (), quick=False)] == ["gllm-12"]
    assert "gllm-12" in [plan.name for plan in chosen(["gllm"], (), quick=False)]
    with pytest.raises(UsageError, match="gllm-12"):
        chosen(["gllm-112"], (), quick=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("gllm-112",), "gllm-12"),
        (("gllm-12", "--set", "study.rate=1"), "study.requests"),
        (("gllm-12", "--set", "gpu=L21"), "L20"),
        (("gllm-12", "--set", "nonsense=1"), "nonsense"),
        (("gllm-12", "--quick", "--set", "study.requests=-1"), "study.requests=-1: should be"),
        (("gllm-12", "--quick", "--set", "kv.pages=-1"), "kv.pages=-1"),
        (("gllm-12", "--executor", "threads"), "dask"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    status, _, errors = evenflow("figures", *arguments, "--out", str(tmp_path / "out"))
    assert status == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert named in errors
    assert not list((tmp_path / "out").glob("*.png"))
