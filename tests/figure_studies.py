"""A figure's study, and a run of whole prompts of a second a stage, for tests of figures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenflow.results.metrics import summarize
from evenflow.types import Request
from experiments.figures.make import FOLDER
from experiments.figures.schema import load_plan
from experiments.figures.study import Study
from experiments.outcome import Outcome
from experiments.study.points import Store
from sim import simulate
from tests.worlds import small_world


def study_of(name: str, folder: Path, *overrides: str) -> Study:
    """Return the study of a figure of ours, its points under a folder."""
    plan = load_plan(FOLDER / f"{name}.yaml", overrides)
    return Study(plan, Store(folder / "points"), ThreadPoolExecutor(1))


def outcome(
    requests: list[Request], depth: int = 2, token_budget: int = 4096, **more: Any
) -> Outcome:
    """Return a run with whole prompts of a second a stage, and what was made of it."""
    sizes = {"depth": depth, "total_pages": 1_000, "max_model_len": 8192}
    params = {"token_budget": token_budget}
    result = simulate(small_world(requests, "sarathi", params, **sizes, **more))
    result = replace(result, provenance={"deployment": {"kv_pages": 1_000}})
    return Outcome(result, summarize(result), 0.0, (result,))
