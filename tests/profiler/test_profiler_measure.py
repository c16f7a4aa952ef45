"""The measuring loop on a device of closed form: a clock that only its operators move."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from evenflow.core.batch import Work
from evenflow.costs.profile.cost import operator_counts
from evenflow.costs.profile.file import Header, LayerShapes, Profile
from evenflow.errors import UsageError
from evenflow.profiler import timed_runs
from evenflow.profiler.check import errors, take
from evenflow.profiler.machine import most_beside, neighbours, places_beside, require_threads
from evenflow.profiler.shapes import Limits, Shape, grid, random_shapes
from evenflow.specs.model import model

LIMITS = Limits(max_tokens=64, max_rows=8, max_context=128, max_total_context=512)
LAYERS = 3
OPERATORS = ("linear_qkv", "linear_o", "linear_up", "linear_down", "norm", "rope", "activation")


class Machine:
    """A device whose operators take exact times, and the clock they move."""

    note = ""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[Shape] = []
        self.fail_after: int | None = None

    def operator_s(self, name: str, shape: Shape) -> float:
        """Seconds of one time in one layer."""
        if name == "attention_prefill":
            return sum(1e-7 * t * (c + t / 2) + 1e-5 for t, c in shape.chunks)
        if name == "attention_decode":
            return 1e-6 * len(shape.decodes) + 1e-7 * sum(shape.decodes)
        return 1e-6 * shape.tokens + 1e-5

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[timed_runs.Mark], None]:
        self.order.append(shape)
        if self.fail_after is not None and len(self.order) > self.fail_after:
            raise KeyboardInterrupt
        names = [*OPERATORS, "kv_write"]
        names += ["attention_prefill"] if shape.chunks else []
        names += ["attention_decode"] if shape.decodes else []

        def run(mark: timed_runs.Mark) -> None:
            self.now_s += 1e-6 * shape.rows
            mark("cpu_prepare")
            for name in names:
                times = LAYERS * (2 if name == "norm" else 1)
                self.now_s += times * self.operator_s(name, shape)
                mark(name)
            self.now_s += 2e-6 * shape.tokens
            mark("embedding")
            for name in ("head", "sample"):
                self.now_s += 3e-6 * shape.rows
                mark(name)

        return run


class Stopwatch:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.mark_s = 0.0
        self.names: list[str] = []
        self.times: list[float] = []

    def start(self) -> None:
        self.names, self.times = [], [self.machine.now_s]

    def mark(self, name: str) -> None:
        self.machine.now_s += self.mark_s
        self.names.append(name)
        self.times.append(self.machine.now_s)

    def stop(self) -> dict[str, float]:
        return timed_runs.summed(self.names, list(np.diff(self.times)))

    was_disturbed = False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(timed_runs, "perf_counter", lambda: machine.now_s)
    return machine


def run(machine: Machine, journal: timed_runs.ProfileJournal, budget_s: float) -> list[Shape]:
    return timed_runs.measure(
        machine,
        LIMITS,
        (),
        Stopwatch(machine),
        journal,
        budget_s=budget_s,
        rng=np.random.default_rng(0),
    )


def test_the_budget_picks_the_grid_and_is_kept(machine: Machine, tmp_path: Path) -> None:
    levels = []
    for budget_s in (0.5, 0.8, 20.0):
        with timed_runs.ProfileJournal(tmp_path / f"{budget_s}.journal", {}) as journal:
            began_s = machine.now_s
            shapes = run(machine, journal, budget_s)
            assert machine.now_s - began_s == pytest.approx(budget_s, rel=0.05)
            levels.append(journal.plan["level"])
            assert shapes == grid(LIMITS, levels[-1])
            # A denser grid's micro-batches do not take what the coarsest's do, on average.
            assert len(journal.runs) >= 0.9 * timed_runs.GOOD_ROUNDS * len(shapes)
    assert levels == sorted(set(levels))


def test_a_budget_of_nothing_takes_the_fewest_rounds(machine: Machine, tmp_path: Path) -> None:
    with timed_runs.ProfileJournal(tmp_path / "journal", {}) as journal:
        shapes = run(machine, journal, 0.0)
        assert len(journal.runs) == timed_runs.MIN_ROUNDS * len(shapes)


def test_rounds_are_whole_and_in_ever_new_order(machine: Machine, tmp_path: Path) -> None:
    with timed_runs.ProfileJournal(tmp_path / "journal", {}) as journal:
        count = len(run(machine, journal, 0.0))
    rounds = [machine.order[start : start + count] for start in range(2 * count, 5 * count, count)]
    assert all(set(members) == set(rounds[0]) for members in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_an_interrupted_measurement_goes_on(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    coarse = len(grid(LIMITS, 0))
    machine.fail_after = 2 * coarse + 50
    with pytest.raises(KeyboardInterrupt), timed_runs.ProfileJournal(path, {"what": 1}) as journal:
        run(machine, journal, 0.5)
    with path.open("a") as file:
        file.write('{"shot": [3, {"li')  # killed while it wrote
    machine.fail_after = None
    with timed_runs.ProfileJournal(path, {"what": 1}) as journal:
        assert len(journal.runs) == 50
        shapes = run(machine, journal, 0.5)
        # Twice warmed up, but measured once.
        assert journal.spent_s == pytest.approx(0.5, rel=0.2)
        assert {run.shape for run in journal.runs} == set(range(len(shapes)))
        journal.remove()
    assert not path.exists()


NO_JOURNALS = (b"hello\n", b"[1]\n", b'{"facts": {}}\n{"shot": 3}\n', b"hello", b"a\nb", b"\xff\n")


@pytest.mark.parametrize("data", NO_JOURNALS)
def test_a_file_that_is_no_journal_is_refused_and_stays(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a profile's journal"):
        timed_runs.ProfileJournal(path, {})
    assert path.read_bytes() == data
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UsageError, match="is a link"):
        timed_runs.ProfileJournal(tmp_path / "link", {})


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    with timed_runs.ProfileJournal(tmp_path / "journal", {"model": "a"}):
        pass
    with pytest.raises(UsageError, match="interrupted profile of something else"):
        timed_runs.ProfileJournal(tmp_path / "journal", {"model": "b"})


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        timed_runs.ProfileJournal(tmp_path / "none" / "journal", {})


# -- points and predictions -----------------------------------------------------------------------


def profile_of(machine: Machine, path: Path) -> Profile:
    spec = model("Qwen2.5-14B")
    with timed_runs.ProfileJournal(path, {}) as journal:
        shapes = run(machine, journal, 2.0)
        counts = operator_counts(replace(spec, num_layers=LAYERS))
        points = timed_runs.operator_points(
            timed_runs.runs_by_shape(shapes, journal.runs), counts, 1
        )
    header = Header(
        "machine", "other", "none", "none", "float32", "unknown", 1, "", 1, "test", "m",
        LayerShapes.of(spec),
    )  # fmt: skip
    return Profile(header, tuple(sorted(points, key=lambda point: point.key)))


def test_points_are_times_of_one_layer(machine: Machine, tmp_path: Path) -> None:
    profile = profile_of(machine, tmp_path / "journal")
    for name in ("linear_qkv", "norm", "rope"):
        for point in profile.of(name):
            assert point.median_s == pytest.approx(1e-6 * (point.tokens or 0) + 1e-5)
    for point in profile.of("attention_decode"):
        context = 1e-7 * (point.context_tokens or 0)
        assert point.median_s == pytest.approx(1e-6 * (point.tokens or 0) + context)
    assert {point.tokens for point in profile.of("head")} >= set(range(1, 9))
    for name in ("attention_prefill", "attention_decode"):
        sizes = [point.tokens for point in profile.of(name)]
        assert all(sizes.count(size) > 1 for size in sizes)


def test_median_and_spread_are_those_of_the_repeats() -> None:
    shape = Shape((), (5, 5))
    runs = [timed_runs.TimedRun(0, {"linear_o": LAYERS * value}, 0.0) for value in range(1, 12)]
    (point,) = timed_runs.operator_points({shape: runs}, {"linear_o": LAYERS}, 2)
    assert (point.p10_s, point.median_s, point.p90_s) == (2, 6, 10)
    assert (point.repeats, point.ranks, point.tokens) == (11, 2, 2)


def test_disturbed_runs_do_not_count_where_there_are_others() -> None:
    shape = Shape((), (5, 5))
    quiet = [timed_runs.TimedRun(0, {"linear_o": LAYERS * 1.0}, 0.0)] * 3
    loud = [timed_runs.TimedRun(0, {"linear_o": LAYERS * 9.0}, 0.0, True)] * 4
    (point,) = timed_runs.operator_points({shape: quiet + loud}, {"linear_o": LAYERS}, 1)
    assert (point.median_s, point.repeats) == (1.0, 3)
    (point,) = timed_runs.operator_points({shape: quiet[:1] + loud}, {"linear_o": LAYERS}, 1)
    assert (point.median_s, point.repeats) == (9.0, 5)


def test_preparation_is_no_time_of_the_stage() -> None:
    assert timed_runs.stage_s({"cpu_prepare": 5.0, "head": 1.0, "norm": 2.0}) == 3.0


def test_what_marks_cost_is_told_and_is_no_time_of_a_stage(machine: Machine) -> None:
    """A mark takes 5 us; a check compares a prediction without them with runs without them."""
    rng, shapes = np.random.default_rng(5), random_shapes(LIMITS, 6, np.random.default_rng(5))
    stopwatch = Stopwatch(machine)
    stopwatch.mark_s = 5e-6
    by_shape = take(machine, shapes, stopwatch, repeats=4, rng=rng)
    for shape, runs in by_shape.items():
        marked, whole = timed_runs.by_marks(runs)
        marks = len(marked[0].seconds) - 1
        more_s = timed_runs.stage_s(marked[0].seconds) - timed_runs.stage_s(whole[0].seconds)
        assert more_s == pytest.approx(5e-6 * (marks - 1)), shape
    assert 0.005 < timed_runs.marks_share(by_shape) < 0.5


class ExactCost:
    """What the machine takes, told as a cost model of one stage; `factor` off."""

    depth = 1

    def __init__(self, machine: Machine, factor: float) -> None:
        self.machine = machine
        self.factor = factor

    def times(self, batch: Work) -> list[float]:
        shape = next(s for s in self.machine.order if s.work() == batch)
        stopwatch = Stopwatch(self.machine)
        stopwatch.start()
        self.machine.prepare(shape, np.random.default_rng(0))(stopwatch.mark)
        return [self.factor * timed_runs.stage_s(stopwatch.stop())]


def test_errors_are_those_of_the_predictions(machine: Machine, tmp_path: Path) -> None:
    profile = profile_of(machine, tmp_path / "journal")
    rng = np.random.default_rng(5)
    shapes = random_shapes(LIMITS, 40, rng)
    by_shape = take(machine, shapes, Stopwatch(machine), repeats=4, rng=rng)
    assert all(len(runs) == 8 for runs in by_shape.values())
    cost, spec = ExactCost(machine, 0.9), replace(model("Qwen2.5-14B"), num_layers=LAYERS)
    rows = {row.operator: row for row in errors(by_shape, profile, spec, cost, ranks=1)}
    assert list(rows)[-1] == "stage"
    assert rows["stage"].median == pytest.approx(0.1)
    assert rows["stage"].bias == pytest.approx(-0.1)
    assert rows["stage"].spread_p95 == pytest.approx(0, abs=1e-6)
    assert rows["linear_up"].p95 == pytest.approx(0, abs=1e-9)
    assert rows["attention_decode"].p95 < 0.02
    assert rows["attention_prefill"].median < 0.1
    assert sum(row.share for row in rows.values()) == pytest.approx(2)


def test_a_run_that_waits_is_disturbed() -> None:
    for threads, expected in ((1, True), (2, False)):
        stopwatch = timed_runs.CpuStopwatch(threads)
        stopwatch.start()
        time.sleep(0.01)
        stopwatch.mark("a")
        stopwatch.stop()
        assert stopwatch.was_disturbed is expected


def test_one_thread_is_not_charged_for_what_others_compute() -> None:
    for threads, waits in ((1, False), (2, True)):
        stopwatch = timed_runs.CpuStopwatch(threads)
        stopwatch.start()
        time.sleep(0.05)
        stopwatch.mark("a")
        assert (stopwatch.stop()["a"] >= 0.05) is waits


def test_the_cpu_stopwatch_sums_by_name() -> None:
    stopwatch = timed_runs.CpuStopwatch()
    for _ in range(2):
        stopwatch.start()
        for name in ("a", "b", "a"):
            stopwatch.mark(name)
        seconds = stopwatch.stop()
        assert list(seconds) == ["a", "b"]
        assert all(0 < value < 1 for value in seconds.values())


# -- stages that compute beside: they compute, they end, and their death is told ------------------


class Writer:
    """A subject whose runs are seen from outside: it writes its process and how often it ran."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs = 0

    def prepare(self, shape: Shape, rng: np.random.Generator) -> Callable[[timed_runs.Mark], None]:
        self._runs += 1
        self._path.write_text(f"{os.getpid()} {self._runs}\n")
        return lambda mark: None


def seen(path: Path, runs: int, limit_s: float = 30.0) -> int:
    """Return the process of a writer once it has run so often."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        words = path.read_text().split() if path.exists() else []
        if len(words) == 2 and int(words[1]) >= runs:
            return int(words[0])
        time.sleep(0.01)
    raise AssertionError("it does not compute")


def here() -> list[list[int]]:
    return [sorted(os.sched_getaffinity(0))[:1]]


def test_a_neighbour_computes_meanwhile_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    with neighbours(partial(Writer, path), [Shape(((4, 0),))], here()):
        process = seen(path, 3)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_measurement_whose_neighbour_died_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    beside = neighbours(partial(Writer, path), [Shape(((4, 0),))], here())
    beside.__enter__()
    os.kill(seen(path, 1), signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(UsageError, match="computed beside ended with -9"):
        beside.__exit__(None, None, None)


def test_stages_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.profiler.machine._cores", lambda: list(range(7)))
    assert places_beside(2, 2) == [[3, 4], [1, 2]]
    assert (most_beside("cpu", 2), most_beside("cpu", 7), most_beside("cuda", 1)) == (2, 0, 0)
    require_threads(2, 3)
    with pytest.raises(UsageError, match=r"--beside 3: .* at most 2 is right"):
        require_threads(2, 4)
