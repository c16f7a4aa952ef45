"""The published claims beside ours: queries of tables, values leaf by leaf, a ratio, a verdict.

Runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import yaml

from evenflow.errors import UsageError, instead_of
from evenflow.experiments.figures.schema import MISSED, PAPER, Asked, Query
from evenflow.keys import shown
from evenflow.study.uncertainty import range_of

CLAIMS = Path(__file__).parent / "claims.yaml"
MISSES = Path(__file__).parent / "misses.yaml"

Verdict = Literal[
    "exact", "holds", "within 10 %", "within 25 %", "right order", "wrong", "too short to tell",
    "not run",
]  # fmt: skip
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
UNJUDGED: tuple[Verdict, ...] = ("too short to tell", "not run")
"""From best to worst: a claim of several values gets the worst of theirs. What is near is a value,
and of a comparison its effect."""

LEAST_EFFECT = 0.05
"""A smaller share of the published effect is none: seeds alone move a ratio by as much."""
NO_EFFECT = math.log(1.05)
"""A published ratio nearer to 1 claims no effect: the value is compared itself."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A published result. `value` is a number, a bound, a list or a mapping.

    A bound is "<= 0.02", say; "> 1" is a direction. `neutral`: of a ratio, whether 1 would say that
    nothing differs; not so of a share.
    """

    id: str
    paper: str
    where: str
    kind: Literal["ratio", "absolute", "order", "exact"]
    quantity: str
    value: Any
    neutral: bool = True

    @property
    def is_comparison(self) -> bool:
        return self.kind == "ratio" and self.neutral


@dataclass(frozen=True, slots=True)
class Answer:
    """One value of a claim, and ours. `part` is its key or position, empty for a single value.

    `ratio` is ours / paper. Of a comparison, `effect` is log(ours) / log(paper):
    1 is the whole published effect, 0 none of it, below 0 the opposite; None where there is none.
    `low` and `high` are the ends of the 90 % interval of ours, where nine more runs were made.
    """

    claim: Claim
    part: str
    ours: Any
    paper: Any
    ratio: float | None
    verdict: Verdict
    effect: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_number(self) -> bool:
        """Whether both are numbers above zero."""
        return all(isinstance(v, int | float) and v > 0 for v in (self.ours, self.paper))

    @property
    def is_inside(self) -> bool | None:
        """Whether the paper's value lies in the interval; None where there is none."""
        if self.low is None or self.high is None or not self.is_number:
            return None
        return bool(self.low <= self.paper <= self.high)


def load_claims() -> list[Claim]:
    """Return the published claims."""
    return [Claim(**entry) for entry in yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))]


def claim_of(claim_id: str) -> Claim:
    """Return the claim of that id; UsageError for one that is none."""
    known = {claim.id: claim for claim in load_claims()}
    if claim_id not in known:
        raise UsageError(f"claims: unknown {shown(claim_id)}; {instead_of(claim_id, known)}")
    return known[claim_id]


def load_misses() -> dict[str, str]:
    """Return, by claim, why our value differs from the paper's, as a sentence."""
    return dict(yaml.safe_load(MISSES.read_text(encoding="utf-8")) or {})


Ends = Mapping[str, Sequence[float]]
"""The ends of the intervals of a claim's values, by their part."""


def answers(claim: Claim, ours: Any, intervals: Ends | None = None) -> list[Answer]:
    """Compare a claim, value by value, with ours of the same shape; None where there is none."""
    found = []
    for one in _compared(claim, "", claim.value, ours):
        low, high = (intervals or {}).get(one.part, (None, None))
        found.append(replace(one, low=low, high=high))
    return found


def ends(ours: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Ends]:
    """Return the ends of the 90 % intervals of our values, from those of the nine wrong runs.

    A ratio is taken in each of the nine, so an error common to both its runs is no error of it.
    """
    found: dict[str, Ends] = {}
    for claim in load_claims():
        if claim.id not in ours or claim.kind not in ("ratio", "absolute"):
            continue
        every = [answers(claim, each.get(claim.id)) for each in others]
        values = {group[0].part: [a.ours for a in group] for group in zip(*every, strict=True)}
        ranges = {part: range_of(own) for part, own in values.items() if None not in own}
        found[claim.id] = {part: (r.low, r.high) for part, r in ranges.items() if r is not None}
    return found


def worst(found: Sequence[Answer]) -> Verdict:
    """Return the verdict on a claim: the worst on its values."""
    return max((answer.verdict for answer in found), key=VERDICTS.index)


def answer(table: pd.DataFrame, asked: Asked) -> Any:
    """Return our value of a claim, in the shape of what the query asks for; None for no number."""
    match _parts(asked):
        case Mapping() as parts:
            return {name: answer(table, part) for name, part in parts.items()}
        case list() as parts:
            ours = [answer(table, part) for part in parts]
            return ours if parts[0].then is None else {"max": max, "min": min}[parts[0].then](ours)
        case query:
            value = _value(table, query)
            return value if math.isfinite(value) else None


def _parts(asked: Asked) -> Mapping[str, Query] | list[Query] | Query:
    """Return the parts of a query's list or mapping, one by one; without any, the query itself."""
    if isinstance(asked, Mapping):
        return asked
    keys = asked.model_dump()
    inside = [(keys[part], name) for part in ("where", "over") for name in keys[part]]
    for mapping, name in (*inside, (keys, "take"), (keys, "best")):
        several = mapping[name]
        if isinstance(several, list | dict):
            parts = []
            for one in several.values() if isinstance(several, dict) else several:
                mapping[name] = one
                parts.append(Query.model_validate(keys))
            return dict(zip(several, parts, strict=True)) if isinstance(several, dict) else parts
    return asked


def with_papers(
    table: pd.DataFrame, queries: Mapping[str, Asked], *, judged: bool = True
) -> pd.DataFrame:
    """Return a table with a column `COLUMN, paper` beside each column that a claim is about.

    It has the paper's value, or bound, where the claim is about one point, or the best one. That of
    a ratio is times our value of what it is over, so that it stands where ours would have to be; of
    one system over another it stands at the other. `COLUMN, missed` is 1 where ours is further off
    than 25 %, unless nothing is `judged`.
    """
    table = table.copy()
    for name, query in queries.items():
        claim = claim_of(name)
        for one, value in _leaves(query, claim.value):
            if isinstance(value, str) and value != claim.value:
                continue  # a sentence in words, of which the bound is ours
            verdict = _leaf(claim, "", value, answer(table, one)).verdict
            number = float(value.split()[-1]) if isinstance(value, str) else value
            _put(table, one, number, judged and verdict in ("right order", "wrong"))
    return table


def _leaves(asked: Asked, paper: Any) -> Iterator[tuple[Query, Any]]:
    """Yield the queries whose answer is one number, with the paper's; no directions as > 1."""
    pairs: list[tuple[Query, Any]] = []
    match _parts(asked), paper:
        case Mapping() as parts, Mapping():
            pairs = [(part, paper[name]) for name, part in parts.items() if name in paper]
        case list() as parts, list():
            pairs = list(zip(parts, paper, strict=False))
        case Query() as query, int() | float():
            yield query, paper
        case Query() as query, str() if "=" in paper:
            yield query, paper
    for part, value in pairs:
        yield from _leaves(part, value)


def _put(table: pd.DataFrame, query: Query, value: float, missed: bool) -> None:
    where, means = query.where, _means(table, query, query.where)
    heights, compared = means * 0 + value, means
    if query.over:
        others = _means(table, query, where | query.over)
        heights, compared = others * value, (means / others)[others > 0]
        if "system" in query.over:
            where, heights = where | query.over, means / value
    compared = compared.dropna()
    if query.best in ("max", "min") and len(compared):
        best = compared.idxmax() if query.best == "max" else compared.idxmin()
        heights = heights[heights.index == best]
    if len(heights) != 1 or not math.isfinite(heights.iloc[0]) or query.take not in table:
        return
    rows = _rows(table, where)
    place = heights.index[0] if isinstance(heights.index, pd.MultiIndex) else [heights.index[0]]
    for name, at in zip(heights.index.names, place, strict=True):
        rows = rows if name is None else rows[rows[name] == at]
    table.loc[rows.index, f"{query.take}{PAPER}"] = heights.iloc[0]
    table.loc[rows.index, f"{query.take}{MISSED}"] = float(missed)


def _value(table: pd.DataFrame, query: Query) -> float:
    means = _means(table, query, query.where)
    if query.over:
        others = _means(table, query, query.where | query.over)
        means = (means / others)[others > 0].dropna()
    if query.best == "range":
        return float(means.max() - means.min())
    return {"max": means.max, "min": means.min}.get(str(query.best), means.mean)()


def _means(table: pd.DataFrame, query: Query, where: Mapping[str, Any]) -> pd.Series[float]:
    """Return means over the seeds of the queried column, by the axes that the query leaves open.

    Of a table without seeds, an axis is what is no fraction.
    """
    table = _rows(table, where)
    known = table.loc[:, :"seed"] if "seed" in table else table.select_dtypes(exclude="float")
    axes = [name for name in known if name not in {"seed", *where, *query.over}]
    _, inverse, column = str(query.take).rpartition("1/")
    taken = 1 / table[column] if inverse else table[column]
    taken = np.log(taken) if query.how == "geomean" else taken
    by = [table[name] for name in axes] or [pd.Series(0, table.index)]
    means = taken.groupby(by, sort=False).mean()
    return np.exp(means) if query.how == "geomean" else means


def _rows(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in where.items():
        column = table[name]
        if isinstance(value, float) and pd.api.types.is_numeric_dtype(column):
            apart = (column - value).abs()
            table = table[apart == apart.min()]
        else:  # a number may be what words of an axis say
            table = table[column == (f"{value:g}" if isinstance(value, float) else value)]
    return table


class Score(NamedTuple):
    """Nearness of answers, over all ratios of one thing to another: ours, and 1 in their place.

    `off` is the geometric mean of max(ours / paper, paper / ours), `within` how many values are
    within 25 %; of pairs of values that a claim puts in an order, `agree` have that order.
    `inside`: how many of the `intervals` of all claims have the paper's value in them.
    """

    values: int
    off: float
    null_off: float
    within: int
    null_within: int
    pairs: int
    agree: int
    intervals: int
    inside: int


def score(found: Sequence[Answer]) -> Score:
    """Return the score of all claims in which 1 would say that nothing differs, bounds left out."""
    known = [answer for answer in found if answer.claim.is_comparison and answer.is_number]
    ours = np.abs(np.log([answer.ours / answer.paper for answer in known]))
    null = np.abs(np.log([float(answer.paper) for answer in known]))
    within, null_within = (int((off <= math.log(1.25)).sum()) for off in (ours, null))
    off, null_off = (math.exp(each.mean()) if known else math.nan for each in (ours, null))
    orders = [order for group in by_claim(known) for order in _orders(group)]
    inside = [told for answer in found if (told := answer.is_inside) is not None]
    counts = len(orders), sum(orders), len(inside), sum(inside)
    return Score(len(known), off, null_off, within, null_within, *counts)


def _orders(group: Sequence[Answer]) -> Iterator[bool]:
    """Yield, for each pair of a claim's values that the paper orders, whether ours has that order.

    Of lists, one a system, systems are compared at the same place of the list.
    """
    for one, other in combinations(group, 2):
        place, beside = (answer.part.partition("[")[2] for answer in (one, other))
        same_list = one.part.partition("[")[0] == other.part.partition("[")[0]
        if (place == beside or same_list) and one.paper != other.paper:
            yield (one.ours - other.ours) * (one.paper - other.paper) > 0


def score_in_words(told: Score) -> str:
    """Say the score in a few sentences."""
    words = (
        f"Of {told.values} published ratios {told.within} are within 25 % of the value; a model "
        f"that always says 1 has {told.null_within}. Ours are off by a factor of {told.off:.2f} in "
        f"the geometric mean, those of that model by {told.null_off:.2f}. Of {told.pairs} pairs of "
        f"values that a claim puts in an order, {told.agree} have that order."
    )
    if not told.intervals:
        return words
    intervals = f"Of {told.intervals} values with an interval, {told.inside}"
    return f"{words} {intervals} have the paper's inside."


def by_claim(found: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Yield the values of each claim together."""
    for claim_id in dict.fromkeys(answer.claim.id for answer in found):
        yield [answer for answer in found if answer.claim.id == claim_id]


def with_interval(answer: Answer) -> str:
    """Return our value as a table shows it, with its interval where there is one."""
    if answer.low is None or answer.high is None:
        return number(answer.ours)
    return f"{number(answer.ours)} ({number(answer.low)} to {number(answer.high)})"


def number(value: object) -> str:
    """Return a value of a claim as a table shows it."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _compared(claim: Claim, part: str, paper: Any, ours: Any) -> Iterator[Answer]:
    if isinstance(paper, Mapping):
        for key, value in paper.items():
            below = ours.get(key) if isinstance(ours, Mapping) else None
            yield from _compared(claim, f"{part} {key}".strip(), value, below)
    elif isinstance(paper, list) and claim.kind != "order":
        given = ours if isinstance(ours, Sequence) and len(ours) == len(paper) else None
        same_order = given is not None and _ranks(given) == _ranks(paper)
        for index, value in enumerate(paper):
            mine = None if given is None else given[index]
            yield _leaf(claim, f"{part}[{index}]", value, mine, same_order)
    else:
        yield _leaf(claim, part, paper, ours)


def _leaf(claim: Claim, part: str, paper: Any, ours: Any, same_order: bool = False) -> Answer:
    if ours is None or (isinstance(ours, float) and not math.isfinite(ours)):
        return Answer(claim, part, None, paper, None, "not run")
    if claim.kind == "order":
        return Answer(claim, part, ours, paper, None, "exact" if ours == paper else "wrong")
    if isinstance(paper, str):
        sign, bound = paper.split()
        ratio = ours / float(bound)
        return Answer(claim, part, ours, paper, ratio, _of_bound(ratio, sign))
    ratio = ours / paper if paper else None
    if claim.kind == "exact":
        same = math.isclose(ours, paper, rel_tol=1e-9)
        return Answer(claim, part, ours, paper, ratio, "exact" if same else "wrong")
    compared = claim.is_comparison and min(ours, paper) > 0
    if not compared or abs(math.log(paper)) < NO_EFFECT:
        verdict = _by_distance(ours / paper) or ("right order" if same_order else "wrong")
        return Answer(claim, part, ours, paper, ratio, verdict)
    effect = math.log(ours) / math.log(paper)
    ordered = effect > LEAST_EFFECT or same_order
    verdict = _by_distance(effect) or ("right order" if ordered else "wrong")
    return Answer(claim, part, ours, paper, ratio, verdict, effect)


def _of_bound(ratio: float, sign: str) -> Verdict:
    """Judge by a bound: <= and >= by how far it is missed; < and > are directions, had or not."""
    over = ratio if sign[0] == "<" else 1 / ratio if ratio else math.inf
    if over < 1 or (over == 1 and sign[-1] == "="):
        return "holds"
    return (_by_distance(over) if sign[-1] == "=" else None) or "wrong"


def _by_distance(ratio: float) -> Verdict | None:
    distance = abs(ratio - 1)
    if distance <= 0.10:
        return "within 10 %"
    return "within 25 %" if distance <= 0.25 else None


def _ranks(values: Sequence[Any]) -> list[int]:
    finite = [v if isinstance(v, int | float) else math.nan for v in values]
    return sorted(range(len(finite)), key=finite.__getitem__)
