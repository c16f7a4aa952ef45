"""Measure whole commands: CPU seconds (user and system) and peak memory, and imports by cost.

`python benchmarks/bench_process.py [--against PYTHON] [--runs N] [--trace FILE] [--requests N]`
from the repository. `--against` is the interpreter of an environment with another version, which
takes turns with this one: pairs of one sitting are what can be compared on a machine that does
other work.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

RUN = """\
model: Qwen2.5-32B
gpu: L20
stages: 4
costs: {{kind: affine, base_s: 0.005, per_token_s: 0.00002}}
kv: {{pages: 25000}}
max_model_len: 32768
runtime: ideal
scheduler: {{name: token_throttling}}
workload: {{trace: {trace}, requests: {requests}, arrivals: {arrivals}}}
"""
COMMANDS = {
    "start-up: one request, summary": ["--save", "summary", "--set", "workload.requests=1"],
    **{
        f"{policy}, --save requests": ["--save", "requests", "--set", f"scheduler.name={policy}"]
        for policy in ("token_throttling", "sarathi", "vllm")
    },
    "token_throttling, --save all (default)": ["--save", "all"],
}
MODULES = 15
"""How many modules are listed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", metavar="PYTHON", help="of an environment with another version"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="replayed; default: the sample, as Poisson")
    parser.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    pythons = [arguments.against, sys.executable] if arguments.against else [sys.executable]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = arguments.trace and arguments.trace.resolve()
        arrivals = "replay" if trace else "{kind: poisson, rate: 5.9}"
        run = RUN.format(
            trace=trace or "azure-conv-sample", arrivals=arrivals, requests=arguments.requests
        )
        (folder / "run.yaml").write_text(run, encoding="utf-8")
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "cache")  # compiled once, for all
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.chdir(folder)  # no version is found where the command is started
        for index, python in enumerate(pythons):
            cpu_of(python, COMMANDS["start-up: one request, summary"], folder / f"warm-{index}")
        for label, words in COMMANDS.items():
            compare(label, words, pythons, arguments.runs, folder)
        imports(folder)


def compare(label: str, words: list[str], pythons: list[str], runs: int, folder: Path) -> None:
    """Print medians, spread and peak memory of a command, and the ratio of two versions."""
    seconds: dict[str, list[float]] = defaultdict(list)
    peak_mb: dict[str, float] = defaultdict(float)
    for turn in range(runs):
        for index, python in enumerate(pythons):
            cpu_s, megabytes = cpu_of(python, words, folder / f"{label}-{turn}-{index}")
            seconds[python].append(cpu_s)
            peak_mb[python] = max(peak_mb[python], megabytes)
    for python, times in seconds.items():
        spread = f"{min(times):.2f} to {max(times):.2f}"
        median = statistics.median(times)
        print(f"{label:38s} {median:6.2f} s ({spread}) {peak_mb[python]:5.0f} MB  {python}")
    if len(pythons) > 1:
        ratios = [now / then for then, now in zip(*seconds.values(), strict=True)]
        print(
            f"{'':38s} {statistics.median(ratios):6.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def cpu_of(python: str, words: list[str], out: Path) -> tuple[float, float]:
    """Return CPU seconds and peak memory (MB) of a simulation with these words."""
    command = ["-m", "evenflow", "simulate", "run.yaml", "--out", str(out), *words]
    child = subprocess.Popen([python, *command], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{python} {' '.join(command)}: exit {child.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def imports(folder: Path) -> None:
    """Print the modules that take longest to import, without what they import themselves."""
    command = [sys.executable, "-X", "importtime", "-m", "evenflow", "simulate", "run.yaml"]
    words = COMMANDS["start-up: one request, summary"]
    done = subprocess.run(
        [*command, "--out", str(folder / "imports"), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"import time: +(\d+) \| +(\d+) \| *(\S+)", done.stderr)
    print(
        f"{len(found)} modules are imported in {sum(int(own) for own, _, _ in found) / 1e3:.0f} ms:"
    )
    for own, whole, name in sorted(found, key=lambda row: -int(row[0]))[:MODULES]:
        print(f"{int(own) / 1e3:8.1f} ms {int(whole) / 1e3:8.1f} ms with its imports  {name}")


if __name__ == "__main__":
    main()
