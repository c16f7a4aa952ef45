"""A profile beside the silicon tables: ratios of what both say of a layer's parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.costs.profile.file import write_profile
from evenflow.specs.model import model
from tests.profiles import points, prefill_s, profile
from tools.gpu_report import CHUNKS, DECODES, TOKENS, compare

NAME = "Llama-3.1-8B"


def written(folder: Path, device: str, factor: float = 1.0) -> Path:
    path = folder / "profile.csv"
    slower = [
        each._replace(**dict.fromkeys(("median_s", "p10_s", "p90_s"), factor * each.median_s))
        for each in points()
    ]
    write_profile(path, profile(slower, spec=model(NAME), device=device), over=True)
    return path


def test_a_slower_profile_has_larger_ratios(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    pytest.importorskip("pyarrow", reason="pip install -e '.[silicon]'")
    once, twice = (compare(NAME, written(tmp_path, "NVIDIA H200", factor)) for factor in (1, 2))
    assert once["gpu"] == "H200"
    assert len(once["points"]) == len(TOKENS) + len(CHUNKS) + len(DECODES)
    for part, ratio in once["median_ratio"].items():
        assert 0 < ratio == pytest.approx(twice["median_ratio"][part] / 2)
    whole = next(row for row in once["points"] if row["part"] == "prefill attention")
    assert whole["measured_us"] == pytest.approx(1e6 * prefill_s(512, 0))


def test_a_device_without_tables_says_so(tmp_path: Path) -> None:
    assert compare(NAME, written(tmp_path, "AMD EPYC")) == {"left_out": "no tables of AMD EPYC"}
