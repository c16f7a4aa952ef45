"""Systems of pools from the command line: one YAML line, which files, one line for a mistake."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from experiments.run_file.pools import divide, system
from experiments.run_file.run import RunConfig
from experiments.run_file.workload import WorkloadConfig
from tests.command_line import evenflow, write_inputs

POOL_FILES = {"requests.csv", "batches.csv", "stages.csv", "bubbles.csv", "timeline.json.gz"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_inputs(tmp_path)
    return tmp_path


def simulated(out: str, *overrides: str) -> dict[str, object]:
    settings = [word for override in overrides for word in ("--set", override)]
    status, _, errors = evenflow("simulate", "RUN.yaml", "--out", out, *settings)
    assert (status, errors) == (0, "")
    found: dict[str, object] = json.loads(Path(out, "summary.json").read_text(encoding="utf-8"))
    return found


def rows(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["distserve", "splitwise"])
def test_one_line_of_yaml_is_enough(name: str) -> None:
    summary = simulated("run", f"scheduler={name}")
    assert summary["completed"] == 20
    folders = {path.name for path in Path("run").iterdir() if path.is_dir()}
    files = {path.name for path in Path("run").iterdir()} - folders
    assert files == {
        "summary.json",
        "requests.csv",
        "transfers.csv",
        "report.html",
        "manifest.json",
        "wall_clock.json",
    }
    assert folders == {"prefill", "decode"}
    for part in folders:
        assert {path.name for path in Path("run", part).iterdir()} == POOL_FILES
    several = [row for row in rows("run/requests.csv") if int(row["output_tokens"]) > 1]
    moved = rows("run/transfers.csv")
    assert sorted(row["request_id"] for row in moved) == sorted(
        row["request_id"] for row in several
    )
    assert {(row["source"], row["destination"]) for row in moved} == {("prefill", "decode")}
    assert not any(int(row["decode_tokens"]) for row in rows("run/prefill/batches.csv"))
    assert not any(int(row["prefill_tokens"]) for row in rows("run/decode/batches.csv"))


def test_all_parameters() -> None:
    summary = simulated(
        "run",
        "stages=4",
        "scheduler={name: splitwise, kv_bytes_per_token: 1000, watermark: 0.1, "
        "transfer_link: {bandwidth_gb_s: 0.001, latency_us: 500}, "
        "prefill: {stages: 1, scheduler: vllm, costs: {kind: affine, base_s: 0.001, "
        "per_token_s: 0}}, decode: {tensor_parallel: 2, pages: 30, scheduler: {name: orca, "
        "max_num_seqs: 3}}, mixed: {stages: 1, borrow_tokens: 0}}",
    )
    moved = rows("run/transfers.csv")
    assert summary["transferred_bytes"] == sum(float(row["bytes"]) for row in moved)
    for row in moved:
        tokens, start_s = int(row["tokens"]), float(row["start_s"])
        assert float(row["bytes"]) == 1000 * tokens
        assert float(row["end_s"]) == pytest.approx(start_s + tokens * 0.001 + 0.0005)
    provenance = summary["provenance"]
    assert isinstance(provenance, dict)
    pools = provenance["deployment"]["pools"]
    assert [(name, pools[name]["stages"], pools[name]["kv_pages"]) for name in pools] == [
        ("prefill", 1, 50),
        ("mixed", 1, 50),
        ("decode", 1, 30),
    ]
    # A quarter of the GPUs has four times the layers a stage; given costs stay as they are.
    assert rows("run/prefill/stages.csv")[0]["end_s"] == "0.001"


def test_two_runs_have_the_same_bytes() -> None:
    line = "scheduler={name: splitwise, mixed: {stages: 1, borrow_tokens: 0}}"
    for out in ("one", "two"):
        simulated(out, line, "stages=3")
    for path in sorted(Path("one").rglob("*")):
        if path.is_file() and path.name != "wall_clock.json":
            assert path.read_bytes() == Path("two", path.relative_to("one")).read_bytes(), path


def test_a_comparison_with_a_pipeline() -> None:
    status, output, errors = evenflow(
        "compare", "RUN.yaml", "--schedulers", "token_throttling,distserve", "--out", "run"
    )
    assert (status, errors) == (0, "")
    assert "KV back-pressure (s)" in output
    table = rows("run/comparison.csv")
    assert [row["backpressure_s"] == "" for row in table] == [True, False]
    arrivals = [
        [row["arrival_s"] for row in rows(f"run/{name}/requests.csv")]
        for name in ("token_throttling", "distserve")
    ]
    assert arrivals[0] == arrivals[1]
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "distserve: prefill" in page
    assert "distserve: decode" in page


def test_a_later_run_leaves_nothing_of_the_pools() -> None:
    simulated("run", "scheduler=distserve")
    Path("run/decode/notes.txt").write_text("mine", encoding="utf-8")
    assert evenflow("simulate", "RUN.yaml", "--out", "run", "--force")[0] == 0
    assert not Path("run/prefill").exists()
    assert not Path("run/transfers.csv").exists()
    assert [path.name for path in Path("run/decode").iterdir()] == ["notes.txt"]


def test_the_list_of_schedulers() -> None:
    status, output, _ = evenflow("schedulers")
    assert status == 0
    for word in ("distserve", "splitwise", "transfer_link: None", "DistServe (OSDI'24)", "mixed."):
        assert word in output


def shares(stages: int, ranks: int, line: dict[str, object]) -> dict[str, tuple[int, int]]:
    config = RunConfig(
        stages=stages,
        tensor_parallel=ranks,
        costs={"kind": "affine", "base_s": 0.1, "per_token_s": 0.0},
        kv={"pages": 10},
        scheduler={"name": "splitwise", **line},
        workload=WorkloadConfig(trace="any"),
    )
    found = divide(config, system(config.scheduler))
    return {name: (share.stages, share.tensor_parallel) for name, share in found.items()}


@pytest.mark.parametrize(
    ("stages", "ranks", "line", "expected"),
    [
        (4, 1, {}, {"prefill": (2, 1), "decode": (2, 1)}),
        (5, 1, {}, {"prefill": (2, 1), "decode": (3, 1)}),
        (4, 2, {}, {"prefill": (2, 2), "decode": (2, 2)}),
        (1, 4, {}, {"prefill": (1, 2), "decode": (1, 2)}),
        (4, 1, {"prefill": {"tensor_parallel": 2}}, {"prefill": (1, 2), "decode": (2, 1)}),
        (4, 1, {"decode": {"stages": 3}}, {"prefill": (1, 1), "decode": (3, 1)}),
        (4, 1, {"mixed": {}}, {"prefill": (1, 1), "mixed": (1, 1), "decode": (2, 1)}),
    ],
)
def test_pools_share_the_gpus_of_the_run(
    stages: int, ranks: int, line: dict[str, object], expected: dict[str, tuple[int, int]]
) -> None:
    assert shares(stages, ranks, line) == expected


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["scheduler=distserv"], "did you mean 'distserve'?"),
        (["scheduler.name=distserve"], 'distserve: unknown key "token_budget"; known: decode'),
        (["scheduler={name: distserve, prefil: {}}"], 'did you mean "prefill"?'),
        (["scheduler={name: distserve, mixed: {}}"], 'unknown key "mixed"'),
        (["scheduler={name: distserve, prefill: {stage: 1}}"], 'did you mean "stages"?'),
        (
            ["scheduler={name: distserve, decode: {stages: 0}}"],
            "scheduler distserve: decode.stages: should be null, a whole number of at least 1",
        ),
        (
            ["scheduler={name: splitwise, mixed: {borrow_tokens: -1}}", "stages=3"],
            "mixed.borrow_tokens: should be at least 0, not -1",
        ),
        (
            ["scheduler={name: distserve, watermark: 1}"],
            "watermark: should be less than 1.0, not 1",
        ),
        (
            ["scheduler={name: distserve, transfer_link: {latency_us: 3}}"],
            'transfer_link needs the key "transfer_link.bandwidth_gb_s", or a name',
        ),
        (
            ["scheduler={name: distserve, transfer_link: {bandwidth_gb_s: 3}}"],
            "scheduler distserve: a transfer_link needs the KV's size: give kv_bytes_per_token",
        ),
        (
            ["scheduler={name: distserve, transfer_link: pcie, kv_bytes_per_token: 1}"],
            'unknown link "pcie"',
        ),
        (
            ["scheduler=distserve", "stages=1"],
            "scheduler distserve: no GPU is left for the prefill pool of the 1; give the run more",
        ),
        (
            ["scheduler={name: distserve, prefill: {stages: 2}, decode: {stages: 2}}"],
            "the pools take 4 GPUs (prefill 2, decode 2); the run has 2: stages 2 x "
            "tensor_parallel 1",
        ),
        (
            ["scheduler={name: distserve, prefill: {tensor_parallel: 2}}", "stages=6"],
            "the prefill pool's 3 GPUs are no whole number of stages of 2",
        ),
        (
            ["scheduler={name: distserve, decode: {scheduler: splitwise}}"],
            "decode.scheduler: splitwise is itself made of pools",
        ),
        (
            ["scheduler={name: distserve, decode: {scheduler: sarathy}}"],
            "scheduler distserve: decode pool: unknown scheduler 'sarathy' (did you mean",
        ),
        (
            ["scheduler={name: distserve, prefill: {scheduler: {name: vllm, watermark: 3}}}"],
            "scheduler distserve: prefill pool: scheduler vllm: watermark should be a number",
        ),
        (
            ["scheduler={name: distserve, decode: {costs: roofline}}"],
            'decode pool: its part of the run: costs.kind: roofline needs the key "model"',
        ),
        (["scheduler={name: distserve, decode: {pages: auto}}"], "kv.pages: auto needs the key"),
        (["scheduler=distserve", "virtual_engines=true"], "virtual_engines: not with distserve"),
        (
            ["model=Qwen2.5-32B", "gpu=L20", "kv.pages=auto", "scheduler=distserve"],
            "scheduler distserve: prefill pool: Qwen2.5-32B does not fit",
        ),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], told: str) -> None:
    settings = [word for override in overrides for word in ("--set", override)]
    status, output, errors = evenflow("simulate", "RUN.yaml", "--out", "run", *settings)
    assert (status, errors.count("\n")) == (2, 1), output + errors
    assert errors.startswith("error: ")
    assert told in errors
    assert not Path("run").exists()


def test_a_policy_that_stalls_in_a_pool_is_told() -> None:
    Path("policy_of_pool.py").write_text(
        "from evenflow.types import Plan\n"
        "class Idle:\n"
        "    def schedule(self, view):\n"
        "        return Plan()\n",
        encoding="utf-8",
    )
    for name in ("prefill", "decode"):
        line = f"scheduler={{name: distserve, {name}: {{scheduler: 'policy_of_pool:Idle'}}}}"
        status, _, errors = evenflow("simulate", "RUN.yaml", "--set", line)
        assert (status, errors.count("\n")) == (2, 1)
        assert "policy Idle stalls at " in errors
