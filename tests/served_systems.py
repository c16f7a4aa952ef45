"""Serve every system of the papers from its own file with tiny torch workers, and check it.

`make test-systems`; names as arguments: these alone. The deployment is the file's (stages, ranks,
engines, pools, policy); model, trace and pages are replaced. Tokens must be those of transformers,
and decisions must replay.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from evenflow.types import Request
from experiments.systems import systems
from runtime.tokens import RandomTexts
from tests.command_line import evenflow, write_inputs
from tests.tiny_models import continued, save_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples" / "systems"
SHAPE = {"num_hidden_layers": 4, "vocab_size": 100}  # what four stages and four ranks divide


def serve(name: str, folder: Path, expected: dict[int, list[int]]) -> tuple[str, bool]:
    """Serve a system; return a row of the table, and whether something is wrong."""
    out = folder / name
    keys = (
        f"model={folder}",
        f"workload={{trace: {folder / 'trace.csv'}, arrivals: offline}}",
        "workers={kind: torch, dtype: float32}",
        "kv.pages=400",
        "max_model_len=256",
    )
    sets = [word for key in keys for word in ("--set", key)]
    status, _, errors = evenflow("run", str(EXAMPLES / f"{name}.yaml"), *sets, "--out", str(out))
    if status:
        return f"| {name} | {errors.strip().splitlines()[-1]} | | |", status != 2
    lines = gzip.decompress((out / "tokens.jsonl.gz").read_bytes()).decode().splitlines()
    tokens = {line["request_id"]: line["tokens"] for line in map(json.loads, lines)}
    replays = evenflow("replay", str(out))[0] == 0
    facts: dict[str, Any] = json.loads((out / "summary.json").read_text())
    right = tokens == expected, replays
    words = " | ".join("yes" if each else "NO" for each in right)
    return f"| {name} | {facts['completed']} completed | {words} |", not all(right)


def main() -> int:
    """Print the table; return 1 if a system writes other tokens, or does not replay."""
    wrong = False
    print("| system | requests | tokens equal | replay equal |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_inputs(folder)
        model = save_checkpoint(folder, "llama", **SHAPE)
        requests = [Request(i, 0.0, 20 + 7 * i % 50, 1 + i % 5) for i in range(20)]
        text_of = RandomTexts(SHAPE["vocab_size"], seed=0)
        expected = {
            request.request_id: continued(model, text_of(request).prompt_ids, request.output_tokens)
            for request in requests
        }
        for name in sys.argv[1:] or [system.name for system in systems()]:
            row, failed = serve(name, folder, expected)
            print(row, flush=True)
            wrong |= failed
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
