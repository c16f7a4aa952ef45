"""The page of `evenflow explore`: one file, with a server behind it or with its points inside."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from evenflow.explore.document import Given
from evenflow.explore.pictures import shown_metrics
from evenflow.report.page import document, plotly_library, scripts
from evenflow.report.run_page import BLOCKS, CAPTIONS, cause_list, key, swatch
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

BUTTONS = {
    "pin": "pin A",
    "copy": "copy as command",
    "link": "copy link",
    "yaml": "RUN.yaml",
    "data": "data",
}


def live_page(given: Given) -> str:
    """Return the page of a server."""
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
    body = "\n".join(_body(name, about, still="points" in data))
    return document(name, script, body)


def _body(name: str, about: str, *, still: bool) -> Iterator[str]:
    yield f"<header><h1>{escape(name)}</h1>"
    yield f'<p class="caption">{about}</p>'
    yield '<p class="caption" id="status" role="status">starting ...</p></header>'
    yield '<div class="explore">'
    yield '<section aria-label="Settings"><p class="error" id="error" role="alert"></p>'
    yield '<div id="controls"></div>'
    locked = " readonly" if still else ""
    yield (
        "<details open><summary>RUN.yaml</summary>"
        f'<textarea id="text" aria-label="RUN.yaml" rows="18" spellcheck="false"{locked}>'
        "</textarea></details>"
    )
    buttons = {id: words for id, words in BUTTONS.items() if not (still and id == "link")}
    yield '<p class="tools">'
    yield " ".join(f'<button id="{id}">{words}</button>' for id, words in buttons.items())
    yield '</p><pre id="command" tabindex="0" aria-label="The same as a command"></pre></section>'
    yield '<main><p class="key" id="runs"></p><p class="caption" id="sample"></p>'
    yield '<div id="tiles"></div><ul id="notes" class="caption"></ul>'
    yield (
        '<div id="swept" hidden><h2>A slider\'s sweep</h2><p class="caption" id="swept-told"></p>'
        '<label>Metric <select id="swept-metric"></select></label><div><div id="swept-figure">'
        "</div></div></div>"
    )
    yield f"<h2>Stages at work</h2>{_keys()}"
    yield '<div id="timelines"></div>'
    yield "<details><summary>What the causes of idle time mean</summary>"
    yield f"{cause_list()}</details>"
    for heading, figures in FIGURES.items():
        yield _heading(heading)
        yield f'<div class="row{" two" if len(figures) > 1 else ""}">'
        yield from (_figure(each, words, heading) for each, words in figures.items())
        yield "</div>"
        if heading == "Where the stage time goes":
            yield _heading("Tokens in each micro-batch")
            yield '<div class="row two" id="tokens"></div>'
    yield "</main></div>"


def _heading(heading: str) -> str:
    return f'<h2>{heading}</h2><p class="caption">{CAPTIONS[heading]}</p>'


def _figure(name: str, words: str, heading: str) -> str:
    about = escape(f"{heading} {name.partition('-')[2].upper()}".strip())
    return (
        f'<div><p class="head">{words}</p><div id="{name}" data-figure="{name}" '
        f'data-words="{about}"></div><p class="tools"></p></div>'
    )


def _keys() -> str:
    shades = BLOCKS | {cause_label(part): shade for part, shade in PARTS.items()}
    return key({words: swatch(shade) for words, shade in shades.items()})
