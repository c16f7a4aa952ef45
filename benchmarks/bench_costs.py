"""Measure microseconds per predicted micro-batch on four stages.

Run it from the repository: `python -m benchmarks.bench_costs`.
"""

from __future__ import annotations

import timeit
from itertools import cycle

from evenflow.costs import AffineCost, RooflineCost, StageCost, Work, decode_work, prefill_work
from evenflow.costs.base import Span
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model

CALLS = 200_000


def mixed_work(rows: int) -> Work:
    """Return a micro-batch of two prompt chunks and `rows` decodes."""
    return Work((Span(0, 384), Span(512, 1024)), 896, rows, rows * 1500, rows + 2)


WORKS = {
    "decode": [decode_work(rows, rows * 1500) for rows in range(1, 257)],
    "mixed": [mixed_work(rows) for rows in range(1, 257)],
    "prefill": [prefill_work(tokens, 256) for tokens in range(1, 2049)],
}


def microseconds(cost: StageCost, works: list[Work]) -> float:
    """Return the best of five means over CALLS calls, sizes taken in turn."""
    next_work = cycle(works).__next__
    loop = "for _ in range(calls): times(next_work())"
    names = {"times": cost.times, "next_work": next_work, "calls": CALLS}
    return min(timeit.repeat(loop, globals=names, number=1, repeat=5)) / CALLS * 1e6


def main() -> None:
    """Print one line per cost model and kind of micro-batch."""
    spec = model("Qwen2.5-32B")
    deployment = Deployment(spec, gpu("L20"), split_layers(spec.num_layers, 4))
    costs: dict[str, StageCost] = {
        "affine": AffineCost(0.005, 2e-5, 4),
        "roofline": RooflineCost(deployment),
    }
    for name, cost in costs.items():
        for kind, works in WORKS.items():
            print(f"{name:9} {kind:8} {microseconds(cost, works):6.2f} us")


if __name__ == "__main__":
    main()
