"""`variant: code` of Token Throttling; that it is the package's: test_engine_journals."""

from __future__ import annotations

import pytest

from evenflow.core.scheduling import Plan, Prefill, View
from evenflow.errors import PolicyError
from evenflow.experiments.recordings import gllm
from evenflow.experiments.recordings.journal import Replayer, read, replayed, world_of
from evenflow.schedulers import create
from tests.places import ROOT
from tests.worlds import engine_of, send

JOURNALS = sorted((ROOT / "tests" / "journals").glob("gllm-*.jsonl.gz"))


def test_the_journals_preempt_where_pages_are_few() -> None:
    for path in JOURNALS:
        preempted = any(event.get("preempted") for event in read(path, gllm.FACTS.fields))
        assert preempted == ("tight" in path.name)


def test_the_default_reading_is_not_the_packages() -> None:
    events = read(JOURNALS[-1], gllm.FACTS.fields)
    events[0] = {**events[0], "variant": "reading"}
    world = world_of(gllm, JOURNALS[-1], events)
    assert replayed(events, Replayer(gllm, world)).difference is not None


class Short:
    """Ends every prefill after `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def schedule(self, view: View) -> Plan:
        prompts = list(view.prompts)
        return Plan([Prefill(prompts[0].request_id, self.tokens, ends=True)])


def test_a_prefill_does_not_end_early_unless_the_policy_says_so() -> None:
    batcher = engine_of(Short(9), 8, [(10, 5)])
    with pytest.raises(PolicyError, match="request 0: ends its prefill early"):
        batcher.next(0.0)


def test_a_micro_batch_has_at_most_2048_decodes() -> None:
    policy = create("token_throttling", {"variant": "code", "max_prefill": 10**4})
    batcher = engine_of(policy, 5000, [(1, 3)] * 2100, depth=1)
    for expected in (0, 2048):
        batch = send(batcher, 0.0)
        assert batch.decode_tokens == expected
        batcher.complete(batch, 1.0)
