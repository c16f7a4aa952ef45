"""Measure `evenflow plan` from the shell, as a line of the table of `make bench`.

`python -m benchmarks.bench_plan [--compiled PYTHON] [--runs N] [--trace FILE]` from the repository.
The question is that of docs/plan.md, on Azure's code trace in EVENFLOW_SHARED, or else on the
sample of it. What is compared takes turns, and the ratio is the median of the pairs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

RUN = """\
model: Llama-3.1-70B
gpu: H100
tensor_parallel: 4
stages: 1
scheduler: sarathi
workload: {{trace: {trace}, arrivals: {{kind: replay, scale: 2}}}}
"""
SHARED = Path(os.environ.get("EVENFLOW_SHARED", "../shared")).resolve()
CODE = SHARED / "traces" / "AzureLLMInferenceTrace_code.csv"
ASKED = ["--gpus", "4..64", "--slo", "p99_ttft_ms=2000", "--slo", "p99_tpot_ms=100"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", metavar="PYTHON", help="with the compiled core")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--trace", help="a file, or a sample's name")
    asked = parser.parse_args()
    trace = Path(asked.trace or (CODE if CODE.exists() else "azure-code-sample"))
    pythons = [sys.executable, *filter(None, [asked.compiled])]
    with tempfile.TemporaryDirectory() as name:
        text = RUN.format(trace=trace.resolve() if trace.exists() else trace)
        turns = [[plan(each, name, text) for each in pythons] for _ in range(asked.runs)]
    told = []
    for of_one in zip(*turns, strict=True):
        wall_s, cpu_s = map(median, zip(*of_one, strict=True))
        told.append(f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU")
    ratio = f"{median(now[0] / plain[0] for plain, now in turns):.2f}" if asked.compiled else ""
    what = f"plan, 4 to 64 GPUs, {os.cpu_count()} cores"
    print("|", " | ".join([what, *told, *[""] * (2 - len(told)), ratio, "10 s"]), "|")


def plan(python: str, below: str, text: str) -> tuple[float, float]:
    """Make the plan in a new folder, as points that are there are not simulated again.

    Returns the seconds of the clock, and of the CPU with all workers.
    """
    folder = tempfile.mkdtemp(dir=below)
    Path(folder, "run.yaml").write_text(text, encoding="utf-8")
    words = [python, "-P", "-m", "evenflow", "plan", "run.yaml", *ASKED]
    started = time.perf_counter()
    child = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {child.returncode}")
    return time.perf_counter() - started, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
