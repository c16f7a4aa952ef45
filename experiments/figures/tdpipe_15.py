"""TD-Pipe's figure 15: decode with work stealing between its batches and without."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from experiments.figures.study import Drawing, Study
from experiments.figures.tdpipe_switch import SHOWN, draw_variants, run_variants

WITHOUT = "without"


def make(study: Study) -> Drawing:
    """Run TD-Pipe with batches that stay as they were split, and its own."""
    table = run_variants(study, {WITHOUT: {"work_stealing": False}})
    return Drawing(draw_variants(table, "work stealing", study.gpus), table, SHOWN, _claims(table))


def _claims(table: pd.DataFrame) -> dict[str, Any]:
    rows = table[(table.rule == WITHOUT) & (table.pair == "L20 + Qwen2.5-32B")]
    return {"tdpipe-stealing-l20": float((1 / rows.over_own).mean()) if len(rows) else math.nan}
