"""TD-Pipe's offline comparison: five systems on four L20, ratios beside the paper's, two figures.

    python -m experiments.tdpipe [--sweeps] [--requests N] [--figures DIR]

Reads the configurations in examples/tdpipe. Knows which numbers the paper gives; fits none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenflow.config import load_config
from evenflow.errors import UsageError
from experiments.build import load_workload
from experiments.runs import Job, Outcome, run_job
from experiments.tdpipe_figures import draw_kv_usage, draw_utilisation

EXAMPLES = Path("examples/tdpipe")
SYSTEMS = {
    "TP+SB": "tp-sb.yaml",
    "TP+HB": "tp-hb.yaml",
    "PP+SB": "pp-sb.yaml",
    "PP+HB": "pp-hb.yaml",
    "TD-Pipe": "td-pipe.yaml",
}
TD_PIPE = "TD-Pipe"

LARGEST_PUBLISHED = {"TP+SB": 1.91, "TP+HB": 1.90, "PP+SB": 2.73, "PP+HB": 2.21}
"""TD-Pipe over each on four GPUs, section 4.2: the largest over two GPUs and three models. The
paper's text gives no other ratios, so a smaller one here need not contradict it."""

PUBLISHED_OUTPUT_THROUGHPUT = 2642.68
PUBLISHED_SCALING = 2.97
PUBLISHED_STEALING = 1.14
"""TD-Pipe on L20 and 32B: output tokens/s on 4 (figure 13a), 4 GPUs over 2 (section 4.2), with over
without work stealing (figure 15a)."""

BASELINES = {
    "engines, 256": (),
    "one pool, 256": ("virtual_engines=false",),
    "engines, 1024": ("scheduler.max_num_seqs=1024",),
}
"""What the paper leaves open of its baselines, as overrides. vLLM 0.5 under PP runs an engine a
stage, each with its share of the KV and `max_num_seqs` of its own, 256 by default; the first entry
is that, and what examples/tdpipe holds. The others give all stages one scheduler, or more seats."""

OCCUPANCIES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
FINISH_RATIOS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.05)


def run_example(name: str, *overrides: str) -> Outcome:
    """Simulate a configuration of examples/tdpipe with `key=value` overrides."""
    path = EXAMPLES / name
    config = load_config(path, overrides)
    return run_job(Job(config, load_workload(config, path.parent), path.parent))


def throughput(outcome: Outcome) -> float:
    """Return output tokens/s from the first prefill to the last token."""
    return float(outcome.summary["offline_output_throughput"])


def table_of_systems(outcomes: Mapping[str, Outcome]) -> Table:
    """Return throughput, and what it comes from, of each system."""
    heads = ("output tok/s", "all tok/s", "stages busy", "evictions", "rejected", "wall s")
    table = Table("system", *heads, title="offline throughput")
    for label, outcome in outcomes.items():
        summary = outcome.summary
        table.add_row(
            label,
            f"{throughput(outcome):.0f}",
            f"{summary['offline_total_throughput']:.0f}",
            f"{summary['busy_share']:.0%}",
            str(summary["preemptions"]),
            str(summary["failed"]),
            f"{outcome.wall_s:.1f}",
        )
    return table


def table_of_ratios(best: Outcome, requests: str) -> Table:
    """Return TD-Pipe's throughput over each baseline's, under each reading of the baselines."""
    table = Table("TD-Pipe over", "paper, largest", *BASELINES, title="ratios")
    for label, published in LARGEST_PUBLISHED.items():
        rates = [
            throughput(run_example(SYSTEMS[label], requests, *overrides))
            for overrides in BASELINES.values()
        ]
        ratios = [f"{throughput(best) / rate:.2f}" for rate in rates]
        table.add_row(label, f"{published:.2f}", *ratios)
    return table


def table_of_claims(best: Outcome, requests: str) -> Table:
    """Return TD-Pipe's own numbers beside the paper's."""
    halved = throughput(run_example(SYSTEMS[TD_PIPE], requests, "stages=2"))
    sticky = throughput(run_example(SYSTEMS[TD_PIPE], requests, "scheduler.work_stealing=false"))
    rows = (
        ("output tok/s", PUBLISHED_OUTPUT_THROUGHPUT, throughput(best)),
        ("4 GPUs over 2", PUBLISHED_SCALING, throughput(best) / halved),
        ("with over without work stealing", PUBLISHED_STEALING, throughput(best) / sticky),
    )
    table = Table("TD-Pipe, L20 and 32B", "paper", "simulated", title="claims")
    for name, published, simulated in rows:
        table.add_row(name, f"{published:.5g}", f"{simulated:.4g}")
    return table


def table_of_sweeps(best: Outcome, requests: str) -> Table:
    """Return TD-Pipe's throughput under other switches and predictors, relative to its own."""
    others: Sequence[tuple[str, Sequence[Any], str]] = (
        ("figure 13", OCCUPANCIES, "scheduler.kv_occupancy_ratio={}"),
        ("figure 16", FINISH_RATIOS, "scheduler.request_finish_ratio={}"),
        ("predictor", ("mean", "{kind: noisy, accuracy: 0.52}"), "scheduler.predictor={}"),
        ("public code", ("code",), "scheduler.variant={}"),
    )
    table = Table("", "setting", "output tok/s", "over TD-Pipe", "evictions", title="sweeps")
    for name, values, override in others:
        for value in values:
            outcome = run_example(SYSTEMS[TD_PIPE], requests, override.format(value))
            rate, evictions = throughput(outcome), outcome.summary["preemptions"]
            setting = escape(override.format(value).removeprefix("scheduler."))
            relative = f"{rate / throughput(best):.3f}"
            table.add_row(name, setting, f"{rate:.0f}", relative, str(evictions))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--sweeps", action="store_true", help="also figures 13 and 16")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    chosen = parser.parse_args(arguments)
    if not EXAMPLES.is_dir():
        raise UsageError(f"no folder {EXAMPLES}: run it from the root of the repository")
    requests = f"workload.requests={chosen.requests}"
    console = Console(width=120)
    outcomes = {label: run_example(file, requests) for label, file in SYSTEMS.items()}
    console.print(table_of_systems(outcomes))
    console.print(table_of_ratios(outcomes[TD_PIPE], requests))
    console.print(table_of_claims(outcomes[TD_PIPE], requests))
    if chosen.sweeps:
        console.print(table_of_sweeps(outcomes[TD_PIPE], requests))
    results = {label: outcome.result for label, outcome in outcomes.items()}
    chosen.figures.mkdir(parents=True, exist_ok=True)
    draw_kv_usage(results[TD_PIPE], chosen.figures / "tdpipe_kv_usage.png")
    shown = {label: results[label] for label in ("PP+HB", TD_PIPE)}
    draw_utilisation(shown, chosen.figures / "tdpipe_utilisation.png")
    print(*sorted(chosen.figures.glob("tdpipe_*.png")), sep="\n")


if __name__ == "__main__":
    main()
