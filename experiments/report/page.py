"""The frame of every HTML report: one page that needs nothing else; equal input, equal bytes.

Knows no run and no sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from experiments.report.style import THEMES, WIDTH, Figure
from experiments.report.tables import html_table

SORT = """
function sortBy(head) {
  const body = head.closest("table").tBodies[0], at = head.cellIndex;
  const key = row => row.cells[at].textContent.replaceAll(",", "");
  const rows = [...body.rows], sign = head.dataset.down ? -1 : 1;
  head.dataset.down = sign > 0 ? "1" : "";
  rows.sort((a, b) => sign * (parseFloat(key(a)) - parseFloat(key(b)) ||
    key(a).localeCompare(key(b), undefined, {numeric: true})));
  body.append(...rows);
}
"""
"""Sorts a table's rows by the column of a head, the other way at the next click."""

STYLE = f"""
:root {{ color-scheme: light dark; --text: #1f2933; --soft: #52606d; --back: #ffffff;
  --box: #f3f6f9; --line: #e4e7eb; --best: #e3f1e8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #d5dae1; --soft: #9aa5b1; --back: #14181d;
  --box: #1f252c; --line: #323a44; --best: #1d3a2b; }} }}
body {{ font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--text);
  background: var(--back); max-width: {WIDTH}px; margin: 32px auto 64px; padding: 0 16px; }}
h1 {{ font-size: 28px; line-height: 1.2; margin: 0 0 12px; }}
h2 {{ font-size: 20px; margin: 40px 0 4px; }}
.verdict {{ background: var(--box); border-left: 4px solid #0072B2; padding: 12px 18px; }}
.verdict p {{ font-size: 18px; margin: 4px 0; }}
.verdict ul {{ margin: 6px 0; padding-left: 22px; }}
.caption {{ color: var(--soft); font-size: 14px; margin: 0 0 6px; }}
.head {{ font-size: 14px; margin: 10px 0 0; overflow-wrap: anywhere; }}
.row {{ display: grid; gap: 0 16px; }}
.row > div {{ min-width: 0; }}
.two {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); }}
.three {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 270px), 1fr)); }}
table {{ border-collapse: collapse; width: 100%; font-size: 15px; table-layout: fixed; }}
thead th:first-child {{ width: 38%; }}
table.narrow {{ table-layout: auto; width: auto; display: block; overflow-x: auto; }}
table.narrow th {{ overflow-wrap: normal; }}
table.narrow thead th:first-child {{ width: auto; }}
th, td {{ padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); }}
th {{ overflow-wrap: anywhere; vertical-align: bottom; }}
tbody th {{ text-align: left; font-weight: 500; }}
th small {{ display: block; color: var(--soft); font-weight: 400; font-size: 12.5px; }}
.unit {{ color: var(--soft); font-weight: 400; }}
th[onclick] {{ cursor: pointer; text-decoration: underline dotted; }}
td {{ font-variant-numeric: tabular-nums; }}
td.best {{ font-weight: 700; background: var(--best); }}
.key {{ font-size: 13.5px; margin: 8px 0 0; }}
.key span {{ display: inline-block; margin-right: 16px; }}
i {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }}
.key svg {{ margin-right: 6px; vertical-align: 2px; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; font-size: 14px; }}
dt {{ font-weight: 600; }}
dd {{ margin: 0; }}
pre {{ background: var(--box); padding: 12px; overflow-x: auto; font-size: 13px; }}
.picture svg {{ max-width: 100%; height: auto; background: white; }}
summary {{ cursor: pointer; font-weight: 600; margin-top: 12px; }}
@media (max-width: 600px) {{
  body {{ margin-top: 16px; padding: 0 10px; }}
  table {{ font-size: 13px; }}
  th, td {{ padding: 4px 5px; }}
  dl {{ grid-template-columns: 1fr; }}
}}
"""

DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)"), themes = THEMES;
const look = () => ({layout: themes[dark.matches ? 1 : 0]});
const config = {displaylogo: false, responsive: true,
  displayModeBar: matchMedia("(hover: hover)").matches && "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
const figures = [];
const draw = (name, f) => figures.push([name, f]);
addEventListener("DOMContentLoaded", () => figures.forEach(([name, f]) =>
  Plotly.newPlot(name, f.data, {...f.layout, template: look()}, config)));
dark.addEventListener("change", () => document.querySelectorAll(".js-plotly-plot")
  .forEach(each => Plotly.relayout(each, {template: look()})));
""".replace("THEMES", json.dumps(THEMES, separators=(",", ":")))
"""Draws when all has its place; colours follow the reader's system."""


def page(
    title: str, parts: Sequence[str], provenance: Mapping[str, Any], plotly_js: str = ""
) -> str:
    """Return a page as HTML: the title, its parts, the provenance.

    With Plotly's library inside, where a part is a `figure`; a `picture` needs none.
    """
    facts = json.dumps(provenance, indent=2, sort_keys=True, default=str, ensure_ascii=False)
    lines = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{escape(title)}'
        f"</title>\n<style>{STYLE}</style>\n"
        f"<script>{plotly_js and plotly_js + DRAW}{SORT}</script></head>\n"
        "<body>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        f"<details><summary>Configuration and provenance</summary><pre>{escape(facts)}</pre>"
        "</details>\n</body></html>\n",
    ]
    return "\n".join(lines)


def section(heading: str, caption: str) -> str:
    """Return a heading with what there is to see below it."""
    return f'<h2>{heading}</h2>\n<p class="caption">{caption}</p>'


@dataclass(frozen=True, slots=True)
class Addition:
    """What is said of a run beside its numbers: rows under heads, and what they rest on."""

    heading: str
    sentence: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def html(self) -> str:
        """The same for a run's page."""
        return section(self.heading, self.sentence) + html_table(self.heads, self.rows)


def figure(name: str, drawn: Figure, head: str = "") -> str:
    """Return a place on the page, with `name` as its id, and the script that draws there.

    `head`: HTML to stand over it. A fixed id and an escaped "<" keep the page deterministic and
    whole.
    """
    text = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    over = f'<p class="head">{head}</p>' if head else ""
    return f'<div>{over}<div id="{name}"></div>\n<script>draw("{name}",{text})</script></div>'


def beside(kind: str, figures: Sequence[str]) -> str:
    """Return figures side by side, "two" or "three" in a row, fewer where it is narrow."""
    return f'<div class="row {kind}">{"".join(figures)}</div>'


def picture(svg: str) -> str:
    """Return a drawing as part of a page, as `plots.svg` makes it."""
    return f'<div class="picture">{svg[svg.index("<svg") :]}</div>'


def plotly_library() -> str:
    """Return Plotly's script: its own smaller build, of which the file beside says the source."""
    return Path(__file__).with_name("plotly-basic.min.js").read_text(encoding="utf-8")
