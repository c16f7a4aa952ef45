"""A trace in memory: prompt and output lengths, and arrival times if it has them, as columns.

Knows nothing of files, formats or how a trace becomes requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenflow.errors import UsageError
from evenflow.types import Prefix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SKIPPED = "skipped as asked"
"""Why the first requests of a trace are dropped where whoever loads it skips some."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """Requests in order of arrival (file order where there are no times), and their origin.

    `arrival_s`: seconds since the earliest request, [n], never decreasing; None without times.
    `prompt_tokens`, `output_tokens`: [n], 1 or more. `dropped`: rows left out, by reason, among the
    `rows_read`; `reordered`: rows that the file has earlier than the row before them. `sha256`: see
    `traces.formats.fingerprint`. `seed` and `neighbours`: what a sample was drawn with; None and 0
    for a file. `texts`: the prompts, [n], where they were asked for and the file holds them.
    `prefixes`: what the requests have in common, [n]; None where nothing is known of it. `max_new`:
    output tokens that clients allow, [n], None for one of which that is not known; None where it is
    known of nobody. `priority`: how urgent they are, [n], the lower first; None: all the same.
    """

    name: str
    format: str
    arrival_s: Floats | None
    prompt_tokens: Ints
    output_tokens: Ints
    dropped: dict[str, int]
    sha256: str | None
    path: str | None
    rows_read: int
    reordered: int = 0
    seed: int | None = None
    neighbours: float = 0.0
    texts: Sequence[str] | None = None
    prefixes: Sequence[Prefix] | None = None
    max_new: Sequence[int | None] | None = None
    priority: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def with_conversations(trace: Trace) -> Trace:
    """Return the trace with each turn's tokens, prompt and output, known as its conversation's.

    A turn belongs to the conversation of the row before it if its prompt is at least as long as
    that row's prompt and output together: then it can hold the whole history.

    Known error: neighbouring rows of two conversations whose lengths happen to fit count as one.
    Raises UsageError for a sample, whose rows are drawn apart, and where prefixes are known.
    """
    if trace.path is None or trace.prefixes is not None:
        why = "its rows are drawn one by one" if trace.path is None else "it names its prefixes"
        raise UsageError(f"trace {trace.name}: conversations: true does not apply, {why}")
    conversation = total = 0
    prefixes = []
    rows = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for prompt, output in rows:
        if prompt < total:
            conversation += 1
        total = prompt + output
        prefixes.append(Prefix((conversation,), total, total))
    return replace(trace, prefixes=prefixes)


class LengthFilter(NamedTuple):
    """Bounds on lengths, all inclusive, in tokens; None means no bound."""

    min_prompt: int
    min_output: int
    max_prompt: int
    max_output: int | None = None
    max_total: int | None = None

    def reason(self, prompt: int, output: int) -> str:
        """Say why a request is left out; "" keeps it."""
        if prompt < self.min_prompt:
            return f"prompt under {self.min_prompt} tokens"
        if output < self.min_output:
            return f"output under {self.min_output} tokens"
        if prompt > self.max_prompt:
            return f"prompt over {self.max_prompt} tokens"
        if self.max_output is not None and output > self.max_output:
            return f"output over {self.max_output} tokens"
        if self.max_total is not None and prompt + output > self.max_total:
            return f"prompt + output over {self.max_total} tokens"
        return ""


FILTERS: Mapping[str, LengthFilter] = MappingProxyType(
    {
        "vllm": LengthFilter(4, 4, max_prompt=1024, max_total=2048),
        "gllm": LengthFilter(4, 4, max_prompt=1024, max_output=512),
    }
)
"""The filters of the benchmarks of vLLM and gLLM. Rows are not shuffled: they keep their order."""
