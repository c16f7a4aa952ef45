"""Runs side by side: who is asked for, no process is left; what differs between two of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import evenflow as ef
from evenflow.config.run import load_config
from evenflow.config.systems import systems
from evenflow.errors import LostProcessError
from evenflow.study.compare import budgets, line_up, parse_schedulers, run_all
from tests.command_line import complaint, done, evenflow, killed, summary_of

pytestmark = pytest.mark.usefixtures("folder")

SLOW = """\
import time
from evenflow.schedulers.sarathi import Sarathi


class Slow(Sarathi):
    def schedule(self, view):
        time.sleep(30)
        return super().schedule(view)
"""


@pytest.mark.processes
def test_a_comparison_that_writes_nothing(tmp_path: Path) -> None:
    config = load_config(tmp_path / "RUN.yaml")
    entries = parse_schedulers("sarathi,{name: sarathi, token_budget: 32},vllm")
    jobs = line_up(entries, config, tmp_path)
    assert (jobs[0].label, jobs[0].config) == ("sarathi", config)
    before = set(tmp_path.rglob("*"))
    comparison = run_all(jobs)
    assert set(tmp_path.rglob("*")) == before
    assert comparison.table.index.to_list() == ["sarathi", "sarathi(token_budget=32)", "vllm"]
    assert set(comparison.table["completed"]) == {20}
    assert set(comparison.runs) == set(comparison.summaries)


def test_a_comparison_says_where_budgets_differ(tmp_path: Path) -> None:
    """The run's 64, gLLM's 2,048 of prompts; vLLM V0 is limited by the model's length."""
    config = load_config(tmp_path / "RUN.yaml")

    def line(words: str) -> str:
        return budgets(line_up(parse_schedulers(words), config, tmp_path))

    assert line("sarathi,token_throttling,vllm,vllm_v1") == (
        "budgets of a micro-batch differ (tokens): sarathi token_budget 64, token_throttling "
        "max_prefill 2048, vllm no max_num_batched_tokens, vllm_v1 max_num_batched_tokens 2048"
    )
    assert line("{name: sarathi, token_budget: 2048},token_throttling") == ""
    done("compare", "RUN.yaml", "--schedulers", "sarathi,token_throttling", "--out", "out")
    assert "max_prefill 2048.</p>" in Path("out/report.html").read_text(encoding="utf-8")


def test_policies_that_bring_no_cpu_time_have_that_of_the_engine_among_them(
    tmp_path: Path,
) -> None:
    """A system whose paper says its CPU time keeps it, and so does all where the run gives one."""
    gllm = next(each for each in systems() if each.name == "gllm")
    on_a_gpu = ["model=Qwen2.5-32B", "gpu=L20", "stages=4", "costs=roofline", "runtime=null"]
    for more, first in (([], "vllm-0.19"), (["runtime=vllm"], "vllm")):
        config = load_config(tmp_path / "RUN.yaml", [*on_a_gpu, "kv.pages=auto", *more])
        jobs = line_up(["sarathi", "vllm_v1", gllm], config, tmp_path)
        assert [job.config.cpu_time for job in jobs] == [first, first, "gllm"]
        marked = ["(default)" in re.findall(r"CPU time [^,]*", j.config.setup())[0] for j in jobs]
        assert marked == [first == "vllm-0.19"] * 2 + [False]


def killer(*_: object) -> None:
    raise SystemExit(9)


@pytest.mark.processes
def test_a_process_that_dies_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.study.compare._count_in", killer)
    jobs = line_up(["sarathi"], load_config(tmp_path / "RUN.yaml"), tmp_path)
    with pytest.raises(LostProcessError, match="a worker died"):
        run_all(jobs)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
def test_no_worker_outlives_a_comparison_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    schedulers = "slow:Slow,{name: slow:Slow, token_budget: 32}"
    arguments = ("compare", "RUN.yaml", "--schedulers", schedulers, "--out", "out")
    killed(tmp_path, *arguments, when=lambda workers: len(workers) >= 2)


def saved(name: str, **keys: Any) -> str:
    ef.simulate("RUN.yaml", set=keys, out=name, save="requests")
    return name


def test_the_same_requests_are_compared_one_by_one() -> None:
    a, b = saved("a"), saved("b", **{"costs.base_s": 0.006})
    found = ef.diff(a, b)
    assert found.config.to_dict("index") == {"costs.base_s": {"a": 0.005, "b": 0.006}}
    for metric, end in {"mean_ttft_ms": "first_token_s", "mean_e2el_ms": "completion_s"}.items():
        sides = [pd.read_csv(f"{name}/requests.csv") for name in (a, b)]
        gaps = 1e3 * (sides[1][end] - sides[0][end])  # they arrive at the same times
        row = found.metrics.loc[metric]
        assert row["mean"] == pytest.approx(gaps.mean())
        assert row["half_width"] == pytest.approx(2.093 * gaps.sem(), rel=1e-3)
        assert row["n"] == 20
        assert row["difference"] == pytest.approx(row["mean"])
    assert found.warnings == ["20 requests are few: others may tell otherwise"]
    assert ef.diff(a, ef.simulate("RUN.yaml")).metrics.empty
    assert "the configurations are equal\nall numbers are equal\n" in done("diff", "a", "a")


def test_other_requests_are_not_paired_and_one_that_only_one_run_completed_is_in_no_pair() -> None:
    a = saved("a")
    found = ef.diff(a, saved("b", **{"workload.arrivals.scale": 2}))
    row = found.metrics.loc["mean_e2el_ms"]
    assert not found.paired
    assert row["mean"] == pytest.approx(row["difference"])
    assert "not the same requests: the differences are unpaired" in found.warnings
    found = ef.diff(a, saved("c", max_model_len=60))
    assert found.paired
    lost = summary_of("c")["failed"]
    assert found.metrics.loc["mean_ttft_ms", "n"] == 20 - lost < 20
    assert f"not as many requests were completed: 20 with a, {20 - lost} with c" in found.warnings


def test_a_run_that_completes_nothing_has_no_numbers_and_no_differences() -> None:
    done("simulate", "RUN.yaml", "--out=a", "--save=summary")
    shown = done("simulate", "RUN.yaml", "--set=kv.pages=1", "--out=b", "--save=all")
    assert shown.startswith("NOT FAIR: 20 of 20 requests (100.0%) were refused or given up; the")
    assert re.search(r"TTFT mean \(ms\) +-", shown)
    assert "completed no request" in Path("b/report.html").read_text()
    assert summary_of("b")["mean_ttft_ms"] is summary_of("b")["duration"] is None
    found = ef.diff("a", "b")
    assert math.isnan(found.metrics.loc["mean_ttft_ms", "difference"])
    lines = [line.split() for line in done("diff", "a", "b").splitlines()]
    (row,) = (line for line in lines if line[:3] == ["TTFT", "mean", "(ms)"])
    assert row[4:] == ["-", "-"]
    assert lines[0][:3] == ["NOT", "FAIR:", "with"]
    assert found.warnings[0].startswith("with b, 20 of 20 requests (100.0%) were refused")


def test_the_command_says_what_differs_and_what_is_not_fair() -> None:
    saved("a"), saved("b", **{"costs.base_s": 0.006})
    Path("b/requests.csv").unlink()
    told = json.loads(Path("b/summary.json").read_text())
    told["provenance"] |= {"git_commit": "f00"}
    told["provenance"]["trace"] |= {"sha256": "0", "name": "other.csv"}
    Path("b/summary.json").write_text(json.dumps(told))
    output = done("diff", "a", "b")
    for line in (
        "costs.base_s",
        "TTFT mean (ms)",
        "NOT FAIR: other traces: trace.csv and other.csv",
        f"NOT FAIR: made by other versions of evenflow: {ef.__version__} (commit",
        "NOT FAIR: no table of requests in b: no differences per request (--save requests)",
    ):
        assert line in output


SLOWER = ("--set", "costs.base_s=0.006")


def test_a_change_is_checked_against_a_baseline_run_by_run() -> None:
    """A micro-batch takes 5 ms and 20 us a token a stage, then 6 ms and 20 us."""
    Path("other.yaml").write_text(Path("RUN.yaml").read_text().replace("pages: 200", "pages: 100"))
    runs = "check", "RUN.yaml", "other.yaml"
    assert done(*runs, "--write", "base.json").startswith("ok: 2 runs, 0 limits\n| run | output")
    text = Path("base.json").read_text()
    known = {each["name"]: each for each in json.loads(text)}
    before = known["other.yaml: mean_tpot_ms"]
    assert (before["unit"], known["RUN.yaml: completed"]["value"]) == ("ms", 20)

    against = *runs, "--against", "base.json", "--fail-if"
    same = done(*against, "mean_tpot_ms > +0%", "--fail-if", "completed<20")
    assert f"| other.yaml | {before['value']:.1f} (0.0%) | 20 (0.0%) |" in same

    checked = ef.check(
        ["RUN.yaml", "other.yaml"],
        against="base.json",
        fail_if=["mean_tpot_ms>+3%", "mean_tpot_ms<-3%", "mean_tpot_ms>+1e6", "mean_itl_ms>1e6"],
        set={"costs.base_s": 0.006},
    )
    value = checked.table.value["other.yaml", "mean_tpot_ms"]
    change = checked.table.change["other.yaml", "mean_tpot_ms"]
    assert change == pytest.approx(value / before["value"] - 1)
    assert [line.split(":")[0] for line in checked.failures] == ["FAILS mean_tpot_ms>+3%"] * 2

    status, output, _ = evenflow(*against, "mean_tpot_ms>+3%", *SLOWER, "--write", "base.json")
    assert (status, output.count("FAILS"), output.count("NOT FAIR: ")) == (1, 2, 2)
    assert f"{value:.1f} (+{100 * change:.1f}%)" in output
    assert Path("base.json").read_text() != text


def test_a_run_is_checked_once() -> None:
    line = complaint("check", "RUN.yaml", "RUN.yaml", "--write", "base.json")
    assert line == "RUN.yaml: is there twice; name each run once"
    assert not Path("base.json").exists()


def test_a_run_that_completes_nothing_keeps_no_bound_and_one_that_is_gone_is_told() -> None:
    Path("base.json").write_text('[{"name": "gone.yaml: completed", "unit": "", "value": 1}]')
    refuses = "--set", "max_model_len=2", "--allow-refused", "--against", "base.json"
    status, output, errors = evenflow("check", "RUN.yaml", *refuses, "--fail-if", "mean_tpot_ms>9")
    assert (status, output.splitlines()[0]) == (1, "FAILS mean_tpot_ms>9: RUN.yaml: -")
    assert errors.endswith("gone.yaml: in the baseline only\n")


def test_requests_that_cannot_be_read_are_a_mistake() -> None:
    saved("a")
    for text in ("", "request_id\n1\n", "a,b\n1\n2,3,4\n", "\0"):
        Path("a/requests.csv").write_text(text)
        assert complaint("diff", "a", "a").startswith("a/requests.csv: is no table of requests: ")
