"""What to know of a run before the first long one: its mistakes, and whether its seed matters."""

from __future__ import annotations

from pathlib import Path

from evenflow.errors import UsageError
from experiments.run_file.build import Workload
from experiments.run_file.run import RunConfig
from experiments.runs import Job, Outcome, run_job
from traces import SAMPLE_NAMES


def dry_run(config: RunConfig, workload: Workload, beside: Path) -> Outcome:
    """Simulate the two smallest requests of a workload; UsageError if neither can be served."""
    outcome = run_job(Job(config, _smallest(workload), beside))
    if not outcome.summary["completed"]:
        why = outcome.result.reason[0]
        raise UsageError(f"workload: none of its requests can be served: the smallest: {why}")
    return outcome


def seed_matters(config: RunConfig) -> bool:
    """Say whether another seed gives another run: something of it is drawn."""
    return (
        config.workload.trace in SAMPLE_NAMES
        or config.workload.arrivals.kind not in ("replay", "offline", "closed")
        or config.speculative is not None
        or "predictor" in config.scheduler.params
    )


def _smallest(workload: Workload) -> Workload:
    sizes = [request.prompt_tokens + request.output_tokens for request in workload.requests]
    places = sorted(sorted(range(len(sizes)), key=sizes.__getitem__)[:2])
    texts = None if workload.texts is None else [workload.texts[place] for place in places]
    return Workload([workload.requests[place] for place in places], workload.trace, texts)
