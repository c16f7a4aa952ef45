"""What it costs that a stage hears of a micro-batch with its activations, and prepares before it
computes: the gap on each micro-batch, with emulated stages and with torch on this CPU.

Run it from the repository, on a machine with nothing else to do: `python -m benchmarks.coupling`
takes about two minutes; `--out FOLDER` keeps gaps.csv there, and `--draw FILE` draws it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evenflow.config.run import RunConfig
from evenflow.report.plots import finish, key, panels, plain_decades
from evenflow.results.run import RunResult
from evenflow.runtime.real import real_workload, serve_job
from evenflow.study.runs import Job

MODES = {"ahead": "#0b5fa5", "with_activations": "#d9730d"}
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 2000,
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TORCH = {"kind": "torch", "weights": "random"}


def config_of(workers: dict[str, Any], folder: Path) -> RunConfig:
    """Return a run of two stages: 64 requests at once, up to 64 tokens a micro-batch."""
    given = {
        "model": str(folder / "config.json"),
        "stages": 2,
        "costs": {"kind": "affine", "base_s": 0.02, "per_token_s": 0.0},
        "kv": {"pages": 4000},
        "scheduler": {
            "name": "vllm_balanced",
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
            "async_scheduling": False,
        },
        "workload": {"trace": str(folder / "trace.csv"), "arrivals": "offline"},
        "max_model_len": 4096,
        "workers": workers,
    }
    return RunConfig.model_validate_json(json.dumps(given))


def gaps_ms(result: RunResult) -> Iterator[dict[str, float]]:
    """Yield each micro-batch's gap on the last stage: from when the stage before has computed it,
    and this one the micro-batch before it, until this one computes it.
    """
    made_s = np.maximum(result.end_s[1:, 0], result.end_s[:-1, 1])
    gap_s, takes_s = result.start_s[1:, 1] - made_s, result.end_s[1:, 1] - result.start_s[1:, 1]
    rows = result.prefill_tokens[1:] + result.decode_tokens[1:]
    for tokens, gap, takes in zip(rows.tolist(), gap_s.tolist(), takes_s.tolist(), strict=True):
        yield {"tokens": tokens, "gap_ms": 1e3 * gap, "stage_ms": 1e3 * takes}


def measured(folder: Path, rounds: int) -> pd.DataFrame:
    """Serve the same load `rounds` times in each mode, in turn, by both kinds of workers."""
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    lines = [f"{32 + 7 * number % 97},{40 + 5 * number % 41}\n" for number in range(64)]
    lengths = "num_prefill_tokens,num_decode_tokens\n" + "".join(lines)
    (folder / "trace.csv").write_text(lengths, encoding="utf-8")
    rows = []
    for kind in ({"kind": "emulated"}, TORCH):
        for number in range(rounds):
            for mode in MODES:
                config = config_of({**kind, "metadata": mode}, folder)
                served = serve_job(Job(config, real_workload(config, folder), folder))
                if served.failure is not None or served.interrupted:
                    raise SystemExit(served.failure or "interrupted")
                about = {"workers": kind["kind"], "metadata": mode, "round": number}
                about["wall_s"] = float(served.result.end_s.max() - served.result.start_s.min())
                rows += [about | row for row in gaps_ms(served.result)]
    return pd.DataFrame(rows)


def table(gaps: pd.DataFrame) -> pd.DataFrame:
    """Return median gaps with their P10 and P90, the range of the rounds' medians, and the stage's
    median."""
    lines = []
    for (workers, mode), some in gaps.groupby(["workers", "metadata"], sort=False):
        low, median, high = np.percentile(some.gap_ms, [10, 50, 90])
        rounds = some.groupby("round").gap_ms.median()
        walls = some.groupby("round").wall_s.first()
        lines.append(
            {
                "workers": workers,
                "metadata": mode,
                "micro-batches": len(some),
                "gap, median ms": round(median, 3),
                "P10 to P90": f"{low:.2f} to {high:.2f}",
                "medians of rounds": f"{rounds.min():.2f} to {rounds.max():.2f}",
                "stage, median ms": round(some.stage_ms.median(), 2),
                "gap / stage": f"{median / some.stage_ms.median():.1%}",
                "run s": f"{walls.min():.2f} to {walls.max():.2f}",
            }
        )
    return pd.DataFrame(lines)


def draw(gaps: pd.DataFrame, path: Path) -> None:
    """Draw the distribution of gaps between micro-batches, by mode and kind of workers."""
    figure, cells = panels(2, 4, 3.2)
    for axes, (kind, some) in zip(cells, gaps.groupby("workers"), strict=True):
        for mode, color in MODES.items():
            for _, each in some[some.metadata == mode].groupby("round"):
                shares = np.linspace(0, 100, len(each))
                axes.plot(np.sort(each.gap_ms), shares, color=color, alpha=0.8, lw=1.2)
            axes.plot([], [], color=color, label=f"metadata: {mode}")
        stage_ms = some.stage_ms.median()
        axes.set(xscale="log", xlabel="gap before a micro-batch on stage 1 (ms)", ylim=(0, 100))
        finish(axes, f"{kind} workers, a stage takes {stage_ms:.1f} ms")
        plain_decades(axes.xaxis)
    cells[0].set_ylabel("micro-batches (%)")
    key(cells[0])
    figure.savefig(path)


def main() -> None:
    """Print the table, with the load average before."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/coupling"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draw", type=Path, help="a picture of gaps.csv, which is not made anew")
    options = parser.parse_args()
    path = options.out / "gaps.csv"
    if options.draw is None:
        options.out.mkdir(parents=True, exist_ok=True)
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        measured(options.out, options.rounds).to_csv(path, index=False)
    gaps = pd.read_csv(path)
    print(table(gaps).to_string(index=False))
    if options.draw is not None:
        draw(gaps, options.draw)


if __name__ == "__main__":
    main()
