"""The frame of every HTML report: one page that needs nothing else; equal input, equal bytes.

Knows no run and no sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from evenflow.errors import UsageError
from experiments.report.style import WIDTH, Figure

STYLE = f"""
body {{ font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #1f2933;
  max-width: {WIDTH}px; margin: 32px auto 64px; padding: 0 16px; }}
h1 {{ font-size: 28px; line-height: 1.2; margin: 0 0 12px; }}
h2 {{ font-size: 20px; margin: 40px 0 4px; }}
.verdict {{ background: #f3f6f9; border-left: 4px solid #0072B2; padding: 12px 18px; }}
.verdict p {{ font-size: 18px; margin: 4px 0; }}
.verdict ul {{ margin: 6px 0; padding-left: 22px; }}
.caption {{ color: #52606d; font-size: 14px; margin: 0 0 6px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 15px; table-layout: fixed; }}
thead th:first-child {{ width: 38%; }}
table.narrow {{ table-layout: auto; width: auto; }}
table.narrow thead th:first-child {{ width: auto; }}
th, td {{ padding: 5px 10px; text-align: right; border-bottom: 1px solid #e4e7eb; }}
tbody th {{ text-align: left; font-weight: 500; }}
th small {{ display: block; color: #7b8794; font-weight: 400; font-size: 12.5px; }}
.unit {{ color: #7b8794; font-weight: 400; }}
td {{ font-variant-numeric: tabular-nums; }}
td.best {{ font-weight: 700; background: #eaf4ee; }}
.key {{ font-size: 13.5px; margin: 8px 0 0; }}
.key span {{ margin-right: 16px; white-space: nowrap; }}
i {{ display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; font-size: 14px; }}
dt {{ font-weight: 600; }}
dd {{ margin: 0; }}
pre {{ background: #f3f6f9; padding: 12px; overflow-x: auto; font-size: 13px; }}
div[id] {{ overflow-x: auto; }}
th {{ overflow-wrap: anywhere; }}
.picture svg {{ max-width: 100%; height: auto; }}
summary {{ cursor: pointer; font-weight: 600; margin-top: 12px; }}
"""

CONFIG = '{displaylogo:false,modeBarButtonsToRemove:["select2d","lasso2d","autoScale2d"]}'


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
        f"</title>\n<style>{STYLE}</style>\n<script>{plotly_js}</script></head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        f"<details><summary>Configuration and provenance</summary><pre>{escape(facts)}</pre>"
        "</details>\n</body></html>\n",
    ]
    return "\n".join(lines)


def section(heading: str, caption: str) -> str:
    """Return a heading with what there is to see below it."""
    return f'<h2>{heading}</h2>\n<p class="caption">{caption}</p>'


def figure(name: str, drawn: Figure) -> str:
    """Return a place on the page, with `name` as its id, and the script that draws there.

    A fixed id and an escaped "<" keep the page deterministic and whole.
    """
    text = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<div id="{name}"></div>\n<script>(f=>Plotly.newPlot("{name}",f.data,f.layout,'
        f"{CONFIG}))({text})</script>"
    )


def picture(svg: str) -> str:
    """Return a drawing as part of a page, as `plots.svg` makes it."""
    return f'<div class="picture">{svg[svg.index("<svg") :]}</div>'


def plotly_library() -> str:
    """Return Plotly's script; UsageError where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError("the report needs plotly: pip install 'evenflow[report]'") from error
    return str(get_plotlyjs())
