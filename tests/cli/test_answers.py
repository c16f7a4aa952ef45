"""A policy that never answers is told where it is; what only computes long is left alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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


class Disarming(Endless):
    """Takes back what it could be woken by."""

    def schedule(self, view: View) -> Plan:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.alarm(0)
        return super().schedule(view)


class Slow:
    """Many answers that together take longer than the limit for one."""

    def schedule(self, view: View) -> Plan:
        time.sleep(0.03)
        prompts = [Prefill(prompt.request_id, prompt.remaining) for prompt in view.waiting]
        return Plan(prompts, decodes=view.ready_decodes)


@pytest.mark.parametrize("policy", [Endless, Disarming])
def test_a_policy_that_never_answers_is_told_where_it_is(policy: type[Endless]) -> None:
    world = small_world([Request(0, 0.0, 10, 3)], make_scheduler=policy)
    message = r" raised TimeoutError: no answer in 0.05 s \(test_answers.py:\d+: "
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


class Moving(Slow):
    def schedule(self, view: View) -> Plan:
        os.chdir("/")
        return super().schedule(view)


def test_a_policy_that_goes_elsewhere_moves_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    simulate(small_world([Request(0, 0.0, 10, 2)], make_scheduler=Moving))
    assert Path.cwd() == tmp_path
    assert capsys.readouterr().err == "note: a policy went to '/'; paths stay those of before\n"


class Forking(Slow):
    def __init__(self) -> None:
        self.copies: list[int] = []

    def schedule(self, view: View) -> Plan:
        self.copies.append(os.fork())
        if not self.copies[-1] and len(self.copies) > 1:
            raise ValueError("a copy that fails must end as one that answers does")
        return super().schedule(view)


def test_a_copy_of_the_process_that_a_policy_makes_ends_with_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    policy = Forking()
    result = simulate(small_world([Request(0, 0.0, 10, 2)], make_scheduler=lambda: policy))
    statuses = {os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in policy.copies}
    assert (result.status, statuses) == (["completed"], {1})
    line = "error: Forking forked this process; the copy ends here\n"
    assert capfd.readouterr().err == line * len(policy.copies) == line * 2
