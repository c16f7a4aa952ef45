"""A figure's study, and a run of whole prompts of a second a stage, for tests of figures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenflow.experiments.figures import FOLDER
from evenflow.experiments.figures.schema import FigurePlan, load_plan
from evenflow.experiments.figures.study import FigureStudy
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome
from evenflow.sim import simulate
from evenflow.study.points import Store
from evenflow.types import Request
from tests.worlds import small_world


def plan_of(name: str, *overrides: str, quick: bool = False) -> FigurePlan:
    """Return a figure of ours with what is set by hand."""
    return load_plan(FOLDER / f"{name}.yaml", overrides, quick=quick)


def study_of(name: str, folder: Path, *overrides: str, wrong: int | None = None) -> FigureStudy:
    """Return the study of a figure of ours, its points under a folder."""
    store = Store(folder / "points")
    return FigureStudy(plan_of(name, *overrides), store, ThreadPoolExecutor(1), wrong=wrong)


def outcome(
    requests: list[Request], depth: int = 2, token_budget: int = 4096, **more: Any
) -> Outcome:
    """Return a run with whole prompts of a second a stage, and what was made of it."""
    sizes = {"depth": depth, "total_pages": 1_000, "max_model_len": 8192}
    params = {"token_budget": token_budget}
    result = simulate(small_world(requests, "sarathi", params, **sizes, **more))
    result = replace(result, provenance={"deployment": {"kv_pages": 1_000}})
    return Outcome(result, summarize(result), 0.0, (result,))
