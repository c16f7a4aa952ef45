"""Real runs in which a worker stops, or dies and starts again, beside their simulations.

    nice -n -15 python benchmarks/real_faults.py [RUNS]

Four emulated workers, real processes, get SIGSTOP and SIGCONT, or are killed and started anew, by
the same process that joins the simulation. Prints a row a fault: mean TTFT and E2EL, simulated, and
the least and the most of the runs. Takes 20 s a run; the machine should do nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # workers import this module as they start
    from evenflow.study.runs import Job

REQUESTS = 20
FAULTS = {
    "none": {"name": "real_faults.py:nothing"},
    "worker 2 stopped at 5 s for 2 s": {"name": "real_faults.py:pause"},
    "killed at 5 s, back after 20 s": {"name": "real_faults.py:die"},
}


def nothing(world: Any) -> Iterator[Any]:
    """Wait, so that the run without a fault goes the same way."""
    yield world.env.timeout(1.0)


def pause(world: Any, at_s: float = 5.0, lasts_s: float = 2.0) -> Iterator[Any]:
    """Stop stage 2 for a while."""
    yield world.env.timeout(at_s)
    world.stages[2].stop(finish=True)
    yield world.env.timeout(lasts_s)
    world.stages[2].start()


def die(world: Any, at_s: float = 5.0, restart_s: float = 20.0) -> Iterator[Any]:
    """Let the engine die, and serve again."""
    yield world.env.timeout(at_s)
    world.replicas[0].fail(restart_s)


def job(folder: Path, fault: dict[str, Any]) -> Job:
    """Return a run of 20 requests, two a second, with micro-batches of 0.2 s and more."""
    import numpy as np

    from evenflow.config.run import RunConfig
    from evenflow.runtime.real import real_workload
    from evenflow.study.runs import Job

    rng = np.random.default_rng(1)
    times_s = np.cumsum(rng.exponential(0.5, REQUESTS))
    sizes = rng.integers(40, 200, REQUESTS), rng.integers(2, 12, REQUESTS)
    rows = (f"{at_s:.3f},{p},{out}" for at_s, p, out in zip(times_s, *sizes, strict=True))
    head = "arrived_at,num_prefill_tokens,num_decode_tokens"
    (folder / "trace.csv").write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    config = RunConfig.model_validate(
        {
            "stages": 4,
            "costs": {"kind": "affine", "base_s": 0.2, "per_token_s": 0.0005},
            "kv": {"pages": 1000},
            "scheduler": {"name": "sarathi", "token_budget": 128},
            "workers": {"kind": "emulated"},
            "workload": {"trace": str(folder / "trace.csv")},
            "processes": [fault],
        }
    )
    beside = Path(__file__).parent
    return Job(config, real_workload(config, beside), beside)


def main(runs: int) -> None:
    from evenflow.experiments.validation import validate

    with TemporaryDirectory() as folder:
        for name, fault in FAULTS.items():
            found = validate(job(Path(folder), fault), runs, REQUESTS).found
            cells = [name]
            for metric in ("mean_ttft_ms", "mean_e2el_ms"):
                line = found["end_to_end"][metric]
                keys = ("simulated", "calibrated", "least", "most")
                cells += [
                    "{:.3f} | {:.3f} | {:.3f} to {:.3f}".format(*(line[k] / 1e3 for k in keys))
                ]
            loads = [load for both in found["load"] for load in both]
            cells.append(f"load {min(loads):.1f} to {max(loads):.1f}")
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
