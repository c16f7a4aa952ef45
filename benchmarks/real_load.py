"""Serve thousands of requests that are all there at once by emulated stages, in real time: what
the driver computes for a micro-batch, and how much memory its processes gain.

Run it from the repository: `python -m benchmarks.real_load`; it takes about a minute.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from evenflow.config.build import load_workload
from evenflow.config.run import RunConfig
from evenflow.runtime.real import serve_job
from evenflow.study.runs import Job

REQUESTS, ROWS = 5000, 256
CONFIG = {
    "stages": 4,
    "costs": {"kind": "affine", "base_s": 0.005, "per_token_s": 1e-6},
    "kv": {"pages": 200_000},
    "workers": "emulated",
    "scheduler": {
        "name": "sarathi",
        "token_budget": 2048,
        "max_num_seqs": 8 * ROWS,
        "max_batch_rows": ROWS,
    },
    "workload": {"trace": "azure-conv-sample", "requests": REQUESTS, "arrivals": "offline"},
}
MARKS = (0.1, 0.5, 0.9)
"""Shares of the requests done at which memory is read: after warm-up and before the end."""


def resident_mb() -> list[float]:
    """Return the memory of this process, then of its children by age, in MB."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    sizes = []
    for process in ("self", *children):
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return sizes


def main() -> None:
    """Print one line for the driver's work, and one for memory at each of MARKS."""
    config = RunConfig.model_validate_json(json.dumps(CONFIG))
    job = Job(config, load_workload(config, Path()), Path())
    due = [int(share * REQUESTS) for share in MARKS]
    memory: list[str] = []

    def on_done(count: int) -> None:
        while due and count >= due[0]:
            sizes = " ".join(f"{size:.1f}" for size in resident_mb())
            memory.append(f"{due.pop(0)} requests done: {sizes} MB (driver, then its children)")

    served = serve_job(job, on_done)
    rows = served.result.decode_tokens
    work_ms = 1e3 * np.asarray(served.heard.driver_s)
    full = int(0.9 * ROWS)
    for name, chosen in (("all", rows >= 0), (f"{full} decodes and more", rows >= full)):
        some = work_ms[chosen]
        median, p99 = np.percentile(some, [50, 99])
        print(
            f"{name}: {len(some)} micro-batches, the driver takes {some.mean():.3f} ms on average,"
            f" {median:.3f} at the median, {p99:.3f} at P99"
        )
    print(*memory, sep="\n")


if __name__ == "__main__":
    main()
