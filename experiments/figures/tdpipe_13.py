"""TD-Pipe's figure 13: when to end prefill, its own rule against fixed shares of the KV in use."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from experiments.figures.study import Drawing, Study
from experiments.figures.tdpipe_switch import (
    OUTPUT,
    OWN,
    SHOWN,
    draw_variants,
    run_variants,
)


def make(study: Study) -> Drawing:
    """Run TD-Pipe with prefill that ends at each occupancy of `study.ratios`, and its own."""
    fixed = {f"{ratio:.0%}": {"kv_occupancy_ratio": ratio} for ratio in study.numbers["ratios"]}
    table = run_variants(study, fixed)
    figure = draw_variants(table, "prefill ends when this share of the KV is held", study.gpus)
    return Drawing(figure, table, SHOWN, _claims(study, table))


def _claims(study: Study, table: pd.DataFrame) -> dict[str, Any]:
    own = table[(table.rule == OWN) & (table.pair == "L20 + Qwen2.5-32B")]
    return {"tdpipe-l20-32b": float(own[OUTPUT].mean()) if study.gpus == 4 else math.nan}
