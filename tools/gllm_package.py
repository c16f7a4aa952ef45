"""Drives the scheduler of gLLM's published package over random loads, and records what it decides.

    python -m tools.gllm_package --package FOLDER [--runs 20] [--seed 0] [--out FOLDER]

FOLDER has the package `gllm-rt` unpacked; `make test-gllm` fetches 0.0.6.post1. Its scheduler,
sequences and page ids are the package's own; what they import beside these (communication, CUDA,
the model) is stood in for here. What is recorded is replayed at once with `variant: code`; the
exit code is 1 unless all of it is equal.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from evenflow.experiments.recordings import gllm
from evenflow.experiments.recordings.journal import Event, Replayer, replayed, world_of
from evenflow.schedulers.token_throttling import Variant
from tools.recordings import SUFFIX, arguments, drawn, refuse, release, write

PAGE_TOKENS = 16
DEPTHS = (1, 2, 4)
VARIANTS: tuple[Variant, ...] = ("code", "reading", "paper")


class Rotation:
    """Stands in for `random`: the package spreads the remainder of equation 4 by chance."""

    def __init__(self) -> None:
        self.calls = 0

    def randint(self, low: int, high: int) -> int:
        """Return each of low to high in turn."""
        self.calls += 1
        return low + (self.calls - 1) % (high - low + 1)


class Pages:
    """Stands in for the package's memory manager, over its own allocator of ids."""

    def __init__(self, allocator: Any, total: int) -> None:
        self.ids = allocator(0, total - 1)
        self.total = total

    def get_num_free_pages(self) -> int:
        return int(self.ids.get_num_free_ids())

    def get_memory_free(self) -> float:
        return self.get_num_free_pages() / self.total

    def pre_allocate_page(self, sequences: Sequence[Any]) -> None:
        for seq in sequences:
            while len(seq.page_table) * PAGE_TOKENS < seq.seq_len:
                seq.page_table.append(self.ids.allocate())

    def free(self, seq: Any) -> None:
        for page in seq.page_table:
            self.ids.free(page)


def _module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


@contextmanager
def package(folder: Path) -> Iterator[SimpleNamespace]:
    """Import what decides of the package in `folder`, without what needs a GPU."""
    gllm = _module("gllm", __path__=[str(folder / "gllm")])
    names = ("scheduler", "sequence", "id_allocator")
    log = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    kinds = {
        "transformers": ("PreTrainedTokenizer", "PreTrainedTokenizerFast"),
        "gllm.memory_manager": ("MemoryManager", "PrefixMemoryManager"),
        "gllm.model_runner": ("ModelRunner",),
    }
    stand_ins = {
        name: _module(name, **{kind: type(kind, (), {}) for kind in kinds[name]}) for name in kinds
    }
    stand_ins |= {
        "gllm": gllm,
        "logger": _module("logger", logger=log),
        "gllm.comm": _module("gllm.comm", IPCPackage=_sent),
        "gllm.dist_utils": _module("gllm.dist_utils", get_world_size=lambda: 1),
        "gllm.utils": _module("gllm.utils", unify_decode=None),
    }
    with patch.dict(sys.modules, stand_ins):
        yield SimpleNamespace(**{name: importlib.import_module(f"gllm.{name}") for name in names})


def _sent(_: object) -> SimpleNamespace:
    return SimpleNamespace(act_schedule_ids=[], next_tokens=[], free_ids=[])


class Driver:
    """The package's scheduler, asked and answered as its worker does, with a journal of it."""

    def __init__(self, modules: SimpleNamespace, config: Event) -> None:
        module = modules.scheduler
        module.random = Rotation()
        module.get_world_size = lambda: config["depth"]
        self.pages = Pages(modules.id_allocator.IDAllocator, config["pages"])
        runner = SimpleNamespace(
            memory_manager=self.pages,
            maxd=2048,
            maxp=config["max_prefill"],
            minp=config["min_prefill"],
            iterp=config["iterations"],
            kvthresh=config["kv_thresh"],
            page_size=PAGE_TOKENS,
            free=self.pages.free,
            use_mm=False,
        )
        self.make_sequence = modules.sequence.Sequence
        self.scheduler = module.Scheduler(config["depth"], runner, "token_throttling")
        self.scheduler.set_log(False)
        self.journal: list[Event] = [config]

    @property
    def in_flight(self) -> int:
        return len(self.scheduler.batch_running)

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.seqs_to_prefill or scheduler.seqs_to_decode)

    def add(self, request_id: int, prompt: int, output: int) -> None:
        """Let a request arrive."""
        seq = self.make_sequence(request_id, [1] * prompt, [], output, ignore_eos=True)
        self.scheduler.add_new_requests([seq])
        self.journal.append({"kind": "add", "id": request_id, "prompt": prompt, "output": output})

    def ask(self) -> bool:
        """Ask until a micro-batch comes or nothing changes; return whether anything did."""
        preempted: list[int] = []
        while True:
            decoding = list(self.scheduler.seqs_to_decode)
            rows = self.scheduler.schedule_once()
            left = {row.seq_id for row in [*rows, *self.scheduler.seqs_to_decode]}
            now = [seq.seq_id for seq in decoding if seq.seq_id not in left]
            preempted += now
            if rows or not now:
                break
        if not rows and not preempted and not self.in_flight:
            return False
        was_decoding = {seq.seq_id for seq in decoding}
        free = self.pages.get_num_free_pages()
        self.journal.append(
            {
                "kind": "ask",
                "decodes": [row.seq_id for row in rows if row.seq_id in was_decoding],
                "prefills": [
                    [row.seq_id, row.to_compute_token_num]
                    for row in rows
                    if row.seq_id not in was_decoding
                ],
                "preempted": sorted(preempted),
                "free": free,
            }
        )
        return True

    def take_back(self) -> None:
        """Let the oldest micro-batch return."""
        self.scheduler.add_next_tokens([0] * len(self.scheduler.batch_running[0]))
        self.scheduler.process_output()
        self.journal.append({"kind": "done"})


def config_of(rng: random.Random, depth: int, *, tight: bool) -> Event:
    """Draw the settings of a run; with a tight pool, decodes run out of pages."""
    return {
        "kind": "config",
        "depth": depth,
        "pages": rng.randint(60, 150) if tight else 4000,
        "page_tokens": PAGE_TOKENS,
        "iterations": rng.choice([1, 4, 8]),
        "max_prefill": rng.choice([64, 256, 2048]),
        "min_prefill": rng.choice([8, 32]),
        "kv_thresh": rng.choice([0.05, 0.1]),
    }


def record(
    modules: SimpleNamespace, config: Event, rng: random.Random, requests: int
) -> list[Event]:
    """Drive a random load to its end, or to where the package fails or waits for ever."""
    driver = Driver(modules, config)
    longest = rng.choice([100, 400])  # prompt; outputs are long where prompts are short
    arrivals = deque(
        (number, rng.randint(1, longest), rng.randint(1, 450 - longest))
        for number in range(requests)
    )
    often, busy = rng.choice([0.05, 0.2, 1.0]), rng.random()
    while arrivals or driver.has_work or driver.in_flight:
        while arrivals and (rng.random() < often or not (driver.has_work or driver.in_flight)):
            driver.add(*arrivals.popleft())
        if driver.has_work and driver.in_flight < config["depth"]:
            try:
                goes_on = driver.ask()
            except AssertionError:  # its own, when a prefill finds no page
                goes_on = False
            if not goes_on:
                driver.journal.append({"kind": "fails"})
                break
        if driver.in_flight == config["depth"] or (driver.in_flight and rng.random() > busy):
            driver.take_back()
    return driver.journal


def compare(modules: SimpleNamespace, options: argparse.Namespace, depth: int, pool: str) -> bool:
    """Record and replay runs of one depth and pool; print the shares, return if all is equal."""
    equal, batches = Counter[str](), 0
    differences: list[str] = []
    preemptions = failed = 0
    for run, rng in drawn(options, depth, pool):
        drawn_config = config_of(rng, depth, tight=pool == "tight")
        config = {**drawn_config, "engine": f"gllm-rt {release(options.package)}"}
        journal = record(modules, config, rng, options.requests)
        preemptions += sum(len(event.get("preempted", ())) for event in journal)
        failed += journal[-1]["kind"] == "fails"
        if options.out is not None:
            write(options.out / f"gllm-pp{depth}-{pool}-{run}{SUFFIX}", journal)
        batches += sum(bool(rows(event)) for event in journal)
        equal.update({variant: equal_batches(journal, variant) for variant in VARIANTS})
        difference = replayed(journal, replayer(journal)).difference
        differences += [difference] if difference else []
    part = 100 / max(batches, 1)
    shares = ", ".join(f"{variant} {part * equal[variant]:.1f} %" for variant in VARIANTS)
    print(
        f"{depth} stages, {pool}: {batches} micro-batches, "
        f"{preemptions} preemptions, {failed} of {options.runs} runs failed; equal: {shares}",
        flush=True,
    )
    for difference in differences[:1]:
        print(f"code differs first at {difference}")
    return not differences


def replayer(journal: Sequence[Event], variant: Variant = "code") -> Replayer:
    """Return a Batcher of ours with the settings of a journal, in a variant."""
    config, *events = journal
    world = world_of(gllm, Path(), [{**config, "variant": variant}, *events])
    return Replayer(gllm, world)


def equal_batches(journal: Sequence[Event], variant: Variant) -> int:
    """Count the micro-batches with the same rows and tokens in a variant, in any order.

    It goes on from its own state after one that differs.
    """
    ours, equal = replayer(journal, variant), 0
    for number, event in enumerate(journal[1:]):
        if event["kind"] != "ask":
            ours.feed(event, float(number))
            continue
        answer = gllm.rows_of(ours.ask(float(number)))
        equal += bool(rows(event)) and rows(event) == rows(answer)
    return equal


def rows(event: Event) -> list[list[int]]:
    """Return the rows of a micro-batch and the tokens of prompts, sorted."""
    decodes = [[number] for number in event.get("decodes", ())]
    return sorted([*decodes, *map(list, event.get("prefills", ()))])


def main() -> None:
    parser = arguments("Record gLLM's own decisions and replay them.", runs=20)
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the journals here")
    options = parser.parse_args()
    if options.package is None:
        refuse("--package: the package, unpacked; make test-gllm fetches it")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}")
    with package(options.package) as modules:
        equal = [
            compare(modules, options, depth, pool) for depth in DEPTHS for pool in ("calm", "tight")
        ]
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
