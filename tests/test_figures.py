"""Figures: their YAML, the layers of a run, the claims' verdicts, and the files of one of them."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import evenflow

from evenflow.errors import UsageError
from experiments.figures.claims import Claim, answers, ends, load_claims, load_misses, score, worst
from experiments.figures.layers import layered
from experiments.figures.make import FOLDER, chosen, make, maker, markdown, names, write_claims
from experiments.figures.schema import load_plan
from experiments.figures.study import Drawing, Study
from experiments.study.points import Store
from experiments.study.uncertainty import COSTS


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
        ("ratio", 2.0, 2.14, "within 10 %"),
        ("ratio", 2.0, 1.75, "within 25 %"),
        ("ratio", 2.0, 1.1, "right order"),
        ("ratio", 2.0, 1.01, "wrong"),
        ("ratio", 2.0, 0.9, "wrong"),
        ("ratio", [1.0, 2.0, 4.0], [1.0, 1.9, 2.0], "right order"),
        ("ratio", [1.0, 2.0, 4.0], [1.0, 1.9], "not run"),
        ("ratio", "<= 0.02", 0.01, "holds"),
        ("ratio", "<= 0.02", 0.024, "within 25 %"),
        ("ratio", "<= 0.02", 0.2, "wrong"),
        ("ratio", {"a": ">= 2", "b": ">= 2"}, {"a": 2.0, "b": 9.0}, "holds"),
        ("ratio", ">= 2", 1.9, "within 10 %"),
        ("ratio", ">= 2", 1.0, "wrong"),
        ("ratio", "> 1", 1.01, "holds"),
        ("ratio", "> 1", 1.0, "wrong"),
        ("ratio", {"a": "< 1", "b": "> 1"}, {"a": 0.9, "b": 0.99}, "wrong"),
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


def test_a_ratio_has_the_interval_of_nine_ratios() -> None:
    ours = {"throughput": 1.0, "e2el": 0.9}
    wrong = [{"throughput": math.exp(0.1 * z), "e2el": 0.9} for z in COSTS]
    known = ends({"gllm-ck-vs-vllm": ours}, [{"gllm-ck-vs-vllm": each} for each in wrong])
    assert set(known) == {"gllm-ck-vs-vllm"}
    (low, high), same = (known["gllm-ck-vs-vllm"][part] for part in ("throughput", "e2el"))
    assert (math.log(low), math.log(high)) == pytest.approx((-0.1645, 0.1645), rel=1e-3)
    assert same == pytest.approx((0.9, 0.9))
    (published,) = (each for each in load_claims() if each.id == "gllm-ck-vs-vllm")
    found = answers(published, ours, known["gllm-ck-vs-vllm"])
    assert [answer.is_inside for answer in found] == [True, False]  # 1.1 and 0.92
    assert score(found)[-2:] == (2, 1)
    assert "Of 2 values with an interval, 1 have the paper's inside." in markdown(found)


def test_a_wrong_study_has_slower_kernels_and_other_seeds(tmp_path: Path) -> None:
    plan = load_plan(FOLDER / "gllm_15.yaml")
    with ThreadPoolExecutor(1) as executor:
        studies = [Study(plan, Store(tmp_path), executor, None, wrong) for wrong in (None, 8)]
    run = {"model": "Qwen2.5-32B", "gpu": "L20", "workload": {"trace": "sharegpt-sample"}}
    scales = [study.config(study.system("gLLM"), run).scale for study in studies]
    assert scales[0].costs == 1 < scales[1].costs
    assert not {*studies[0].seeds} & {*studies[1].seeds}


SMALL = {
    "gllm_1": ("study.batches=10", "study.loads=[0.5]"),
    "gllm_8": (),
    "gllm_10": ("study.loads=[0.5, 1]", "study.pairs=[[L20, Qwen2.5-14B]]"),
    "gllm_11": (),
    "gllm_12": ("study.pairs=[[L20, Qwen2.5-14B]]",),
    "gllm_14": ("study.loads=[0.5, 1]",),
    "gllm_15": ("study.loads=[1.0]",),
    "gllm_16": ("study.loads=[1.0]", "study.vary={min_prefill: [16, 32]}"),
    "decides_3": (),
    "decides_4": (),
    "sarathi_1": ("study.rates=[0.5]",),
    "sarathi_3": (),
    "sarathi_4": (),
    "sarathi_5": (),
    "sarathi_6": (),
    "sarathi_9": (),
    "sarathi_12": ("model=Mistral-7B", "study.limits=1"),
    "sarathi_13": (),
    "sarathi_14": (),
    "sarathi_table3": (),
    "sarathi_table4": ("study.capacity_requests=60", "study.loads=[0.5]"),
    "tdpipe_2": (),
    "tdpipe_6": ("study.all_tokens=[64]",),
    "tdpipe_9": (),
    "tdpipe_10": (),
    "tdpipe_11": ("study.pairs=[[L20, Qwen2.5-32B]]",),
    "tdpipe_12": (),
    "tdpipe_13": ("study.ratios=[0.5]",),
    "tdpipe_14": ("workload.requests=2000",),
    "tdpipe_readings": ("study.readings={plain: {}}",),
    "blog_batching": ("study.seats=[4]",),
    "blog_chunking": ("study.all_chunks=[1024]", "study.decodes=2"),
    "blog_disaggregation": ("study.rates=[2]",),
    "blog_fragmentation": (),
}
"""One of each kind, or of each code behind it, made small."""

CLAIMED = {
    "tdpipe-stealing-example": {"average": [116, 114, 114, 114], "submitted": [80, 114, 114, 114]},
    "gllm-vllm-coupling": pytest.approx(0.17),
}


def made(name: str, folder: Path, *overrides: str) -> tuple[dict[str, Any], Drawing]:
    """Return what is told of a figure, made with few requests, and the figure."""
    few = {"requests": 40 if name.startswith("sarathi") else 10, "seeds": [0]}
    known = load_plan(FOLDER / f"{name}.yaml").keys.study
    short = [f"study.{key}={value}" for key, value in few.items() if key in known]
    plan = load_plan(FOLDER / f"{name}.yaml", (*short, *SMALL[name], *overrides), quick=True)
    with ThreadPoolExecutor(1) as executor:
        drawing = make(plan, folder, Store(folder / "points"), executor)
    return dict(json.loads((folder / f"{plan.name}.json").read_text())), drawing


@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_is_made(name: str, tmp_path: Path) -> None:
    if name == "tdpipe_14":
        pytest.importorskip("sklearn")
    about, drawing = made(name, tmp_path)
    assert about["title"]
    assert len(drawing.table)
    assert set(drawing.shown or ()) <= set(drawing.table)
    written = {path.suffix for path in tmp_path.glob(f"{name.replace('_', '-')}.*")}
    assert written == {".png", ".svg", ".csv", ".json"}
    for claim_id, ours in about["claims"].items():
        assert CLAIMED.get(claim_id, ours) == ours
    if name == "tdpipe_11":
        assert drawing.table[drawing.table.gpus == 1].error.str.contains("does not fit").all()
        assert drawing.table[drawing.table.gpus > 1].error.isna().all()


def test_a_figure_writes_its_files_and_its_claims(tmp_path: Path) -> None:
    about, _ = made("gllm_12", tmp_path, "study.pairs=[[L20, Qwen2.5-14B], [L20, Qwen2.5-32B]]")
    assert about["facts"]["requests"] == 10
    assert about["facts"]["kv_pages"]
    assert about["claims"] == {}, "not the pairs of the paper"
    assert {answer.verdict for answer in write_claims(tmp_path)} == {"not run"}
    about, _ = made("tdpipe_9", tmp_path)
    found = {answer.claim.id: answer for answer in write_claims(tmp_path)}
    assert found["tdpipe-stealing-example"].verdict == "exact"
    text = (tmp_path / "claims.md").read_text()
    assert "another set-up, so that no claim is compared" in text
    assert "a coarse pass, --set study.requests" in text, "whoever reads a claim knows of both"


OWN = """\
title: "Speed by budget, {requests} requests"
source: my own
run: {stages: 2, costs: {kind: affine, base_s: 0.01, per_token_s: 0.001}, kv: {pages: 400},
      workload: {trace: sharegpt-sample, arrivals: offline}}
systems: {ours: {scheduler: sarathi}}
study: {requests: 5, seeds: [0, 1], budgets: [64, 512]}
vary: [budget]
axes: {budget: {key: scheduler.token_budget}}
over: {reference: {budget: 64}, of: {gain: total_token_throughput}}
plot:
  panels: [{kind: lines, x: budget, y: {gain: ours}, legend: {}}]
"""


def test_a_figure_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    arguments = "figures", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out")
    status, out, _ = evenflow(*arguments, "--set", "study.requests=4")
    assert status == 0
    assert "mine.png" in out
    table = pd.read_csv(tmp_path / "out" / "mine.csv")
    assert list(table.columns[:2]) == ["budget", "seed"]
    assert list(table.columns[-2:]) == ["error", "gain"]
    assert table.gain[:2].tolist() == [1, 1]
    assert set(table.completed) == {4}
    assert not (tmp_path / "out" / "claims.md").exists()


def test_a_figure_may_be_like_another(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    plot = "plot: {height: 3}"
    (tmp_path / "other.yaml").write_text(f"title: x\nsource: y\nlike: mine\n{plot}\n")
    mine, other = (load_plan(tmp_path / name).keys for name in ("mine.yaml", "other.yaml"))
    assert other.plot == {**mine.plot, "height": 3}
    assert (other.title, other.study) == ("x", mine.study)
    assert not load_plan(tmp_path / "other.yaml").of_a_paper


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("run: {stages", "ran: {stages", 'unknown key "ran"'),
        ("vary: [budget]", "vary: [budget, load]", "KeyError: 'rates'"),
        ("vary: [budget]", "vary: []", "the figure has no cases; give vary"),
        ("vary: [budget]", "vary: [speed]", "vary: speed: should be one of load, pair"),
        ("kind: lines", "kind: pie", "'bars', 'stack', 'lying' or 'lines'"),
        ("x: budget", "x: budgets", "budgets"),
        ("stages: 2", "stages: two", "stages"),
        ("source: my own", "source: my own\nlike: mine", "mine.yaml:3: like: the figure would be"),
        ("source: my own", "source: my own\nlike: nothing", "nothing.yaml: no such file"),
        ("panels: [{kind", "panels: 3 #", "panels"),
        ("vary: [budget]", "vary: [budget]\nmeasure: none", "none: no such function"),
    ],
)
def test_mistakes_in_ones_own_are_one_line(old: str, new: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN.replace(old, new))
    where = str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out")
    status, _, errors = evenflow("figures", *where)
    assert (status, errors.count("\n")) == (2, 1)
    assert words in errors


def test_names_choose_one_or_a_whole_paper() -> None:
    assert [plan.name for plan in chosen(["gllm-12"], (), quick=False)] == ["gllm-12"]
    assert "gllm-12" in [plan.name for plan in chosen(["gllm"], (), quick=False)]
    with pytest.raises(UsageError, match="gllm-12"):
        chosen(["gllm-112"], (), quick=False)
