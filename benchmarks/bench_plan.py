"""Measure `evenflow plan` from the shell, as a line of the table of `make bench`.

`python -m benchmarks.bench_plan [--compiled PYTHON] [--runs N] [--trace FILE]` from the repository.
The question is that of docs/plan.md, on Azure's code trace in EVENFLOW_SHARED, or else on the
sample of it. What is compared takes turns, and the ratio is the median of the pairs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.children import Taken, taken

RUN = """\
model: Llama-3.1-70B
gpu: H100
tensor_parallel: 4
stages: 1
scheduler: sarathi
runtime: ideal
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
        wall_s, cpu_s, _ = map(median, zip(*of_one, strict=True))
        told.append(f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU")
    ratio = (
        f"{median(now.wall_s / plain.wall_s for plain, now in turns):.2f}" if asked.compiled else ""
    )
    what = f"plan, 4 to 64 GPUs, {os.cpu_count()} cores"
    print("|", " | ".join([what, *told, *[""] * (2 - len(told)), ratio, "10 s"]), "|")


def plan(python: str, below: str, text: str) -> Taken:
    """Make the plan in a new folder, as points that are there are not simulated again."""
    folder = Path(tempfile.mkdtemp(dir=below))
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return taken([python, "-P", "-m", "evenflow", "plan", "run.yaml", *ASKED], folder)


if __name__ == "__main__":
    main()
