"""How vLLM V1 goes on with what runs under `--scheduling-policy priority`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from functools import partial

from evenflow.scheduling import Plan, Prefill, View


def most_urgent(view: View, most: int, tokens: int) -> Generator[Plan, None, int]:
    """Go on with what runs, and preempt the least urgent of it; return how many tokens are left.

    If who is preempted is who lacks a page, the rest waits.
    """
    pages = partial(view.decode_pages, order="arrival")
    decodes = min(view.ready_decodes, most)
    while pages(decodes) > view.free_pages:
        fitting = bisect_right(range(1, decodes + 1), view.free_pages, key=pages)
        lacking, _ = view.ready(fitting + 1, "arrival")[fitting]
        victim = view.victim("lowest_priority")
        yield Plan(preempt=[victim])
        if victim == lacking:
            yield Plan(decodes=fitting)
            return 0
        decodes = min(view.ready_decodes, most)
    tokens -= decodes
    prefills = []
    for prompt in view.partials[: bool(tokens)]:
        chunk = min(prompt.remaining, tokens)
        need = view.pages_for(prompt.computed + chunk) - prompt.pages
        while need + pages(decodes) > view.free_pages:
            victim = view.victim("lowest_priority")
            yield Plan(preempt=[victim])
            decodes = min(view.ready_decodes, decodes)
            if victim == prompt.request_id:
                break
        else:
            prefills.append(Prefill(prompt.request_id, chunk))
            tokens -= chunk
    yield Plan(prefills, decodes)
    return tokens
