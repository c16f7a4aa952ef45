"""The bytes of what runs write, held: `make freeze` compares them with tests/freeze/frozen.json.

`make freeze-update` writes them anew and says which files moved, and by how much at most. Knows the
commands only, so that no change of the code behind them asks for a change here. Provenance, wall
clocks and pictures are left out. Floating point may differ by numpy's version: frozen for each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).parent.parent
INPUTS = ROOT / "tests" / "freeze"
FROZEN = INPUTS / "frozen.json"
FEW = (
    "--set run.workload.requests=60"
    " --set parameters={scheduler.iterations:[1,8],scheduler.kv_thresh:[0,0.2]}"
)
QUICK = {
    **{
        f"system-{path.stem}": f"simulate {path.relative_to(ROOT)} --out out"
        for path in sorted((ROOT / "examples" / "systems").glob("*.yaml"))
    },
    "quickstart": "simulate examples/quickstart.yaml --out out",
    "readme-policy": "simulate run.yaml --set scheduler=my_policy:ShortestFirst --out out",
    "compare": "compare examples/quickstart.yaml --schedulers token_throttling,vllm --out out"
    " --set workload.requests=100",
    "sweep": f"sweep examples/sweep/azure.yaml {FEW} --out out",
    "sweep-random": "sweep random.yaml --out out",
    "sweep-search": "sweep search.yaml --out out",
    "capacity": "capacity run.yaml --slo p99_ttft_ms=5000 --tolerance 0.1 --out out"
    " --set workload.requests=300",
    "replay": "replay journal",
}
WHOLE = {**QUICK, "figures": "figures --quick --out out"}

LEFT_OUT = {"provenance", "evenflow_version", "git_commit", "code_sha256", "host", "decision"}
"""Where results come from, and what a page says: its intervals are fitted by linear algebra."""

Files = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the bytes of now")
    parser.add_argument("--quick", action="store_true", help="without the figures")
    parser.add_argument("cases", nargs="*", help="default: all")
    args = parser.parse_args()
    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    known = frozen.get(np.__version__, {})
    cases = {
        k: v for k, v in (QUICK if args.quick else WHOLE).items() if k in (args.cases or WHOLE)
    }
    if not known and not args.update:
        print(f"nothing is frozen for numpy {np.__version__}: make freeze-update first")
        return 2
    moved = 0
    for case, command in cases.items():
        files = outputs_of(command)
        changes = list(differences(known.get(case, {}), files))
        moved += len(changes)
        print(f"{case}: {len(files)} files, {len(changes) or 'none'} moved", flush=True)
        for change in changes:
            print(f"  {change}", flush=True)
        known[case] = files
    if args.update:
        FROZEN.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**frozen, np.__version__: known}, indent=0, sort_keys=True)
        FROZEN.write_text(text + "\n", encoding="utf-8")
    return 1 if moved and not args.update else 0


def outputs_of(command: str, run: Callable[[Path, str], str] | None = None) -> Files:
    """Run a command in a folder of its own; return a hash and column means of what it wrote.

    `run` returns what the command prints in a folder; None: it is a process.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(INPUTS, folder, dirs_exist_ok=True)
        shutil.copytree(ROOT / "examples", folder / "examples")
        printed = (run or _process)(folder, command)
        if not (folder / "out").exists():
            return {"stdout": {"sha256": digest(printed.encode()), "means": {}}}
        return {
            str(path.relative_to(folder / "out")): frozen_file(path)
            for path in kept(folder / "out")
        }


def _process(folder: Path, command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "evenflow", *shlex.split(command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def kept(folder: Path) -> Iterable[Path]:
    """Return the tables and facts of a folder: no clocks, pages, pictures and stores of points.

    The words beside a figure's table (a .json).
    """
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        left_out = bool(
            {"store", "points", "wall_clock.json", "manifest.json"}.intersection(inside)
        )
        tells_of_a_table = path.suffix == ".json" and path.with_suffix(".csv").exists()
        if path.suffix in {".csv", ".json", ".md", ".yaml"} and not (left_out or tells_of_a_table):
            yield path


def frozen_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        facts = json.loads(path.read_text())
        facts = {key: value for key, value in facts.items() if key not in LEFT_OUT}
        means = {k: v for k, v in facts.items() if isinstance(v, int | float)}
        return {"sha256": digest(json.dumps(facts, sort_keys=True).encode()), "means": means}
    text, means = path.read_text(encoding="utf-8"), {}
    if path.suffix == ".csv" and text:
        table = pd.read_csv(path, dtype=str, keep_default_na=False).drop(
            columns="key", errors="ignore"
        )
        text = table.to_csv(index=False)
        numbers = pd.read_csv(path).select_dtypes("number").mean()
        means = {str(k): float(v) for k, v in numbers.items() if math.isfinite(v)}
    return {"sha256": digest(text.encode()), "means": means}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def differences(old: Files, new: Files) -> Iterable[str]:
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"{name}: not written any more"
        elif name not in old:
            yield f"{name}: new"
        elif old[name]["sha256"] != new[name]["sha256"]:
            yield f"{name}: means moved by {moved_by(old[name]['means'], new[name]['means'])}"


def moved_by(old: dict[str, float], new: dict[str, float]) -> str:
    """Say by which share the mean that moved most did."""
    shares = {k: abs(new[k] - old[k]) / max(abs(old[k]), 1e-300) for k in old.keys() & new.keys()}
    largest = max(shares, key=lambda name: shares[name], default=None)
    return "nothing" if largest is None else f"at most {shares[largest]:.2g} ({largest})"


if __name__ == "__main__":
    sys.exit(main())
