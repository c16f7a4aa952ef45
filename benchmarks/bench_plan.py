"""Measure `evenflow plan` from the shell: seconds of the clock and of CPU, and what was simulated.

`python benchmarks/bench_plan.py [--against PYTHON] [--runs N] [--trace FILE]` from the repository.
The question is that of docs/plan.md; it needs Azure's code trace for its numbers. `--against` is
the interpreter of an environment with another version, which takes turns with this one: pairs of
one sitting are what can be compared on a machine that does other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """\
model: Llama-3.1-70B
gpu: H100
tensor_parallel: 4
stages: 1
scheduler: sarathi
workload: {{trace: {trace}, arrivals: {{kind: replay, scale: 2}}}}
"""
ASKED = ["--gpus", "4..64", "--slo", "p99_ttft_ms=2000", "--slo", "p99_tpot_ms=100"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", metavar="PYTHON", help="of an environment with another version"
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--trace", default="azure-code-sample", help="a file, or a sample's name")
    arguments = parser.parse_args()
    trace = Path(arguments.trace)
    pythons = [arguments.against, sys.executable] if arguments.against else [sys.executable]
    walls: dict[str, list[float]] = {python: [] for python in pythons}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = RUN.format(trace=trace.resolve() if trace.exists() else trace)
        (folder / "run.yaml").write_text(text, encoding="utf-8")
        for turn in range(arguments.runs):
            for index, python in enumerate(pythons):
                walls[python].append(plan(python, folder, folder / f"{turn}-{index}"))
    if len(pythons) > 1:
        ratios = [now / then for then, now in zip(*walls.values(), strict=True)]
        print(f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})")


def plan(python: str, folder: Path, out: Path) -> float:
    """Make the plan, print what it took and its answer; return the seconds of the clock."""
    words = [python, "-m", "evenflow", "plan", "run.yaml", *ASKED, "--out", str(out)]
    started = time.perf_counter()
    child = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)  # with the workers that it waited for
    wall_s, child.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {child.returncode}")
    told = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    cpu_s, done = used.ru_utime + used.ru_stime, told["effort"]
    print(f"{wall_s:6.1f} s, {cpu_s:6.1f} s of CPU on {os.cpu_count()} cores  {python}")
    print(
        f"  {done['simulated']} of {done['points']} points in {done['simulations']} simulations, "
        f"{done['on_all_requests']} points on all {told['requests']} requests: "
        f"{told['best']['replicas']} x {told['best']['setting']}"
    )
    return wall_s


if __name__ == "__main__":
    main()
