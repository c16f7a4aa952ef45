"""TD-Pipe's figure 16: when to end decode, its own rule against fixed shares of finished ones."""

from __future__ import annotations

from experiments.figures.study import Drawing, Study
from experiments.figures.tdpipe_switch import SHOWN, draw_variants, run_variants


def make(study: Study) -> Drawing:
    """Run TD-Pipe with decode that ends at each finished share of `study.ratios`, and its own."""
    fixed = {f"{ratio:.0%}": {"request_finish_ratio": ratio} for ratio in study.numbers["ratios"]}
    table = run_variants(study, fixed)
    label = "decode ends when this share of its requests has finished"
    return Drawing(draw_variants(table, label, study.gpus), table, SHOWN)
