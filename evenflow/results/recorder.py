"""Recorder of the events of a run, as columns, from which it makes a RunResult; in both worlds.

What is recorded may go to a file: block behind block, each readable whatever becomes of the next.
A killed process leaves all blocks that it has written, the last of them perhaps cut.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections import abc
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from evenflow.core.batch import MicroBatch
from evenflow.core.decodes import Sequence
from evenflow.core.request import Request
from evenflow.errors import LATEST_S, UsageError
from evenflow.results.run import (
    BATCHES,
    GAPS,
    GIVEN_UP,
    REQUESTS,
    STAGES,
    TALLY,
    WAIT_CODES,
    WAITS,
    RunResult,
    Tally,
    gathered,
    joined,
    ordered,
)


class Ended(NamedTuple):
    """An ended request, and why it ended. A rejected one got none of the output it asked for."""

    sequence: Sequence
    status: str
    reason: str


DAMAGED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    struct.error,
)
"""Errors that reading a damaged file of blocks may raise."""

Block = dict[str, NDArray[Any] | list[str]]
"""What was recorded in a while: columns by name, which need not be equally long."""


class Blocks(Protocol):
    """Store of a Recorder's blocks: a list, or a BlockFile."""

    def append(self, block: Block, /) -> None: ...
    def __iter__(self) -> abc.Iterator[Block]: ...


class StageTimes:
    """Times of a micro-batch on a stage: when it was available, when it began and when it ended."""

    def __init__(self, available_s: float, start_s: float, end_s: float) -> None:
        self.available_s = available_s
        self.start_s = start_s
        self.end_s = end_s


PACKED: Final = 1024
"""Micro-batches after which numbers move into arrays, while the processor's cache has them."""


class Tallier:
    """Collects what a summary needs of the micro-batches of a block: see `Tally`."""

    def __init__(self) -> None:
        self._returned_s: list[float] = []
        self._sampled_rows: list[int] = []
        self._busy_s: list[float] = []
        self._start_s: list[float] = []
        self._free_pages = self._kv_tokens = 0
        self._packed: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []

    def add(self, batch: MicroBatch, stages: list[StageTimes]) -> None:
        """Add a micro-batch with its times on each stage."""
        if not self._start_s:
            self._start_s.append(stages[0].start_s)
        self._returned_s.append(stages[-1].end_s)
        self._sampled_rows.append(batch.output_tokens)
        self._free_pages += batch.free_pages
        self._kv_tokens += batch.kv_tokens
        for stage in stages:
            self._busy_s.append(stage.end_s - stage.start_s)
        if len(self._returned_s) == PACKED:
            self._pack()

    def _pack(self) -> None:
        times = _column(self._returned_s, float), _column(self._busy_s, float)
        self._packed.append((*times, _column(self._sampled_rows, int)))
        self._returned_s, self._busy_s, self._sampled_rows = [], [], []

    def columns(self) -> Block:
        """Return the columns of the tally."""
        self._pack()
        returned_s, busy_s, sampled_rows = map(np.concatenate, zip(*self._packed, strict=True))
        return {
            "returned_s": returned_s,
            "sampled_rows": sampled_rows,
            "busy_s": np.array([busy_s.sum()]),
            "free_pages": np.array([self._free_pages]),
            "kv_tokens": np.array([self._kv_tokens]),
            "start_s": np.array(self._start_s),
        }


class Recorder:
    """Collect the events of a run as columns, and make a RunResult of them; in both worlds.

    Micro-batches are recorded in the order scheduled, each once all its stage times are known. What
    is flushed goes to `blocks`, which may have some of before; without any, it is kept here. If
    not `whole`, it leaves the tally of its micro-batches only, and no waits.
    """

    def __init__(self, depth: int, blocks: Blocks | None = None, *, whole: bool = True) -> None:
        self._depth = depth
        self.whole = whole
        self._kept: list[Block] = []
        self._blocks: Blocks = self._kept if blocks is None else blocks
        self._num_flushed = 0
        # A micro-batch's numbers in the order of BATCHES, then those of STAGES for each stage.
        row = struct.Struct(f"{len(BATCHES) + len(STAGES) * depth}d")
        self._row_bytes, self._pack_into = row.size, row.pack_into
        self._batches = bytearray(1000 * row.size if whole else 0)
        self.num_bytes = 0
        """What the micro-batches that were not flushed yet take, if they are kept."""
        self._tally = Tallier()
        self._completed: list[Sequence] = []
        self._others: list[Ended] = []
        self._wait_s = array("d")
        self._wait_reason = array("q")

    def passed(self, batch: MicroBatch, stages: list[StageTimes]) -> None:
        """Record a micro-batch that passed the stages at these times."""
        if self.whole:
            times = [time for at in stages for time in (at.available_s, at.start_s, at.end_s)]
            self.batch(batch, times)
        else:
            self.num_bytes += self._row_bytes
            self._tally.add(batch, stages)

    def batch(self, batch: MicroBatch, stage_times: list[float]) -> None:
        """Record a micro-batch and its (available, start, end) on each stage, in seconds."""
        if not self.whole:
            times = zip(stage_times[::3], stage_times[1::3], stage_times[2::3], strict=True)
            self.passed(batch, [StageTimes(*stage) for stage in times])
            return
        used = self.num_bytes
        self.num_bytes = used + self._row_bytes
        if used == len(self._batches):
            self._batches += bytes(used)
        self._pack_into(
            self._batches,
            used,
            batch.scheduled_s,
            batch.prefill_tokens,
            batch.decode_tokens,
            batch.output_tokens,
            batch.free_pages,
            batch.kv_tokens,
            *stage_times,
        )

    def wait(self, now_s: float, reason: str) -> None:
        """Record that the driver asked for a micro-batch and got none."""
        self._wait_s.append(now_s)
        self._wait_reason.append(WAIT_CODES[reason])

    def finish(self, sequences: list[Sequence]) -> None:
        """Record ended sequences; aborted ones were given up by the policy."""
        self._completed += [seq for seq in sequences if not seq.aborted]
        for seq in sequences:
            if seq.aborted:
                self.abort(seq, GIVEN_UP)

    def abort(self, seq: Sequence, reason: str) -> None:
        self._others.append(Ended(seq, "aborted", reason))

    def reject(self, request: Request, reason: str) -> None:
        seq = Sequence(request, request.prompt_tokens, generated=request.output_tokens)
        self._others.append(Ended(seq, "rejected", reason))

    @property
    def num_done(self) -> int:
        """Number of ended requests: finished, aborted or rejected."""
        return self._num_flushed + len(self._completed) + len(self._others)

    def flush(self, gap_s: abc.Sequence[float], gap_count: abc.Sequence[int], more: Block) -> None:
        """Move what was collected to the blocks, with the gaps and `more` columns beside it."""
        block = {**self._block(gap_s, gap_count), **more}
        if self._kept:
            _extend(self._kept[0], block)
        else:
            self._blocks.append(block)
        self._num_flushed = self.num_done
        self._completed, self._others, self.num_bytes = [], [], 0
        self._tally = Tallier()
        for collected in (self._wait_s, self._wait_reason):
            del collected[:]

    def column(self, name: str) -> NDArray[Any]:
        """Return one of the columns that were flushed as `more`."""
        columns = [np.asarray(block[name]) for block in self._blocks]
        return np.concatenate(columns) if columns else np.zeros(0)

    def _block(self, gap_s: abc.Sequence[float], gap_count: abc.Sequence[int]) -> Block:
        ended = [*(Ended(seq, "completed", "") for seq in self._completed), *self._others]
        block: Block = {
            **gathered(REQUESTS, ended),
            "gap_s": _column(gap_s, float),
            "gap_count": _column(gap_count, int),
        }
        if not self.whole:
            return {**block, **self._tally.columns()}
        columns = self._micro_batches()
        waits = {
            "wait_s": np.array(self._wait_s),
            "wait_reason": np.array(self._wait_reason, dtype=np.int64),
        }
        return {**block, **waits, **{name: column.flatten() for name, column in columns.items()}}

    def _micro_batches(self) -> dict[str, NDArray[Any]]:
        width = len(BATCHES)
        numbers = np.frombuffer(memoryview(self._batches)[: self.num_bytes])
        numbers = numbers.reshape(-1, width + len(STAGES) * self._depth)
        columns: dict[str, Any] = {
            name: numbers[:, index].astype(column.kind)
            for index, (name, column) in enumerate(BATCHES.items())
        }
        for index, name in enumerate(STAGES):
            columns[name] = numbers[:, width + index :: len(STAGES)].copy()
        return columns

    def result(
        self,
        *,
        gap_s: abc.Sequence[float],
        gap_count: abc.Sequence[int],
        prefix_cache: bool = False,
        **facts: Any,
    ) -> RunResult:
        """Return the columns of the run; `facts` are the fields of a RunResult that are not
        columns.

        The columns are moved: what was recorded is in the result only. Columns that `column`
        returns stay.

        UsageError for a run with times beyond LATEST_S.
        """
        blocks = [*self._blocks, self._block(gap_s, gap_count)]
        self._batches = bytearray()  # they are in the last block

        def taken(name: str) -> Any:
            return joined([block.pop(name) for block in blocks if name in block])

        found = {name: taken(name) for name in REQUESTS}
        order = np.argsort(found["request_id"], kind="stable")
        columns: dict[str, Any] = {name: ordered(each, order) for name, each in found.items()}
        if not prefix_cache:
            columns["cached_tokens"] = None
        columns |= {name: taken(name) for name in GAPS}
        tally = None if self.whole else Tally(**{name: taken(name) for name in TALLY})
        for name, column in {**BATCHES, **WAITS, **STAGES}.items():
            columns[name] = taken(name) if self.whole else np.zeros(0, column.kind)
        for name in STAGES:
            columns[name] = columns[name].reshape(-1, self._depth)
        result = RunResult(depth=self._depth, kept_tally=tally, **facts, **columns)
        if not np.all(result.tally.returned_s <= LATEST_S):
            raise UsageError(
                f"the run would last for more than {LATEST_S:g} s; give costs and links that are "
                "less slow"
            )
        return result


def _column(numbers: abc.Sequence[float], kind: type[float]) -> NDArray[Any]:
    """Return numbers as an array, in half the time that NumPy takes to read them one by one."""
    packed = struct.pack(f"{len(numbers)}{'q' if kind is int else 'd'}", *numbers)
    return np.frombuffer(packed, kind).copy()


def _extend(block: Block, more: Block) -> None:
    """Make the columns of a block longer, in place: many small arrays would leave holes."""
    for name, column in more.items():
        known: Any = block[name]
        if isinstance(column, list):
            known += column
        else:
            known.resize(len(known) + len(column), refcheck=False)
            known[len(known) - len(column) :] = column


# -- blocks in a file ------------------------------------------------------------------------------


class BlockFile:
    """Blocks in a new file behind `head`, facts that JSON can hold. OSError: it cannot be made.

    Each block is with the system when `append` returns. Where the file cannot be written on, on a
    full disk, blocks are kept in memory from then on.
    """

    def __init__(self, path: Path, head: abc.Mapping[str, Any]) -> None:
        self._path = path
        self._kept: list[Block] = []
        self._full = False
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._write(head, b"")

    def append(self, block: Block) -> None:
        """Write a block, unless nothing is in it."""
        if not any(map(len, block.values())):
            return
        words = {name: column for name, column in block.items() if isinstance(column, list)}
        numbers = {name: np.asarray(block[name]) for name in block.keys() - words.keys()}
        types = {name: [column.dtype.str, len(column)] for name, column in numbers.items()}
        data = b"".join(column.tobytes() for column in numbers.values())
        if self._full or not self._write([words, types], data):
            self._kept.append(block)

    def __iter__(self) -> abc.Iterator[Block]:
        yield from read_blocks(self._path)[1]
        yield from self._kept

    def close(self) -> None:
        """Write no more; what is there can still be read."""
        self._file.close()

    def _write(self, head: Any, data: bytes) -> bool:
        """Write a header line and its data, or nothing; return whether there was room."""
        whole = self._file.tell()
        rest = memoryview(json.dumps(head).encode() + b"\n" + data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._full = True
            os.ftruncate(self._file.fileno(), whole)
        return not self._full


def read_blocks(path: Path) -> tuple[Any, abc.Iterator[Block]]:
    """Return the head of a file and its complete blocks; UsageError for any other file."""
    try:
        with open(path, "rb") as file:
            head = _line(file)
            return head, _blocks(path, file.tell())
    except (OSError, *DAMAGED) as error:
        raise UsageError(f"{path}: no records of a run: {error}") from None


def _blocks(path: Path, start: int) -> abc.Iterator[Block]:
    with open(path, "rb") as file:
        file.seek(start)
        try:
            while (line := _line(file)) is not None:
                words, types = line
                block: Block = dict(words)
                for name, (kind, count) in types.items():
                    dtype = np.dtype(kind)
                    data = file.read(dtype.itemsize * count)
                    if len(data) < dtype.itemsize * count:
                        return
                    block[name] = np.frombuffer(data, dtype)
                yield block
        except DAMAGED as error:
            raise UsageError(f"{path}: damaged before byte {file.tell()}: {error}") from None


def _line(file: BinaryIO) -> Any:
    """Return the content of the next line; None where no complete one is left."""
    line = file.readline()
    return json.loads(line) if line.endswith(b"\n") else None
