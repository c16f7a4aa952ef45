"""The palette: colours that meet in one picture can be told apart, by the colour-blind too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import yaml

from evenflow.report.style import DECODE, PARTS, PREFILL, SCHEDULER_COLOURS
from evenflow.report.words import cause_label
from tests.places import ROOT

SIGHT = {
    "usual": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
"""What is seen of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1."""
PAGES = ["#FFFFFF", "#14181D"]
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def lab(shade: str, sight: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* (D65) of `#RRGGBB` as it is seen."""
    sent = np.array([int(shade[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(sent <= 0.04045, sent / 12.92, ((sent + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(TO_XYZ @ np.clip(sight @ linear, 0, 1) / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(shades: list[str], sight: np.ndarray) -> float:
    """Return the least CIE 1976 distance between two of the colours; 2.3 is just noticed."""
    seen = [lab(shade, sight) for shade in shades]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


def test_distances_are_those_of_the_definition() -> None:
    assert lab("#FFFFFF", SIGHT["usual"]) == pytest.approx([100, 0, 0], abs=0.01)
    assert nearest(["#FFFFFF", "#777777"], SIGHT["usual"]) == pytest.approx(50, abs=0.2)
    red, green = "#CC6677", "#7F8A5F"
    assert nearest([red, green], SIGHT["deuteranopia"]) < nearest([red, green], SIGHT["usual"])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    ("meet", "least"),
    [([*PARTS.values(), PREFILL, DECODE, *PAGES], 13), ([*SCHEDULER_COLOURS, *PAGES], 21)],
    ids=["a stage's time", "runs"],
)
def test_colours_that_meet_are_apart(meet: list[str], least: float, sight: str) -> None:
    assert nearest(meet, SIGHT[sight]) > least


def contrast(shade: str, page: str) -> float:
    """Return the contrast ratio of WCAG 2: 1 of equal colours, 21 of black on white."""
    lightness = [lab(each, SIGHT["usual"])[0] for each in (shade, page)]
    dark, light = sorted(
        ((part + 16) / 116) ** 3 if part > 8 else part / 903.3 for part in lightness
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("page", "least"), [("#FFFFFF", 1.4), ("#14181D", 2)])
def test_every_colour_is_seen_on_the_page(page: str, least: float) -> None:
    shades = [*PARTS.values(), PREFILL, DECODE, *SCHEDULER_COLOURS]
    assert min(contrast(each, page) for each in shades) > least


def test_a_figure_of_the_causes_has_the_words_and_colours_of_the_report() -> None:
    path = ROOT / "examples/studies/idle_causes.yaml"
    plot = yaml.safe_load(path.read_text(encoding="utf-8"))["plot"]
    (panel,) = plot["panels"]
    words = {"computing" if name == "busy" else name: each for name, each in panel["y"].items()}
    assert words == {part: cause_label(part) for part in PARTS}
    assert panel["colors"] == list(PARTS.values())
