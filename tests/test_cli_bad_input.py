"""A user's mistake: one clear line, exit status 2, nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import RUN, evenflow, write_inputs

ROOT = Path(__file__).parent.parent
OUT = "results"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own, with a RUN.yaml that works; its imports end with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_inputs(tmp_path)
    return tmp_path


def refusal(*overrides: str, command: str = "simulate") -> str:
    """Return the error line of a run that must be refused, having written nothing."""
    before = sorted(Path().rglob("*"))
    settings = [word for override in overrides for word in ("--set", override)]
    extra = ["--schedulers", "sarathi,vllm"] if command == "compare" else []
    status, output, errors = evenflow(command, "RUN.yaml", "--out", OUT, *settings, *extra)
    assert status == 2, output + errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert "Traceback" not in output + errors
    caches = {path for path in Path().rglob("*") if "__pycache__" in str(path)}
    assert sorted(set(Path().rglob("*")) - caches) == before
    return errors.removeprefix("error: ").rstrip()


def test_the_configuration_itself_is_right() -> None:
    status, output, errors = evenflow("simulate", "RUN.yaml", "--out", OUT, "--save", "summary")
    assert (status, errors) == (0, "")
    assert output.endswith(f"{OUT}\n")


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "RUN.yaml: no such file"),
        ("", "RUN.yaml: the file is empty"),
        ("- 1\n", "RUN.yaml:1: should be a mapping"),
        ("stages: \x00\n", "RUN.yaml: not valid YAML: unacceptable character #x0000"),
        (RUN + "gpu: L21\n", 'unknown gpu "L21"; did you mean "L20"?'),
        (RUN + "gpu: {name: X, memory_gb: 4}\n", "gpu: a key is missing"),
        (RUN + "stagse: 2\n", 'RUN.yaml:6: unknown key "stagse"; did you mean "stages"?'),
        (RUN.replace("stages: 2", "stages: two"), "RUN.yaml:1: stages: should be a whole number"),
        (RUN.replace("pages: 200", "pages: auto"), 'kv.pages: auto needs the key "model"'),
    ],
)
def test_the_configuration_file(command: str, text: str | None, told: str) -> None:
    if text is None:
        Path("RUN.yaml").unlink()
    else:
        Path("RUN.yaml").write_text(text, encoding="utf-8")
    assert told in refusal(command=command)


HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, 'trace "trace.csv" is neither a file nor a bundled sample; known: arxiv-16k-sample'),
        ("", "trace trace.csv"),
        (HEAD, "trace trace.csv: no rows"),
        ("when,what\n1,2\n", "trace trace.csv"),
        ("arrived_at,num_prefill_tokens\n0,5\n", "trace trace.csv"),
        (HEAD + "0.0,10,5\n1.0,-3,5\n", "trace trace.csv, line 3: num_prefill_tokens is '-3'"),
        (HEAD + "0.0,nan,5\n", "trace trace.csv, line 2: num_prefill_tokens is 'nan'"),
        (HEAD + "0.0,10,NaN\n", "trace trace.csv, line 2: num_decode_tokens is 'NaN'"),
        (HEAD + "later,10,5\n", "trace trace.csv, line 2: arrived_at is 'later'"),
        ("num_prefill_tokens,num_decode_tokens\n10,5\n", "the trace has no arrival times"),
    ],
)
def test_the_trace(text: str | None, told: str) -> None:
    if text is None:
        Path("trace.csv").unlink()
    else:
        Path("trace.csv").write_text(text, encoding="utf-8")
    assert told in refusal()


QWEN = "model=Qwen2.5-32B"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["workload.requests=0"], "workload.requests: should be at least 1, not 0"),
        (["workload.requests=21"], "21 requests asked of trace trace.csv, which has 20"),
        (["workload.arrivals.rate=2"], 'unknown key "workload.arrivals.rate"'),
        (["workload.arrivals={kind: poisson, rate: -1}"], "should be greater than 0.0, not -1"),
        (["workload.format=azur"], "azure"),
        (["workload.filter=vlm"], 'did you mean "vllm"?'),
        (["model=Qwen2.5-33B"], 'unknown model "Qwen2.5-33B", and no such file; did you mean'),
        ([QWEN, "gpu=L21"], 'unknown gpu "L21"; did you mean "L20"? known: A100-40G'),
        ([QWEN, "gpu={name: X, memory_gb: 4}"], "gpu: a key is missing"),
        ([QWEN, "link=pcie"], 'unknown link "pcie"'),
        (
            ["kv={pages: 9, swap: true, host_link: {bandwidth_gb_s: 50}}"],
            'kv.swap needs the key "mo',
        ),
        (["kv.swap=true"], 'kv.swap needs the key "kv.host_link"'),
        (["kv.host_link={bandwidth_gb_s: 50}"], 'kv.host_link needs the key "kv.swap: true"'),
        (["scheduler={name: static, padded: 1}"], "padded should be true or false, not 1"),
        (
            ["workload={trace: azure-conv-sample, requests: 9, conversations: true}"],
            "trace azure-conv-sample: conversations: true does not apply",
        ),
        ([QWEN, "stages=[30, 30]"], "[30, 30] add up to 60 layers; the model has 64"),
        ([QWEN, "stages=65"], "65 stages for 64 layers"),
        ([QWEN, "gpu=L20", "stages=1", "kv.pages=auto"], "Qwen2.5-32B does not fit"),
        ([QWEN, "gpu=L20", "costs=roofline", "tensor_parallel=2"], "give its bandwidth_gb_s"),
        (["scheduler=sarathy"], "unknown scheduler 'sarathy'"),
        (["scheduler.token_budgte=3"], "token_budget"),
        (["scheduler.token_budget=0"], "token_budget"),
        (
            ["scheduler.token_budget=many"],
            "token_budget should be a whole number of at least 1 or auto, not 'many'",
        ),
        (
            ["scheduler.token_budget=1.5"],
            "token_budget should be a whole number of at least 1 or auto, not 1.5",
        ),
        (
            ["scheduler.watermark=.nan"],
            "watermark should be a number of at least 0 and below 1, not nan",
        ),
        (
            ["scheduler.tbt_slo_s=-1"],
            "scheduler sarathi: tbt_slo_s should be a number above 0 or null, not -1",
        ),
        (
            ["scheduler={name: td_pipe, future_points: []}"],
            "td_pipe: future_points should be numbers of decode steps in rising order or null",
        ),
        (
            ["scheduler={name: td_pipe, future_points: [1.5]}"],
            "numbers of decode steps in rising order or null, not [1.5]",
        ),
        (
            ["scheduler.max_num_seqs=true"],
            "max_num_seqs should be a whole number of at least 1, not True",
        ),
        (["scheduler=nowhere:Policy"], "cannot import 'nowhere'"),
        (["scheduler=json:Nothing"], "json has no class 'Nothing'"),
    ],
)
def test_names_and_values(overrides: list[str], told: str) -> None:
    assert told in refusal(*overrides)


POLICY = """\
from evenflow.types import Plan, Prefill

class Policy:
    def __init__(self, depth: int = 1):
        {constructor}

    def schedule(self, view):
        {schedule}
"""


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("name", "schedule", "told"),
    [
        ("raises", "return 1 / 0", "policy Policy raised ZeroDivisionError: division by zero"),
        ("says_nothing", "return None", "policy Policy returned None, not a Plan"),
        (
            "unknown_request",
            "return Plan([Prefill(10**6, 1)])",
            "policy Policy prefills request 1000000, which is not",
        ),
        (
            "too_many_tokens",
            "return Plan([Prefill(0, 10**6)])",
            "policy Policy, request 0: prefills 1000000 of 20 tokens",
        ),
        (
            "negative",
            "return Plan([Prefill(0, -1)])",
            "policy Policy, request 0: prefills -1 of 20 tokens",
        ),
        ("no_decode_ready", "return Plan(decodes=5)", "policy Policy takes 5 decodes of 0 ready"),
        ("stalls", "return Plan()", "policy Policy stalls at 0 s"),
    ],
)
def test_a_policy_that_breaks_its_promise(
    command: str, name: str, schedule: str, told: str
) -> None:
    module = f"policy_{name}"
    text = POLICY.format(constructor="pass", schedule=schedule)
    Path(f"{module}.py").write_text(text, encoding="utf-8")
    if command == "simulate":
        assert told in refusal(f"scheduler={module}:Policy")
    else:
        Path("RUN.yaml").write_text(RUN.replace("{name: sarathi, token_budget: 64}", "sarathi"))
        before = sorted(Path().glob("*"))
        status, _, errors = evenflow(
            "compare", "RUN.yaml", "--out", OUT, "--schedulers", f"sarathi,{module}:Policy"
        )
        assert (status, errors.count("\n")) == (2, 1)
        assert told in errors
        assert sorted(set(Path().glob("*")) - {Path("__pycache__")}) == before


def test_a_policy_that_cannot_be_made() -> None:
    text = POLICY.format(constructor="{}['key']", schedule="return Plan()")
    Path("policy_constructor.py").write_text(text, encoding="utf-8")
    assert "KeyError: 'key'" in refusal("scheduler=policy_constructor:Policy")
    told = refusal("scheduler={name: 'policy_constructor:Policy', depht: 3}")
    assert "did you mean 'depth'?" in told
    Path("policy_syntax.py").write_text("class Policy(:", encoding="utf-8")
    assert "cannot import 'policy_syntax'" in refusal("scheduler=policy_syntax:Policy")


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_an_output_folder_that_cannot_be_written(command: str) -> None:
    Path(OUT).write_text("a file is in the way", encoding="utf-8")
    assert f"{OUT}: cannot write there" in refusal(command=command)
    assert Path(OUT).read_text(encoding="utf-8") == "a file is in the way"


def test_a_failed_run_leaves_an_earlier_one_as_it_was() -> None:
    evenflow("simulate", "RUN.yaml", "--out", OUT, "--save", "requests")
    earlier = {path: path.read_bytes() for path in Path(OUT).iterdir()}
    assert {path.name for path in earlier} == {
        "summary.json",
        "requests.csv",
        "manifest.json",
        "wall_clock.json",
    }
    refusal("workload.requests=21")
    assert {path: path.read_bytes() for path in Path(OUT).iterdir()} == earlier


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("", "names no scheduler"),
        ("sarathi,sarathi", "sarathi is there twice"),
        ("sarathi,{token_budget: 3}", "should be a name, or a mapping with a name"),
        ("[", "should be like"),
        ("sarathi,sarathy", "unknown scheduler 'sarathy'"),
    ],
)
def test_a_list_of_schedulers(listed: str, told: str) -> None:
    status, _, errors = evenflow("compare", "RUN.yaml", "--out", OUT, "--schedulers", listed)
    assert (status, errors.count("\n")) == (2, 1)
    assert told in errors
    assert not Path(OUT).exists()


@pytest.mark.parametrize("name", ["missing.yaml", "RUN.yaml"])
def test_as_a_process_of_its_own(name: str) -> None:
    Path("policy_process.py").write_text(
        POLICY.format(constructor="pass", schedule="raise RuntimeError('two\\nlines')")
    )
    command = [sys.executable, "-m", "experiments.cli", "simulate", name]
    done = subprocess.run(
        [*command, "--set", "scheduler=policy_process:Policy"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not Path("out").exists()
