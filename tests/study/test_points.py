"""Points are simulated once, whoever simulates them, and their records are found again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.errors import LostProcessError, UsageError
from evenflow.results.outcome import Outcome
from evenflow.study.points import (
    Point,
    Record,
    Store,
    code_digest,
    executor_of,
    simulate_point,
    simulated,
)
from evenflow.study.trials import Simulator
from tests.command_line import write_trace
from tests.sweeps import simulator

RUN: dict[str, Any] = {
    "stages": 2,
    "costs": {"kind": "affine", "base_s": 0.01, "per_token_s": 1e-5},
    "kv": {"pages": 1000},
    "scheduler": "sarathi",
    "workload": {"trace": "azure-conv-sample", "requests": 5, "arrivals": "offline"},
}


def point(*overrides: str, beside: Path = Path()) -> Point:
    return Point(configured(Document("a.yaml", RUN, {}), overrides), beside)


def completed(outcome: Outcome, factor: int) -> dict[str, Any]:
    return {"completed": (1, factor * outcome.summary["completed"])}  # a list in JSON


def test_the_key_follows_what_a_result_depends_on(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", "0,5,5")
    words = f"workload.trace={trace}", "workload.requests=1"
    named = point(*words, beside=tmp_path)
    before = named.key
    assert before == point(*words, beside=tmp_path).key
    assert named.workload.requests[0].output_tokens == 5
    write_trace(trace, "0,5,50")
    assert named.workload.requests[0].output_tokens == 50
    keys = [before, named.key, point().key, point("workload.seed=1").key]
    keys += [Point(point().config, Path(), completed, (("factor", n),)).key for n in (1, 2)]
    assert len(set(keys)) == len(keys)


def test_a_point_is_run_once_and_found_again(tmp_path: Path) -> None:
    points = [point(), point("scheduler=vllm"), point()]
    told: list[int] = []
    with simulator(tmp_path, on_done=told.append) as who:
        first = who.records(points)
    assert first[0] == first[2] == simulate_point(points[0])
    assert (told[0], told[-1]) == (0, 3)
    closed = ThreadPoolExecutor(1)
    closed.shutdown()  # so that a run would be an error
    assert Simulator(Store(tmp_path), closed).records(points) == first


def test_results_of_other_code_stay_and_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.study.points.code_digest", lambda: "other")
    Store(tmp_path).put(Record("00", {}))
    monkeypatch.undo()
    Store(tmp_path).clear()
    assert Store(tmp_path).get("00") is None
    Store(tmp_path).put(Record("00", {"x": 1}))
    assert Store(tmp_path).get("00") == Record("00", {"x": 1})
    assert json.loads((tmp_path / "other/00/00.json").read_text())["values"] == {}


def test_what_a_killed_study_had_begun_to_write_goes(tmp_path: Path) -> None:
    Store(tmp_path).put(Record("00", {}))
    old, new = tmp_path / ".results.json.123.partial", tmp_path / ".results.json.124.partial"
    others = [tmp_path / name for name in (".partial-my_notes", ".results.json.mine.partial")]
    for path in (old, new, *others):
        path.touch()
    for path in (old, *others):
        os.utime(path, (0, 0))
    Store(tmp_path)
    assert sorted(path for path in tmp_path.glob(".*")) == sorted([new, *others])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"key": "00"}',
        '{"key": "01", "values": {}}',
        "[]",
        '{"key": "00", "values": 3}',
        '{"key": "00", "values": {}, "x": 1}',
    ],
)
def test_what_is_no_record_of_its_key_is_told(tmp_path: Path, text: str) -> None:
    Store(tmp_path).put(Record("00", {"x": math.inf, "y": 0.1, "z": [None]}))
    assert Store(tmp_path).get("00") == Record("00", {"x": math.inf, "y": 0.1, "z": [None]})
    (path,) = tmp_path.rglob("00.json")
    path.write_text(text)
    with pytest.raises(UsageError, match=r"00/00\.json: .*; remove it"):
        Store(tmp_path).get("00")


def test_a_store_goes_through_no_link_of_its_folder(tmp_path: Path) -> None:
    key, out = "ab" * 32, tmp_path / "out"
    mine = tmp_path / "mine" / f"{key}.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    place = out / code_digest()[:12] / "ab"
    place.parent.mkdir(parents=True)
    place.symlink_to(mine.parent)
    for call in (
        lambda: Store(out).clear(),
        lambda: Store(out).put(Record(key, {})),
        lambda: Store(out).get(key),
    ):
        with pytest.raises(UsageError, match="/ab: is a link"):
            call()
    assert mine.read_text() == "mine"


def test_a_failed_point_says_why_and_is_simulated_again_when_asked(tmp_path: Path) -> None:
    points = [point("workload.trace=missing.csv"), point()]
    told: list[Record] = []
    for retry, count in ((False, 1), (False, 1), (True, 2)):
        with simulator(tmp_path, on_failure=told.append, retry=retry) as who:
            failed, done = who.records(points)
        assert "missing.csv" in failed.error
        assert (done.error, done.values["completed"]) == (None, 5)
        assert [record.key for record in told] == [points[0].key] * count


def killed(outcome: Outcome) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return outcome.summary


@pytest.mark.processes
def test_a_worker_that_is_killed_ends_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    points = [point(), Point(point().config, Path(), killed), point("workload.seed=1")]
    with (
        pytest.raises(LostProcessError, match="a worker died"),
        executor_of("process", 1) as executor,
    ):
        Simulator(Store(tmp_path), executor).records(points)
    assert Store(tmp_path).get(points[0].key) == simulate_point(points[0])
    assert Store(tmp_path).get(points[1].key) is None


@pytest.mark.processes
def test_a_pool_ends_with_the_block_that_an_error_leaves() -> None:
    """Else its thread meets tasks that are cancelled later, of which Python 3.11's dies."""
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), executor_of("process", 1) as pool:
        assert 1 / pool.submit(int).result()
    assert threading.active_count() == before


class Broken(Executor):
    """An executor whose processes are gone after one task."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def submit(self, call: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        if self.done.done():
            raise BrokenProcessPool
        self.done.set_result(call(*arguments))
        return self.done


def test_what_is_done_is_kept_when_a_worker_dies_before_all_is_asked(tmp_path: Path) -> None:
    with pytest.raises(LostProcessError, match="what is done is kept"):
        Simulator(Store(tmp_path), Broken()).records([point(), point("workload.seed=1")])
    assert Store(tmp_path).get(point().key) == simulate_point(point())


def test_a_measure_is_kept_instead_of_the_summary_as_it_is_read_again(tmp_path: Path) -> None:
    asked = Point(point().config, Path(), completed, (("factor", 3),))
    with simulator(tmp_path) as who:
        (fresh,) = who.records([asked])
    assert fresh.values == {"completed": [1, 15]}
    assert Store(tmp_path).get(asked.key) == fresh


def test_a_cluster_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr("evenflow.study.points.CONNECT_LIMIT_S", 5.0)
    own = {"processes": False, "threads_per_worker": 1, "dashboard_address": ":0"}
    with distributed.LocalCluster(n_workers=1, **own) as cluster:
        name = f"dask:{cluster.scheduler_address}"
        with executor_of(name) as executor:
            records = Simulator(Store(tmp_path), executor).records([point()])
            assert records == [simulate_point(point())]
        monkeypatch.setattr("evenflow.study.points.code_digest", lambda: repr(object()))
        with pytest.raises(UsageError, match="runs another version"), executor_of(name):
            pass
    monkeypatch.setattr("evenflow.study.points.CONNECT_LIMIT_S", 0.3)
    with distributed.LocalCluster(n_workers=0, **own) as cluster:
        name = f"dask:{cluster.scheduler_address}"
        with pytest.raises(UsageError, match="has no workers"), executor_of(name):
            pass


def test_a_cluster_that_has_lost_its_workers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    own = {"processes": False, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(n_workers=1, **own) as cluster,
        executor_of(f"dask:{cluster.scheduler_address}") as executor,
    ):
        monkeypatch.setattr("evenflow.study.points.CONNECT_LIMIT_S", 0.5)
        cluster.scale(0)
        with pytest.raises(LostProcessError, match="the cluster went away"):
            list(simulated([point()], executor))


@pytest.mark.long
@pytest.mark.processes
def test_a_cluster_goes_on_when_one_of_its_workers_dies() -> None:
    distributed = pytest.importorskip("distributed")
    own = {"threads_per_worker": 1, "dashboard_address": ":0"}
    points = [point(f"workload.seed={seed}") for seed in range(30)]
    found: list[Record] = []
    with (
        distributed.LocalCluster(n_workers=2, **own) as cluster,
        executor_of(f"dask:{cluster.scheduler_address}") as executor,
    ):
        victim, other = distributed.default_client().run(os.getpid).values()
        for record in simulated(points, executor):
            if not found:
                os.kill(victim, signal.SIGKILL)
            found.append(record)
    assert victim != other
    assert {record.key for record in found} == {point.key for point in points}
    assert not any(record.error for record in found)


def test_an_input_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", "0,5,5")
    store = Store(tmp_path / "store")

    class Meddler(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Any:
            write_trace(trace, "0,5,50")
            return super().submit(*args, **options)

    with Meddler(1) as executor, pytest.raises(UsageError, match="changed while"):
        Simulator(store, executor).records([point(f"workload.trace={trace}", beside=tmp_path)])


def test_a_store_that_keeps_nothing_leaves_nothing(tmp_path: Path) -> None:
    Store(tmp_path / "store")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="cannot write there"):
        Store(tmp_path / "file" / "store")


class HalfDone(Executor):
    """An executor of which every other task never ends."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, *_: Any) -> Future[Any]:  # type: ignore[override]
        self.futures.append(Future())
        if len(self.futures) % 2:
            self.futures[-1].set_result(Record("", {}))
        return self.futures[-1]


@pytest.mark.parametrize(
    ("ended_by", "cancelled"), [(GeneratorExit, True), (KeyboardInterrupt, False)]
)
def test_tasks_are_cancelled_where_enough_is_known_and_left_to_their_pool_where_all_ends(
    ended_by: type[BaseException], cancelled: bool
) -> None:
    """The pool's own thread ends what is left when its processes die; cancelled, it cannot."""
    pool = HalfDone()
    records = simulated([point(), point()], pool)
    next(records)
    with pytest.raises(ended_by):
        records.throw(ended_by())
    assert pool.futures[1].cancelled() == cancelled


def test_tasks_are_left_to_their_pool_where_a_record_cannot_be_kept(tmp_path: Path) -> None:
    pool = HalfDone()  # its records are of no point that was asked for
    with pytest.raises(UsageError, match="has changed while") as error:
        Simulator(Store(tmp_path), pool).records([point(), point("workload.seed=1")])
    assert error.tb is not None  # on its way out, as where the pool ends
    assert not pool.futures[1].cancelled()


def test_modules_may_still_load_when_a_command_ends() -> None:
    """A thread loads them, and Python that ends loads no concurrent.futures.thread."""
    script = "import sys, evenflow.study.points; print('concurrent.futures.thread' in sys.modules)"
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, text=True) == "True\n"
