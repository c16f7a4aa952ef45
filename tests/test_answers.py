"""A policy that never answers is told where it is; what only computes long is left alone."""

from __future__ import annotations

import signal
import time

import pytest

from evenflow.answers import answers_in
from evenflow.errors import PolicyError
from evenflow.sim import simulate
from evenflow.types import Plan, Prefill, Request, View
from tests.worlds import small_world


class Endless:
    def schedule(self, view: View) -> Plan:
        while view.num_waiting:
            pass
        return Plan()


class Slow:
    """Many answers that together take longer than the limit for one."""

    def schedule(self, view: View) -> Plan:
        time.sleep(0.03)
        prompts = [Prefill(prompt.request_id, prompt.remaining) for prompt in view.waiting]
        return Plan(prompts, decodes=view.ready_decodes)


def test_a_policy_that_never_answers_is_told_where_it_is() -> None:
    world = small_world([Request(0, 0.0, 10, 3)], make_scheduler=Endless)
    message = r"policy Endless raised TimeoutError: no answer in 0.05 s \(test_answers.py:\d+: "
    with answers_in(0.05), pytest.raises(PolicyError, match=message):
        simulate(world)


def test_many_answers_may_take_longer_than_one() -> None:
    world = small_world([Request(0, 0.0, 10, 12)], make_scheduler=Slow)
    with answers_in(0.05):
        assert simulate(world).completion_s.size == 1
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_whoever_uses_the_alarm_keeps_it() -> None:
    def theirs(*_: object) -> None: ...

    before = signal.signal(signal.SIGALRM, theirs)
    try:
        with answers_in(0.01):
            assert signal.getsignal(signal.SIGALRM) is theirs
    finally:
        signal.signal(signal.SIGALRM, before)
