"""Sarathi: where its published scheduler is stricter than the paper."""

from __future__ import annotations

import pytest

from evenflow.schedulers import create
from tests.worlds import engine_of, steps_of


@pytest.mark.parametrize(
    ("mode", "budget", "pages", "prompts", "steps"),
    [
        # a decode asks for a free page even where it needs none; what it frees admits nobody
        ("hybrid", 64, 3, [(20, 4), (10, 3)], "0:20 1:10|0:1|0:1 1:11|0:1|1:12"),
        ("hybrid", 64, 2, [(20, 3)], "0:20|0:21|0:22"),
        (
            "hybrid",
            64,
            4,
            [(20, 4), (10, 3), (10, 2)],
            "0:20 1:10 2:10|0:1 1:1|0:1 1:1 2:11|0:1",
        ),
        ("chunked_only", 64, 3, [(20, 4), (10, 3)], "0:20 1:10|0:1|1:11|0:1|1:12|0:1"),
        # the rest of a prompt goes alone, though the budget has room
        ("chunked_only", 16, 9, [(20, 2), (10, 2)], "0:16|0:4|0:1|1:10|1:1"),
    ],
)
def test_steps_are_those_of_the_published_scheduler(
    mode: str, budget: int, pages: int, prompts: list[tuple[int, int]], steps: str
) -> None:
    """As its rules, written down from the published files, decide on one stage."""
    policy = create("sarathi", {"token_budget": budget, "watermark": 0.0, "mode": mode})
    serving = engine_of(policy, pages, prompts, depth=1, max_in_flight=1)
    assert steps_of(serving) == steps
