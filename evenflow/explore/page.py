"""The page of `evenflow explore`: one file, with a server behind it or with its points inside."""

from __future__ import annotations

import gzip
import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

from pydantic_core import to_json

from evenflow.config.yaml_file import value_of
from evenflow.errors import UsageError
from evenflow.explore import tasks
from evenflow.explore.controls import Control, steps
from evenflow.explore.document import Given, settled
from evenflow.explore.pictures import picture, shown_metrics, simulated
from evenflow.files import require_new, write_new
from evenflow.report.page import document, plotly_library, scripts, section
from evenflow.report.run_page import BLOCKS, QUEUE_BINS, cause_list, key, swatch
from evenflow.report.style import DASHES, PARTS, SCHEDULER_COLOURS
from evenflow.report.words import cause_label
from evenflow.schedulers import POOLED, parameters, policy

FIGURES = {
    "Where the stage time goes": {"causes": ""},
    "Latency": {f"latency-{name}": "" for name in ("ttft", "tpot", "itl", "e2el")},
    "Requests in the system": {"queue-0": "waiting for a first token", "queue-1": "generating"},
    "KV cache": {"kv": ""},
}
"""The figures below each heading, and what stands over them."""

LIVE = (
    "Move a slider: the run is simulated anew, its first requests first. What is drawn is a "
    "simulation of every micro-batch on every stage."
)
STILL = "The sliders move between points that were simulated; there is no server behind this page."


def live_page(given: Given) -> str:
    question = given.question
    return _page(given, {"text": question.text, "others": question.others}, LIVE)


def still_page(given: Given, axes: list[dict[str, Any]], points: Mapping[str, Any]) -> str:
    """Return the page with its points, by the positions of their values on the axes."""
    packed = gzip.compress(json.dumps(points, separators=(",", ":")).encode(), mtime=0)
    inside = {"axes": axes, "points": b64encode(packed).decode("ascii")}
    return _page(given, {"text": given.text, "others": [], **inside}, STILL)


def _page(given: Given, data: Mapping[str, Any], about: str) -> str:
    look = {"metrics": shown_metrics(given.slo), "colours": SCHEDULER_COLOURS, "dashes": DASHES}
    text = json.dumps({**data, **look}, separators=(",", ":")).replace("<", "\\u003c")
    own = Path(__file__).with_name("explore.js").read_text(encoding="utf-8")
    script = f"{plotly_library()}\n{scripts()}{own.replace('PAGE', text, 1)}"
    name = f"Explore {given.file.name}"
    return document(name, script, _body(name, about, still="points" in data))


def _body(name: str, about: str, *, still: bool) -> str:
    """Return the page's elements (explore.html), which explore.js fills."""
    shades = BLOCKS | {cause_label(part): shade for part, shade in PARTS.items()}
    text = Path(__file__).with_name("explore.html").read_text(encoding="utf-8")
    return Template(text).substitute(
        name=escape(name),
        about=about,
        locked=" readonly" if still else "",
        link="" if still else '<button id="link">copy link</button> ',
        keys=key({words: swatch(shade) for words, shade in shades.items()}),
        causes=cause_list(),
        figures="\n".join(_figures()),
    )


def _figures() -> Iterator[str]:
    for heading, figures in FIGURES.items():
        yield section(heading, bins=QUEUE_BINS)
        yield f'<div class="row{" two" if len(figures) > 1 else ""}">'
        yield from (_figure(each, words, heading) for each, words in figures.items())
        yield "</div>"
        if heading == "Where the stage time goes":
            yield section("Tokens in each micro-batch")
            yield '<div class="row two" id="tokens"></div>'


def _figure(name: str, words: str, heading: str) -> str:
    about = escape(f"{heading} {name.partition('-')[2].upper()}".strip())
    return (
        f'<div><p class="head">{words}</p><div id="{name}" data-figure="{name}" '
        f'data-words="{about}"></div><p class="tools"></p></div>'
    )


MOST_POINTS, MOST_PAGE_BYTES = 200, 3_000_000

BATCHES = 160
"""Micro-batches that each run of a point has one by one."""

STEPS = 7
"""Values of a slider where `--vary` gives none."""


def write_page(path: Path, given: Given, vary: Sequence[str]) -> None:
    """Write a new page; UsageError for what cannot be, and for more than MOST_PAGE_BYTES."""
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
