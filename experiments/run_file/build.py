"""Turn a checked configuration into what a simulation needs: requests, and the world they meet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenflow.schedulers import POOLED
from evenflow.types import Request
from experiments.run_file.build_pools import build_pools
from experiments.run_file.build_world import Built, build_world, find
from experiments.run_file.run import RunConfig
from traces import load_trace, make_requests, with_conversations


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, and which trace they are from (for the provenance).

    `texts`: their prompts, where a predictor may read them and the trace holds them.
    """

    requests: list[Request]
    trace: dict[str, Any]
    texts: Sequence[str] | None = None


def load_workload(config: RunConfig, beside: Path, *, keep_text: bool = False) -> Workload:
    """Load the trace and give its requests their arrival times.

    A relative path is looked for in the current folder, then in `beside`, the configuration's.
    `keep_text` keeps the prompts even where this configuration's scheduler reads none.
    """
    given = config.workload
    trace = load_trace(
        find(given.trace, beside),
        format=given.format,
        limit=given.requests,
        skip=given.skip,
        tokenizer=None if given.tokenizer is None else find(given.tokenizer, beside),
        filter=given.filter,
        seed=given.seed,
        keep_text=keep_text or reads_text(config),
    )
    if given.conversations:
        trace = with_conversations(trace)
    requests = make_requests(trace, given.arrivals.model_dump(), given.requests, given.seed)
    facts = ("name", "format", "path", "sha256", "rows_read", "dropped", "reordered")
    origin = {name: getattr(trace, name) for name in facts}
    if trace.path is not None:
        origin["path"] = given.trace  # as written: the same from whichever folder it was found
    return Workload(requests, origin, trace.texts)


def reads_text(config: RunConfig) -> bool:
    """Say whether the scheduler's predictor may read the prompts."""
    predictor = config.scheduler.params.get("predictor")
    return isinstance(predictor, dict) and predictor.get("kind") == "classifier"


def build(
    config: RunConfig, requests: list[Request], beside: Path, texts: Sequence[str] | None = None
) -> Built:
    """Return the world that a configuration describes; UsageError for what cannot be.

    `texts` are the prompts of the requests, where there are any and a predictor may read them.
    The policy is made once here, so that a mistake in its parameters is found before the run.
    """
    if config.scheduler.name in POOLED:
        return build_pools(config, requests, beside, texts)
    return build_world(config, requests, beside, texts)


def make_importable(*folders: Path) -> None:
    """Let `module:Class` name a policy in one of these folders; the first one wins."""
    for folder in reversed(folders):
        path = str(folder.resolve())
        if path not in sys.path:
            sys.path.insert(0, path)
