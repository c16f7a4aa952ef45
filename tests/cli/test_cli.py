"""The command line on a small run: which files, which bytes, which last line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import platform
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

import evenflow as package
from evenflow.cli.terminal import progress
from evenflow.compiled import is_compiled
from evenflow.config.provenance import checkout_commit
from evenflow.core import batcher
from evenflow.study.advice import BOUNDS
from tests.command_line import done, evenflow, refusal, rows_of, summary_of, write_trace

pytestmark = pytest.mark.usefixtures("folder")

EVERYTHING = {
    "summary.json",
    "requests.csv",
    "batches.csv",
    "stages.csv",
    "bubbles.csv",
    "timeline.json.gz",
    "report.html",
    "manifest.json",
    "wall_clock.json",
}


@pytest.mark.parametrize(
    ("save", "files"),
    [
        ("summary", {"summary.json", "manifest.json"}),
        ("requests", {"summary.json", "requests.csv", "manifest.json", "wall_clock.json"}),
        ("all", EVERYTHING),
    ],
)
def test_the_files_of_a_run(save: str, files: set[str]) -> None:
    output = done("simulate", "RUN.yaml", "--save", save, "--out", "run")
    assert {path.name for path in Path("run").iterdir()} == files
    assert output.splitlines()[-1] == ("run/report.html" if save == "all" else "run")


def test_neither_the_folder_nor_the_hash_seed_changes_a_byte(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "evenflow", "simulate"]
    root = str(Path(package.__file__).parents[1])
    for name, beside, seed in (("one", ".", "1"), ("two", "below", "2")):
        Path(beside).mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        paths = [str(folder / "RUN.yaml"), "--out", str(folder / name)]
        subprocess.run(
            [*command, *paths], cwd=beside, env=environment, check=True, capture_output=True
        )
    for file in EVERYTHING - {"wall_clock.json"}:
        assert Path("one", file).read_bytes() == Path("two", file).read_bytes(), file
    clocks = [json.loads(Path(name, "wall_clock.json").read_text()) for name in ("one", "two")]
    assert set(clocks[0]) == set(clocks[1]) == {"date", "wall_s"}


def test_the_columns_and_the_provenance() -> None:
    done("simulate", "RUN.yaml", "--out", "run", "--set", "workload.seed=7")
    head = Path("run/requests.csv").read_text(encoding="utf-8").splitlines()[0]
    assert head == (
        "request_id,arrival_s,prompt_tokens,output_tokens,first_token_s,completion_s,"
        "preemptions,status,reason"
    )
    batches, stages = rows_of("run/batches.csv"), rows_of("run/stages.csv")
    assert len(stages) == 2 * len(batches)
    assert sum(int(row["prefill_tokens"]) for row in batches) == sum(
        int(row["prompt_tokens"]) for row in rows_of("run/requests.csv")
    )
    assert {row["stage"] for row in rows_of("run/bubbles.csv")} == {"0", "1"}
    assert json.loads(gzip.decompress(Path("run/timeline.json.gz").read_bytes()))["traceEvents"]
    source = summary_of("run")["provenance"]
    assert source["seed"] == source["config"]["workload"]["seed"] == 7
    assert source["trace"]["path"] == "trace.csv"
    assert len(source["trace"]["sha256"]) == len(source["config_sha256"]) == 64
    assert source["evenflow_version"] == package.__version__
    assert source["cost_source"]["kind"] == "affine"
    assert source["host"] == platform.node()


def test_asking_for_the_commit_leaves_the_checkout_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git would note that a file was touched, and hold a lock meanwhile, which a kill leaves."""
    code = tmp_path / "evenflow" / "__init__.py"
    code.parent.mkdir()
    code.touch()
    who = "-c user.name=a -c user.email=a@b"
    for command in ("init -q", "add evenflow", f"{who} commit -qm one"):
        subprocess.run(["git", *command.split()], check=True)
    os.utime(code, (1, 1))
    index = Path(".git/index").read_bytes()
    with monkeypatch.context() as patch:  # `folder` forgets the modules of its files
        patch.setattr(package, "__file__", str(code))
        assert re.fullmatch("[0-9a-f]{40}", str(checkout_commit.__wrapped__()))
    assert Path(".git/index").read_bytes() == index


def test_a_comparison_uses_the_same_arrivals() -> None:
    listed = "sarathi,{name: sarathi, token_budget: 32},vllm"
    output = done("compare", "RUN.yaml", "--schedulers", listed, "--out", "run")
    assert output.splitlines()[-1] == "run/report.html"
    folders = ["sarathi", "sarathi-token_budget=32", "vllm"]
    assert {path.name for path in Path("run").iterdir()} == {
        *folders,
        "report.html",
        "comparison.csv",
        "manifest.json",
    }
    files = {path.name for path in Path("run/vllm").iterdir()}
    assert files == EVERYTHING - {"manifest.json", "report.html"}
    arrivals = [
        [row["arrival_s"] for row in rows_of(f"run/{name}/requests.csv")] for name in folders
    ]
    assert arrivals[0] == arrivals[1] == arrivals[2]
    table = rows_of("run/comparison.csv")
    assert [row["scheduler"] for row in table] == ["sarathi", "sarathi(token_budget=32)", "vllm"]
    # The configuration's own parameters (token_budget 64) go to the scheduler of that name.
    assert len({row["num_micro_batches"] for row in table[:2]}) == 2
    done("simulate", "RUN.yaml", "--out", "alone", "--save", "requests")
    assert Path("alone/requests.csv").read_bytes() == Path("run/sarathi/requests.csv").read_bytes()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("models", "Qwen2.5-32B|32.8|131.4|Qwen3.5-27B*|aiconfigurator has their times"),
        ("gpus", "A100-80G-PCIe|memory_bandwidth_gb_s: 1000"),
        ("links", "pcie-l20|20.79"),
        ("links", "ethernet-25g|3.125|30|25 Gbit/s nominal"),
        ("systems", "splitwise|TP+SB|PP+HB|SGLang|gLLM with CK"),
        ("metrics", "p99_ttft_ms|offered_requests_per_s"),
        (
            "schedulers",
            "token_throttling|sarathi|orca|static|vLLM V0 (before 0.8|td_pipe|distserve",
        ),
        ("schedulers", "max_prefill: 2048|transfer_link: None|DistServe (OSDI'24)|mixed."),
    ],
)
def test_what_there_is_can_be_listed(command: str, words: str) -> None:
    output = done(command)
    for word in words.split("|"):
        assert word in output


def test_a_run_file_to_begin_with_is_whole_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "full.yaml: cannot be written: No space left on device" in refusal("init", "full.yaml")


def test_a_lack_of_memory_says_what_to_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("evenflow.study.runs.run_job", full)
    line = refusal("simulate", "RUN.yaml")
    assert line == "the memory does not suffice: give fewer requests"


def test_a_progress_bar_needs_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with progress(["points"], 3) as shown:
        shown.done(1)


def test_a_run_file_to_begin_with_runs_and_is_never_written_over() -> None:
    done("init", "mine.yaml")
    few = ("--set", "workload.requests=3", "--save", "summary")
    done("simulate", "mine.yaml", *few, "--out", "first")
    text = Path("mine.yaml").read_text()
    assert "is there already" in refusal("init", "mine.yaml")
    assert Path("mine.yaml").read_text() == text
    output = done("compare", "mine.yaml", "--systems", "tp_sb,gllm", *few, "--out", "systems")
    assert "tp_sb: {stages: 1, tensor_parallel: 4, scheduler: vllm, runtime: vllm}" in output
    assert "PP1 x TP4, machine pcie-l20 (default), link pcie-l20" in output


def test_the_version() -> None:
    build = "compiled" if is_compiled(batcher.__name__) else "plain Python"
    assert done("--version") == f"evenflow {package.__version__}, {build}\n"


def test_traces() -> None:
    assert json.loads(done("traces", "info", "trace.csv"))["requests"] == 20
    assert json.loads(done("traces", "fit", "trace.csv"))["input_tokens"]["n"] == 20
    assert done("traces", "convert", "trace.csv", "--out", "copy.csv") == "copy.csv\n"
    info = [json.loads(done("traces", "info", name)) for name in ("trace.csv", "copy.csv")]
    assert info[0]["prompt_tokens"] == info[1]["prompt_tokens"]
    numbers = re.findall(r"\d+\.\d+", done("traces", "fit", "trace.csv"))
    assert max(len(each.replace(".", "").lstrip("0")) for each in numbers) == 9, "digits"


def test_a_lean_run_loads_no_heavy_module_and_starts_no_thread(folder: Path) -> None:
    code = (
        "import os, sys; from evenflow import cli\n"
        "sys.argv[1:] = ['simulate', 'RUN.yaml', '--save', 'requests']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert len(cli.app.app.registered_commands) == 1\n"
        "tasks = '/proc/self/task'\n"
        "assert not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1\n"
        "heavy = {'pandas', 'matplotlib', 'numpy.ma', 'scipy', 'torch', 'concurrent.futures',\n"
        "'evenflow.schedulers.td_pipe', 'evenflow.config.pools'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(package.__file__).parent.parent
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert Path("out/RUN/summary.json").exists()


def test_a_command_that_is_not_there_is_looked_for_among_all() -> None:
    words = [sys.executable, "-m", "evenflow", "simulat", "RUN.yaml"]
    finished = subprocess.run(words, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "'simulate'" in finished.stderr


def test_what_is_left_out_is_said(folder: Path) -> None:
    write_trace(folder / "trace.csv", "0,10,5", "1,10,0", "2,5000,5")
    status, output, errors = evenflow("simulate", "RUN.yaml", "--save", "summary")
    assert status == 0
    assert errors == "dropped 1 rows of the trace: no output tokens\n"
    assert output.splitlines()[0] == (
        "NOT FAIR: 1 of 2 requests (50.0%) were refused or given up; the first: 5005 tokens exceed "
        "max_model_len 3200"
    )
    assert summary_of("out/RUN")["failed"] == 1
    assert evenflow("simulate", "RUN.yaml", "--save", "requests")[0] == 0
    served, never = rows_of("out/RUN/requests.csv")
    assert (served["status"], served["reason"]) == ("completed", "")
    assert (never["status"], never["completion_s"]) == ("rejected", "")
    assert never["reason"] == "5005 tokens exceed max_model_len 3200"


def test_prefixes_that_no_cache_shares_are_said(folder: Path) -> None:
    row = '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    (folder / "moon.jsonl").write_text(2 * row, encoding="utf-8")
    given = ("simulate", "RUN.yaml", "--save", "summary", "--set", "workload={trace: moon.jsonl}")
    assert evenflow(*given)[2] == (
        "the trace says what prompts have in common, and each computes it; kv.prefix_cache: true "
        "shares it, as vLLM, SGLang and TensorRT-LLM do by default\n"
    )
    assert evenflow(*given, "--set", "kv.prefix_cache=true")[::2] == (0, "")


def test_advice_is_printed_and_written_with_what_bubbles_cost() -> None:
    output = done("simulate", "RUN.yaml", "--save", "summary", "--advise")
    found = rows_of("out/RUN/advice.csv")
    bounds = [row["change"] for row in found if row["change"].startswith("bound: ")]
    assert bounds == [f"bound: {words}" for words in BOUNDS.values()]
    assert output.count("bound: ") == 5
    assert found[0]["change"] == "as it is"
    assert float(found[0]["duration"]) == summary_of("out/RUN")["duration"]


def test_goodput_counts_requests_within_all_limits() -> None:
    done("simulate", "RUN.yaml", "--set", "goodput={e2el: 1e9}", "--out", "lax")
    limits = "goodput={e2el: 1e9, ttft: 15}"
    output = done("simulate", "RUN.yaml", "--set", limits, "--out", "strict")
    assert "\nSLO: E2EL 1e+09 ms, TTFT 15 ms\n" in output
    done("simulate", "RUN.yaml", "--save", "summary", "--out", "unlimited")
    assert summary_of("unlimited")["request_goodput"] is None
    lax, strict = summary_of("lax"), summary_of("strict")
    ttft_ms = [
        1e3 * (float(row["first_token_s"]) - float(row["arrival_s"]))
        for row in rows_of("strict/requests.csv")
    ]
    good = sum(each <= 15 for each in ttft_ms)
    assert 0 < good < 20
    assert lax["request_goodput"] == lax["request_throughput"]
    assert strict["request_goodput"] == pytest.approx(good / float(str(strict["duration"])))


def test_where_nobody_watches_a_line_now_and_then_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress(["points"]) as shown:
        shown.done(3)
        monkeypatch.setattr("evenflow.cli.terminal.LINE_EVERY_S", 0.0)
        shown.done(4, 12)
        shown.failed()
    assert capsys.readouterr().err == "points: 4 of 12\npoints: 4 of 12, 1 failed\n"


def test_a_terminal_has_a_bar_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    written = StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", written)
    with progress(["sarathi", "vllm"], 8) as shown:
        shown([2, 5])
        shown.failed()
    words = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", " ", written.getvalue()).split()
    assert {"sarathi", "2/8", "vllm", "5/8", "failed"} <= set(words)


def test_a_policy_may_be_named_by_its_file(folder: Path) -> None:
    (folder / "policies").mkdir()
    (folder / "policies" / "mine.py").write_text(
        "from evenflow.schedulers.sarathi import Sarathi\n\n\nclass Mine(Sarathi): ...\n"
    )
    names = "./policies/mine.py:Mine,sarathi"
    done("compare", "RUN.yaml", "--schedulers", names, "--out", "out", "--save", "summary")
    first, second = (summary_of(f"out/{name}") for name in ("policies-mine.py-Mine", "sarathi"))
    assert first["mean_ttft_ms"] > 0
    assert second["mean_ttft_ms"] > 0


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("compare RUN.yaml --schedulers tok", ["token_throttling"]),
        ("validate RUN.yaml --schedulers sarathi,tok", ["sarathi,token_throttling"]),
        ("plan RUN.yaml --schedulers vllm_", ["vllm_v1", "vllm_balanced"]),
        ("compare RUN.yaml --systems td", ["td_pipe"]),
        ("figures gllm-7", ["gllm-7"]),
        ("simulate RUN.yaml --set gp", ["gpu="]),
        ("simulate RUN.yaml --set gpu=H20", ["gpu=H200", "gpu=H20"]),
        ("sweep SWEEP.yaml --set run.model=Llama-3.1-8", ["run.model=Llama-3.1-8B"]),
        ("run RUN.yaml --set machine=td", ["machine=tdpipe-l20", "machine=tdpipe-pcie"]),
        ("run RUN.yaml --set stages=", []),
        ("profile run --model Llama-3.1-8", ["Llama-3.1-8B"]),
    ],
)
def test_a_shell_completes_names(
    monkeypatch: pytest.MonkeyPatch, words: str, completed: list[str]
) -> None:
    monkeypatch.setenv("_EVENFLOW_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"evenflow {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert evenflow()[1].split() == completed
