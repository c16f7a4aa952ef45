"""The Python front door: `import evenflow as ef`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import evenflow as ef
from evenflow import Plan, Prefill, View
from evenflow.config.yaml_file import value_of
from evenflow.study.slo import parse_slo
from tests.command_line import RUN as WRITTEN
from tests.command_line import evenflow, fits_a_screen, write_trace
from tests.places import ROOT

pytestmark = pytest.mark.usefixtures("folder")

RUN: dict[str, Any] = value_of(WRITTEN, "RUN.yaml")


class OneByOne:
    """A policy with a state, which would show in a second run if it were shared."""

    def __init__(self, limit: int = 10**9, *, max_model_len: int = 0) -> None:
        self.limit = limit
        self.max_model_len = max_model_len
        self.asked = 0

    def schedule(self, view: View) -> Plan:
        self.asked += 1
        prompt = next(view.prompts, None) if self.asked < self.limit else None
        prefills = [Prefill(prompt.request_id, prompt.remaining)] if prompt else []
        return Plan(prefills, decodes=view.ready_decodes)


def test_a_budget_that_was_found_is_said() -> None:
    """A micro-batch of 384 tokens takes 5 + 0.02 * 384 ms on each of two stages, 26 ms in all."""
    scheduler = {"name": "sarathi", "token_budget": "auto", "tbt_slo_s": 0.026}
    run = ef.simulate(RUN | {"scheduler": scheduler})
    assert run.result.provenance["deployment"]["token_budget"] == 384
    assert run.result.provenance["setup"].endswith(", token_budget 384 (auto)")
    assert "token_budget" not in ef.simulate(RUN).result.provenance["setup"]


def test_a_run_is_its_tables_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    run = ef.simulate("RUN.yaml")
    assert sorted(folder.iterdir()) == before
    assert run.summary["completed"] == len(run.requests) == 20
    assert evenflow("simulate", "RUN.yaml", "--out", "out")[0] == 0
    for name in ("requests", "batches", "stages", "bubbles"):
        written = pd.read_csv(f"out/{name}.csv", keep_default_na=False)
        pd.testing.assert_frame_equal(getattr(run, name), written, check_dtype=False)
    assert run.transfers.empty


def test_what_is_written_is_what_the_command_writes() -> None:
    ef.simulate("RUN.yaml", out="ours")
    assert evenflow("simulate", "RUN.yaml", "--out", "theirs")[0] == 0
    for path in Path("theirs").glob("*.csv"):
        assert Path("ours", path.name).read_bytes() == path.read_bytes()
    Path("ours/notes.txt").touch()
    with pytest.raises(ef.UsageError, match="--force"):
        ef.simulate("RUN.yaml", out="ours")
    assert ef.simulate("RUN.yaml").write("ours", save="summary", force=True) == Path("ours")
    left = sorted(path.name for path in Path("ours").iterdir())
    assert left == ["manifest.json", "notes.txt", "summary.json"]


@pytest.mark.parametrize("run", ["RUN.yaml", Path("RUN.yaml"), RUN], ids=["text", "path", "keys"])
def test_a_run_may_be_a_file_or_its_keys(run: Any) -> None:
    assert ef.simulate(run).summary == ef.simulate("RUN.yaml").summary


def test_keys_are_changed_and_a_policy_replaced() -> None:
    run = ef.simulate("RUN.yaml", set={"workload.requests": 5, "scheduler.token_budget": 32})
    config = run.result.provenance["config"]
    assert (len(run.requests), config["scheduler"]["params"]) == (5, {"token_budget": 32})
    named = ef.simulate("RUN.yaml", scheduler="vllm")
    assert named.result.provenance["config"]["scheduler"] == {"name": "vllm", "params": {}}
    given = ef.simulate("RUN.yaml", scheduler={"name": "sarathi", "token_budget": 64})
    assert given.summary == ef.simulate("RUN.yaml").summary


def test_an_object_is_copied_and_a_class_is_called() -> None:
    policy = OneByOne()
    runs = [ef.simulate("RUN.yaml", scheduler=each) for each in (policy, policy, OneByOne)]
    assert policy.asked == 0
    assert runs[0].summary == runs[1].summary == runs[2].summary
    policies = [run.result.provenance["policy"] for run in runs]
    assert policies[0] == policies[2]
    assert policies[0]["name"] == f"{OneByOne.__module__}:OneByOne"
    assert len(policies[0]["source_sha256"]) == 64
    engines = {"virtual_engines": True}
    assert ef.simulate("RUN.yaml", scheduler=policy, set=engines).summary["completed"] == 20


def test_schedulers_are_compared_on_the_same_requests(folder: Path) -> None:
    before = sorted(folder.iterdir())
    policies: list[Any] = ["vllm", OneByOne(), {"name": "sarathi", "token_budget": 32}]
    comparison = ef.compare("RUN.yaml", policies)
    assert sorted(folder.iterdir()) == before
    assert list(comparison.table.index) == ["vllm", "OneByOne", "sarathi(token_budget=32)"]
    alone = [ef.simulate("RUN.yaml", scheduler=policy).summary for policy in policies]
    assert list(comparison.table.mean_e2el_ms) == [each["mean_e2el_ms"] for each in alone]
    assert comparison.runs["OneByOne"].result.provenance["policy"]["name"].endswith("OneByOne")
    ef.compare("RUN.yaml", policies[:2], set={"workload.requests": 4}, out="out")
    written = pd.read_csv("out/comparison.csv")
    assert list(written.scheduler) == ["vllm", "OneByOne"]
    assert list(written.completed) == [4, 4]
    assert Path("out/OneByOne/batches.csv").exists()
    with pytest.raises(
        ef.UsageError, match=r'OneByOne is there twice; a mapping names them: \{"a"'
    ):
        ef.compare("RUN.yaml", [OneByOne, OneByOne()])


def test_policies_of_one_class_go_by_the_names_of_a_mapping() -> None:
    few = {"workload.requests": 4}
    policies: dict[str, Any] = {"one": OneByOne(9), "b/c": OneByOne, "two": "vllm"}
    found = ef.compare("RUN.yaml", policies, set=few, out="out", save="summary")
    assert list(found.table.index) == ["one", "b/c", "two"]
    folders = {path.parent.name for path in Path("out").glob("*/summary.json")}
    assert folders == {"one", "b-c", "two"}
    for names in (["b c", "b/c"], ["", "a"], ["..", "a"], ["report.html", "a"]):
        with pytest.raises(ef.UsageError, match=r"is there twice|can be no folder"):
            ef.compare("RUN.yaml", dict.fromkeys(names, OneByOne), out="more")
    assert not Path("more").exists()


def test_a_sweep_names_a_policy_by_its_words_and_takes_importable_classes_and_objects() -> None:
    keys = {"run": RUN | {"workload": RUN["workload"] | {"requests": 2}}}
    schedulers = [OneByOne, OneByOne(9), {"name": "sarathi", "token_budget": 32}, "vllm"]
    found = ef.sweep(keys | {"parameters": {"scheduler": schedulers}}, workers=1)
    name = f"{OneByOne.__module__}:OneByOne"
    names = [name, f"{name} limit=9", "sarathi budget=32", "vllm"]
    assert [name for name in found.table.scheduler if name != "sarathi budget=64"] == names
    changed = OneByOne()
    changed.limit = {3, 4}  # type: ignore[assignment]
    local = type("Local", (OneByOne,), {"__qualname__": "f.<locals>.Local"})
    for policy, told in ((changed, "its parameter limit is no attribute of"), (local, "is of a")):
        with pytest.raises(ef.UsageError, match=told):
            ef.sweep(keys | {"parameters": {"scheduler": [policy]}}, workers=1)


def test_a_result_is_at_most_a_screen() -> None:
    few = {"workload.requests": 3}
    wide: dict[str, Any] = {f"policy {index}": OneByOne for index in range(14)}
    compared = fits_a_screen(ef.compare("RUN.yaml", wide, set=few))
    assert "... and 3 more columns" in compared._repr_html_()
    run = fits_a_screen(ef.simulate("RUN.yaml", set=few))
    fits_a_screen(ef.diff(run, fits_a_screen(ef.simulate("RUN.yaml"))))


def test_published_systems_are_compared_as_the_command_does(folder: Path) -> None:
    found = ef.compare("RUN.yaml", ["vllm"], systems=["vllm_v0", "orca"]).table
    assert list(found.index) == ["vllm", "vllm_v0", "orca"]
    words = ("--schedulers", "vllm", "--systems", "vllm_v0,orca", "--out", "out")
    assert evenflow("compare", "RUN.yaml", *words)[0] == 0
    written = pd.read_csv("out/comparison.csv")
    assert list(written.mean_e2el_ms) == pytest.approx(list(found.mean_e2el_ms), rel=1e-6)
    with pytest.raises(ef.UsageError, match="--systems orka: no such system"):
        ef.compare("RUN.yaml", systems=["orka"])
    with pytest.raises(ef.UsageError, match="nothing is named"):
        ef.compare("RUN.yaml")
    nameless = {key: value for key, value in yaml.safe_load(WRITTEN).items() if key != "scheduler"}
    with pytest.raises(ef.UsageError, match="scheduler"):
        ef.compare(nameless)


@pytest.mark.long
def test_a_script_needs_no_guard(folder: Path) -> None:
    script = "import evenflow as ef\nprint(len(ef.compare('RUN.yaml', ['vllm', 'sarathi']).table))"
    (folder / "script.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{script}\n")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_sweep_is_its_points(folder: Path) -> None:
    keys = {"run": RUN, "parameters": {"kv.pages": [100, 200]}}
    before = sorted(folder.iterdir())
    found = ef.sweep(keys, set={"run.scheduler.token_budget": 32}, workers=1)
    points = fits_a_screen(found).points
    assert sorted(folder.iterdir()) == before
    assert list(points["kv.pages"]) == [100, 200]
    patch = {"kv.pages": 100, "scheduler.token_budget": 32}
    assert points.mean_e2el_ms[0] == ef.simulate(RUN, set=patch).summary["mean_e2el_ms"]
    Path("SWEEP.yaml").write_text("run: RUN.yaml\nparameters: {kv.pages: [100, 200]}\n")
    table = ef.sweep("SWEEP.yaml", workers=1, out="out").table
    assert len(table) == 2
    assert Path("out/points.csv").exists()


def test_a_capacity_is_a_rate_and_its_points() -> None:
    write_trace(Path("trace.csv"), *(f"{i / 100},{20},{3}" for i in range(300)))
    found = ef.capacity(RUN, {"mean_queue_ms": 100}, tolerance=0.3, workers=1, out="out")
    assert fits_a_screen(found).status == "found"
    assert found.points.rate.min() <= found.rate.mean <= found.points.rate.max()
    assert Path("out/capacity.json").exists()
    for slo in ("mean_queue_ms=100", ["mean_queue_ms=100"]):
        assert tuple(parse_slo(slo)) == found.question.slo[:1]


def test_figures_are_drawings(folder: Path) -> None:
    before = sorted(folder.iterdir())
    drawings = ef.figures(["sarathi-6"], quick=True, workers=1)
    assert sorted(folder.iterdir()) == before
    assert len(fits_a_screen(drawings["sarathi-6"]).table)
    ef.figures(["sarathi-6"], quick=True, workers=1, out="out")
    assert {path.name for path in Path("out").iterdir()} >= {"sarathi-6.png", "claims.md"}


@pytest.mark.pictures
def test_a_figure_of_ones_own_compares_policies_and_is_saved_as_a_column_in_pdf() -> None:
    systems = {"a": {"scheduler": OneByOne}, "b": {"scheduler": OneByOne(9)}, "c": "sarathi"}
    panels = [{"kind": "lines", "x": "rate", "y": {y: y}} for y in ("mean_ttft_ms", "mean_tpot_ms")]
    keys: dict[str, Any] = {
        "like": "gllm-10",
        "title": "Mine",
        "run": RUN,
        "systems": systems,
        "study": {"rates": [5.0], "requests": 3, "seeds": [0]},
        "vary": ["rate", "system"],
        "add": {},
        "plot": {"panels": panels, "rows": [], "common": {}, "let": {}},
    }
    looks: dict[str, Any] = {"formats": ["pdf"], "width": 3.3, "style": "seaborn-v0_8-paper"}
    (made,) = ef.figures({"mine": keys}, out="out", workers=1, **looks).values()
    assert list(made.table.system) == ["a", "b", "c"]
    assert {path.name for path in Path("out").glob("mine.*")} == {
        "mine.csv",
        "mine.json",
        "mine.pdf",
    }
    assert Path("out/mine.pdf").read_bytes().startswith(b"%PDF")
    assert made.figure.get_figwidth() == 3.3
    assert [axes.get_subplotspec().rowspan.start for axes in made.figure.axes] == [0, 1]
    note = " ".join(made.figure.get_supxlabel().split())
    assert "limit 9" in note
    assert not [word for word in ("ShareGPT", "loads", "paper") if word in note]
    for name, value in (("formats", ["gif"]), ("width", 0.1), ("style", "nice")):
        with pytest.raises(ef.UsageError, match=f"--{name.removesuffix('s')}"):
            ef.figures({"mine": keys}, workers=1, **{name: value})


def test_several_pipelines_are_told_apart() -> None:
    run = ef.simulate("RUN.yaml", scheduler="distserve", set={"workload.requests": 5})
    assert set(run.batches.pipeline) == set(run.bubbles.pipeline) == {"prefill", "decode"}
    assert len(run.transfers) == sum(run.requests.output_tokens > 1)
    replicas = ef.simulate("RUN.yaml", set={"replicas": {"count": 2}})
    assert set(replicas.stages.pipeline) == {"sarathi, replica 0", "sarathi, replica 1"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"run": "none.yaml"}, "none.yaml: no such file"),
        ({"run": {"stages": 2}}, "mistakes"),
        ({"run": RUN, "scheduler": 3}, "scheduler: should be a name"),
        ({"run": RUN, "scheduler": "sarahti"}, "unknown scheduler 'sarahti'"),
        ({"run": RUN, "set": {"kv.pagse": 3}}, 'unknown key "kv.pagse"'),
        ({"run": RUN, "scheduler": OneByOne(limit=3)}, "policy OneByOne stalls"),
    ],
)
def test_a_mistake_is_one_line(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ef.UsageError, match=told) as caught:
        ef.simulate(**arguments)
    assert "\n" not in str(caught.value)


def test_the_front_door_is_listed_and_loads_late() -> None:
    assert {"simulate", "compare", "sweep", "capacity", "figures"} <= set(dir(ef))
    with pytest.raises(AttributeError, match="simulat"):
        ef.simulat  # noqa: B018
    script = "import evenflow, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"numpy", "pandas", "pydantic", "evenflow.api"} & set(json.loads(done.stdout))
