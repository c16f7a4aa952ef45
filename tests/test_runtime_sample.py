"""Sampling: greedy, top-k, top-p; seeded per request, whatever else is in the micro-batch."""

from __future__ import annotations

from collections import Counter

import pytest

from evenflow.errors import UsageError

torch = pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")

from runtime.torch.sample import GREEDY, Sampling, sample  # noqa: E402

PROBABILITIES = torch.tensor([0.1, 0.5, 0.15, 0.25])
LOGITS = PROBABILITIES.log()


def draws(how: Sampling, count: int = 2000) -> Counter[int]:
    return Counter(
        token for position in range(count) for token in sample(LOGITS[None], [how], [position])
    )


def test_temperature_zero_is_greedy() -> None:
    assert draws(GREEDY, 5) == {1: 5}


def test_the_frequencies_are_the_probabilities() -> None:
    seen = draws(Sampling(temperature=1.0))
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert seen[token] / 2000 == pytest.approx(probability, abs=0.04)


def test_temperature_sharpens() -> None:
    seen = draws(Sampling(temperature=0.5))
    squares = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert seen[1] / 2000 == pytest.approx(float(squares[1]), abs=0.04)


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_p=0.45), {1}),
        (Sampling(1.0, top_p=0.7), {1, 3}),
        (Sampling(1.0, top_p=0.8), {1, 2, 3}),
        (Sampling(1.0, top_k=3, top_p=0.5), {1}),
        (Sampling(1.0), {0, 1, 2, 3}),
    ],
)
def test_only_the_likeliest_tokens_are_drawn(how: Sampling, allowed: set[int]) -> None:
    assert set(draws(how, 300)) == allowed


def test_a_request_draws_alike_in_any_company() -> None:
    how = Sampling(1.0, seed=7)
    rows = torch.stack([LOGITS.flip(0), LOGITS, LOGITS])
    together = [sample(rows, [Sampling(0.7), how, GREEDY], [3, at, 5])[1] for at in range(50)]
    assert together == [sample(LOGITS[None], [how], [at])[0] for at in range(50)]
    other = [sample(LOGITS[None], [Sampling(1.0, seed=8)], [at])[0] for at in range(50)]
    assert together != other


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**values)  # type: ignore[arg-type]
