"""Conversations in a trace that has a row for each turn: whose history each prompt begins with.

Knows lengths only. A turn belongs to the conversation of the row before it if its prompt is at
least as long as that row's prompt and output together: then it can hold the whole history.
"""

from __future__ import annotations

from dataclasses import replace

from evenflow.errors import UsageError
from evenflow.types import Prefix
from traces.trace import Trace


def with_conversations(trace: Trace) -> Trace:
    """Return the trace with each turn's tokens, prompt and output, known as its conversation's.

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
