"""Result of a run, as columns; and several results as one: of replicas, of a system's pools.

`RunResult` lists the columns, once: recording, merging and writing follow that list. Knows nothing
of how a run came about, nor of conclusions.
"""

from collections import abc
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Columns = abc.Mapping[str, NDArray[Any] | list[str]]
"""A table: equally long columns by name."""

WAIT_REASONS = ("kv", "policy", "work")
"""Why the driver had no micro-batch for a stage that could take one: work waited and pages did not
suffice; work waited, pages sufficed, and the policy sent nothing; there was nothing to run. Of
several engines that wait, the first of these reasons counts."""

GIVEN_UP = "the policy gave it up: its pages do not suffice"
"""What is said of a request that a policy ends early."""

WAIT_CODES = {reason: code for code, reason in enumerate(WAIT_REASONS)}


class Column(NamedTuple):
    """Marks a field as a column: of which table, and of which type its numbers are.

    `path` is the attribute of what is recorded that it holds, `Ended` or a transfer; None: it is
    recorded number by number. `written`: whether the table as people read it has the column.
    """

    table: Literal["requests", "batches", "stages", "waits", "gaps", "transfers", "tally"]
    kind: type[int] | type[float] | type[str]
    path: str | None = None
    written: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Transfers:
    """KV that moved between the pools of one system: columns, in the order in which it set out.

    `source` and `destination` index the system's pools. The KV is ready from `ready_s`, when the
    request has its first token, and travels from `start_s` to `end_s`. Until then it holds `tokens`
    tokens (whole pages) on both sides. It waited for the transfers before it. For `blocked_s` of
    that wait the link was free and no pool had room for it (back-pressure). The link is busy for
    `link_busy_s` of each transfer. `bytes` None: unknown.
    """

    request_id: Annotated[Ints, Column("transfers", int, "handover.request.request_id")]
    source: Annotated[Ints, Column("transfers", int, "source")]
    destination: Annotated[Ints, Column("transfers", int, "destination")]
    tokens: Annotated[Ints, Column("transfers", int, "tokens")]
    bytes: Annotated[Floats | None, Column("transfers", float)] = None
    ready_s: Annotated[Floats, Column("transfers", float, "ready_s")]
    start_s: Annotated[Floats, Column("transfers", float, "start_s")]
    end_s: Annotated[Floats, Column("transfers", float, "end_s")]
    blocked_s: Annotated[Floats, Column("transfers", float, "blocked_s")]
    link_busy_s: Annotated[Floats, Column("transfers", float, "link_busy_s", written=False)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Tally:
    """Data of micro-batches that a summary needs, kept even where they themselves are not.

    `returned_s` and `sampled_rows` have a row a micro-batch, as in RunResult. The others are sums,
    one for each block of micro-batches that was reduced at a time: `busy_s` of all stages,
    `free_pages` and `kv_tokens`; and `start_s`, when its first one began on stage 0.
    """

    returned_s: Annotated[Floats, Column("tally", float)]
    sampled_rows: Annotated[Ints, Column("tally", int)]
    busy_s: Annotated[Floats, Column("tally", float)]
    free_pages: Annotated[Ints, Column("tally", int)]
    kv_tokens: Annotated[Ints, Column("tally", int)]
    start_s: Annotated[Floats, Column("tally", float)]


class Mark(NamedTuple):
    """Mark that a process of the user's left at some time of a run."""

    time_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Disturbed:
    """Time that processes of the user's cost a pipeline, in seconds.

    `stopped_s`: how long each micro-batch was stopped on each stage, [m, depth]. `slowed_s`: how
    much longer it took because a stage was slow. Both are within `start_s` to `end_s`. `outages`:
    from when on what was lost had been sent until the engine served again.
    """

    stopped_s: Floats
    slowed_s: Floats
    outages: tuple[tuple[float, float], ...] = ()


def tallied(columns: abc.Mapping[str, Any]) -> Tally:
    """Return the tally of one block, given its columns of BATCHES and STAGES by name."""
    kv_tokens = columns["kv_tokens"]
    with np.errstate(invalid="ignore"):  # of a run that never ends, which is refused
        busy_s = (columns["end_s"] - columns["start_s"]).sum()
    return Tally(
        returned_s=columns["end_s"][:, -1],
        sampled_rows=columns["sampled_rows"],
        busy_s=np.array([busy_s]),
        free_pages=np.array([columns["free_pages"].sum()]),
        kv_tokens=np.array([0 if kv_tokens is None else kv_tokens.sum()]),
        start_s=columns["start_s"][:1, 0],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RunResult:
    """Columns of one run. Times are seconds from the start of the run; NaN means "never".

    Requests (n rows, in order of request id): `request_id`, `arrival_s`, `prompt_tokens`,
    `output_tokens`, `first_scheduled_s`, `first_token_s`, `completion_s`, `preemptions`, `status`,
    `reason` and `cached_tokens`. Output tokens are counted as they came, of a rejected one as asked
    for. It is first scheduled with the first part of its prompt. `status` is "completed",
    "rejected" or, where a client left, "aborted"; `reason` says why it was not completed, else "".
    Cached tokens of the prompt were in the prefix cache when the request was first admitted. None
    without a prefix cache.

    Micro-batches (m rows, in the order scheduled, which is also the order in which they return):
    `scheduled_s`, `prefill_tokens`, `decode_tokens`, `sampled_rows`, `free_pages`, `kv_tokens` and
    `returned_s`. Sampled rows are the output tokens that come out when the micro-batch returns. KV
    tokens are the token slots filled in the other pages; None where unknown. Per stage, as
    [m, depth]: `available_s` (its input is there), `start_s`, `end_s` (it computes). Between
    `available_s` and `start_s` the micro-batch queues behind its predecessor, then the CPU prepares
    it.

    `wait_s`, `wait_reason`: from when on the driver had nothing to send, and why (an index into
    WAIT_REASONS). That holds until the next micro-batch is scheduled; repeats before it are left
    out. `gap_s`, `gap_count`: time between successive tokens of a request, and how many such gaps.
    `replicas`: of how many pipelines these are the micro-batches (see `merged`). Of `engines` that
    divide `total_pages` evenly, `free_pages` and `kv_tokens` are those of the engine that sent the
    micro-batch.

    Of a run that did not keep them there are no micro-batches and no waits, but their tally.
    Where processes of the user's joined in, `marks` are what they did, and `disturbed` what that
    cost; else None. A system of several pools has the result of each in `pools`, and what moved
    between them in `transfers`. `of_pools` says what the columns of the whole then mean.
    """

    depth: int
    max_in_flight: int | None
    total_pages: int
    page_tokens: int
    engines: int = 1
    replicas: int = 1

    request_id: Annotated[Ints, Column("requests", int, "sequence.request.request_id")]
    arrival_s: Annotated[Floats, Column("requests", float, "sequence.request.arrival_s")]
    prompt_tokens: Annotated[Ints, Column("requests", int, "sequence.request.prompt_tokens")]
    output_tokens: Annotated[Ints, Column("requests", int, "sequence.generated")]
    first_scheduled_s: Annotated[
        Floats, Column("requests", float, "sequence.first_scheduled_s", written=False)
    ]
    first_token_s: Annotated[Floats, Column("requests", float, "sequence.first_token_s")]
    completion_s: Annotated[Floats, Column("requests", float, "sequence.completion_s")]
    preemptions: Annotated[Ints, Column("requests", int, "sequence.epoch")]
    status: Annotated[list[str], Column("requests", str, "status")]
    reason: Annotated[list[str], Column("requests", str, "reason")]
    cached_tokens: Annotated[Ints | None, Column("requests", int, "sequence.cached_tokens")] = None

    scheduled_s: Annotated[Floats, Column("batches", float)]
    prefill_tokens: Annotated[Ints, Column("batches", int)]
    decode_tokens: Annotated[Ints, Column("batches", int)]
    sampled_rows: Annotated[Ints, Column("batches", int, written=False)]
    free_pages: Annotated[Ints, Column("batches", int)]
    kv_tokens: Annotated[Ints | None, Column("batches", int, written=False)] = None

    available_s: Annotated[Floats, Column("stages", float, written=False)]
    start_s: Annotated[Floats, Column("stages", float)]
    end_s: Annotated[Floats, Column("stages", float)]

    wait_s: Annotated[Floats, Column("waits", float)]
    wait_reason: Annotated[Ints, Column("waits", int)]
    gap_s: Annotated[Floats, Column("gaps", float)]
    gap_count: Annotated[Ints, Column("gaps", int)]

    provenance: dict[str, Any] = field(default_factory=dict)
    pools: "abc.Mapping[str, RunResult]" = field(default_factory=dict)
    transfers: Transfers | None = None
    kept_tally: Tally | None = None
    marks: tuple[Mark, ...] | None = None
    disturbed: Disturbed | None = None

    @property
    def tally(self) -> Tally:
        """Tally of the micro-batches, as a summary takes it."""
        if self.kept_tally is not None:
            return self.kept_tally
        return tallied({name: getattr(self, name) for name in (*BATCHES, *STAGES)})

    @property
    def returned_s(self) -> Floats:
        """Time at which each micro-batch left the last stage."""
        return self.end_s[:, -1]

    def tables(self, *names: str) -> dict[str, Columns]:
        """Return the tables that people read: `requests`, `batches`, `stages` and, of pools,
        `transfers`; `marks` where processes joined in.

        Or only the named ones. The columns are as in the files of these names; `pandas.DataFrame`
        takes each as it is. `stages` has a row a stage and micro-batch, stage by stage. Times in
        seconds. What a run has not (`cached_tokens` without a prefix cache) is left out.
        """
        made = {"requests": self._requests, "batches": self._batches, "stages": self._stages}
        if self.transfers is not None:
            made["transfers"] = self._transfers
        if self.marks is not None:
            made["marks"] = self._marks
        return {name: make() for name, make in made.items() if not names or name in names}

    def _requests(self) -> dict[str, Any]:
        return _written(self, REQUESTS)

    def _batches(self) -> dict[str, Any]:
        numbers = {"batch_id": np.arange(len(self.scheduled_s)), **_written(self, BATCHES)}
        return {**numbers, "returned_s": self.returned_s}

    def _stages(self) -> dict[str, Any]:
        count = len(self.scheduled_s)
        return {
            "stage": np.repeat(np.arange(self.depth), count),
            "batch_id": np.tile(np.arange(count), self.depth),
            **{name: times_s.T.ravel() for name, times_s in _written(self, STAGES).items()},
        }

    def _marks(self) -> dict[str, Any]:
        assert self.marks is not None
        columns = [list(column) for column in zip(*self.marks, strict=True)] or [[], [], []]
        made: dict[str, Any] = dict(zip(Mark._fields, columns, strict=True))
        return made | {"time_s": np.array(made["time_s"], dtype=float)}

    def _transfers(self) -> dict[str, Any]:
        moved, names = _written(self.transfers, TRANSFERS), list(self.pools)
        ends = {end: [names[index] for index in moved[end]] for end in ("source", "destination")}
        return moved | ends


def columns_of(kind: type, table: str) -> dict[str, Column]:
    """Return the columns of one table by name, in the order in which the class lists them."""
    return {name: mark for name, mark in _columns(kind).items() if mark.table == table}


@cache
def _columns(kind: type) -> dict[str, Column]:
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: mark for name, hint in hints for mark in getattr(hint, "__metadata__", ())}


REQUESTS = columns_of(RunResult, "requests")
BATCHES = columns_of(RunResult, "batches")
STAGES = columns_of(RunResult, "stages")
WAITS = columns_of(RunResult, "waits")
GAPS = columns_of(RunResult, "gaps")
TRANSFERS = columns_of(Transfers, "transfers")
TALLY = columns_of(Tally, "tally")


def _written(result: object, columns: abc.Mapping[str, Column]) -> dict[str, Any]:
    table = {name: getattr(result, name) for name, column in columns.items() if column.written}
    return {name: values for name, values in table.items() if values is not None}


def joined(parts: abc.Sequence[Any]) -> Any:
    """Return the parts of a column as one, a list of lists, else an array."""
    return list(chain(*parts)) if isinstance(parts[0], list) else np.concatenate(parts)


def ordered(column: Any, order: Any) -> Any:
    return [column[row] for row in order] if isinstance(column, list) else column[order]


def gathered(columns: abc.Mapping[str, Column], records: abc.Iterable[object]) -> dict[str, Any]:
    """Return the columns that have a path, each value read from the records by that path."""
    found: dict[str, list[Any]] = {"": [*records]}

    def read(path: str) -> list[Any]:
        if path not in found:
            before, _, name = path.rpartition(".")
            found[path] = [*map(attrgetter(name), read(before))]
        return found[path]

    return {
        name: read(path) if kind is str else np.array(read(path), dtype=kind)
        for name, (_, kind, path, _) in columns.items()
        if path is not None
    }


# -- around the stages of a real run ---------------------------------------------------------------


class Around(NamedTuple):
    """Time of a real run around its stages, in seconds.

    A row a micro-batch, and a column a stage or a hop.

    `schedule_s`: from the decision, or when stage 0 has the one before, until stage 0 has it.
    `prepare_s`: on each stage, until it computes what is there and could start. `hops_s`: from the
    end of a stage until the next one has what it needs. `freed_s`, `returned_s`: from the end of
    stage 0, and of the last one, until the driver knows of it.
    """

    schedule_s: Floats
    prepare_s: Floats
    hops_s: Floats
    freed_s: Floats
    returned_s: Floats


def around_stages(result: RunResult, freed_s: Floats, returned_s: Floats) -> Around:
    """Return the times around the stages of a real run.

    `freed_s`: when the driver knew that stage 0 was free (nothing with a single stage).
    `returned_s`: when it knew that micro-batches were back.
    """
    decided_s = result.scheduled_s.copy()
    decided_s[1:] = np.maximum(decided_s[1:], result.available_s[:-1, 0])
    free_s = np.zeros_like(result.end_s)
    free_s[1:] = result.end_s[:-1]
    heard_s = freed_s if result.depth > 1 else returned_s
    return Around(
        schedule_s=result.available_s[:, 0] - decided_s,
        prepare_s=result.start_s - np.maximum(result.available_s, free_s),
        hops_s=result.available_s[:, 1:] - result.end_s[:, :-1],
        freed_s=heard_s[: len(returned_s)] - result.end_s[:, 0],
        returned_s=returned_s - result.end_s[:, -1],
    )


# -- several results as one ------------------------------------------------------------------------


def merged(results: abc.Sequence[RunResult]) -> RunResult:
    """Return all requests and all micro-batches of replicas: pipelines of one kind, side by side.

    Requests are in order of request id, micro-batches in the order in which they return. Columns
    hold what each pipeline wrote, so stages of different replicas overlap. `free_pages` is one
    replica's. For idle time and occupancy, look at each result by itself. When the drivers waited
    is left out. A single result is returned as it is.
    """
    if len(results) == 1:
        return results[0]
    by_id = _order(results, "request_id")
    by_return = _order(results, "returned_s")
    return replace(
        results[0],
        **_joined(results, REQUESTS, by_id),
        **_joined(results, [*BATCHES, *STAGES], by_return),
        **_joined(results, GAPS),
        kept_tally=_tally(results),
        wait_s=np.zeros(0),
        wait_reason=np.zeros(0, dtype=np.int64),
        disturbed=None,
        replicas=sum(result.replicas for result in results),
    )


def of_pools(
    requests: RunResult, pools: abc.Mapping[str, RunResult], transfers: Transfers
) -> RunResult:
    """Return the result of a system of pools: the request columns of `requests`, the rest of them.

    The whole has the stages of all pools, side by side in their order. A micro-batch takes no time
    on other pools' stages, so that busy time and returns are right. Micro-batches are in the order
    scheduled; within one instant in the order of the pools. Requests are the clients', and those of
    a pool as the pool saw them. A prefill pool makes one token of each. A decode pool sees a
    request arrive when its KV does. `free_pages` counts the pages of the micro-batch's pool.
    """
    parts = list(pools.values())
    depths = [part.depth for part in parts]
    wide = [
        _among_others(part, sum(depths[:index]), sum(depths[index + 1 :]))
        for index, part in enumerate(parts)
    ]
    caps = [part.max_in_flight for part in parts if part.max_in_flight is not None]
    return replace(
        requests,
        depth=sum(depths),
        max_in_flight=sum(caps) if len(caps) == len(parts) else None,
        total_pages=sum(part.total_pages for part in parts),
        **_joined(wide, [*BATCHES, *STAGES], schedule_order(pools)) | {"kv_tokens": None},
        **_joined(parts, GAPS),
        pools=dict(pools),
        transfers=transfers,
    )


def schedule_order(pools: abc.Mapping[str, RunResult]) -> Ints:
    """Return which micro-batch, counted pool after pool, is which of the whole's."""
    return _order(pools.values(), "scheduled_s")


def _order(results: abc.Iterable[RunResult], name: str) -> Ints:
    column = np.concatenate([getattr(result, name) for result in results])
    return np.argsort(column, kind="stable")


def _tally(results: abc.Sequence[RunResult]) -> Tally | None:
    """Return what is left of the micro-batches of replicas that did not keep them."""
    tallies = [result.kept_tally for result in results if result.kept_tally is not None]
    if not tallies:
        return None
    columns = _joined(tallies, TALLY)
    order = np.argsort(columns["returned_s"], kind="stable")
    rows = {name: columns[name][order] for name in ("returned_s", "sampled_rows")}
    began = [tally for tally in tallies if len(tally.returned_s)]
    if began:  # the first one is that of the micro-batch that returns first
        rows["start_s"] = min(began, key=lambda tally: tally.returned_s[0]).start_s
    return Tally(**columns | rows)


def _joined(
    results: abc.Sequence[object], columns: abc.Iterable[str], order: Ints | slice = slice(None)
) -> dict[str, Any]:
    """Return columns of several results as one, in an order; None where one of them has none."""
    parts = {name: [getattr(result, name) for result in results] for name in columns}
    return {
        name: None if any(each is None for each in of) else ordered(joined(of), order)
        for name, of in parts.items()
    }


def _among_others(part: RunResult, before: int, after: int) -> RunResult:
    """Return a pool with stages of others around its own, which take no time."""
    entered = np.repeat(part.scheduled_s[:, None], before, axis=1)
    left = np.repeat(part.returned_s[:, None], after, axis=1)
    stages = {name: np.hstack([entered, getattr(part, name), left]) for name in STAGES}
    return replace(part, depth=before + part.depth + after, **stages)  # type: ignore[arg-type]
