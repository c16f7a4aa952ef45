"""The page of `evenflow explore --out`: the values of its sliders, each point simulated before."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from evenflow.config.yaml_file import value_of
from evenflow.errors import UsageError
from evenflow.explore import tasks
from evenflow.explore.controls import Control, steps
from evenflow.explore.document import Given, settled
from evenflow.explore.page import still_page
from evenflow.explore.pictures import picture, simulated
from evenflow.files import require_new, write_new
from evenflow.schedulers import POOLED, parameters, policy

MOST_POINTS, MOST_PAGE_BYTES = 200, 3_000_000

BATCHES = 160
"""Micro-batches that each run of a point has one by one."""

STEPS = 7
"""Values of a slider where `--vary` gives none."""


def write_page(path: Path, given: Given, vary: Sequence[str]) -> None:
    """Write a new page; UsageError for invalid input, and for more than MOST_PAGE_BYTES."""
    require_new(path)
    axes = _axes(given, vary)
    count = math.prod(len(axis["values"]) for axis in axes)
    if count > MOST_POINTS:
        raise UsageError(f"--vary: {count} points; at most {MOST_POINTS} are right")
    places = list(product(*(range(len(axis["values"])) for axis in axes)))
    points = {",".join(map(str, place)): _point(given, axes, place) for place in places}
    page = still_page(given, axes, points)
    if (size := len(page.encode())) > MOST_PAGE_BYTES:
        raise UsageError(
            f"--out {path}: the page would have {size:,} bytes; at most {MOST_PAGE_BYTES:,} are "
            "right: give --vary fewer values, or fewer --schedulers"
        )
    write_new(path, page)


def _axes(given: Given, vary: Sequence[str]) -> list[Control]:
    """Return the sliders: what `KEY=V1,V2` says, or steps of the range that a page would have."""
    told: list[dict[str, Any]] = []
    tasks.look(given, given.question, told.append)
    document = told[0]["document"]
    known = {each["key"]: each for each in [*document["schedulers"][0], *document["controls"]]}
    first = next((key for key, each in known.items() if "low" in each), "")
    axes = [_axis(known, each) for each in vary or [first]]
    keys = [axis["key"] for axis in axes]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"--vary {twice}: is there twice; give all its values once")
    return axes


def _axis(known: dict[str, Control], text: str) -> Control:
    key, equals, listed = text.partition("=")
    control = known.get(key, {"key": key, "words": ""})
    if equals:
        values = value_of(f"[{listed}]", f"--vary {text}")
    elif key in known:
        values = steps(control, STEPS)
    else:
        raise UsageError(f"--vary {text}: should be KEY=V1,V2, or one of {', '.join(known)}")
    if not values or not all(type(each) in (int, float, str, bool) for each in values):
        raise UsageError(f"--vary {text}: should be KEY=V1,V2, such as kv.pages=1000,2000")
    if len({*map(repr, values)}) < len(values):
        raise UsageError(f"--vary {text}: should have each value once")
    value = control.get("value")
    return {"key": key, "words": control["words"], "values": values} | {
        "value": value if value in values else values[0]
    }


def _point(given: Given, axes: Sequence[Control], place: Sequence[int]) -> dict[str, Any]:
    """Simulate all sides at a point; return what the page shows of it."""
    new = {axis["key"]: axis["values"][at] for axis, at in zip(axes, place, strict=True)}
    others = [_moved(each, new) for each in given.question.others]
    question = given.question.model_copy(update={"set": new, "others": others})
    found = settled(given, question)
    runs = []
    for side, config in enumerate(found.configs):
        job = tasks.job_of(given, found, side)
        outcome, prompts = simulated(job)
        about = {"side": side, "of": len(job.workload.requests)}
        runs.append(picture(outcome, prompts, config, given.slo, BATCHES) | about)
    told = {"text": found.text, "command": found.command(given), "runs": runs}
    plain: dict[str, Any] = json.loads(to_json(told, inf_nan_mode="null"))
    return plain


def _moved(scheduler: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler with the new values of those parameters that it has."""
    name = scheduler["name"]
    own = {} if name in POOLED else parameters(policy(name))
    named = {key.removeprefix("scheduler."): value for key, value in new.items()}
    return scheduler | {key: value for key, value in named.items() if key in own}
