"""Serve every system of the papers from its own file with emulated and torch workers, and check it.

`make test-systems`; names as arguments: these alone. The deployment is the file's (stages, ranks,
engines, pools, policy); the trace is tiny, and for torch so are model and pages. Tokens of torch
must be those of transformers, and decisions must replay.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

from evenflow.types import Request
from experiments.systems import systems
from runtime.tokens import RandomTexts
from tests.command_line import evenflow, write_inputs
from tests.tiny_models import continued, save_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples" / "systems"
REFUSED = {"sglang"}
"""Its decodes run ahead of their last token, which no worker does."""

SHAPE = {"num_hidden_layers": 4, "vocab_size": 100}  # what four stages and four ranks divide


def serve(
    name: str, kind: str, folder: Path, expected: dict[int, list[int]]
) -> tuple[list[str], bool]:
    """Serve a system; return the cells of its row, and whether something is wrong."""
    out = folder / f"{name}-{kind}"
    keys = [f"workload={{trace: {folder / 'trace.csv'}, arrivals: offline}}", f"workers={kind}"]
    if kind == "torch":
        keys += [f"model={folder}", "workers.dtype=float32", "kv.pages=400", "max_model_len=256"]
    sets = [word for key in keys for word in ("--set", key)]
    status, _, errors = evenflow("run", str(EXAMPLES / f"{name}.yaml"), *sets, "--out", str(out))
    if status:
        return [errors.strip().splitlines()[-1], "", ""], name not in REFUSED
    completed = json.loads((out / "summary.json").read_text())["completed"]
    replays = evenflow("replay", str(out))[0] == 0
    right = completed == len(expected) and replays
    tokens = "made up"
    if kind == "torch":
        lines = gzip.decompress((out / "tokens.jsonl.gz").read_bytes()).decode().splitlines()
        found = {line["request_id"]: line["tokens"] for line in map(json.loads, lines)}
        right &= found == expected
        tokens = "equal" if found == expected else "NOT EQUAL"
    return [f"{completed} completed", tokens, "equal" if replays else "NOT EQUAL"], not right


def main() -> int:
    """Print the table; return 1 if a system writes other tokens, or does not replay."""
    wrong = False
    print("| system | workers | requests | tokens | replay |\n|---|---|---|---|---|")
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
            for kind in ("emulated", "torch"):
                cells, failed = serve(name, kind, folder, expected)
                print("| " + " | ".join([name, kind, *cells]) + " |", flush=True)
                wrong |= failed
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
