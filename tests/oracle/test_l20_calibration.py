"""The cost model against measured times of two models on L20, and against published facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenflow.errors import UsageError
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model
from tools.calibrate_l20 import (
    FILES,
    Profile,
    draw,
    errors,
    fit,
    predict,
    read_profile,
    report,
)
from tools.efficiencies import Efficiencies, bundled
from tools.published_facts import published_facts

pytest.importorskip("scipy", reason="fitting needs scipy: pip install 'evenflow[fit]'")

L20 = gpu("L20")
BUNDLED = bundled(L20)


@pytest.fixture(scope="module")
def profiles(shared: Path) -> list[Profile]:
    return [read_profile(shared / "profiles" / file, model(name)) for name, file in FILES.items()]


def test_each_model_predicts_the_other_within_the_bound(profiles: list[Profile]) -> None:
    for known, unknown in (profiles, profiles[::-1]):
        off = errors(unknown, L20, fit([known], L20))
        assert off.mean <= 0.02
        assert off.p95 <= 0.05


def test_the_bundled_efficiencies_are_the_fit_on_both(profiles: list[Profile]) -> None:
    assert fit(profiles, L20) == pytest.approx(BUNDLED, rel=2e-3)
    for profile in profiles:
        assert errors(profile, L20, BUNDLED).mean <= 0.018


def test_a_fit_recovers_the_efficiencies_that_made_the_times() -> None:
    true = Efficiencies(0.7, 0.8, 5e-5)
    lengths = [*range(1, 128, 16), *range(128, 2048, 64)]
    empty = Profile(model("Qwen2.5-7B"), lengths, np.zeros(len(lengths)))
    made = empty._replace(seconds=predict(empty, L20, true))
    assert fit([made], L20) == pytest.approx(true, rel=1e-4)


def test_the_figure_and_the_table_are_made(profiles: list[Profile], tmp_path: Path) -> None:
    short = [
        each._replace(tokens=each.tokens[::64], seconds=each.seconds[::64]) for each in profiles
    ]
    draw(short, L20, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len(report(short, L20).splitlines()) == 2 + 3 * 2


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    path.write_text("a,b\nc,d\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"words\.csv: not a table of length and time"):
        read_profile(path, model("Qwen2.5-32B"))


def test_published_facts_hit_where_the_documentation_says_so() -> None:
    off = {fact.name: fact.off for fact in published_facts()}
    missed = {name for name, value in off.items() if abs(value) > 0.25}
    assert missed == {
        "decode iteration, LLaMA2-70B TP4-PP2, A40, ms",
        "decode iteration, Falcon-180B TP4-PP2, A100, ms",
    }
