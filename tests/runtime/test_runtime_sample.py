"""Sampling: greedy, top-k, top-p; seeded per request, whatever else is in the micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")

from evenflow.runtime.torch.model import drawn_by, sample  # noqa: E402
from evenflow.runtime.wire import Draw  # noqa: E402
from tests.tiny_models import Operations  # noqa: E402

PROBABILITIES = torch.tensor([0.1, 0.5, 0.15, 0.25])
LOGITS = PROBABILITIES.log()


def drawing(temperature: float, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Draw:
    return Draw(0, temperature, top_k, top_p, seed)


def tokens_of(logits: Any, settings: Sequence[Draw | None], positions: Sequence[int]) -> list[int]:
    return sample(logits, torch.from_numpy(drawn_by(settings, positions)))


def draws(how: Draw | None, count: int = 2000) -> Counter[int]:
    return Counter(tokens_of(LOGITS.expand(count, -1), [how] * count, range(count)))


def test_temperature_zero_or_next_to_it_is_greedy() -> None:
    for how in (None, drawing(0.0), drawing(1e-6), drawing(1e-50)):
        assert draws(how, 5) == {1: 5}


def test_the_frequencies_are_the_probabilities_and_temperature_sharpens_them() -> None:
    for temperature, power in ((1.0, 1), (0.5, 2)):
        seen, shares = draws(drawing(temperature)), PROBABILITIES**power
        for token, share in enumerate((shares / shares.sum()).tolist()):
            assert seen[token] / 2000 == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (drawing(1.0, top_k=1), {1}),
        (drawing(1.0, top_k=2), {1, 3}),
        (drawing(1.0, top_p=0.45), {1}),
        (drawing(1.0, top_p=0.7), {1, 3}),
        (drawing(1.0, top_p=0.8), {1, 2, 3}),
        (drawing(1.0, top_k=3, top_p=0.5), {1}),
        (drawing(1.0), {0, 1, 2, 3}),
    ],
)
def test_only_the_likeliest_tokens_are_drawn(how: Draw | None, allowed: set[int]) -> None:
    assert set(draws(how, 300)) == allowed


SETTINGS = [
    drawing(0.7, seed=1),
    drawing(1.0, seed=7),
    None,
    drawing(1.3, top_k=5, top_p=0.9, seed=3),
    drawing(0.9, top_p=0.3),
    drawing(1.0, top_k=1000, top_p=1.0, seed=2),
]


def test_a_request_draws_alike_in_any_company() -> None:
    logits = torch.randn(len(SETTINGS), 301, generator=torch.Generator().manual_seed(0))
    rows = list(zip(logits, SETTINGS, strict=True))
    for at in range(20):
        alone = [tokens_of(row[None], [how], [at])[0] for row, how in rows]
        assert tokens_of(logits, SETTINGS, [at] * len(rows)) == alone
        assert tokens_of(logits[2:], SETTINGS[2:], [at] * (len(rows) - 2)) == alone[2:]


def test_another_seed_draws_other_tokens() -> None:
    one, other = (
        tokens_of(LOGITS.expand(50, -1), [drawing(1.0, seed=seed)] * 50, range(50))
        for seed in (7, 8)
    )
    assert one != other


def test_all_rows_are_drawn_at_once_and_none_is_waited_for() -> None:
    """As many operations for twelve rows as for two, and no number is brought to the CPU alone."""
    counts = []
    for rows in (2, 12):
        logits = torch.randn(rows, 50)
        with Operations() as seen:
            tokens_of(logits, [drawing(1.0, top_k=3, top_p=0.9)] * rows, [5] * rows)
        assert "aten._local_scalar_dense.default" not in seen.names
        counts.append(len(seen.names))
    assert counts[0] == counts[1]
