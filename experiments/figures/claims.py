"""The published claims beside ours: queries of tables, values leaf by leaf, a ratio, a verdict.

Runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import yaml

from evenflow.errors import UsageError, instead_of
from evenflow.experiments.figures.schema import MISSED, PAPER, Asked, Query
from evenflow.keys import shown
from evenflow.study.uncertainty import range_of

if TYPE_CHECKING:
    import pandas as pd

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
    kind: Literal["ratio", "absolute", "exact"]
    quantity: str
    value: Any
    neutral: bool = True

    @property
    def is_comparison(self) -> bool:
        return self.kind == "ratio" and self.neutral


@dataclass(frozen=True, slots=True)
class Answer:
    """One value of a claim, and ours. `part` is its key or position, empty for a single value.

    `ratio` is ours / paper. Of a comparison, `effect` is log(ours) / log(paper). The whole
    published effect is 1, none of it 0, the opposite is below 0. None where there is none. `low`
    and `high` are the ends of the 90 % interval of ours, where nine more runs were made.
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
    def row(self) -> str:
        """The list that the value is in: `vllm[` of `vllm[2]`; empty where it is in none."""
        return "".join(self.part.rpartition("[")[:2])


@cache
def load_claims() -> Mapping[str, Claim]:
    entries = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return {entry["id"]: Claim(**entry) for entry in entries}


def claim_of(claim_id: str) -> Claim:
    """Return the claim of that id; UsageError for an unknown one."""
    known = load_claims()
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
    mine, papers = dict(_flat(ours)), list(_flat(claim.value))
    plain = [Answer(claim, part, mine.get(part), paper, None, "not run") for part, paper in papers]
    return [
        replace(_judged(each, plain), low=low, high=high)
        for each in plain
        for low, high in [(intervals or {}).get(each.part, (None, None))]
    ]


def _flat(value: Any, part: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in a mapping or a list with their place: `vllm[2]`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{part} {key}".strip())
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{part}[{index}]")
    else:
        yield part, value


def ends(ours: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Ends]:
    """Return the ends of the 90 % intervals of our values, from those of the nine wrong runs.

    A ratio is taken in each of the nine. So an error common to both its runs is no error of it.
    """
    found: dict[str, Ends] = {}
    for name in ours:
        if (claim := claim_of(name)).kind != "exact":
            every = [answers(claim, each.get(name)) for each in others]
            values = {group[0].part: [a.ours for a in group] for group in zip(*every, strict=True)}
            ranges = {part: range_of(own) for part, own in values.items() if None not in own}
            found[name] = {part: (r.low, r.high) for part, r in ranges.items() if r is not None}
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

    It has the paper's value, or bound, where the claim is about one point, or the best one. The
    value of a ratio is times ours of what it is over. So it stands where ours would have to be. Of
    one system over another it stands at the other. `COLUMN, missed` is 1 where ours is further off
    than 25 %, unless nothing is `judged`.
    """
    table = table.copy()
    for name, query in queries.items():
        claim = claim_of(name)
        for one, value in _leaves(query, claim.value):
            if isinstance(value, str) and value != claim.value:
                continue  # a sentence in words, of which the bound is ours
            (ours,) = answers(replace(claim, value=value), answer(table, one))
            number = float(value.split()[-1]) if isinstance(value, str) else value
            _put(table, one, number, judged and ours.verdict in ("right order", "wrong"))
    return table


def _leaves(asked: Asked, paper: Any) -> Iterator[tuple[Query, Any]]:
    """Yield the queries whose answer is one number, with the paper's; no directions as > 1."""
    match _parts(asked), paper:
        case Mapping() as parts, Mapping():
            for name, part in parts.items():
                yield from _leaves(part, paper.get(name))
        case list() as parts, list():
            for part, value in zip(parts, paper, strict=False):
                yield from _leaves(part, value)
        case Query() as query, int() | float():
            yield query, paper
        case Query() as query, str() if "=" in paper:
            yield query, paper


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
    place = heights.index[0] if heights.index.nlevels > 1 else [heights.index[0]]
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
    known = table.loc[:, :"seed"] if "seed" in table else table.select_dtypes(exclude="float")
    axes = [name for name in known if name not in {"seed", *where, *query.over}]
    _, inverse, column = str(query.take).rpartition("1/")
    table = _rows(table[[*{*axes, *where, column}]], where)
    taken = 1 / table[column] if inverse else table[column]
    taken = np.log(taken) if query.how == "geomean" else taken
    by: list[Any] = [table[name] for name in axes] or [np.zeros(len(table))]
    means = taken.groupby(by, sort=False).mean()
    return np.exp(means) if query.how == "geomean" else means


def _rows(table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    for name, value in where.items():
        column = table[name]
        if isinstance(value, float) and column.dtype.kind in "biuf":
            apart = (column - value).abs()
            table = table[apart == apart.min()]
        else:  # a number may be what words of an axis say
            table = table[column == (f"{value:g}" if isinstance(value, float) else value)]
    return table


def score(found: Sequence[Answer]) -> str:
    """Say how near all ratios are in which 1 would say that nothing differs; "" where none is.

    Beside them stands 1 in their place. Bounds are left out.
    """
    known = [answer for answer in found if answer.claim.is_comparison and answer.is_number]
    if not known:
        return ""
    ours = np.abs(np.log([answer.ours / answer.paper for answer in known]))
    null = np.abs(np.log([float(answer.paper) for answer in known]))
    within, null_within = (int((off <= math.log(1.25)).sum()) for off in (ours, null))
    orders = [order for group in by_claim(known) for order in _orders(group)]
    words = (
        f"Of {len(known)} published ratios {within} are within 25 % of the value; a model that "
        f"always says 1 has {null_within}. Ours are off by a factor of {math.exp(ours.mean()):.2f} "
        f"in the geometric mean, those of that model by {math.exp(null.mean()):.2f}. Of "
        f"{len(orders)} pairs of values that a claim puts in an order, {sum(orders)} have that "
        "order."
    )
    ranges = [each for each in found if each.is_number and None not in (each.low, each.high)]
    if not ranges:
        return words
    inside = sum(each.low <= each.paper <= each.high for each in ranges)
    return f"{words} Of {len(ranges)} values with an interval, {inside} have the paper's inside."


def _orders(group: Sequence[Answer]) -> Iterator[bool]:
    """Yield, for each pair of a claim's values that the paper orders, whether ours has that order.

    Of lists, one a system, systems are compared at the same place of the list.
    """
    for one, other in combinations(group, 2):
        places = {answer.part.partition("[")[2] for answer in (one, other)}
        if (len(places) == 1 or one.row == other.row) and one.paper != other.paper:
            yield (one.ours - other.ours) * (one.paper - other.paper) > 0


def by_claim(found: Sequence[Answer]) -> Iterator[list[Answer]]:
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


def _judged(plain: Answer, all_of: Sequence[Answer]) -> Answer:
    """Return the answer with its verdict; `all_of` are those of the same claim."""
    claim, ours, paper = plain.claim, plain.ours, plain.paper
    if ours is None or not math.isfinite(ours):
        return plain
    if isinstance(paper, str):
        sign, bound = paper.split()
        ratio = ours / float(bound)
        return replace(plain, ratio=ratio, verdict=_of_bound(ratio, sign))
    told = replace(plain, ratio=ours / paper if paper else None)
    if claim.kind == "exact":
        same = math.isclose(ours, paper, rel_tol=1e-9)
        return replace(told, verdict="exact" if same else "wrong")
    ordered = _in_order([each for each in all_of if plain.row and each.row == plain.row])
    compared = claim.is_comparison and min(ours, paper) > 0
    if not compared or abs(math.log(paper)) < NO_EFFECT:
        verdict = _by_distance(ours / paper) or ("right order" if ordered else "wrong")
        return replace(told, verdict=verdict)
    effect = math.log(ours) / math.log(paper)
    ordered = ordered or effect > LEAST_EFFECT
    verdict = _by_distance(effect) or ("right order" if ordered else "wrong")
    return replace(told, verdict=verdict, effect=effect)


def _in_order(row: Sequence[Answer]) -> bool:
    """Say whether our values of a list are in the paper's order."""
    if not row or any(each.ours is None for each in row):
        return False
    columns = [each.ours for each in row], [each.paper for each in row]
    ours, papers = (np.argsort(column, kind="stable").tolist() for column in columns)
    return bool(ours == papers)


def _of_bound(ratio: float, sign: str) -> Verdict:
    """Judge by a bound: <= and >= by how far it is missed; < and > are only directions."""
    over = ratio if sign[0] == "<" else 1 / ratio if ratio else math.inf
    if over < 1 or (over == 1 and sign[-1] == "="):
        return "holds"
    return (_by_distance(over) if sign[-1] == "=" else None) or "wrong"


def _by_distance(ratio: float) -> Verdict | None:
    distance = abs(ratio - 1)
    return "within 10 %" if distance <= 0.10 else "within 25 %" if distance <= 0.25 else None
