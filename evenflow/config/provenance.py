"""Origin of a result: version, commit, configuration, trace, costs; apart, when it was made.

It reads clocks and starts git, which is why it is not in the core.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import evenflow
from evenflow.compiled import is_compiled
from evenflow.config.run import RunConfig
from evenflow.core import batcher
from evenflow.runtimes import RuntimeOverheads

SCHEMA_VERSION = 2
"""Raised when a key of summary.json or a column of a table changes its meaning or its name."""


def code_version() -> dict[str, Any]:
    """Return the running code: the version of its results, its own, and the commit."""
    return {
        "schema_version": SCHEMA_VERSION,
        "evenflow_version": evenflow.__version__,
        "git_commit": checkout_commit(),
    }


def provenance(
    config: RunConfig,
    trace: Mapping[str, Any],
    cost_source: Mapping[str, Any],
    host: RuntimeOverheads,
) -> dict[str, Any]:
    """Return what a run was made from, equal for two runs of one configuration on a host.

    `host`: the CPU time that the costs' profile measured.
    """
    return {
        **code_version(),
        "compiled": is_compiled(batcher.__name__),
        "setup": config.setup(),
        "config": config.resolved(),
        "config_sha256": config.digest(),
        "trace": dict(trace),
        "cost_source": dict(cost_source),
        "runtime": config.runtime_facts(host),
        "seed": config.workload.seed,
        "host": platform.node(),
    }


def wall_clock(seconds: float) -> dict[str, Any]:
    """Return what differs from run to run: the date, and the seconds the run took.

    It has a separate file, so that the others are the same bytes each time.
    """
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "wall_s": round(seconds, 3)}


@cache
def checkout_commit() -> str | None:
    """Return the commit the package runs from ("-dirty" with changes), None outside a checkout.

    It is asked once. What a process has imported stays as it is.
    """
    checkout = Path(evenflow.__file__).parent.parent
    if not (checkout / ".git").exists():
        return None  # an installed copy may lie inside the repository of someone else
    told = ("--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no")
    try:
        status = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), "status", *told],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.splitlines()
    except OSError:
        return None
    commit = next((line.split()[2] for line in status if line.startswith("# branch.oid ")), None)
    changed = any(not line.startswith("#") for line in status)
    return commit and commit + "-dirty" * changed
