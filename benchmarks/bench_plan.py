"""Measure `evenflow plan` from the shell, as a line of the table of `make bench`.

`python -m benchmarks.bench_plan [--compiled PYTHON] [--runs N] [--trace FILE]` from the repository.
The question is that of docs/plan.md, on Azure's code trace in EVENFLOW_SHARED, or else on the
sample of it, with and without `runtime: ideal`. What is compared takes turns, and the ratio is the
median of the pairs.
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
workload: {{trace: {trace}, arrivals: {{kind: replay, scale: 2}}}}
"""
RUNTIMES = {"": "runtime: ideal\n", " without `runtime`": ""}
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
    text = RUN.format(trace=trace.resolve() if trace.exists() else trace)
    for words, runtime in RUNTIMES.items():
        with tempfile.TemporaryDirectory() as name:
            runs = range(asked.runs)
            turns = [[plan(each, name, runtime + text) for each in pythons] for _ in runs]
        tell(f"plan{words}, 4 to 64 GPUs, {os.cpu_count()} cores", turns)


def tell(what: str, turns: list[list[Taken]]) -> None:
    """Print a row of the table: turns of plain Python, and of the compiled core if asked."""
    told = []
    for of_one in zip(*turns, strict=True):
        wall_s, cpu_s, _ = map(median, zip(*of_one, strict=True))
        told.append(f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU")
    compiled = len(told) == 2
    ratio = f"{median(now.wall_s / plain.wall_s for plain, now in turns):.2f}" if compiled else ""
    print("|", " | ".join([what, *told, *[""] * (2 - len(told)), ratio, "10 s"]), "|")


def plan(python: str, below: str, text: str) -> Taken:
    """Make the plan in a new folder, as points that are there are not simulated again."""
    folder = Path(tempfile.mkdtemp(dir=below))
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return taken([python, "-P", "-m", "evenflow", "plan", "run.yaml", *ASKED], folder)


if __name__ == "__main__":
    main()
