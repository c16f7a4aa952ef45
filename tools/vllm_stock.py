"""Serve a run's requests with vLLM and its own scheduler: what `evenflow run --engine vllm` is
compared with.

Writes a result as `vllm bench serve --save-detailed` does, and `generated_ids` beside it. Needs the
vLLM that `evenflow.runtime.vllm` asks for, in an environment of its own (`make test-vllm`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenflow.core.request import Request
from evenflow.runtime.front import TraceReplay
from evenflow.runtime.kinds import servable, workers_of
from evenflow.runtime.real import job_of
from evenflow.runtime.vllm import EngineWorkers, arguments


def served(run: Path, overrides: list[str]) -> dict[str, Any]:
    """Return what vLLM by itself makes of the requests of a run."""
    job = job_of(run, overrides, engine="vllm")
    built = job.built()
    world, workers = servable(built), workers_of(job.config, built, job.beside)
    assert isinstance(workers, EngineWorkers)
    assert workers.text_of is not None
    from evenflow.runtime.vllm.engine import VllmEngine

    tokens: dict[int, list[tuple[float, int]]] = defaultdict(list)
    front = TraceReplay(world.requests, world.concurrency)
    batcher, entered = world.batcher(), dict[int, float]()
    with VllmEngine(arguments(workers.engine, world), own_scheduler=True) as engine:
        started_s = time.monotonic()
        while front or engine.is_busy:
            now_s = time.monotonic() - started_s
            while (request := front.due(now_s)) is not None:
                if batcher.refusal(request) is None:
                    engine.add(request, workers.text_of(request))
                    entered[request.request_id] = request.arrival_s
            if not engine.is_busy:
                time.sleep(max(0.0, (front.next_s or now_s) - now_s))
                continue
            for part in engine.step().values():
                now_s = time.monotonic() - started_s
                for out in part.outputs:
                    tokens[int(out.request_id)] += [(now_s, each) for each in out.new_token_ids]
                    front.left(out.finish_reason is not None)
    requests = [request for request in world.requests if request.request_id in entered]
    return _detailed(requests, entered, tokens)


def _detailed(
    requests: list[Request], entered: dict[int, float], tokens: dict[int, list[tuple[float, int]]]
) -> dict[str, Any]:
    rows = [
        [entered[request.request_id], *(at_s for at_s, _ in tokens[request.request_id])]
        for request in requests
    ]
    last_s = max(row[-1] for row in rows)
    return {
        "duration": last_s - min(row[0] for row in rows),
        "completed": len(requests),
        "start_times": [row[0] for row in rows],
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [len(row) - 1 for row in rows],
        "ttfts": [row[1] - row[0] for row in rows],
        "itls": [[later - at_s for at_s, later in pairwise(row[1:])] for row in rows],
        "generated_ids": {
            request.request_id: [token for _, token in tokens[request.request_id]]
            for request in requests
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    options.out.write_text(json.dumps(served(options.run, options.set)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # else its extensions print what they leak


if __name__ == "__main__":
    main()
