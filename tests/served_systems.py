"""Serve every system of the papers from its own file with emulated and torch workers, and check it.

`make test-systems` prints the table of docs/validation.md; names as arguments: these rows alone.
The deployment is the file's (stages, ranks, engines, pools, policy); the trace is tiny, and for
torch so are model and pages. Tokens of torch must be those of transformers, decisions must replay,
and a run of which a worker is killed must end with a line. Emulated stages of 20 ms are
validated, at real-time priority where the machine allows it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from evenflow.config.systems import systems
from evenflow.report.folder import RECORDS
from evenflow.report.tables import markdown_table, percent
from evenflow.results.recorder import read_blocks
from evenflow.runtime.real import job_of
from evenflow.runtime.tokens import RandomTexts
from tests import command_line
from tests.places import ROOT
from tests.tiny_models import continued, save_checkpoint

EXAMPLES = ROOT / "examples" / "systems"
SHAPE = {"num_hidden_layers": 4, "vocab_size": 100}  # what four stages and four ranks divide
MORE = {
    "gllm, two replicas": ("gllm", ["replicas={count: 2, router: least_outstanding}"]),
    "gllm, prefix cache": ("gllm", ["kv.prefix_cache=true", "workload.conversations=true"]),
}
"""What no system of the papers is: the example it is made from, and its keys."""

IN_STEP = "vllm_v1", "vllm_balanced"
"""Systems whose decodes run ahead of their tokens, which torch workers do not serve."""

STAGES_S = "costs={kind: affine, base_s: 0.02, per_token_s: 1.0e-5}"
OFTEN = [f"{0.2 * i:.1f},{100 + 37 * i % 200},{10 + 7 * i % 20}" for i in range(20)]
"""The trace of a validation: five requests a second, each some seconds long."""
HEADS = ["system", "workers", "requests", "tokens", "replay", "structure"]
HEADS += ["mean E2EL, configured", "calibrated", "kill -9"]
NONE = "-"
LIMIT_S = 120.0


class Row:
    """A system served by one kind of workers; `found` are the cells, `wrong` whether one is."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        example, more = MORE.get(name, (name, []))
        self.kind = kind
        self.path = EXAMPLES / f"{example}.yaml"
        self.out = folder / f"{name}-{kind}".replace(", ", "-").replace(" ", "-")
        self.keys = [f"workload={{trace: {folder / 'trace.csv'}, arrivals: offline}}"]
        self.keys += [f"workers={kind}", *more]
        if kind == "torch":
            self.keys += [f"model={folder}", "workers.dtype=float32", "kv.pages=400"]
            self.keys += ["max_model_len=256"]
            self.keys += ["scheduler.async_scheduling=false"] * (name in IN_STEP)
        self.found = [name, kind]
        self.wrong = False

    def arguments(self, command: str, *keys: str) -> list[str]:
        sets = [word for key in (*self.keys, *keys) for word in ("--set", key)]
        return [command, str(self.path), *sets, "--out", str(self.out) + f"-{command}"]

    def note(self, cell: str, *, right: bool = True) -> None:
        self.found.append(cell)
        self.wrong |= not right

    def serve(self, expected: Callable[[Any], dict[int, list[int]]]) -> bool:
        """Serve it, and compare its tokens and decisions; return whether it is served at all."""
        status, _, errors = command_line.evenflow(*self.arguments("run"))
        if status:
            self.note(errors.strip().splitlines()[-1], right=False)
            self.found += [""] * (len(HEADS) - len(self.found))
            return False
        out = Path(f"{self.out}-run")
        completed = command_line.summary_of(out)["completed"]
        self.note(f"{completed} completed", right=completed == 20)
        tokens = "made up"
        if self.kind == "torch":
            tokens = (
                "equal"
                if command_line.tokens_of(out) == expected(job_of(self.path, self.keys))
                else "NOT EQUAL"
            )
        self.note(tokens, right=tokens != "NOT EQUAL")
        replays = command_line.evenflow("replay", str(out))[0] == 0
        self.note("equal" if replays else "NOT EQUAL", right=replays)
        return True

    def validate(self) -> None:
        """Compare it, with emulated stages of 20 ms, with what the simulator says."""
        if self.kind != "emulated":
            self.found += [NONE] * 3
            return
        trace = command_line.write_trace(self.out.with_suffix(".csv"), *OFTEN)
        keys = STAGES_S, f"workload.trace={trace}", "workload.arrivals=replay"
        with _real_time():
            runs = ["--runs", "1", "--calibrate", "10"]
            status, _, errors = command_line.evenflow(*self.arguments("validate", *keys), *runs)
        if status:
            self.note(errors.strip().splitlines()[-1], right=False)
            self.found += [""] * 2
            return
        data = json.loads(Path(f"{self.out}-validate", "validation.json").read_text())
        same = [layer["same_micro_batches"] for layer in data.get("structure", ())]
        self.note(percent(min(same), sign=False) if same else NONE, right=same == [1.0] * len(same))
        line = data["end_to_end"]["mean_e2el_ms"]
        self.found += [percent(line["error"]), percent(line.get("calibrated_error")) or NONE]

    def kill(self) -> None:
        """Kill a worker of a run that serves; say how long the run then took to end with a line."""
        slowly = "workload.arrivals={kind: poisson, rate: 1}"
        process = command_line.spawn(*self.arguments("run", slowly)[:-1], f"{self.out}-killed")
        try:
            victim = _worker_of(process, Path(f"{self.out}-killed"))
            killed_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            _, errors = process.communicate(timeout=LIMIT_S)
            took_s = time.monotonic() - killed_s
        finally:
            process.kill()
        right = process.returncode == 1 and "was killed by signal 9" in errors
        right &= command_line.gone(process) and Path(f"{self.out}-killed", "requests.csv").is_file()
        self.note(f"{took_s:.1f} s" if right else "WRONG", right=right)


@contextmanager
def _real_time() -> Iterator[None]:
    """Come before what else the machine does, the processes that are started too."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _worker_of(process: Any, out: Path) -> int:
    """Return a worker of a run once requests have been recorded."""
    limit_s = time.monotonic() + LIMIT_S
    while time.monotonic() < limit_s and process.poll() is None:
        for path in out.glob(f".partial-*/{RECORDS}"):
            if any(len(block.get("request_id", ())) for block in read_blocks(path)[1]):
                return next(pid for pid in reversed(command_line.group(process)) if _is_worker(pid))
        time.sleep(0.05)
    raise AssertionError(f"{out}: the run does not start")


def _is_worker(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def rows(names: Sequence[str], folder: Path) -> list[Row]:
    """Serve systems by both kinds of workers; tell of each as it is done."""
    command_line.write_inputs(folder)
    model = save_checkpoint(folder, "llama", **SHAPE)
    text_of, done = RandomTexts(SHAPE["vocab_size"], seed=0), []

    @cache
    def continuation(prompt: tuple[int, ...], tokens: int) -> list[int]:
        return continued(model, prompt, tokens)

    def expected(job: Any) -> dict[int, list[int]]:
        return {
            each.request_id: continuation(tuple(text_of(each).prompt_ids), each.output_tokens)
            for each in job.workload.requests
        }

    for kind in ("emulated", "torch"):
        for name in names:
            row = Row(name, kind, folder)
            if row.serve(expected):
                row.validate()
                row.kill()
            print(row.found, file=sys.stderr, flush=True)
            done.append(row)
    return done


def main() -> int:
    """Print the table; return 1 if a system does something else than it should."""
    with tempfile.TemporaryDirectory() as scratch:
        names = sys.argv[1:] or [*(system.name for system in systems()), *MORE]
        done = rows(names, Path(scratch))
    print(markdown_table(HEADS, [row.found for row in done]))
    return int(any(row.wrong for row in done))


if __name__ == "__main__":
    sys.exit(main())
