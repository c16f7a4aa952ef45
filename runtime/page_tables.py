"""Page tables, sent to the workers as differences: writer and reader.

A step names only new pages of sequences and the sequences that released theirs. A continuing decode
costs its id. Knows no sockets and no clock.
"""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass, field

from evenflow.core.batch import MicroBatch
from evenflow.core.batcher import Batcher
from evenflow.core.decodes import Sequence
from evenflow.engines.queues import ahead_of
from evenflow.errors import WorkerError
from evenflow.runtime.tokens import TokenBook
from evenflow.runtime.wire import Growth, Piece, Shared, Step


@dataclass(slots=True)
class _Told:
    """State of a sequence at the workers, as of its `epoch`.

    Of its `pages` the first `published` are those of a prefix cache.

    Its engine's pages are those of the workers from `first_page` on.
    """

    sequence: Sequence
    epoch: int
    first_page: int
    pages: list[int] = field(default_factory=list)
    published: int = 0


class StepWriter:
    """The driver's end: writes micro-batches of one pipeline's engines as steps, and numbers them
    in the order scheduled.

    The pages of the engines lie one after the other in the workers' memory. `book` has the token
    ids where workers compute with them.
    """

    def __init__(self, engines: abc.Sequence[Batcher], book: TokenBook | None = None) -> None:
        self._engines = engines
        self._count = 0
        self._book = book
        self._told: dict[int, _Told] = {}
        self._preemptions = 0
        self._ended: list[int] = []
        self._adopted: list[Piece] = []
        self._shared: list[Shared] = []

    def step(
        self, batch: MicroBatch, activation_bytes: int, work_s: list[float], hops_s: list[float]
    ) -> Step:
        dropped = self._ended + self._preempted()
        adopted = [piece for piece in self._adopted if piece.request_id in self._told]
        self._ended, self._adopted = [], []
        for told in self._told.values():
            self._tell_shared(told)
        pieces = [
            Piece(chunk.sequence.request.request_id, chunk.start, chunk.stop, chunk.last, new_pages)
            for chunk, new_pages in (
                (c, self._new_pages(c.sequence, c.start)) for c in batch.chunks
            )
        ]
        decodes, grown = [], []
        for seq in batch.decodes.sequences() if batch.decodes is not None else ():
            request_id = seq.request.request_id
            decodes.append(request_id)
            if len(seq.pages) > len(self._told[request_id].pages):
                grown.append(Growth(request_id, self._new_pages(seq)))
        tokens, draws = [], []
        if self._book is not None:
            ahead = ahead_of(batch)
            counts = None if ahead is None else {name: count for name, (_, count) in ahead.items()}
            tokens = self._book.inputs(batch.chunks, decodes, counts)
            ends = [piece.request_id for piece in pieces if piece.last]
            draws = self._book.draws([*ends, *(piece.request_id for piece in adopted)])
        shared, self._shared = self._shared, []
        number, self._count = self._count, self._count + 1
        news = number, dropped, pieces, decodes, grown
        return Step(*news, activation_bytes, work_s, hops_s, tokens, draws, adopted, shared)

    def adopt(self, seq: Sequence) -> None:
        """Note a sequence after its KV has arrived: the next step says where it is."""
        tokens = seq.request.prompt_tokens + seq.generated - 1
        pages = self._new_pages(seq)
        self._adopted.append(Piece(seq.request.request_id, 0, tokens, False, pages))

    def ended(self, sequences: list[Sequence]) -> None:
        """Note sequences that finished or were aborted: no later step has them."""
        self.dropped(sequences)
        if self._book is not None:
            for seq in sequences:
                self._book.ended(seq.request.request_id)

    def dropped(self, sequences: list[Sequence]) -> None:
        """Note sequences that leave this pool; they may go on in another."""
        for seq in sequences:
            if self._told.pop(seq.request.request_id, None) is not None:
                self._ended.append(seq.request.request_id)

    def _new_pages(self, seq: Sequence, kept_tokens: int = 0) -> list[int]:
        """Note and return a sequence's new pages; at first `kept_tokens` are in others' pages."""
        request_id = seq.request.request_id
        if (told := self._told.get(request_id)) is None:
            told = self._told[request_id] = _Told(seq, seq.epoch, self._first_page(request_id))
            self._tell_shared(told, kept_tokens)
        new_pages = seq.pages[len(told.pages) :]
        told.pages += new_pages
        return [told.first_page + page for page in new_pages]

    def _tell_shared(self, told: _Told, kept_tokens: int = 0) -> None:
        """Note pages of a prefix cache that a sequence got since the last step that named it.

        It may be in no micro-batch just now: the pages that it left are free for another.
        """
        seq, start, published = told.sequence, told.published, len(told.sequence.chain)
        if start >= published:
            return
        while told.pages[start : start + 1] == seq.pages[start : start + 1] != []:
            start += 1
        if start < published:
            told.pages[start:published] = seq.pages[start:published]
            pages = [told.first_page + page for page in seq.pages[start:published]]
            self._shared.append(Shared(seq.request.request_id, start, pages, kept_tokens))
        told.published = published

    def _first_page(self, request_id: int) -> int:
        before = 0
        for engine in self._engines:
            if request_id in engine.queues.live:
                break
            before += engine.pool.total_pages
        return before

    def _preempted(self) -> list[int]:
        preemptions = sum(engine.queues.preemptions for engine in self._engines)
        if preemptions == self._preemptions:
            return []
        self._preemptions = preemptions
        gone = [number for number, told in self._told.items() if told.sequence.epoch != told.epoch]
        for request_id in gone:
            del self._told[request_id]
        return gone


@dataclass(slots=True)
class _Held:
    pages: list[int] = field(default_factory=list)
    tokens: int = 0


class PageTable:
    """A worker's end: the pages and the number of computed tokens of each row.

    A step numbered 0 is the first of another run, which begins with no rows. Raises WorkerError
    for a step that cannot follow on the ones before: a message was lost.
    """

    def __init__(self, page_tokens: int, total_pages: int) -> None:
        self._page_tokens = page_tokens
        self._total_pages = total_pages
        self._rows: dict[int, _Held] = {}
        self._owners: Counter[int] = Counter()  # of each page
        self._place: dict[int, int] = {}  # of a page in all rows that own it

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, step: Step) -> list[Piece]:
        """Apply a step's changes of rows and pages; return its rows, chunks of prompts first."""
        if step.batch_id == 0:
            self._rows.clear()
            self._owners.clear()
        for request_id in step.dropped:
            self._leave(self._rows.pop(request_id, _Held()).pages)
        self._share(step.shared)
        for piece in step.adopted:
            self._rows[piece.request_id] = _Held()
            self._give(piece.request_id, piece.pages)
            self._advance(piece.request_id, 0, piece.stop, False)
        for request_id, new_pages in step.grown:
            self._give(request_id, new_pages)
        rows = []
        for piece in step.pieces:
            if piece.start == 0:
                self._rows.setdefault(piece.request_id, _Held())
            self._give(piece.request_id, piece.pages)
            rows.append(self._advance(piece.request_id, piece.start, piece.stop, piece.last))
        for request_id in step.decodes:
            start = self._held(request_id).tokens
            rows.append(self._advance(request_id, start, start + 1, True))
        return rows

    def _share(self, shared: abc.Sequence[Shared]) -> None:
        """Give rows shared pages, once all rows have released their old ones."""
        for request_id, start, pages, tokens in shared:
            if start == 0:
                self._rows.setdefault(request_id, _Held(tokens=tokens))
            self._leave(self._held(request_id).pages[start : start + len(pages)])
        for request_id, start, pages, _ in shared:
            self._held(request_id).pages[start : start + len(pages)] = []
            for place, page in enumerate(pages, start):
                self._take(request_id, page, place, is_shared=True)

    def _give(self, request_id: int, new_pages: list[int]) -> None:
        for page in new_pages:
            self._take(request_id, page, len(self._held(request_id).pages), is_shared=False)

    def _take(self, request_id: int, page: int, place: int, *, is_shared: bool) -> None:
        is_free = page not in self._owners or (is_shared and self._place[page] == place)
        if not is_free or not 0 <= page < self._total_pages:
            raise WorkerError(f"request {request_id} gets page {page}, which is not free")
        self._owners[page] += 1
        self._place[page] = place
        self._held(request_id).pages.insert(place, page)

    def _leave(self, pages: list[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]

    def _held(self, request_id: int) -> _Held:
        held = self._rows.get(request_id)
        if held is None:
            raise WorkerError(f"request {request_id} goes on and was never begun")
        return held

    def _advance(self, request_id: int, start: int, stop: int, last: bool) -> Piece:
        held = self._held(request_id)
        if start != held.tokens:
            raise WorkerError(f"request {request_id} goes on at {start}, not at {held.tokens}")
        if stop > len(held.pages) * self._page_tokens:
            raise WorkerError(f"request {request_id} has {len(held.pages)} pages for {stop} tokens")
        held.tokens = stop
        return Piece(request_id, start, stop, last, held.pages)
