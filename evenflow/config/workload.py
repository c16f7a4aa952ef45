"""The workload: its requests and their arrival times."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from evenflow.config.yaml_file import find
from evenflow.keys import Count, Keys
from evenflow.traces import (
    SAMPLE_NAMES,
    AnyArrivals,
    Replay,
    Trace,
    load_trace,
    make_requests,
    with_conversations,
)
from evenflow.types import Request

MOST_REQUESTS = 10**8
"""More than the memory of most machines holds; what does not fit is an error, too."""


class Workload(NamedTuple):
    """The requests of a run, and which trace they are from (for the provenance).

    `texts`: their prompts, where a predictor may read them and the trace holds them. `prompt_ids`:
    those in the tokens of a model that reads them. `before`: what the server was sent earlier, a
    list of requests for each part.
    """

    requests: list[Request]
    trace: dict[str, Any]
    texts: Sequence[str] | None = None
    prompt_ids: Sequence[Sequence[int]] | None = None
    before: tuple[list[Request], ...] = ()


class ColumnsConfig(Keys):
    """The columns of a log: names, or paths of keys such as `usage.prompt_tokens`."""

    arrival: str | None = None
    """When a request came; null: a usual name, if there is one."""
    prompt: str | None = None
    """Its prompt tokens; null: a usual name."""
    output: str | None = None
    """Its output tokens; null: a usual name."""


class PartConfig(Keys):
    """Requests that come, and their arrivals."""

    trace: Annotated[str, Field(min_length=1)] = Field(examples=["azure-conv-sample"])
    """A sample's name, or the path of a file of a known format (docs/traces.md)."""
    format: str | None = None
    """The file's format; null: detected."""
    columns: ColumnsConfig | None = None
    """A log's columns, where their names are not known; null: those of the format."""
    time_unit: Literal["s", "ms", "us", "ns", "iso"] | None = None
    """The unit of a file's times, iso: calendar times; null: the format's, or seen."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """What becomes of rows that cannot be read; skip: they are counted, the first five named."""
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = None
    """How many requests (num_prompts); null: all of the file."""
    skip: Annotated[int, Field(ge=0, le=MOST_REQUESTS)] = 0
    """Requests of the trace left out before the first."""
    arrivals: AnyArrivals = Replay()
    """When requests arrive; a trace's own times by default."""
    seed: Annotated[int, Field(ge=0)] = 0
    """What random arrivals and samples are drawn from."""
    neighbours: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] = 0.0
    """Of a sample: the rank correlation, a ratio, of a request's lengths with those of the one
    before; 0: each request is drawn by itself.
    """
    tokenizer: str | None = None
    """The path of a tokenizer.json, for traces that hold text; where a model computes, its own: it
    gets the prompts of the trace.
    """
    filter: str | None = None
    """Which rows are left out as a paper did (docs/traces.md); null: none."""
    conversations: bool = False
    """Whether the trace has a row for each turn, whose prompt holds the turns before."""
    max_new: Count | None = None
    """Output tokens that clients allow where the trace does not say; a longer output is allowed as
    it is.
    """

    @property
    def is_drawn(self) -> bool:
        """Whether the trace is a sample, so that there is always more of it."""
        return self.trace in SAMPLE_NAMES

    @property
    def concurrency(self) -> int | None:
        """Number of requests that a closed loop holds; None for open arrivals."""
        return getattr(self.arrivals, "concurrency", None)

    def rows(self, beside: Path, limit: int | None, *, keep_text: bool = False) -> Trace:
        """Load at most `limit` requests of the trace; their prompts too if `keep_text`."""
        return load_trace(
            find(self.trace, beside),
            format=self.format,
            limit=limit,
            skip=self.skip,
            tokenizer=None if self.tokenizer is None else find(self.tokenizer, beside),
            filter=self.filter,
            seed=self.seed,
            neighbours=self.neighbours,
            keep_text=keep_text,
            columns=None if self.columns is None else self.columns.model_dump(exclude_none=True),
            time_unit=self.time_unit,
            on_bad_row=self.on_bad_row,
        )

    def load(self, beside: Path, *, keep_text: bool = False) -> Workload:
        """Load the trace, its prompts too if `keep_text`, and give its requests their times."""
        trace = self.rows(beside, self.requests, keep_text=keep_text)
        if self.conversations:
            trace = with_conversations(trace)
        requests = make_requests(trace, self.arrivals, self.requests, self.seed)
        if (most := self.max_new) is not None:
            requests = [
                replace(each, max_new_tokens=max(most, each.output_tokens))
                if each.max_new_tokens is None
                else each
                for each in requests
            ]
        facts = ("name", "format", "path", "sha256", "rows_read", "dropped", "reordered")
        origin = {name: getattr(trace, name) for name in facts}
        if trace.doubts:
            origin["doubts"] = trace.doubts
        if trace.prefixes is not None:
            origin["prefixes"] = True
        if trace.path is not None:
            origin["path"] = self.trace  # as written: the same from whichever folder it was found
        return Workload(requests, origin, trace.texts)


class WorkloadConfig(PartConfig):
    """The workload whose results are reported, on a server that may have served others before.

    The requests of the same number have the same prompt, unless the traces themselves say
    which prefixes are alike.
    """

    after: list[PartConfig] = Field([])
    """Workloads that the same servers served before, one when the one before is done; they leave
    their prefixes in the caches.
    """

    def load(self, beside: Path, *, keep_text: bool = False) -> Workload:
        """Load the trace, its prompts too if `keep_text`, and give its requests their times."""
        loaded = super().load(beside, keep_text=keep_text)
        if not self.after:
            return loaded
        parts = [part.load(beside) for part in self.after]
        return loaded._replace(
            trace=loaded.trace | {"after": [part.trace for part in parts]},
            before=tuple(part.requests for part in parts),
        )
