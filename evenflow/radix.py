"""A prefix cache as a radix tree: runs of pages that came together are used and evicted together.

Source: SGLang 0.5.23 (its UnifiedRadixCache). Who holds what, and what is found, is as in a
`PrefixCache`; what is pushed out is not.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from evenflow.kv import CachedPage, Holder, PrefixCache
from evenflow.request import Prefix


@dataclass(slots=True, eq=False)
class Run:
    """Pages that follow one another in the tree, and when they were last used."""

    pages: list[CachedPage]
    used: tuple[int, int]

    @property
    def is_idle_leaf(self) -> bool:
        return not self.pages[-1].children and not self.pages[-1].holders


class RadixCache(PrefixCache):
    """A prefix cache that evicts the leaf that was used least recently, as a whole.

    To look a prompt up is to use what it begins with. A run is split where a prompt was found to
    begin with a part of it, where another goes on differently, and where a prompt ends whose output
    is in it. Content enters when it has been computed (`late`): chunk by chunk, and output at the
    end of its request.
    """

    __slots__ = ("_run_of", "_runs", "_uses")

    late = True

    def __init__(self, total_pages: int, page_tokens: int = 16) -> None:
        super().__init__(total_pages, page_tokens)
        self._runs: dict[Run, None] = {}
        self._run_of: dict[int, Run] = {}
        self._uses = 0

    def find(self, chain: list[CachedPage], prefix: Prefix, tokens: int) -> int:
        """Bring `chain` up to date, as a PrefixCache does; what is found is used now."""
        chain.clear()
        pages = super().find(chain, prefix, tokens)
        runs = list(self._along(chain))
        self._uses += 1
        for distance, run in enumerate(reversed(runs)):
            run.used = self._uses, -distance
        return pages

    def publish(self, holder: Holder, prefix: Prefix, tokens: int) -> None:
        """Make the full pages of the first `tokens` tokens findable; all of them are used now."""
        super().publish(holder, prefix, tokens)
        self._use(holder.chain)
        prompt_pages = self._full_pages(prefix, holder.request.prompt_tokens)
        if prompt_pages < len(holder.chain):
            self._use(holder.chain[:prompt_pages])

    def _use(self, chain: abc.Sequence[CachedPage]) -> None:
        for run in self._along(chain):
            run.used = self._next_use()
        new = [node for node in chain if node.page not in self._run_of]
        if new:
            self._add(Run(new, self._next_use()))

    def _along(self, chain: abc.Sequence[CachedPage]) -> abc.Iterator[Run]:
        """Iterate over the runs of a path, the last of them split where the path leaves it."""
        start = 0
        while start < len(chain) and (run := self._run_of.get(chain[start].page)) is not None:
            stop = start + len(run.pages)
            path = chain[start:stop]
            same = next(
                (at for at, page in enumerate(path) if page is not run.pages[at]), len(path)
            )
            if same < len(run.pages):
                run = self._split(run, same)
            yield run
            start += same

    def _split(self, run: Run, count: int) -> Run:
        """Let the first pages of a run be one of their own; return it."""
        first = Run(run.pages[:count], self._next_use())
        run.pages = run.pages[count:]
        run.used = self._next_use()
        self._add(first)
        return first

    def _add(self, run: Run) -> None:
        self._runs[run] = None
        self._run_of.update((node.page, run) for node in run.pages)

    def _next_use(self) -> tuple[int, int]:
        self._uses += 1
        return self._uses, 0

    def _evict(self) -> None:
        victim = min((run for run in self._runs if run.is_idle_leaf), key=_last_use)
        del self._runs[victim]
        for node in reversed(victim.pages):
            del self._run_of[node.page]
            self._evict_page(node)


def _last_use(run: Run) -> tuple[int, int]:
    return run.used
