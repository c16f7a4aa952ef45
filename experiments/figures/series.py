"""What happens within runs: micro-batches and stages over time, and the figures of them.

A figure's `plot` says which panels stand beside each other for each run, with the words over them,
and which columns of the runs are its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evenflow.results.run import Floats, Ints, RunResult
from experiments.figures.axes import cases_of, poisson
from experiments.figures.panels import Panel, draw_panel
from experiments.figures.study import Drawing, Study, overview
from experiments.figures.style import COLORS, PARTS, grid_lines
from experiments.figures.tables import run_cases
from experiments.outcome import Outcome
from experiments.report.data import covered, present, used_share
from experiments.report.plots import panels as axes_of

Run = Mapping[str, Any]
"""A row of a table of runs, or the numbers of a study."""

FEW = 20
"""Up to so many micro-batches are told apart by their numbers."""


# -- measures -------------------------------------------------------------------------------------


def micro_batches(
    outcome: Outcome,
    columns: Sequence[str],
    first: int | None = None,
    batches: int | None = None,
    bins: int = 0,
) -> dict[str, Any]:
    """Return a run's overview, and columns of its micro-batches: of all, or of `batches` from
    number `first` on (None: in the middle of the run).

    `batch` is their number, `used` the share of KV pages held; others are of `RunResult`.
    `mean_change`: how many tokens one differs from that before it, in the mean. With `bins`,
    `time_s` and `busy` are the share of stages that compute in equal parts of the time that is
    shown, of the whole run if it is all.
    """
    result = outcome.result
    total = len(result.scheduled_s)
    count = total if batches is None else batches
    start = max(0, (total - count) // 2) if first is None else first
    shown = slice(start, start + count)
    tokens = (result.prefill_tokens + result.decode_tokens)[shown]
    values = {
        **overview(outcome),
        "mean_change": float(np.abs(np.diff(tokens)).mean()) if len(tokens) > 1 else 0.0,
        **{name: _column(result, name)[shown].tolist() for name in columns},
    }
    if bins:
        times_s = result.scheduled_s[shown]
        start_s, end_s = times_s[0], times_s[-1]
        if batches is None:
            start_s, end_s = 0.0, result.returned_s[-1]
        edges = np.linspace(start_s, end_s, bins + 1)
        values["time_s"] = edges[:-1].tolist()
        values["busy"] = busy_over_time(result, edges).tolist()
    return values


def _column(result: RunResult, name: str) -> Any:
    if name == "batch":
        return np.arange(len(result.scheduled_s))
    return used_share(result).round(4) if name == "used" else getattr(result, name)


def busy_over_time(result: RunResult, edges: Floats) -> Floats:
    """Return the share of stages that compute, a mean over each interval between `edges` (s)."""
    stages = zip(result.start_s.T, result.end_s.T, strict=True)
    busy_s = np.sum([covered(*times_s, edges) for times_s in stages], axis=0)
    shares: Floats = busy_s / (np.diff(edges) * result.depth)
    return shares


def phases(used: list[float], prefill_tokens: list[int], start_s: list[float]) -> pd.DataFrame:
    """Return a row for each run of micro-batches of one kind: where it starts, KV before, after."""
    prefills: Ints = (np.asarray(prefill_tokens) > 0).astype(int)
    first = np.flatnonzero(np.diff(prefills, prepend=1 - prefills[0]))
    last = np.append(first[1:], len(prefills)) - 1
    held = np.asarray(used)
    return pd.DataFrame(
        {
            "phase": np.arange(len(first)),
            "kind": np.where(prefills[first] == 1, "prefill", "decode"),
            "first_step": first,
            "steps": last - first + 1,
            "start_s": np.asarray(start_s)[first],
            "kv_before": np.where(first > 0, held[first - 1], 0.0),
            "kv_after": held[last],
        }
    )


def stalls(outcome: Outcome) -> dict[str, Any]:
    """Return a run's overview and its longest time between two micro-batches that yield tokens.

    `returned_s` and `tokens` are those micro-batches, thinned where more than 10 come in a second.
    The time in which no request has its first token yet, or all are done, is no stall.
    """
    result = outcome.result
    yields = result.sampled_rows > 0
    returned_s, rows = result.returned_s[yields], result.sampled_rows[yields]
    gaps_s = np.diff(returned_s)
    waits = present(result.first_token_s, result.completion_s, returned_s[:-1]) > 0
    longest = int(np.argmax(np.where(waits, gaps_s, 0.0)))
    tenth = np.unique(np.floor(returned_s * 10), return_index=True)[1]
    return {
        **overview(outcome),
        "longest_stall_s": float(gaps_s[longest]),
        "stall_start_s": float(returned_s[longest]),
        "returned_s": returned_s[tenth].tolist(),
        "tokens": np.cumsum(rows)[tenth].tolist(),
    }


# -- figures --------------------------------------------------------------------------------------


def over_time(study: Study) -> Drawing:
    """Run the figure's cases; its table has their series, a row a value."""
    runs, plot = _runs(study), study.plan.keys.plot
    table = pd.concat([exploded(runs, columns) for columns in plot["table"]], ignore_index=True)
    return Drawing(_draw(study, runs), table, study.plan.keys.shown)


def kv_in_use(study: Study) -> Drawing:
    """Run the systems; the table has the phases of prefill and decode."""
    runs = _runs(study)
    runs = runs[runs.error.isna()]
    found = [
        phases(run["used"], run["prefill_tokens"], [stages[0] for stages in run["start_s"]]).assign(
            pair=run["pair"], seed=run["seed"]
        )
        for run in runs.to_dict("records")
    ]
    counts = [int((each.kind == "prefill").sum()) for each in found]
    table = pd.concat(found, ignore_index=True)
    return Drawing(_draw(study, runs.assign(phases=counts)), table, study.plan.keys.shown)


def _runs(study: Study) -> pd.DataFrame:
    numbers = study.numbers
    given = [name for name in ("first", "batches", "bins") if name in numbers]
    more = {name: numbers[name] for name in given} | {"columns": study.plan.keys.plot["columns"]}
    return run_cases(study, cases_of(study), "series.micro_batches", more)


def exploded(runs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return columns of runs with a row for each value of their lists, which are equally long."""
    table = runs[list(columns)]
    while lists := [name for name in columns if isinstance(table[name].iloc[0], list)]:
        table = table.explode(lists)
    return table


def _draw(study: Study, runs: pd.DataFrame) -> Figure:
    """Draw a line of panels for each case: of its first seed, with words on all of them."""
    plot = study.plan.keys.plot
    case = list(runs.loc[:, :"seed"])[:-1]
    groups = [own for _, own in runs[runs.error.isna()].groupby(case, sort=False)]
    panels = plot["panels"]
    (width, height), share_x = plot["size"], plot.get("share_x", "col")
    figure = Figure(figsize=(width, 1.0 + height * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), len(panels), squeeze=False, sharex=share_x, sharey="col")
    for line, own in zip(grid, groups, strict=True):
        spread: dict[Any, Any] = own.select_dtypes("number").agg(["mean", "min", "max"]).to_dict()
        first = {str(name): value for name, value in own.iloc[0].items()}
        words: dict[str, Any] = {**first, **spread, "seeds": len(own), "gpus": study.gpus}
        for axes, (kind, panel) in zip(line, panels.items(), strict=True):
            PANELS[kind](axes, first, study.numbers)
            axes.set_title(panel["title"].format_map(words), loc="left", fontsize=9)
    for axes, last, panel in zip(grid[0], grid[-1], panels.values(), strict=True):
        last.set_xlabel(panel["xlabel"])
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, ncols=2, loc="upper right")
    grid_lines(figure.axes)
    return figure


def _draw_tokens(axes: Axes, run: Run, numbers: Run) -> None:
    """Tokens of micro-batches, by phase if the figure has `parts`; of few also in numbers."""
    decode, prefill = np.array(run["decode_tokens"]), np.array(run["prefill_tokens"])
    total, places = prefill + decode, np.arange(len(decode))
    edges = np.append(places, len(places)) - 0.5
    if len(total) <= FEW:
        axes.bar(places, decode, color=PARTS["decode"], label="decode")
        tops = axes.bar(places, prefill, bottom=decode, color=PARTS["prefill"], label="prefill")
        axes.bar_label(tops, [str(tokens) for tokens in total], padding=2, fontsize=8)
        axes.set_xticks(places, [str(batch) for batch in run["batch"]])
    elif numbers.get("parts", True):
        for tokens, base, name in ((decode, 0, "decode"), (total, decode, "prefill")):
            axes.stairs(tokens, edges, baseline=base, fill=True, color=PARTS[name], label=name)
    else:
        axes.stairs(total, edges, color=COLORS.get(run["system"], "0.3"), linewidth=1.2)
    axes.margins(x=0)
    axes.set(ylabel="tokens", ylim=(0, max(1.15 * total.max(), axes.get_ylim()[1])))


def _draw_stages(axes: Axes, run: Run, numbers: Run) -> None:
    """When each stage computes each micro-batch, which its number names."""
    begin_s = run["start_s"][0][0]
    for batch, prefill, starts_s, ends_s in zip(
        run["batch"], run["prefill_tokens"], run["start_s"], run["end_s"], strict=True
    ):
        color = PARTS["prefill" if prefill else "decode"]
        for stage, (start_s, end_s) in enumerate(zip(starts_s, ends_s, strict=True)):
            left_s, width_s = start_s - begin_s, end_s - start_s
            axes.barh(stage, width_s, 0.8, left_s, color=color, edgecolor="white")
            middle_s = left_s + width_s / 2
            axes.text(middle_s, stage, str(batch), ha="center", va="center", fontsize=7)
    depth = len(run["start_s"][0])
    axes.set(ylabel="stage", yticks=range(depth), ylim=(depth - 0.5, -0.5))
    axes.margins(x=0)


def _draw_busy(axes: Axes, run: Run, numbers: Run) -> None:
    """How busy the stages are over the time shown, and in the whole run."""
    edges = np.array(run["time_s"]) - run["time_s"][0]
    edges = np.append(edges, edges[-1] + edges[1])
    color = COLORS.get(run["system"], "0.5")
    axes.stairs(100 * np.array(run["busy"]), edges, fill=True, color=color, alpha=0.6)
    axes.axhline(100 * run["busy_share"], color="0.2", linewidth=0.8, linestyle="--")
    axes.set(ylabel="stages busy (%)", ylim=(0, 104))
    axes.margins(x=0)


def _draw_kv(axes: Axes, run: Run, numbers: Run) -> None:
    used, prefill = 100 * np.array(run["used"]), np.array(run["prefill_tokens"]) > 0
    edges = np.arange(len(used) + 1) - 0.5
    axes.stairs(used, edges, fill=True, color=PARTS["decode"], label="decode")
    # A phase of few micro-batches is narrower than a pixel: its outline keeps it visible.
    axes.stairs(
        np.where(prefill, used, 0), edges, fill=True, color=PARTS["prefill"], linewidth=0.8,
        label="prefill",
    )  # fmt: skip
    axes.plot(used, color="0.25", linewidth=0.8)
    axes.set(xlim=(0, len(used) - 1), ylim=(0, 104), ylabel="KV in use (%)")


PANELS: Mapping[str, Callable[[Axes, Run, Run], None]] = {
    "tokens": _draw_tokens,
    "stages": _draw_stages,
    "busy": _draw_busy,
    "kv": _draw_kv,
}


def generation_stalls(study: Study) -> Drawing:
    """Run the systems at every rate; show tokens over time beside the tail of the latency."""
    numbers = study.numbers
    rates = sorted({*numbers["rates"], numbers["shown_rate"]})
    cases = {
        (label, rate): study.config(study.keys_of(label), poisson(rate))
        for label in study.plan.keys.systems
        for rate in rates
    }
    table = study.run(cases, ("system", "rate"), stalls)
    figure, (left, right) = axes_of(2, 5, 4.0)
    _draw_generated(left, table, study)
    done = table[table.error.isna()].assign(p99_s=table.p99_itl_ms / 1e3)
    draw_panel(right, Panel.model_validate(study.plan.keys.plot["tail"]), done, numbers)
    grid_lines(figure.axes)
    left.legend(fontsize=8)
    shown = table.drop(columns=["returned_s", "tokens"])
    return Drawing(figure, shown, study.plan.keys.shown)


def _draw_generated(axes: Axes, table: pd.DataFrame, study: Study) -> None:
    """One seed at one rate, around the longest stall of the first system."""
    numbers = study.numbers
    rows = table[(table.rate == numbers["shown_rate"]) & (table.seed == study.seeds[0])]
    first = rows.iloc[0]
    start_s = first.stall_start_s + first.longest_stall_s / 2 - numbers["shown_s"] / 2
    for label, row in rows.set_index("system").iterrows():
        times_s, tokens = np.array(row.returned_s) - start_s, np.array(row.tokens)
        inside = (times_s >= 0) & (times_s <= numbers["shown_s"])
        new = tokens[inside] - tokens[times_s < 0].max(initial=0)
        axes.step(times_s[inside], new, where="post", label=label, color=COLORS.get(label, "0.3"))
    axes.set(title=f"tokens generated, {numbers['shown_rate']} requests/s")
    axes.set(xlabel="time, s", ylabel="tokens since the left edge", xlim=(0, numbers["shown_s"]))
