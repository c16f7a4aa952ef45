"""Drives the scheduler of vLLM's last V0 engine over random loads, and compares its decisions.

    python -m tools.vllm_v0 --package FOLDER [--runs 60] [--seed 0]

FOLDER has the wheel of vLLM 0.6.6.post1 unpacked; `make test-vllm-v0` fetches it (200 MB). Its
scheduler, block manager and sequences are the package's own, without chunked prefills, on one
stage; what they import beside these is stood in for here. The policy `vllm` is asked in the same
steps; the exit code is 1 unless tokens and free pages of every step are equal.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import logging
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from evenflow.core.batcher import Batcher
from evenflow.core.request import Request
from evenflow.costs import AffineCost
from evenflow.experiments.recordings.journal import tokens_of
from evenflow.schedulers import create
from evenflow.sim import World
from tools.absent import AbsentFinder
from tools.recordings import arguments, drawn, refuse, release

VERSION = "0.6.6.post1"
STOOD_IN = (
    *("config", "inputs", "logger", "lora", "multimodal", "pooling_params", "prompt_adapter"),
    *("sampling_params", "spec_decode", "transformers_utils", "utils"),
)
"""Modules of the package that its scheduler imports and does not decide by; and torch."""


def _is_absent(name: str) -> bool:
    room, _, inner = name.partition(".")
    return room == "torch" or (room == "vllm" and inner.partition(".")[0] in STOOD_IN)


def _fill(module: Any) -> None:
    """Put into a module what the scheduler does decide by."""
    if module.__name__ == "vllm.logger":
        module.init_logger = logging.getLogger
    if module.__name__ == "vllm.utils":
        module.Device = Device
        module.cdiv = lambda ones, others: -(-ones // others)
        module.chunk_list = lambda all_, n: [all_[i : i + n] for i in range(0, len(all_), n)]
        module.Counter = type("Counter", (), {})
        module.PyObjectCache = _Cache


class Device(enum.Enum):
    """Where a page lies."""

    GPU, CPU = 1, 2


class _Cache:
    """Stands in for a cache of objects: each is made anew."""

    def __init__(self, make: Any) -> None:
        self.get_object = make

    def reset(self) -> None:
        pass


@contextmanager
def package(folder: Path) -> Iterator[SimpleNamespace]:
    """Import what decides of the package in `folder`, without what needs a GPU."""
    vllm = ModuleType("vllm")
    vllm.__path__ = [str(folder / "vllm")]
    finders = [AbsentFinder(_is_absent, _fill), *sys.meta_path]
    logging.disable(logging.CRITICAL)
    with patch.dict(sys.modules, {"vllm": vllm}), patch.object(sys, "meta_path", finders):
        names = {"scheduler": "vllm.core.scheduler", "sequence": "vllm.sequence"}
        modules = {name: importlib.import_module(path) for name, path in names.items()}
        vars(modules["sequence"])["SingletonInputsAdapter"] = _Inputs
        yield SimpleNamespace(**modules)


class _Inputs:
    """Stands in for the inputs of a sequence: its prompt."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt_token_ids = prompt
        self.prompt = None
        self.multi_modal_data = dict[str, object]()
        self.multi_modal_placeholders = dict[str, object]()
        self.mm_processor_kwargs = dict[str, object]()
        self.token_type_ids: list[int] = []


class Theirs:
    """The package's scheduler, asked and answered as its engine does on one stage."""

    def __init__(self, modules: SimpleNamespace, size: SimpleNamespace) -> None:
        self.modules, self.size, self.left = modules, size, dict[int, int]()
        scheduler = SimpleNamespace(
            max_num_batched_tokens=size.budget,
            max_num_seqs=size.seats,
            max_model_len=size.longest,
            policy="fcfs",
            runner_type="generate",
            preemption_mode=None,
            chunked_prefill_enabled=False,
            is_multi_step=False,
            num_lookahead_slots=0,
            num_scheduler_steps=1,
            delay_factor=0.0,
            send_delta_data=False,
        )
        cache = SimpleNamespace(
            num_gpu_blocks=size.pages,
            num_cpu_blocks=0,
            block_size=size.page_tokens,
            sliding_window=None,
            enable_prefix_caching=False,
            is_attention_free=False,
        )
        self.scheduler = modules.scheduler.Scheduler(scheduler, cache, None)
        self.blocks = self.scheduler.block_manager
        self.blocks.watermark_blocks = int(size.watermark * size.pages)

    def add(self, request: Request) -> None:
        number, sequence = request.request_id, self.modules.sequence
        sampling = SimpleNamespace(n=1, best_of=1, logprobs=None, prompt_logprobs=None)
        row = sequence.Sequence(number, [7] * request.prompt_tokens, self.size.page_tokens)
        group = sequence.SequenceGroup(
            str(number), [row], request.arrival_s, sampling_params=sampling
        )
        self.scheduler.add_seq_group(group)
        self.left[number] = request.output_tokens

    def step(self) -> tuple[dict[int, int], int]:
        """Return the tokens of each request in the next step, and the pages that are free then."""
        sequence, tokens = self.modules.sequence, {}
        _, outputs, _ = self.scheduler.schedule()
        free = int(self.blocks.get_num_free_gpu_blocks())
        for each in outputs.scheduled_seq_groups:
            group, number = each.seq_group, int(each.seq_group.request_id)
            tokens[number] = each.token_chunk_size
            group.update_num_computed_tokens(each.token_chunk_size)
            row = group.seqs[0]
            row.append_token_id(5, {5: sequence.Logprob(0.0)})
            self.left[number] -= 1
            if not self.left[number]:
                row.status = sequence.SequenceStatus.FINISHED_STOPPED
                self.scheduler.free_seq(row)
        self.scheduler.free_finished_seq_groups()
        return tokens, free


def size_of(rng: random.Random) -> SimpleNamespace:
    """Draw the settings of a run, which has few pages in two of three."""
    page_tokens = rng.choice([16, 16, 32])
    pages = rng.choice([rng.randint(10, 40), rng.randint(40, 120), 2000])
    longest = min(1024, (pages - 3) * page_tokens)
    return SimpleNamespace(
        page_tokens=page_tokens,
        pages=pages,
        longest=longest,
        seats=rng.choice([4, 16, 64, 256]),
        watermark=rng.choice([0.01, 0.01, 0.05, 0.0]),
        budget=max(longest, rng.choice([256, 2048])),
    )


def load_of(rng: random.Random, size: SimpleNamespace, requests: int) -> list[Request]:
    """Draw requests, whose times are steps."""
    most, outputs = rng.choice([(40, 150), (300, 20), (150, 60)])
    gap, at, load = rng.choice([0, 0, 1, 5]), 0, []
    for number in range(requests):
        at += rng.randint(0, 2 * gap)
        prompt = rng.randint(1, min(most, size.longest - 20))
        output = min(rng.randint(1, outputs), size.longest - prompt)
        load.append(Request(number, float(at), prompt, output))
    return load


def ours(size: SimpleNamespace, load: list[Request]) -> Batcher:
    """Return the engine that the policy `vllm` decides for."""
    keys = {
        "max_num_batched_tokens": size.budget,
        "max_num_seqs": size.seats,
        "watermark": size.watermark,
    }
    return World(
        load,
        lambda: create("vllm", keys),
        AffineCost(1.0, 0.0, 1),
        depth=1,
        total_pages=size.pages,
        page_tokens=size.page_tokens,
        max_model_len=size.longest,
    ).batcher()


def compared(modules: SimpleNamespace, rng: random.Random, requests: int) -> tuple[int, str]:
    """Return how many steps of a random load are equal, and the first that differs ("": none)."""
    size = size_of(rng)
    load = load_of(rng, size, requests)
    theirs, batcher, coming = Theirs(modules, size), ours(size, load), deque(load)
    steps = 0
    while coming or theirs.scheduler.has_unfinished_seqs():
        while coming and coming[0].arrival_s <= steps:
            theirs.add(coming[0])
            batcher.add(coming.popleft())
        batch = batcher.next(float(steps))
        expected, found = theirs.step(), (tokens_of(batch), batcher.pool.free_pages)
        if found != expected:
            return steps, f"{vars(size)}, step {steps}: {found}; vLLM {expected}"
        if batch is not None:
            batcher.complete(batch, float(steps))
        steps += 1
    return steps, ""


def main() -> None:
    parser = arguments("Compare the policy `vllm` with vLLM 0.6.6's own scheduler.", runs=60)
    parser.add_argument("--requests", type=int, default=40, help="of each run")
    options: argparse.Namespace = parser.parse_args()
    if options.package is None or release(options.package) != VERSION:
        refuse(f"--package: vLLM {VERSION}, unpacked; make test-vllm-v0 fetches it")
    print(f"seed {options.seed}")
    with package(options.package) as modules:
        found = [
            compared(modules, rng, options.requests) for _, rng in drawn(options, "vllm", "v0")
        ]
    unlike = [difference for _, difference in found if difference]
    print(
        f"{len(found) - len(unlike)} of {len(found)} loads equal, {sum(n for n, _ in found)} steps"
    )
    for difference in unlike[:1]:
        print(difference)
    sys.exit(bool(unlike))


if __name__ == "__main__":
    main()
