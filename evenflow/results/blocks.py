"""What a run records, in a file: block behind block, each readable whatever becomes of the next.

A killed process leaves all blocks that it has written, the last of them perhaps cut. Knows columns,
not what they mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from evenflow.errors import UsageError
from evenflow.results.recorder import Block


class BlockFile:
    """Blocks in a new file behind `head`, facts that JSON can say. OSError: it cannot be made.

    Each block is with the system when `append` returns. Where the file cannot be written on, on a
    full disk, blocks are kept in memory from then on.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
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

    def __iter__(self) -> Iterator[Block]:
        yield from read_blocks(self._path)[1]
        yield from self._kept

    def close(self) -> None:
        """Write no more; what is there can still be read."""
        self._file.close()

    def _write(self, head: Any, data: bytes) -> bool:
        """Write a line and what it tells of, or nothing; return whether there was room."""
        whole = self._file.tell()
        rest = memoryview(json.dumps(head).encode() + b"\n" + data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._full = True
            os.ftruncate(self._file.fileno(), whole)
        return not self._full


def read_blocks(path: Path) -> tuple[Any, Iterator[Block]]:
    """Return the head of a file and those of its blocks that are whole; UsageError for no such."""
    try:
        with open(path, "rb") as file:
            head = _line(file)
            return head, _blocks(path, file.tell())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: no records of a run: {error}") from None


def _blocks(path: Path, start: int) -> Iterator[Block]:
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
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}: damaged before byte {file.tell()}: {error}") from None


def _line(file: BinaryIO) -> Any:
    """Return what the next line says; None where there is none that is whole."""
    line = file.readline()
    return json.loads(line) if line.endswith(b"\n") else None
