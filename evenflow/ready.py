"""Decodes that are not in flight, as the groups in which they returned. Knows no policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import islice

from evenflow.groups import DecodeGroup, Row


class ReadyQueue:
    """Groups in the order in which they returned; `rows` counts their members.

    Taking whole groups costs O(1) a group; taking part of one costs O(rows that move). Which
    members of a group go first is deterministic, and by arrival only where the order asked for is
    arrival.
    """

    __slots__ = ("_groups", "_page_tokens", "rows")

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._groups: list[DecodeGroup] = []
        self.rows = 0

    def __iter__(self) -> Iterator[Row]:
        return (row for group in self._groups for row in group.rows())

    def __contains__(self, row: Row) -> bool:
        return any(row in group for group in self._groups)

    @property
    def groups(self) -> Sequence[DecodeGroup]:
        return self._groups

    @property
    def group_sizes(self) -> list[int]:
        return [len(group) for group in self._groups]

    def append(self, group: DecodeGroup) -> None:
        self._groups.append(group)
        self.rows += len(group.members)

    def remove(self, row: Row) -> None:
        group = next(group for group in self._groups if row in group)
        group.leave(row)
        self.rows -= 1
        if not len(group):
            self._groups.remove(group)

    def due_pages(self, count: int, order: str) -> int:
        """Return how many of the first `count` members need a page for their next token."""
        if count >= self.rows:
            return sum(len(group.due_pages()) for group in self._groups)
        return sum(
            0 <= row.page_tick - group.tick < group.stride
            for group, row in self._first(count, order)
        )

    def take(self, count: int, order: str) -> DecodeGroup:
        """Remove the first `count` members in `order` and return them as one group."""
        groups = self._groups
        if len(groups) == 1 and count == self.rows:
            self.rows = 0
            return groups.pop()
        by_arrival = order == "arrival" and count < self.rows
        self.rows -= count
        if by_arrival:
            return self._take_by_arrival(count)
        end = 0 if order == "first_returned" else -1
        taken = self._take_from(end, count)
        while len(taken) < count:
            taken = self._merge(taken, self._take_from(end, count - len(taken)))
        return taken

    def top_up(self, group: DecodeGroup, count: int, order: str) -> DecodeGroup:
        """Return the group with as many more members as are there and it needs to have `count`."""
        missing = min(count - len(group), self.rows)
        if not missing:
            return group
        more = self.take(missing, order)
        return self._merge(group, more) if len(group) else more

    def _take_from(self, end: int, count: int) -> DecodeGroup:
        group = self._groups[end]
        if len(group) <= count:
            return self._groups.pop(end)
        excess = len(group) - count
        if count <= excess:
            return group.split(count, self._page_tokens)
        self._groups[end] = group.split_last(excess, self._page_tokens)
        return group

    def _merge(self, one: DecodeGroup, other: DecodeGroup) -> DecodeGroup:
        larger, smaller = (one, other) if len(one) >= len(other) else (other, one)
        larger.absorb(smaller, self._page_tokens)
        return larger

    def _take_by_arrival(self, count: int) -> DecodeGroup:
        taken = self._groups[0].empty()
        for group, row in self._first(count, "arrival"):
            taken.join(row, group.leave(row), self._page_tokens)
        self._groups = [group for group in self._groups if len(group)]
        return taken

    def _first(self, count: int, order: str) -> list[tuple[DecodeGroup, Row]]:
        groups = self._groups if order != "last_returned" else self._groups[::-1]
        members = ((group, row) for group in groups for row in group.rows())
        if order == "arrival":
            return nsmallest(count, members, key=lambda member: member[1].order)
        return list(islice(members, count))
