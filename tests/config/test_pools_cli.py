"""Systems of pools from the command line: one YAML line, which files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenflow.config.pools import runs_of_pools, system
from evenflow.config.run import RunConfig
from evenflow.config.workload import WorkloadConfig
from tests.command_line import done, evenflow, rows_of, summary_of

POOL_FILES = {"requests.csv", "batches.csv", "stages.csv", "bubbles.csv", "timeline.json.gz"}


pytestmark = pytest.mark.usefixtures("folder")


def simulated(out: str, *overrides: str) -> dict[str, Any]:
    settings = [word for override in overrides for word in ("--set", override)]
    done("simulate", "RUN.yaml", "--out", out, *settings)
    return summary_of(out)


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
    several = [row for row in rows_of("run/requests.csv") if int(row["output_tokens"]) > 1]
    moved = rows_of("run/transfers.csv")
    assert sorted(row["request_id"] for row in moved) == sorted(
        row["request_id"] for row in several
    )
    assert {(row["source"], row["destination"]) for row in moved} == {("prefill", "decode")}
    assert not any(int(row["decode_tokens"]) for row in rows_of("run/prefill/batches.csv"))
    assert not any(int(row["prefill_tokens"]) for row in rows_of("run/decode/batches.csv"))


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
    moved = rows_of("run/transfers.csv")
    assert summary["transferred_bytes"] == sum(float(row["bytes"]) for row in moved)
    for row in moved:
        tokens, start_s = int(row["tokens"]), float(row["start_s"])
        assert float(row["bytes"]) == 1000 * tokens
        assert float(row["end_s"]) == pytest.approx(start_s + tokens * 0.001 + 0.0005)
    pools = summary["provenance"]["deployment"]["pools"]
    assert [(name, pools[name]["stages"], pools[name]["kv_pages"]) for name in pools] == [
        ("prefill", 1, 50),
        ("mixed", 1, 50),
        ("decode", 1, 30),
    ]
    # A quarter of the GPUs has four times the layers a stage; given costs stay as they are.
    assert rows_of("run/prefill/stages.csv")[0]["end_s"] == "0.001"


def test_two_runs_have_the_same_bytes() -> None:
    line = "scheduler={name: splitwise, mixed: {stages: 1, borrow_tokens: 0}}"
    for out in ("one", "two"):
        simulated(out, line, "stages=3")
    for path in sorted(Path("one").rglob("*")):
        if path.is_file() and path.name != "wall_clock.json":
            assert path.read_bytes() == Path("two", path.relative_to("one")).read_bytes(), path


@pytest.mark.long
def test_a_comparison_with_a_pipeline() -> None:
    schedulers = "token_throttling,distserve"
    output = done("compare", "RUN.yaml", "--schedulers", schedulers, "--out", "run")
    assert "KV back-pressure (s)" in output
    table = rows_of("run/comparison.csv")
    assert [row["backpressure_s"] == "" for row in table] == [True, False]
    arrivals = [
        [row["arrival_s"] for row in rows_of(f"run/{name}/requests.csv")]
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


def shares(stages: int, ranks: int, line: dict[str, object]) -> dict[str, tuple[int, int]]:
    config = RunConfig(
        stages=stages,
        tensor_parallel=ranks,
        costs={"kind": "affine", "base_s": 0.1, "per_token_s": 0.0},
        kv={"pages": 10},
        scheduler={"name": "splitwise", **line},
        workload=WorkloadConfig(trace="any"),
    )
    found = runs_of_pools(config, system(config.scheduler))
    return {name: (run.num_stages, run.tensor_parallel) for name, run in found.items()}


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
