"""The table of docs/validation.md in which real vLLM serves with each policy, beside the simulator.

    make vllm-table

Two stages on this machine's CPU. A stage's seconds are those of vLLM's own micro-batches in a run
that is not scored, of other requests in a closed loop. Each policy, and vLLM as it is, then serves
the same requests in turn, round after round. Needs the vLLM that `evenflow.runtime.vllm` asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import numpy as np
import pandas as pd

from evenflow.experiments.reproduce.forms import read_results
from evenflow.report.tables import markdown_table

ROOT = Path(__file__).parent.parent
SHAPE = ROOT / "examples" / "validate" / "small-llama" / "config.json"
STOCK = "vLLM 0.32.0 by itself"
BUDGET = 256
CALIBRATED = 160
IN_STEP = f"max_num_batched_tokens: {BUDGET}, async_scheduling: false"
POLICIES = {
    STOCK: f"{{name: vllm_v1, {IN_STEP}}}",
    "vllm_balanced": f"{{name: vllm_balanced, share: decodes, {IN_STEP}}}",
    "sarathi": f"{{name: sarathi, token_budget: {BUDGET}}}",
    "token_throttling": f"{{name: token_throttling, max_prefill: {BUDGET}, min_prefill: 16}}",
    "td_pipe": "{name: td_pipe}",
}
METRICS = {
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "TTFT mean (ms)",
    "mean_tpot_ms": "TPOT mean (ms)",
    "mean_e2el_ms": "E2EL mean (ms)",
}
HEADS = ("who decides", "metric", "measured", "spread", "simulated", "error", "load averages")
Numbers = dict[str, float]


class Bench:
    """One machine's runs in one folder: `rate` requests a second, `requests` of them."""

    def __init__(self, folder: Path, requests: int, rate: float) -> None:
        self.folder = folder
        self.run = folder / "RUN.yaml"
        self._requests, self._rate = requests, rate
        self._began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Return how long all of it has taken."""
        return time.monotonic() - self._began_s

    def prepare(self, layers: int) -> str:
        """Write the model and the run, with costs of a run that is not scored; say which."""
        shape = json.loads(SHAPE.read_text())
        (self.folder / "model").mkdir(parents=True)
        config = json.dumps(shape | {"num_hidden_layers": layers})
        (self.folder / "model" / "config.json").write_text(config)
        rng = np.random.default_rng(0)
        lengths = rng.lognormal((3.8, 3.0), 0.7, (self._requests + CALIBRATED, 2)).clip(5, 256)
        rows = "".join(f"0,{prompt:.0f},{output:.0f}\n" for prompt, output in lengths)
        head = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
        (self.folder / "trace.csv").write_text(head + rows)
        self._write("{kind: affine, base_s: 0.01, per_token_s: 3.0e-4}")
        self.say(f"measuring micro-batches: {CALIBRATED} requests in a closed loop")
        other = (f"workload.skip={self._requests}", f"workload.requests={CALIBRATED}")
        how = (
            f"scheduler={POLICIES['sarathi']}",
            "workload.arrivals={kind: closed, concurrency: 24}",
        )
        self.evenflow("run", "RUN.yaml", "--out", "calibrated", *_sets(*other, *how))
        base_s, per_token_s, off, count = fitted(
            pd.read_csv(self.folder / "calibrated/batches.csv")
        )
        self._write(f"{{kind: affine, base_s: {base_s}, per_token_s: {per_token_s}}}")
        return (
            f"Costs: {1e3 * base_s:.2f} ms a stage and {1e6 * per_token_s:.1f} us a token, of "
            f"{count} micro-batches of a full pipeline; half of them are less than {off:.1%} off."
        )

    def _write(self, costs: str) -> None:
        self.run.write_text(
            f"model: model\nstages: 2\ncosts: {costs}\ndispatch: engine_loop\n"
            "kv: {pages: 600, page_tokens: 32}\nmax_model_len: 512\n"
            "workers: {kind: vllm, dtype: float32, weights: random, max_num_batched_tokens: 2048}\n"
            f"scheduler: {POLICIES[STOCK]}\nworkload: {{trace: trace.csv, "
            f"requests: {self._requests}, arrivals: {{kind: poisson, rate: {self._rate}}}}}\n"
        )

    def evenflow(self, *arguments: object) -> str:
        """Return what a command prints; SystemExit with what it complains of."""
        return self._python("evenflow", *arguments)

    def stock(self, name: str) -> Numbers:
        """Have vLLM decide by itself; return what came of it."""
        limit = _sets(f"workers.max_num_batched_tokens={BUDGET}")
        self._python("tools.vllm_stock", "RUN.yaml", "--out", f"{name}.json", *limit)
        (run,) = read_results(self.folder / f"{name}.json")
        return {metric: run.metrics[metric] for metric in METRICS}

    def real(self, policy: str, round_: int) -> Numbers:
        """Have vLLM serve with a policy; return what came of it."""
        name = f"{policy.split(maxsplit=1)[0]}-{round_}"
        if policy == STOCK:
            return self.stock(name)
        self.evenflow("run", "RUN.yaml", "--out", name, *_sets(f"scheduler={POLICIES[policy]}"))
        return self._summary(name)

    def simulated(self, policy: str) -> Numbers:
        """Return what the simulator says of a policy."""
        name = f"{policy.split(maxsplit=1)[0]}-simulated"
        setting = _sets(f"scheduler={POLICIES[policy]}")
        self.evenflow("simulate", "RUN.yaml", "--out", name, *setting)
        return self._summary(name)

    def say(self, words: str) -> None:
        """Print where it is."""
        load = os.getloadavg()[0]
        print(f"{self.elapsed_s:5.0f} s, load {load:4.1f}: {words}", flush=True)

    def _summary(self, name: str) -> Numbers:
        summary = json.loads((self.folder / name / "summary.json").read_text())
        return {metric: float(summary[metric]) for metric in METRICS}

    def _python(self, module: str, *arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "leaked" not in line]
            raise RuntimeError("\n".join(lines[-8:]))
        return done.stdout


def fitted(batches: pd.DataFrame) -> tuple[float, float, float, int]:
    """Return the seconds of a stage and of each token in it, by least squares.

    They are those between two micro-batches that come back from a full pipeline, the second not
    the larger: it does not keep the last stage waiting. On one machine both stages share memory
    and caches, so what a stage takes while the other rests would be too little. The median of the
    relative errors is returned too, and how many micro-batches there were.
    """
    batches = batches.sort_values("returned_s")
    scheduled_s, back_s = batches.scheduled_s.to_numpy(), batches.returned_s.to_numpy()
    tokens = (batches.prefill_tokens + batches.decode_tokens).to_numpy()
    full = (scheduled_s[1:] < back_s[:-1]) & (tokens[1:] <= tokens[:-1])
    took_s, sizes = np.diff(back_s)[full], np.column_stack([np.ones(full.sum()), tokens[1:][full]])
    (base_s, per_token_s), *_ = np.linalg.lstsq(sizes, took_s, rcond=None)
    off = np.median(abs(sizes @ [base_s, per_token_s] / took_s - 1))
    return float(base_s), float(per_token_s), float(off), len(took_s)


def _sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def rows(
    policy: str, real: list[Numbers], loads: list[float], simulated: Numbers
) -> Iterator[list[str]]:
    """Yield the rows of a policy in the table."""
    told = ", ".join(f"{load:.1f}" for load in loads)
    for metric, name in METRICS.items():
        values = [numbers[metric] for numbers in real]
        measured, ours = mean(values), simulated[metric]
        spread, error = (max(values) - min(values)) / measured, ours / measured - 1
        cells = f"{measured:,.1f}", f"{spread:.1%}", f"{ours:,.1f}", f"{error:+.1%}"
        yield [policy, name, *cells, told]


def table(bench: Bench, rounds: int, limit_s: float) -> str:
    """Serve with every policy in turn, `rounds` times if `limit_s` bears it; return the table."""
    real: dict[str, list[Numbers]] = {policy: [] for policy in POLICIES}
    loads: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    refused: dict[str, str] = {}
    longest_s = 0.0
    for round_ in range(rounds):
        began_s = bench.elapsed_s
        if began_s + longest_s > limit_s:
            break
        for policy in POLICIES:
            if policy in refused:
                continue
            bench.say(f"round {round_ + 1} of {rounds}, {policy}")
            try:
                real[policy].append(bench.real(policy, round_))
            except RuntimeError as error:
                refused[policy] = str(error).splitlines()[-1]
                bench.say(refused[policy])
            loads[policy].append(os.getloadavg()[0])
        longest_s = max(longest_s, bench.elapsed_s - began_s)
    lines: list[list[str]] = []
    for policy in POLICIES:
        if policy in refused:
            lines.append([policy, f"refused: {refused[policy]}", *[""] * (len(HEADS) - 2)])
        else:
            lines += rows(policy, real[policy], loads[policy], bench.simulated(policy))
    return markdown_table(HEADS, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="no round is to end later")
    options = parser.parse_args()
    bench = Bench(options.out.resolve(), options.requests, options.rate)
    costs = bench.prepare(options.layers)
    text = table(bench, options.rounds, options.limit_s)
    cores, day = os.cpu_count(), datetime.now(UTC).date()
    head = (
        f"{options.requests} requests at {options.rate:g} a second, two stages of "
        f"{options.layers // 2} layers, {cores} cores ({platform.machine()}), {day}. {costs}\n\n"
    )
    (bench.folder / "table.md").write_text(head + text, encoding="utf-8")
    bench.say(f"{bench.folder / 'table.md'}\n{head}{text}")


if __name__ == "__main__":
    main()
