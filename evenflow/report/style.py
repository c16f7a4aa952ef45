"""Colours, dashes and formats that stay the same from picture to picture.

The colours are chosen by search. The colour-blind can distinguish them on white and on the dark
page, as `tests/report/test_palette.py` measures. Does not know what is drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

PREFILL, DECODE, BUSY, GRID = "#E69F00", "#56B4E9", "#D5DAE1", "#E9ECF0"
SCHEDULER_COLOURS = ("#0072B2", "#D55E00", "#8BD18B", "#74465D", "#A2B9FF", "#A22E2E", "#8B8B8B")
_TEXT = Path(__file__).with_name("causes.csv").read_text(encoding="utf-8")
CAUSE_LOOKS = {row["cause"]: row for row in csv.DictReader(_TEXT.splitlines())}
"""The colour of each cause of idle time, its words and what it means."""
CAUSE_COLOURS = {cause: row["colour"] for cause, row in CAUSE_LOOKS.items()}
BAND = 0.05
"""The share by which a prediction may be off within the grey band of a picture."""

DASHES = ("0", "9px,4px", "3px,3px", "9px,3px,2px,3px", "16px,4px", "6px,2px", "2px,6px")
NEUTRAL = "#7B8794"
PARTS = {"computing": BUSY, **CAUSE_COLOURS}
"""What the time of a stage goes to, and its colour."""
FORMATS: Mapping[str, Mapping[str, None]] = {
    "png": {"Software": None},
    "svg": {},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
"""Formats of saved figures, and the metadata that would make equal figures differ."""


def colour(index: int) -> str:
    """Return the colour of the run at position `index`."""
    return SCHEDULER_COLOURS[index % len(SCHEDULER_COLOURS)]


def dash(index: int) -> str:
    """Return the dashes of that run's line, for Plotly and SVG: colour is never the only mark."""
    return DASHES[index % len(DASHES)]


def blend(share: float) -> str:
    """Return the colour between DECODE (0) and PREFILL (1) for a share of prefill tokens."""
    ends = [[int(end[at : at + 2], 16) for at in (1, 3, 5)] for end in (DECODE, PREFILL)]
    mixed = (round(low + share * (high - low)) for low, high in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def faint(solid: str, share: float = 0.15) -> str:
    """Return a colour `#RRGGBB` made transparent but for a share, by default nearly."""
    red, green, blue = (int(solid[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"
