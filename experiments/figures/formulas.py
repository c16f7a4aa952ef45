"""Texts of a figure's file: formulas over columns, and words with numbers in braces.

A file is data. A text is read part by part, and what is not listed here is refused by a line. There
is no attribute, no call, no power, nothing longer than a person writes.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from string import Formatter
from typing import TYPE_CHECKING, Any, NoReturn

from evenflow.errors import UsageError, instead_of
from evenflow.keys import shown

if TYPE_CHECKING:
    import pandas as pd

MOST_LETTERS = 300

RIGHT = "columns, numbers, 'words', + - * / ( ), comparisons, in [...], and, or, not are right"

ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda column, values: column.isin(values),
    ast.NotIn: lambda column, values: ~column.isin(values),
}


def evaluated(text: str, table: pd.DataFrame, numbers: Mapping[str, Any], key: str) -> pd.Series:
    """Return a formula's value in each row of a table; a name is a column.

    `{name}` and `{name[part]}` are numbers of the study; an empty cell is not equal to itself.
    UsageError, in the name of the key, for what is no formula, or none of these columns.
    """
    if len(text) > MOST_LETTERS:
        raise UsageError(f"{key}: has {len(text)} letters; a formula has at most {MOST_LETTERS}")
    reader = _Reader(text, table, numbers, key)
    try:
        return reader.column(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        reader.refuse()
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UsageError(f"{key}: {shown(text)} cannot be computed: {error}") from None


def chosen(text: str, table: pd.DataFrame, numbers: Mapping[str, Any], key: str) -> pd.DataFrame:
    """Return the rows of a table for which a formula holds."""
    holds = evaluated(text, table, numbers, key)
    if holds.dtype != bool:
        raise UsageError(f"{key}: {shown(text)} is neither true nor false; a comparison is right")
    return table[holds]


class _Reader:
    def __init__(
        self, text: str, table: pd.DataFrame, numbers: Mapping[str, Any], key: str
    ) -> None:
        self.text, self.table, self.numbers, self.key = text, table, numbers, key

    def refuse(self) -> NoReturn:
        raise UsageError(f"{self.key}: {shown(self.text)} is no formula; {RIGHT}")

    def column(self, node: ast.expr) -> pd.Series:
        import pandas as pd

        value = self.value(node)
        return value if isinstance(value, pd.Series) else pd.Series(value, self.table.index)

    def value(self, node: ast.expr) -> Any:  # noqa: RET503
        """Return a column, a number, a text or a list."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str()):
                return node.value
            case ast.Name(id=name):
                return self.table[name] if name in self.table else self.unknown(name)
            case ast.Set(elts=[ast.Name() | ast.Subscript() as number]):
                return _field(ast.unparse(number), self.numbers, self.key)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self.value(part) for part in parts]
            case ast.BinOp(op=op) if type(op) in ARITHMETIC:
                return ARITHMETIC[type(op)](self.count(node.left), self.count(node.right))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op):
                value = self.count(node.operand)
                return -value if isinstance(op, ast.USub) else value
            case ast.UnaryOp(op=ast.Not()):
                return ~self.truth(node.operand)
            case ast.BoolOp(op=op, values=parts):
                joins = operator.and_ if isinstance(op, ast.And) else operator.or_
                return reduce(joins, map(self.truth, parts))
            case ast.Compare(ops=ops) if all(type(op) in COMPARISONS for op in ops):
                return reduce(operator.and_, self.compared(node))
        self.refuse()

    def unknown(self, name: str) -> NoReturn:
        hint = instead_of(name, map(str, self.table.columns))
        raise UsageError(f"{self.key}: no column {shown(name)}; {hint}")

    def count(self, node: ast.expr) -> Any:
        """Return a part that is a number, or a column of them: words do not add up."""
        import pandas as pd

        return pd.to_numeric(self.value(node))

    def truth(self, node: ast.expr) -> pd.Series:
        value = self.column(node)
        if value.dtype != bool:
            self.refuse()
        return value

    def compared(self, node: ast.Compare) -> Sequence[pd.Series]:
        parts = [node.left, *node.comparators]
        return [
            COMPARISONS[type(op)](self.column(left), self.value(right))
            for left, op, right in zip(parts, node.ops, parts[1:], strict=False)
        ]


FIELD = re.compile(r"([^.\[\]]*)(?:\[['\"]?([^.\[\]'\"]*)['\"]?\])?")
"""A name, and the name of a part of it."""

FORMAT = re.compile(r"[+,]{0,2}(\.\d\d?)?[defg%]?")


def filled(words: str, numbers: Mapping[str, Any], key: str) -> str:
    """Return words with numbers in place of `{name}`, `{name[part]}` and `{name:.2f}`.

    UsageError, in the name of the key, for an unknown name and for any other format.
    """
    try:
        return "".join(
            before + ("" if name is None else _formatted(name, spec or "", kind, numbers, key))
            for before, name, spec, kind in Formatter().parse(words)
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{key}: {shown(words)}: {error}") from None


def _formatted(
    name: str, spec: str, conversion: str | None, numbers: Mapping[str, Any], key: str
) -> str:
    if conversion or not FORMAT.fullmatch(spec):
        raise UsageError(f"{key}: {{{name}:{spec}}}: no such format; one like {{{name}:.2f}} is")
    return format(_field(name, numbers, key), spec)


def _field(name: str, numbers: Mapping[str, Any], key: str) -> Any:
    found = FIELD.fullmatch(name)
    outer, part = found.groups() if found else (name, None)
    try:
        value = numbers[outer]
        return value if part is None else value[part]
    except (KeyError, TypeError, IndexError):
        raise UsageError(f"{key}: no number {shown(name)}; {instead_of(name, numbers)}") from None
