"""Files that a real run keeps while serving, and the results made from them.

Of a run that was killed, `recover` makes the files of one that ended when this one last kept
something. Serves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evenflow.core.replay import Entry
from evenflow.core.world import World
from evenflow.engines.pools import recovered
from evenflow.errors import UsageError
from evenflow.report.folder import recovery
from evenflow.report.manifest import RECORDS, plain
from evenflow.results.metrics import summarize
from evenflow.results.outcome import Outcome
from evenflow.results.recorder import DAMAGED, Block, BlockFile, Blocks, Recorder, read_blocks
from evenflow.results.run import merged
from evenflow.runtime.journal import NAME, Journal, Lines
from evenflow.runtime.serve import REQUESTS, facts_of
from evenflow.study.runs import Job, write_details, write_results

TOKENS = "tokens.jsonl.gz"
PART = "part"
"""The column of a block that says of which of several parts it is."""

LINK = "bytes_per_token"


class Records:
    """The journal, the tokens and the blocks of a run in a scratch folder, all flushed together.

    It is the `Blocks` of the run's driver, which appends one each second. `on_loss` is called for a
    file that cannot be kept.
    """

    def __init__(self, folder: Path, job: Job, on_loss: Callable[[str], None]) -> None:
        self._folder = folder
        self._journal_of = partial(Journal, config=job.config, beside=job.beside, on_loss=on_loss)
        self._journals: list[Journal] = []
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        made_up = job.config.workers.kind == "emulated"
        self._lines = None if made_up else Lines(folder / TOKENS, on_loss)
        self.on_token = (
            None if made_up else lambda number, token: self._tokens[number].append(token)
        )
        self._blocks: BlockFile | None = None
        self._clients: set[str] = set()  # the parts with requests of their own

    def journal(self, engine: str | None = None) -> Callable[[Entry], None]:
        """Return the writer of an engine's journal, by its folder's name; None: the only engine."""
        place = self._folder / (engine or "")
        place.mkdir(parents=True, exist_ok=True)
        self._journals.append(self._journal_of(place / NAME, pool=engine))
        return self._journals[-1].write

    def begin(self, worlds: Mapping[str, World], **head: Any) -> None:
        """Write what a result needs of each world; of pools also LINK, bytes a token of KV."""
        parts = {name: _facts(world) for name, world in worlds.items()}
        self._clients = {REQUESTS} if LINK in head else {*worlds}
        self._blocks = BlockFile(self._folder / RECORDS, parts.get("", {"parts": parts}) | head)

    def part(self, name: str) -> Blocks:
        """Return the blocks of a part of the run; the only part has no name."""
        return _Part(self, name) if name else self

    def append(self, block: Block) -> None:
        """Write a block, the journal so far, and the tokens of finished requests to disk."""
        assert self._blocks is not None
        for journal in self._journals:
            journal.flush()
        if self._lines is not None and _part_of(block) in self._clients:
            self._write_tokens(map(int, block["request_id"]))
            self._lines.flush()
        self._blocks.append(block)

    def __iter__(self) -> Iterator[Block]:
        assert self._blocks is not None
        return iter(self._blocks)

    def close(self) -> None:
        for journal in self._journals:
            journal.close()
        if self._lines is not None:
            self._write_tokens(sorted(self._tokens))
            self._lines.close()
        if self._blocks is not None:
            self._blocks.close()

    def _write_tokens(self, request_ids: Iterable[int]) -> None:
        assert self._lines is not None
        for request_id in request_ids:
            if (tokens := self._tokens.pop(request_id, None)) is not None:
                self._lines.write({"request_id": request_id, "tokens": tokens})


class _Part:
    """The blocks of one of several parts of a run, among those of all."""

    def __init__(self, records: Records, name: str) -> None:
        self._records = records
        self._name = name

    def append(self, block: Block) -> None:
        self._records.append({**block, PART: [self._name]})

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self._records if _part_of(block) == self._name)


def _part_of(block: Block) -> str:
    return next(iter(block.get(PART, ())), "")


def _facts(world: World) -> dict[str, Any]:
    return {"depth": world.depth, "facts": {**world.facts, "total_pages": world.total_pages}}


def write_served(
    folder: Path, outcome: Outcome, facts: Mapping[str, Any], title: str, lost: list[str]
) -> None:
    """Write all files of a real run into the folder that has its records, but for these.

    Results come first: what does not fit is added to `lost`. UsageError when the results do not.
    """
    from evenflow.report.run_page import write_report

    try:
        _with_room(folder, lambda: write_results(folder, outcome, "all", {"real_run": facts}))
    except OSError as error:
        count = outcome.summary["completed"]
        what = f"cannot write: {error.strerror}; the results of {count} finished requests are lost"
        raise UsageError(f"{title}: {what}") from None
    with _left_out_if_full(folder, lost):
        _with_room(folder, lambda: write_details(folder, outcome))
    with _left_out_if_full(folder, lost):
        page, source = folder / "report.html", outcome.result.provenance
        _with_room(folder, lambda: write_report(page, {outcome.label: outcome}, title, source))


def _with_room(folder: Path, write: Callable[[], None]) -> None:
    """Write; on a full disk again, after removing the records, the source of the results."""
    try:
        write()
    except OSError:
        if not (folder / RECORDS).is_file():
            raise
        (folder / RECORDS).unlink()
        write()


@contextmanager
def _left_out_if_full(folder: Path, lost: list[str]) -> Iterator[None]:
    """Remove the files that a `with` block has begun when it cannot write one; say which."""
    before = set(folder.iterdir())
    try:
        yield
    except OSError as error:
        begun = sorted(set(folder.iterdir()) - before)
        for path in begun:
            path.unlink()
        names = ", ".join(path.name for path in begun)
        lost.append(f"{names} and the like are left out: cannot write: {error.strerror}")


def recover(scratch: Path) -> tuple[Path, Outcome, dict[str, Any], list[str]]:
    """Make the results of a killed run in its scratch folder, which gets another name.

    Return that folder, the outcome, the facts of the run, and what could not be written. UsageError
    for a run that is alive, or had recorded nothing.
    """
    lost: list[str] = []
    with recovery(scratch) as folder:
        head, blocks = read_blocks(scratch / RECORDS)
        if head is None:
            raise UsageError(f"{scratch}: the run was killed before it served anything")
        try:
            outcome, facts = _outcome(head, list(blocks))
            title = str(head["title"])
        except DAMAGED as error:
            raise UsageError(f"{scratch / RECORDS}: no records of a run: {error}") from None
        write_served(scratch, outcome, facts, title, lost)
    return folder, outcome, facts, lost


def _outcome(head: Any, blocks: list[Block]) -> tuple[Outcome, dict[str, Any]]:
    """Return the outcome of a run as of the last of its blocks, and its facts."""
    parts = head.get("parts", {"": head})
    if LINK in head:
        parts = {plain(name): part for name, part in parts.items()}  # each has a folder of its name
    recorders = {name: Recorder(part["depth"], _of(blocks, name)) for name, part in parts.items()}
    flushed_s, admitted_s, driver_s = (
        np.concatenate([recorder.column(name) for recorder in recorders.values()])
        for name in ("flushed_s", "admitted_s", "driver_s")
    )
    results = {
        name: replace(
            recorder.result(gap_s=(), gap_count=(), **parts[name]["facts"]),
            provenance=head["provenance"],
        )
        for name, recorder in recorders.items()
    }
    if LINK in head:
        result = recovered(_of(blocks, REQUESTS), results, head[LINK])
        result = replace(result, provenance=head["provenance"])
    else:
        result = merged([*results.values()])
    summary = summarize(result, head["provenance"]["config"].get("goodput"))
    until_s = float(flushed_s.max(initial=0.0))
    failure = f"the driver was killed; what it had recorded until {until_s:.1f} s is recovered"
    known = max(head["num_requests"], len(admitted_s))
    facts = facts_of(result, failure, known - len(result.status), None, driver_s)
    replicas = (result,) if LINK in head else tuple(results.values())
    return Outcome(result, summary, until_s, replicas, head["label"]), {**facts, "recovered": True}


def _of(blocks: Sequence[Block], part: str) -> list[Block]:
    return [block for block in blocks if _part_of(block) == part]
