"""The page of a decision, and its picture: how the numbers of an SLO change with the rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from evenflow.report import plots
from evenflow.report.page import page, picture, section
from evenflow.report.style import colour
from evenflow.report.tables import html_table, number
from evenflow.report.words import metric_words
from evenflow.study.decision import DecisionRecord, Margin
from evenflow.study.fair import Interval
from evenflow.study.rates import TriedRate, measured
from evenflow.study.slo import Condition, question_words

PRICES = {
    "dollars_per_hour": "an hour",
    "dollars_per_million_tokens": "a million tokens, input and output",
    "dollars_per_million_input_tokens": "a million input tokens, if they pay for everything",
    "dollars_per_million_output_tokens": "a million output tokens, if they pay for everything",
}
SHARES = {"attainment": "requests within limits", "gap_attainment": "token gaps within limit"}
RATES = {"served_requests_per_s": "served", "request_goodput": "goodput, to the last completion"}


def write_page(
    folder: Path, decision: DecisionRecord, provenance: Mapping[str, Any], svg: str = ""
) -> None:
    """Write report.html; `svg` is the picture, if there is one."""
    title = ", ".join(decision.config.setup_parts()[:2])
    text = page(title, list(_parts(decision, svg)), provenance)
    (folder / "report.html").write_text(text, encoding="utf-8")


def _parts(decision: DecisionRecord, svg: str) -> Iterator[str]:
    first, *others = map(escape, decision.sentences)
    points = "".join(f"<li>{sentence}</li>" for sentence in others)
    about = question_words(decision.config, [each.condition for each in decision.margins])
    yield f'<p class="caption">{"<br>".join(map(escape, about))}</p>'
    yield f'<div class="verdict"><p>{first}</p><ul>{points}</ul></div>'
    at = "" if decision.rate is None else f"At {number(decision.rate)} requests/s. "
    heads = ["", "limit", "predicted", "left", "verdict"]
    known = [each for each in decision.margins if each.ends is not None]
    if known:
        heads.insert(3, "90 % interval")
    yield section("Margins", None if known else f"{at}Without 90 % intervals (--intervals).", at=at)
    yield html_table(heads, (_margin(each, bool(known)) for each in decision.margins))
    yield section("What would break it", None if svg else "")
    yield f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in decision.breaks)}</ul>"
    yield picture(svg) if svg else ""
    yield from _price(decision)
    for heading, table in decision.alternatives.items():
        yield section(heading)
        yield html_table([head.replace("\n", " ") for head in table.heads], table.rows)
    yield from _basis(decision)


def _basis(decision: DecisionRecord) -> Iterator[str]:
    yield section("What it rests on")
    told = html_table(["", "what", "how it is known"], decision.basis, narrow=False)
    yield f'<div class="words">{told}</div>'
    if decision.unchosen:
        parts = (part.removesuffix(" (default)") for part in decision.unchosen)
        yield f"<p>Nobody chose: {escape(', '.join(parts))}.</p>"
    if decision.launch:
        yield section("Launch")
        yield f'<pre class="launch">{escape(chr(10).join(decision.launch))}</pre>'


def _margin(margin: Margin, with_ends: bool) -> list[str]:
    ends = "-" if margin.ends is None else " to ".join(number(end, 3) for end in margin.ends)
    return [
        metric_words(margin.condition.metric),
        margin.condition.words,
        number(margin.value, 3),
        *([ends] if with_ends else []),
        margin.left_words,
        margin.verdict,
    ]


def _price(decision: DecisionRecord) -> Iterator[str]:
    known = [(words, decision.price[key]) for key, words in PRICES.items() if key in decision.price]
    yield section("Price", None if known else "No price of a GPU was given.")
    if known:
        yield html_table(["", "$"], [(words, number(value, 3)) for words, value in known])


def draw(
    runs: Sequence[TriedRate], slo: Sequence[Condition], rate: Interval | None, title: str
) -> Figure:
    """Draw the SLO's shares, the rates and its numbers against the rate that arrives.

    Lines are means over replications, bands their least and most. `rate` is the answer, None where
    there is none.
    """
    table = measured(runs)
    figure, (shares, rates, limits) = plots.panels(3, 4.33, 3.8)
    _draw(shares, _known(table, SHARES))
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.set_ylim(0, 1.03)
    _draw(rates, _known(table, RATES))
    span = [min(table.index), max(table.index)]
    rates.plot(span, span, color="black", linewidth=1, linestyle=":", label="arriving")
    rates.set_ylim(bottom=0)
    limited = [each for each in slo if each.limit]
    _draw(limits, {str(each): table[each.metric].astype(float) / each.limit for each in limited})
    limits.axhline(1, color="black", linewidth=1, linestyle=":")
    limits.set_yscale("log")
    limits.set_ylim(bottom=min(0.5, limits.get_ylim()[0]))
    plots.plain_decades(limits.yaxis)
    titles = {"SLO attainment": shares, "Requests/s": rates, "Value / limit": limits}
    for words, axes in titles.items():
        _finish(axes, rate, words)
    figure.suptitle(title, fontsize=10)
    return figure


def _known(table: pd.DataFrame, words: Mapping[str, str]) -> dict[str, pd.Series]:
    """Return the columns that runs have, by their words."""
    some = table.dropna(axis="columns", how="all")
    return {told: some[key] for key, told in words.items() if key in some}


def _draw(axes: Axes, columns: Mapping[str, pd.Series]) -> None:
    for index, (words, column) in enumerate(columns.items()):
        rows = column.groupby(level=0).agg(["mean", "min", "max"])
        axes.plot(rows["mean"], marker="o", markersize=3, color=colour(index), label=words)
        least, most = rows["min"], rows["max"]
        axes.fill_between(rows.index, least, most, color=colour(index), alpha=0.2, linewidth=0)


def _finish(axes: Axes, rate: Interval | None, title: str) -> None:
    axes.set_xlabel("requests/s arriving")
    plots.finish(axes, title)
    if rate is not None:
        axes.axvline(rate.mean, color="#7F7F7F", linestyle="--", linewidth=1)
        if rate.n > 1:
            axes.axvspan(*rate.ends, color="#7F7F7F", alpha=0.15)
    plots.key(axes)
