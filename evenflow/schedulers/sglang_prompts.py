"""SGLang's pass over the prompts: which of them a batch takes, and how much of each.

The rules are SGLang 0.5.23's, in our own words (`_get_new_batch_prefill` and SchedulePolicy); what
decodes, and when prompts are asked for, is `evenflow.schedulers.sglang`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice

from evenflow.schedulers.sglang_rules import Room, longest_prefix_first, needed_tokens
from evenflow.scheduling import Prompt, Upkeep, View

LOOKED_UP = 128  # prompts that are looked up in a pass, at most
REFRESH = 32  # passes


@dataclass(slots=True)
class Slot:
    """The running decodes of one slot as its last answer left them.

    `full`: a prompt did not fit, and nobody has left since. `cut`: its last prompt goes on.
    """

    running: int = 0
    full: bool = False
    cut: bool = False


@dataclass(slots=True)
class Prompts:
    """Takes prompts within limits: tokens of a `chunk` and of all `inputs`, requests `running` and
    of them `rows` in a micro-batch. `mixed`: decodes share the chunk. `chunk_after` returns the
    next chunk by what of the prompt is computed. `lpm`: longest cached prefix first."""

    chunk: int
    inputs: int
    running: int
    rows: int
    mixed: bool
    lpm: bool
    chunk_after: Callable[[int, int], int] | None
    passes: int = 0

    def take(
        self, view: View, slot: Slot, running: int, ratio: float
    ) -> Generator[Upkeep, None, Room | None]:
        """Take the next chunk of the prompt under way, then prompts that wait, in order."""
        partial = next(iter(view.partials), None)
        if partial is None and (slot.full or not view.num_waiting):
            return None
        places = self.running - view.running + (partial is not None)
        places = min(self.rows - running, places)
        if partial is None and places <= 0:
            slot.full = True
            return None
        if view.prefix_cache and view.num_waiting:
            yield from self._look_up(view)
        room = self._room(view, partial, running if self.mixed else 0, ratio)
        if partial is not None:
            tokens = room.next_chunk_of(partial)
            pages = view.pages_for(partial.computed + tokens) - partial.pages
            if tokens <= 0 or pages > view.free_pages:  # of which SGLang dies
                return None
            room.take(partial, tokens)
        yield from self._admit(view, slot, room, places)
        return room

    def _room(self, view: View, partial: Prompt | None, riding: int, ratio: float) -> Room:
        decodes = view.decodes
        chunk = self.chunk
        if partial is not None and self.chunk_after is not None:
            chunk = self.chunk_after(partial.computed, view.page_tokens)
        return Room(
            view.page_tokens,
            chunk - riding,
            self.inputs,
            view.free_pages * view.page_tokens,
            riding,
            riding + needed_tokens(decodes, ratio),
            walks=not view.prefix_cache,
            decodes=decodes,
            ratio=ratio,
        )

    def _admit(self, view: View, slot: Slot, room: Room, places: int) -> Iterator[Upkeep]:
        """Take prompts that wait until one does not fit; with a place left, the slot is full."""
        waiting = view.waiting
        for _ in range(view.num_waiting):
            if room.has_pages and room.is_spent:
                return
            slot.full |= len(room.prefills) >= places
            if slot.full:
                return
            prompt = next(waiting)
            if not room.fits(prompt):
                slot.full = bool(room.prefills or room.decodes)
                return
            if room.chunk_of(prompt) <= 0:
                return
            if prompt.computed:
                yield Upkeep(hold=[prompt.request_id])
                room.free = view.free_pages * view.page_tokens
            room.take(prompt, room.chunk_of(prompt))
            if not room.has_pages:
                slot.full = True
                return

    def _look_up(self, view: View) -> Iterator[Upkeep]:
        """Look up those that wait: to order them, or lest what they begin with is evicted."""
        if self.lpm and view.num_waiting <= LOOKED_UP:
            yield Upkeep(waiting=longest_prefix_first(view))
            return
        if self.passes % REFRESH == 0:
            for prompt in reversed([*islice(view.queue, LOOKED_UP)]):
                view.cached_tokens(prompt)
        self.passes += 1
