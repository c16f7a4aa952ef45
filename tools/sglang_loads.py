"""Records what SGLang's own scheduler decides about random small loads, or about given ones anew.

    python -m tools.sglang_loads --out FOLDER [--runs 60] [--seed 0]
    python -m tools.sglang_loads --again FOLDER

The journals have the form that `evenflow replay` reads; where prompts share tokens, NAME has its
prompts beside it in NAME-prompts. `--again` serves the arrivals of the journals in FOLDER with
their settings and compares line by line; it exits with 1 unless all of them are the same. It needs
an environment with SGLang 0.5.23 (`make test-sglang` makes one), but no GPU. `--package FOLDER`:
another release, unpacked, in its place.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

from tools.absent import AbsentFinder
from tools.recordings import (
    SUFFIX,
    Event,
    Prompts,
    arguments,
    drawn,
    read,
    refuse,
    release,
    require,
    write,
    write_prompts,
)

VERSION = "0.5.23"
LARGE = 20_000  # tokens of a pool that is never short


# -- stands in for packages that SGLang imports and a machine without a GPU lacks -----------------

ABSENT = ("IPython", "flashinfer", "gguf", "sgl_kernel", "soundfile", "torchvision")


def stand_in() -> None:
    """Let everything that is imported from now on find the packages of `ABSENT`."""
    importlib.import_module("transformers.image_utils")  # looks for a real torchvision
    sys.meta_path.insert(0, AbsentFinder(lambda name: name.partition(".")[0] in ABSENT))


# -- random loads ---------------------------------------------------------------------------------


def engine(wanted: str) -> ModuleType:
    """Import the recorder over the engine in this version, or exit with 2."""
    require("sglang", wanted, "test-sglang")
    try:
        stand_in()
        return importlib.import_module("tools.sglang_scheduler")
    except ImportError as error:
        refuse(f"{error.name} is not installed here: make test-sglang makes its environment")


def config_of(rng: random.Random) -> Event:
    """Draw the settings of a run; `tokens` is a small pool as often as a large one."""
    pp, tight = rng.choice([1, 1, 1, 2, 3, 4, 8]), rng.random() < 0.5
    page, running = rng.choice([1, 8, 16, 32, 64]), rng.choice([4, 8, 16, 32, 48, None])
    chunk = rng.choice([64, 128, 256, 512, 2048, None])
    each = 3 if running is None else max(running // pp, 1)
    conservativeness = rng.choice([0.3, 0.1, 0.05] if tight else [1.4, 1.0, 0.3])
    start = min(0.7 * conservativeness, 1.0)
    radix, mixed = rng.random() < 0.4, rng.random() < 0.35
    serves = rng.choice(["all", "all", "speculation", "prefill", "decode"]) if pp > 1 else "all"
    spec = {"k": rng.randint(1, 5), "acceptance": rng.choice([0.3, 0.7, 0.9]), "seed": 0}
    return {
        "kind": "config",
        "engine": f"sglang {VERSION}",
        "tokens": (rng.randint(600, 1500) if tight else LARGE) // page * page,
        "page_size": page,
        "max_running_requests": running,
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": rng.choice([16384, 16384, 320]),
        "prefill_max_requests": rng.choice([None, None, None, 1, 3]),
        "scheduler_recv_interval": rng.choice([1, 1, 1, 3, 10]) if serves == "all" else 1,
        "mixed_chunk": mixed and serves == "all" and chunk is not None,
        "speculative": spec if serves == "speculation" and page > 1 else None,
        "disaggregation_mode": serves if serves in ("prefill", "decode") else None,
        "num_reserved_decode_tokens": rng.choice([512, 64, 16]),
        "transfer_s": rng.choice([0.0, 0.01, 0.2]),
        "pp": pp,
        "pp_async_batch_depth": rng.choice([0, 0, 1, 2]) if pp > 1 else 0,
        "pp_max_micro_batch_size": rng.choice([None, each, 3]),
        "overlap": pp == 1 and rng.random() < 0.6,
        "radix": radix and serves != "decode",
        "schedule_policy": "lpm" if radix and rng.random() < 0.5 else "fcfs",
        "schedule_conservativeness": conservativeness,
        "init_new_token_ratio": start,
        "min_new_token_ratio": start * 0.14,
        "new_token_ratio_decay": (start - start * 0.14) / 600,
        "dynamic_chunking": rng.choice([None, [2e-05, 0.01, 20.0]]) if pp > 1 and chunk else None,
        "prefill_decode_interval": rng.choice([0, 0, 0, 2, 4]),
        "prefill_decode_interval_min_bs": 0,
        "context": 4096,
        "base_s": rng.choice([0.02, 0.005]),
        "per_token_s": rng.choice([1e-05, 1e-04]),
        "t": 0.0,
    }


def load_of(rng: random.Random, config: Event) -> tuple[list[Event], Prompts]:
    """Draw requests in the order of their arrival, and their tokens where prompts share some."""
    longest = min(rng.choice([40, 300, 1500]), config["tokens"] // rng.choice([2, 3]))
    outputs, most = rng.choice([20, 120]), rng.choice([128, 200, None])
    exact = rng.choice([0.0, 0.0, 0.3, 1.0])  # of clients ask for their length and no end token
    if config["tokens"] < LARGE and rng.random() < 0.6:
        longest, outputs, most, exact = 40, 150, 200, 0.0  # many start, and then all of them grow
    gap_s = rng.choice([0.0, 0.01, 0.1])
    opening = [_tokens(rng, longest // 4) for _ in range(2)]
    histories: list[list[int]] = []
    requests, prompts, at = [], {}, 0.0
    for number in range(rng.choice([15, 25, 40, 160 if longest <= 60 else 40])):
        at += rng.expovariate(1 / gap_s) if gap_s else 0.0
        if rng.random() < 0.02:
            at += 30.0  # long enough to run empty
        output = rng.randint(1, outputs)
        turn = rng.randrange(len(histories)) if histories and rng.random() < 0.6 else None
        before = rng.choice(opening) if turn is None else histories[turn]
        prompt = before + _tokens(rng, rng.randint(1, longest // (1 if turn is None else 8) + 1))
        prompt = prompt[: config["tokens"] * 3 // 4]
        histories.append([*prompt, *[7] * (output - 1), 2])
        ignore = rng.random() < exact
        max_new = output if ignore or most is None else max(output, most)
        requests.append(
            {
                "id": number,
                "at": at,
                "prompt": len(prompt),
                "output": output,
                "max_new": max_new,
                "ignore_eos": ignore,
            }
        )
        prompts[number] = prompt
    return requests, prompts if config["radix"] else {}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(10, 499) for _ in range(count)]


def record(
    recorder: ModuleType, config: Event, requests: Iterable[Event], prompts: Prompts
) -> list[Event]:
    """Serve requests with the settings of `config` and return the journal."""
    with tempfile.TemporaryDirectory() as model:
        journal = recorder.RecordedScheduler(config, Path(model), requests, prompts).serve()
    return [config, *journal]


def prompts_of(path: Path) -> Prompts:
    """Return the tokens of a journal's prompts, of its own file or of its family's."""
    names = (path.name.removesuffix(SUFFIX), path.name.partition("-")[0])
    files = [path.with_name(f"{name}-prompts{SUFFIX}") for name in names]
    found = next((file for file in files if file.exists()), None)
    return {} if found is None else {event["id"]: event["prompt"] for event in read(found)}


def again(recorder: ModuleType, paths: Iterable[Path]) -> bool:
    """Record the loads of journals anew; return whether every line is the same."""
    differing = 0
    for path in paths:
        journal = read(path)
        requests = [event for event in journal if event["kind"] == "add"]
        anew = record(recorder, journal[0], requests, prompts_of(path))
        pairs = zip_longest(journal, anew)
        differs = next((number for number, (was, now) in enumerate(pairs, 1) if was != now), None)
        differing += differs is not None
        what = "the same" if differs is None else f"line {differs} is another"
        print(f"{path.name}: {len(anew)} lines, {what}", flush=True)
    return not differing


def main() -> None:
    parser = arguments("Record SGLang's own decisions.")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, metavar="FOLDER", help="write random recordings here")
    task.add_argument("--again", type=Path, metavar="FOLDER", help="record these journals anew")
    options = parser.parse_args()
    if options.package is not None:
        sys.path.insert(0, str(options.package))
    recorder = engine(VERSION if options.package is None else release(options.package))
    logging.disable(logging.CRITICAL)
    if options.again is not None:
        files = sorted(options.again.glob(f"*{SUFFIX}"))
        journals = [path for path in files if "chunked_prefill_size" in read(path)[0]]
        if not journals:
            refuse(f"{options.again}: no journals of SGLang (*{SUFFIX})")
        sys.exit(not again(recorder, journals))
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}", flush=True)
    for run, rng in drawn(options):
        config = config_of(rng) | {"engine": f"sglang {version('sglang')}"}
        requests, prompts = load_of(rng, config)
        path = options.out / f"sglang-{run:03}{SUFFIX}"
        try:
            write(path, record(recorder, config, requests, prompts))
        except RuntimeError as error:  # the engine gets nowhere
            print(f"{path.name} is left out: {error}", file=sys.stderr, flush=True)
            continue
        write_prompts(path, prompts)


if __name__ == "__main__":
    main()
