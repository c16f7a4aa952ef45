"""All that is to be measured on a GPU machine, as one command that runs anywhere.

    python -m tools.gpu_report --device cuda --out gpu-report

For each model: a profile of its layer shapes, and how far predictions from it are off on random
micro-batches. Then: greedy tokens on the device against those on the CPU. Needs torch and numpy,
neither an installation nor a network. Where a run's packages are there too: layers of the first
model served with 1, 2 and 4 stages in each mode, and the validation of three policies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from evenflow.errors import UsageError
from profiler import Settings, check_profile, require_device
from profiler.check import errors_table
from profiler.machine import device_name
from tools.gpu_runtime import (
    SMALL,
    Scale,
    missing_packages,
    serve_and_validate,
    small_checkpoint,
)
from tools.gpu_silicon import compare

MODELS = ("Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-8B")


def report(
    models: Sequence[str], out: Path, settings: Settings, batches: int, scale: Scale
) -> dict[str, Any]:
    """Measure each model, `settings.minutes` each, into `out`; serve the first; return all."""
    require_device(settings.device)
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": device_name(settings.device), "models": {}}
    for name in models:
        found["models"][name] = _measure(name, out, settings, batches)
    found["tokens_equal"] = tokens_equal(settings.device, small_checkpoint(out))
    found["runtime"] = _serve(out, models[0], found["models"][models[0]]["profile"], scale)
    (out / "report.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def _serve(out: Path, name: str, profile: str, scale: Scale) -> dict[str, Any]:
    missing = missing_packages()
    if missing:
        line = f"needs {', '.join(missing)}: bring them as wheels (pip download, pip install)"
        print(f"serving and validation are left out: {line}", flush=True)
        return {"left_out": line}
    return serve_and_validate(out, scale, name, out / profile)


def _measure(name: str, out: Path, settings: Settings, batches: int) -> dict[str, Any]:
    from runtime.torch.timed import profile_model, timed_stage

    path = out / f"{Path(name).stem}.csv.gz"
    began_s = perf_counter()
    profile = profile_model(name, path, settings)
    measured_s = perf_counter() - began_s
    rows = check_profile(path, timed_stage, batches=batches, layers=settings.layers)
    print(f"{name}: {profile.header.grid}\n{errors_table(rows)}\n", flush=True)
    return {
        "profile": path.name,
        "points": len(profile.points),
        "seconds": measured_s,
        "check_seconds": perf_counter() - began_s - measured_s,
        "errors": [row._asdict() for row in rows],
        "silicon": compare(name, path),
    }


def tokens_equal(device: str, folder: Path, new_tokens: int = 32) -> bool:
    """Say whether a checkpoint in float32 gives the same greedy tokens as on the CPU."""
    from runtime.torch.timed import greedy_tokens
    from runtime.torch.weights import load_stage

    prompt = list(range(100, 140))
    stages = (load_stage(folder, 0, SMALL.num_layers, device=where) for where in ("cpu", device))
    expected, found = (greedy_tokens(stage, prompt, new_tokens) for stage in stages)
    return expected == found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder to write")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each model's profile")
    parser.add_argument("--batches", type=int, default=100, help="random micro-batches to check")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names, or config.json files")
    parser.add_argument("--max-tokens", type=int, help="of a chunk; default: the device's")
    parser.add_argument("--max-rows", type=int, help="decodes; default: the device's")
    parser.add_argument("--max-context", type=int, help="of a row; default: the device's")
    parser.add_argument("--requests", type=int, default=200, help="to serve, in each mode")
    parser.add_argument("--context", type=int, default=2048, help="most tokens of a request")
    parser.add_argument("--layers", type=int, default=8, help="of the model that is served")
    parser.add_argument("--runs", type=int, default=2, help="of each validation")
    parser.add_argument("--stages", type=int, nargs="+", default=(1, 2, 4), help="to serve with")
    given = parser.parse_args(arguments)
    settings = Settings(
        given.device,
        given.minutes,
        max_tokens=given.max_tokens,
        max_rows=given.max_rows,
        max_context=given.max_context,
    )
    try:
        scale = Scale(
            given.device, given.requests, given.context, given.layers, given.runs, given.stages
        )
        found = report(given.models, given.out, settings, given.batches, scale)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"tokens on {given.device} equal those on the CPU: {found['tokens_equal']}")
    print(given.out / "report.json")
    return 0 if found["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
