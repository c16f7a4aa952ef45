"""CPU seconds of vLLM's own engine core and model runner for a micro-batch, by what is in it.

    python -m tools.vllm_host --out FILE.csv [--rounds 3]

The engine core schedules for 1, 2, 4 and 8 emulated stages (`tools.vllm_engine`); the model runner
of one stage prepares the inputs of a model of two tiny layers. A row of the file is a micro-batch:
its rows, new requests, prompt tokens and admitted requests, and the seconds of its thread that each
part took. What a GPU adds, copies and launches, is in none. Needs what `tools.vllm_record` needs.
"""

from __future__ import annotations

import argparse
import csv
import os
import pickle
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tools.recordings import require
from tools.vllm_record import ENVIRONMENT, PACKAGE, VERSION

SEATS = (16, 64, 256, 1024)
LENGTHS = ((100, 40), (600, 20))
"""Prompt and output tokens."""
FIELDS = ("part", "stages", "seats", "rows", "new", "prompt_tokens", "active")
SPENT = ("schedule", "message", "update", "inputs", "outputs")
PARTS = {"runner": ((1,), 3), "core": ((1, 2, 4, 8), 4)}
"""Depths of each part, and how many of SEATS."""

Notes = list[dict[str, Any]]


class Clocked:
    """A mix-in for vLLM's scheduler that notes what its methods take."""

    notes: Notes = []  # noqa: RUF012

    def schedule(self: Any, *args: object, **options: object) -> Any:
        began_s = time.thread_time()
        output = super().schedule(*args, **options)  # type: ignore[misc]
        scheduled_s = time.thread_time()
        pickle.loads(pickle.dumps(output, protocol=5))
        counts = output.num_scheduled_tokens
        resumed = output.scheduled_cached_reqs
        decoding = {i for i, c in zip(resumed.req_ids, resumed.num_output_tokens, strict=True) if c}
        output.note = {
            "rows": len(counts),
            "new": len(output.scheduled_new_reqs),
            "prompt_tokens": sum(n for name, n in counts.items() if name not in decoding),
            "active": len(self.running),
            "schedule": scheduled_s - began_s,
            "message": time.thread_time() - scheduled_s,
        }
        return output

    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        began_s = time.thread_time()
        answer = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        note = {**scheduler_output.note, "update": time.thread_time() - began_s}
        if note["rows"]:
            self.notes.append(note)
        return answer


def served(
    stages: int, seats: int, prompt: int, output: int, *, real: bool
) -> list[dict[str, Any]]:
    """Serve twice as many requests as there are seats; return the notes of each micro-batch."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from tools.vllm_engine import Arrival, Setting, engine_of, serve

    class ClockedScheduler(Clocked, Scheduler):  # type: ignore[misc]
        notes: Notes = []  # noqa: RUF012

    setting = Setting(
        pp=stages,
        blocks=6000 if real else 22000,
        block_size=32,
        budget=2048,
        max_num_seqs=seats,
        watermark=0.0,
        prefix_caching=False,
        asynchronous="off",
        base_s=0.01,
        per_token_s=1e-5,
    )
    prompts = [[3 + place % 500 for place in range(prompt)]] * (2 * seats)
    arrivals = [Arrival(0.0, ids, output) for ids in prompts]
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(setting, Path(folder), ClockedScheduler, emulated=not real)
        if real:
            _clock(engine)
        serve(engine, arrivals)
    return ClockedScheduler.notes


def _clock(engine: Any) -> None:
    """Note what the model runner of an engine's only stage takes beside its model."""
    runner = engine.model_executor.driver_worker.worker.model_runner
    spent: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str) -> Callable[..., Any]:
        method = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                spent[name] += time.thread_time() - began_s

        setattr(owner, name, wrapped)
        return wrapped

    timed(runner, "_model_forward")
    timed(runner.model, "compute_logits")
    timed(runner, "_sample")
    execute, sample = timed(runner, "execute_model"), timed(runner, "sample_tokens")

    def execute_model(scheduler_output: Any, *args: Any, **options: Any) -> Any:
        spent.clear()
        answer = execute(scheduler_output, *args, **options)
        not_host_s = spent["_model_forward"] + spent["compute_logits"]
        scheduler_output.note["inputs"] = spent["execute_model"] - not_host_s
        runner.note = scheduler_output.note
        return answer

    def sample_tokens(*args: Any, **options: Any) -> Any:
        answer = sample(*args, **options)
        runner.note["outputs"] = spent["sample_tokens"] - spent["_sample"]
        return answer

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def measured(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each micro-batch of each load."""
    for number in range(rounds):
        for part, (depths, most) in PARTS.items():
            for stages, seats, lengths in product(depths, SEATS[:most], LENGTHS):
                for note in served(stages, seats, *lengths, real=part == "runner"):
                    yield {"part": part, "round": number, "stages": stages, "seats": seats, **note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    require(PACKAGE, VERSION, "test-vllm")
    os.environ.update(ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "4"})
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["round", *FIELDS, *SPENT])
        writer.writeheader()
        for row in measured(given.rounds):
            writer.writerow(row)
            file.flush()
    sys.stdout.flush()
    os._exit(0)  # else its extensions print what they leak


if __name__ == "__main__":
    main()
