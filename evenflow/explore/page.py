"""The page of `evenflow explore`: one file, with a server behind it or with its points inside."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from evenflow.explore.document import Given
from evenflow.explore.pictures import shown_metrics
from evenflow.report.page import document, plotly_library, scripts, section
from evenflow.report.run_page import BLOCKS, QUEUE_BINS, cause_list, key, swatch
from evenflow.report.style import DASHES, PARTS, SCHEDULER_COLOURS
from evenflow.report.words import cause_label

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
