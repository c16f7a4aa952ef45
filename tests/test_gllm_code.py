"""`variant: code` against what gLLM's own scheduler decided, recorded with `make test-gllm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.batcher import Batcher
from evenflow.errors import PolicyError, UsageError
from evenflow.kv import PagePool
from evenflow.schedulers import create
from evenflow.scheduling import Plan, Prefill, View
from evenflow.types import Request
from tools.gllm_replay import read, replay

JOURNALS = sorted((Path(__file__).parent / "journals").glob("gllm-*.jsonl.gz"))


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.name.split(".")[0])
def test_every_decision_is_the_packages(path: Path) -> None:
    journal = read(path)
    outcome = replay(journal, "code")
    assert outcome.difference is None
    assert outcome.equal == outcome.batches > 100
    if "tight" in path.name:
        assert any(event.get("preempted") for event in journal)


def test_the_default_reading_is_not_the_packages() -> None:
    outcome = replay(read(JOURNALS[-1]), "reading")
    assert outcome.difference is not None
    assert outcome.share < 50


@pytest.mark.parametrize(
    ("variant", "params", "name"),
    [
        ("code", {"use_wt": False}, "use_wt"),
        ("code", {"use_ut": False}, "use_ut"),
        ("code", {"coupled": True}, "coupled"),
        ("code", {"victim": "most_pages"}, "victim"),
        ("code", {"reserve": "adaptive"}, "reserve"),
        ("code", {"max_batch_rows": 8}, "max_batch_rows"),
        ("paper", {"reserve": "adaptive"}, "reserve"),
    ],
)
def test_what_a_variant_does_not_have_is_refused(
    variant: str, params: dict[str, object], name: str
) -> None:
    with pytest.raises(UsageError, match=f"variant {variant} has no parameter {name}$"):
        create("token_throttling", {"variant": variant, **params})


class Short:
    """Ends every prefill after `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def schedule(self, view: View) -> Plan:
        prompts = list(view.prompts)
        return Plan([Prefill(prompts[0].request_id, self.tokens, ends=True)])


def test_a_prefill_does_not_end_within_the_prompt() -> None:
    batcher = Batcher(Short(9), PagePool(8, 16), depth=1, max_in_flight=1, max_model_len=64)
    batcher.add(Request(0, 0.0, 10, 5))
    with pytest.raises(PolicyError, match="request 0: ends its prefill within the prompt"):
        batcher.next(0.0)
