"""Measure what people wait for, and write it as one table into docs/speed.md.

`make bench`, or `python -m benchmarks.bench [--compiled PYTHON] [--peer PYTHON] [ROW...]` from the
repository. What is compared takes turns, and a ratio is the median of the rounds, so that other
work on the machine slows both sides. `--compiled` is the interpreter of an environment with the
compiled core, `--peer` one with ai-dynamo-runtime, whose DynoSim replays the same requests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_study import dask, figures, memory, points, sweeps
from benchmarks.children import taken

PAGE = Path(__file__).parent.parent / "docs" / "speed.md"
TABLE = re.compile(r"(?<=<!-- make bench -->\n).*?(?=<!-- end -->)", re.DOTALL)
TRACE = "AzureLLMInferenceTrace_conv.csv"
ROUNDS = 5

RUN = """\
model: Qwen2.5-32B
gpu: L20
costs: {{kind: affine, base_s: 0.005, per_token_s: 0.00002}}
kv: {{pages: 25000}}
max_model_len: 32768
runtime: ideal
scheduler: token_throttling
workload: {{trace: {trace}, requests: {requests}, arrivals: {arrivals}}}
"""
PEER = "import dynamo._core, sys; dynamo._core.run_mocker_trace_replay([sys.argv[1]])"
POLICIES = {"token_throttling": 4, "sarathi": 4, "vllm": 4, "vllm_v1": 1}
"""Policies that are compared with DynoSim, and on how many stages."""

IN_STEP = {"vllm_v1": ", async_scheduling: false"}  # as DynoSim schedules
GOALS = {"token_throttling": 0.5, "sarathi": 0.9, "vllm": 1.0, "vllm_v1": 1.0}
ONE = "stages=4", "workload.requests=1"
OUT = "OUT"
REQUESTS = "requests.jsonl"
QUESTION = Path(__file__).parent / "bench_plan.py"


class Line(NamedTuple):
    """A line of the table: what is measured, beside what, the ratio of both, and the goal."""

    what: str
    measured: str = ""
    beside: str = ""
    ratio: str = ""
    goal: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


class Bench(NamedTuple):
    """What is measured with: the interpreters by build, DynoSim's, and a folder for the runs."""

    builds: Mapping[str, str]
    peer: str | None
    folder: Path

    def simulate(self, build: str, *words: str) -> list[str]:
        """Return the command that simulates `run.yaml`; OUT stands for a new folder."""
        python = [self.builds[build], "-P", "-m", "evenflow"]
        sets = [each for word in words for each in ("--set", word)]
        return [*python, "simulate", "run.yaml", "--out", OUT, *sets]

    def cpu_s(self, command: list[str]) -> float:
        """Return the CPU seconds, user and system, of a command and its children."""
        return taken(self._ready(command), self.folder).cpu_s

    def instructions(self, command: list[str]) -> str:
        """Return how many instructions a command takes, in words; "" without valgrind."""
        if shutil.which("valgrind") is None:
            return ""
        counted = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        done = subprocess.run(
            [*counted, *self._ready(command)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        millions = int(re.findall(r"Collected : (\d+)", done.stderr)[-1]) / 1e6
        return f"; {millions:,.0f} M instructions"

    def _ready(self, command: list[str]) -> list[str]:
        out = tempfile.mkdtemp(dir=self.folder) + "/out"
        return [out if word == OUT else word for word in command]

    def taking_turns(self, commands: Mapping[str, list[str]]) -> dict[str, list[float]]:
        """Return the CPU seconds of each command, run once in each round."""
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                found[name].append(self.cpu_s(command))
        return found


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return a median, with the least and the most."""
    three = statistics.median(values), min(values), max(values)
    return "{} ({} to {})".format(*map(form.format, three))


def ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    """Return the ratios of pairs."""
    return spread([one / other for one, other in zip(ones, others, strict=True)])


def policies(bench: Bench) -> Iterator[Line]:
    """Compare whole runs of each build with DynoSim: requests a CPU second."""
    requests = sum(1 for _ in (bench.folder / REQUESTS).open())

    def rates(seconds: Sequence[float]) -> str:
        return spread([requests / each for each in seconds], "{:,.0f}")

    for policy, stages in POLICIES.items():
        keys = f"scheduler={{name: {policy}{IN_STEP.get(policy, '')}}}", f"stages={stages}"
        commands = {
            build: [*bench.simulate(build, *keys), "--save", "requests"] for build in bench.builds
        }
        if bench.peer is not None:
            commands["DynoSim"] = [bench.peer, "-c", PEER, REQUESTS]
        found = bench.taking_turns(commands)
        for build in bench.builds:
            name = f"{policy}, {stages} stage{'s' * (stages > 1)}, {build}: requests a CPU second"
            of = ("", "")
            if bench.peer is not None:
                of = f"DynoSim {rates(found['DynoSim'])}", ratio(found["DynoSim"], found[build])
            goal = f"{GOALS[policy]}" if build == "compiled" else ""
            yield Line(name, rates(found[build]), *of, goal)


def outputs(bench: Bench) -> Iterator[Line]:
    """Compare the default outputs with `--save requests`."""
    for build in bench.builds:
        command = bench.simulate(build, "stages=4", "workload.requests=4000")
        found = bench.taking_turns(
            {save: [*command, "--save", save] for save in ("all", "requests")}
        )
        every, few = found.values()
        name = f"4,000 requests with all outputs, {build}: CPU seconds"
        yield Line(name, spread(every), f"`--save requests` {spread(few)}", ratio(every, few))


def starts(bench: Bench) -> Iterator[Line]:
    """Measure how commands start: CPU seconds, and instructions, beside Python alone."""
    build = list(bench.builds)[-1]
    python = [bench.builds[build], "-P"]
    alone = [*python, "-c", "pass"]
    for name, command, goal in (
        ("`evenflow simulate` of one request", bench.simulate(build, *ONE), "0.25 s"),
        ("`evenflow --help`", [*python, "-m", "evenflow", "--help"], "0.15 s"),
        ("`import evenflow`", [*python, "-c", "import evenflow"], "0.05 s"),
    ):
        seconds, bare = bench.taking_turns({"command": command, "alone": alone}).values()
        yield Line(
            f"{name}, {build}: CPU seconds",
            spread(seconds) + bench.instructions(command),
            f"Python alone {spread(bare)}{bench.instructions(alone)}",
            ratio(seconds, bare),
            goal,
        )


def plan(bench: Bench) -> Iterator[Line]:
    """Ask the questions of `plan`, if their benchmark is here: it prints lines with these cells."""
    if QUESTION.exists():
        compiled = bench.builds.get("compiled")
        command = [sys.executable, "-m", "benchmarks.bench_plan"]
        command += ["--compiled", compiled] if compiled else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for line in done.stdout.splitlines():
            yield Line(*(cell.strip() for cell in line.strip().strip("|").split("|")[:5]))


def studies(bench: Bench) -> Iterator[Line]:
    """Measure sweeps, pictures and clusters."""
    for measure in (points, sweeps, figures, dask, memory):
        yield Line(*measure(bench.folder))


ROWS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "policies": policies,
    "outputs": outputs,
    "starts": starts,
    "studies": studies,
    "plan": plan,
}


def prepare(folder: Path) -> None:
    """Write the run and, for DynoSim, its requests."""
    from evenflow.traces import Poisson, load_trace, make_requests

    shared = Path(os.environ.get("EVENFLOW_SHARED", "../shared")).resolve() / "traces" / TRACE
    source, arrivals, requests = str(shared), "replay", "null"
    trace = load_trace(source) if shared.exists() else load_trace("azure-conv-sample", limit=14_000)
    if shared.exists():
        rows = zip(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, strict=True)
    else:
        source, arrivals, requests = trace.name, "{kind: poisson, rate: 5.9}", "14000"
        made = make_requests(trace, Poisson(rate=5.9), 14_000, seed=0)
        rows = ((each.arrival_s, each.prompt_tokens, each.output_tokens) for each in made)
    text = RUN.format(trace=source, requests=requests, arrivals=arrivals)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    block = count()
    with (folder / REQUESTS).open("w") as file:
        for at_s, prompt, output in rows:
            blocks = [next(block) for _ in range(-(-int(prompt) // 512))]
            lengths = f'"input_length": {prompt}, "output_length": {output}'
            file.write(f'{{"timestamp": {at_s * 1e3}, {lengths}, "hash_ids": {blocks}}}\n')


def main() -> None:
    """Print each line as it is measured; write the table if all were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", metavar="PYTHON", help="of an environment compiled")
    parser.add_argument("--peer", metavar="PYTHON", help="of an environment with DynoSim")
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="by default all")
    asked = parser.parse_args()
    builds = {"plain": sys.executable} | ({"compiled": asked.compiled} if asked.compiled else {})
    began = time.perf_counter()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    table = [Line("what", "measured", "beside", "ratio", "goal"), Line(*["---"] * 5)]
    print(*table, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{name}/cache"  # compiled once, for all
        bench = Bench(builds, asked.peer, Path(name))
        prepare(bench.folder)
        for build in builds:
            bench.cpu_s(bench.simulate(build, *ONE))
        for row in asked.rows or ROWS:
            for line in ROWS[row](bench):
                print(line, flush=True)
                table.append(line)
    print(f"{time.perf_counter() - began:.0f} s")
    if not asked.rows:
        text = "\n".join(map(str, table)) + "\n"
        PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), "utf-8")


if __name__ == "__main__":
    main()
