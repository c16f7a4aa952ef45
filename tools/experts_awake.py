"""Print how many of DeepSeek-V3's experts decodes wake on the busiest of 8 ranks, from counts.

`python -m tools.experts_awake COUNTS.json`: `logical_count` has a row of 256 a layer, as SGLang's
issue 6017 (`decode_in1000out1000.json`, copied in github.com/GeneratedRandomly/SGLang-reproduce).
A token draws 4 of 8 groups by their best two experts, and 8 experts of these, by the counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenflow.report.tables import markdown_table

TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
RANKS, KEPT, CHOSEN, DRAWS = 8, 4, 8, 300


def awake(counts: NDArray[np.float64], tokens: int, rng: np.random.Generator) -> float:
    """Return the mean number of experts awake on the busiest rank, each of which has a group."""
    with np.errstate(divide="ignore"):  # an expert without tokens is never drawn
        score = np.log(counts) + rng.gumbel(size=(DRAWS * tokens, len(counts)))
    grouped = score.reshape(len(score), RANKS, -1)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    np.put_along_axis(grouped, np.argsort(best)[:, :-KEPT, None], -np.inf, axis=1)
    chosen = np.argpartition(-score, CHOSEN, axis=1)[:, :CHOSEN].reshape(DRAWS, -1)
    woken = np.zeros((DRAWS, len(counts)), dtype=bool)
    np.put_along_axis(woken, chosen, True, axis=1)
    return float(woken.reshape(DRAWS, RANKS, -1).sum(axis=2).max(axis=1).mean())


def main() -> None:
    counts = np.array(json.loads(Path(sys.argv[1]).read_text())["logical_count"], dtype=float)
    layers, rng = counts[counts.any(axis=1)], np.random.default_rng(0)
    rows = [(f"{n}", f"{np.mean([awake(each, n, rng) for each in layers]):.1f}") for n in TOKENS]
    print(markdown_table(["tokens", "experts awake"], rows))


if __name__ == "__main__":
    main()
