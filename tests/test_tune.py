"""Tuning: the space is right, the search finds what is planted, unseen data is unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenflow.errors import UsageError
from evenflow.results.bubbles import CAUSES
from evenflow.schedulers import POLICIES, create, parameters, policy
from evenflow.schedulers.sarathi import Sarathi
from experiments.run_file.build import load_workload
from experiments.run_file.run import configured
from experiments.run_file.yaml_file import Document
from experiments.study.layouts import AS_GIVEN, layouts, pairs_of, parse_gpus, shifted
from experiments.study.points import Record
from experiments.study.searches import Range
from experiments.study.slo import parse_slo
from experiments.study.trials import Part, Trial
from experiments.study.tune import (
    FRESH,
    GLLM,
    LATER,
    TUNED,
    Candidate,
    Check,
    Search,
    Tried,
    Tuned,
    Tuning,
    Wish,
    evaluate,
    prepare,
    run_bubbles,
    run_checks,
    run_search,
    sentences,
    simplified,
    space_of,
    unseen_parts,
)
from tests.command_line import evenflow, write_inputs, write_trace
from tests.sweeps import simulator
from tests.test_points import RUN

POISSON = {
    **RUN,
    "workload": {
        "trace": "azure-conv-sample",
        "requests": 40,
        "arrivals": {"kind": "poisson", "rate": 20.0},
    },
}
MODEL = {
    **POISSON,
    "model": "Qwen2.5-14B",
    "gpu": "L20",
    "stages": 4,
    "link": {"bandwidth_gb_s": 20.0},
    "costs": "roofline",
    "kv": {"pages": "auto"},
}


class Planted(Sarathi):
    """The default holds too few rows; to refuse half of the requests serves the others better."""

    search_space = {  # noqa: RUF012  (as a user writes it)
        "max_num_seqs": {"low": 1, "high": 64, "log": True, "integer": True},
        "refusing": [False, True],
    }

    def __init__(self, *, max_num_seqs: int = 2, refusing: bool = False, idle: float = 0.0) -> None:
        super().__init__(token_budget=4096, max_num_seqs=max_num_seqs)
        self.refusing = refusing

    def refuse(self, prompt_tokens: int, output_tokens: int, pool: Any) -> str | None:
        return "odd" if self.refusing and prompt_tokens % 2 else None


PLANTED = f"{__name__}:Planted"


def tuning(run: dict[str, Any], **wish: Any) -> Tuning:
    slo = tuple(parse_slo(["p99_tpot_ms=1e6"]))
    return prepare(Document("a.yaml", run, {}), Path(), Wish(slo, **wish))


def planted(trials: int) -> Tuning:
    run = {**POISSON, "scheduler": PLANTED}
    return tuning(run, objective="mean_e2el_ms", trials=trials, schedulers=[PLANTED])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Search:
    with simulator(tmp_path_factory.mktemp("store")) as who:
        return run_search(planted(24), who)


@pytest.mark.parametrize("name", POLICIES)
def test_the_ends_of_every_search_space_are_accepted(name: str) -> None:
    space = space_of(name)
    assert space
    assert set(space) <= set(parameters(policy(name)))
    for key, parameter in space.items():
        ends = (parameter.low, parameter.high) if isinstance(parameter, Range) else parameter
        for value in ends:
            facts = {"prefill_s": lambda tokens: 0.0, "decode_s": lambda rows, context: 0.0}
            given = parameter.at(value == ends[1]) if isinstance(parameter, Range) else value
            create(name, {key: given}, max_model_len=4096, **facts)


def test_the_search_finds_what_is_planted_and_refuses_to_cheat(
    found: Search, tmp_path: Path
) -> None:
    best = found.winner.candidate.params
    assert best["max_num_seqs"] >= 10
    assert not best["refusing"]
    mean = "mean_e2el_ms"
    assert found.winner.trial.mean(mean) < 0.5 * found.default.trial.mean(mean)
    cheats = [each for each in found.tried if each.candidate.params.get("refusing")]
    assert cheats
    assert all(each.trial.mean("failed") > 0 for each in cheats)
    with simulator(tmp_path, 2) as other:  # another executor, and a store that has nothing yet
        assert run_search(found.tuning, other) == found


def test_what_was_found_is_checked_on_unseen_data_and_explained(
    found: Search, tmp_path: Path
) -> None:
    with simulator(tmp_path) as who:
        checks = run_checks(found, 3, who)
        bubbles = run_bubbles(found, checks, who)
    assert [check.name for check in checks] == [FRESH, LATER]
    for check in checks:
        assert set(check.trials) == {TUNED, "as given", GLLM}
        assert not {part for part in check.parts if part in found.tuning.train}
        assert check.survives("mean_e2el_ms", "as given")
    assert set(bubbles) == {TUNED, "as given"}
    assert bubbles[TUNED]["computing"] > 0
    tuned = Tuned(found, (), tuple(checks), bubbles)
    assert tuned.points["name"].to_list()[:2] == ["as given", GLLM]
    assert tuned.points[f"{PLANTED}.max_num_seqs"].isna().sum() == 2  # the baselines
    assert len(tuned.table) == 3 * 3 * 2  # contenders, parts, checks
    said = "\n".join(sentences(tuned))
    assert "fresh seeds, against as given: the gain survives: mean_e2el_ms -" in said
    assert "share of the GPU time, against the run as it is: " in said


def check_of(tuned: list[float], other: list[float], metric: str) -> Check:
    def trial(values: list[float]) -> Trial:
        return Trial({}, tuple(Record("", {metric: value}) for value in values))

    parts = tuple(Part(seed, 0) for seed in range(len(tuned)))
    return Check(FRESH, parts, {TUNED: trial(tuned), "as given": trial(other)})


def test_a_gain_survives_beyond_its_interval_only() -> None:
    clear = check_of([11.0, 21.1, 31.2, 41.0], [10.0, 20.0, 30.0, 40.0], "request_goodput")
    assert clear.survives("request_goodput", "as given")
    unclear = check_of([12.0, 19.0, 33.0, 39.0], [10.0, 20.0, 30.0, 40.0], "request_goodput")
    assert unclear.gain("request_goodput", "as given").mean > 0
    assert not unclear.survives("request_goodput", "as given")
    worse = check_of([11.0, 21.1, 31.2, 41.0], [10.0, 20.0, 30.0, 40.0], "mean_ttft_ms")
    assert not worse.survives("mean_ttft_ms", "as given")


def test_a_gain_that_does_not_survive_is_told_plainly(found: Search) -> None:
    def trial(values: list[float]) -> Trial:
        records = [Record("", {"mean_e2el_ms": value, "p99_tpot_ms": 2e6}) for value in values]
        return Trial({}, tuple(records))

    other = trial([10.0, 20.0, 30.0, 40.0])
    trials = {TUNED: trial([8.0, 21.0, 27.0, 41.0]), "as given": other, GLLM: other}
    check = Check(FRESH, tuple(Part(seed, 0) for seed in range(4)), trials)
    bubbles = {
        name: {"computing": 1.0, **dict.fromkeys(CAUSES, 0.0)} for name in (TUNED, "as given")
    }
    said = "\n".join(sentences(Tuned(found, (), (check,), bubbles)))
    assert "fresh seeds, against as given: THE GAIN DOES NOT SURVIVE: mean_e2el_ms -0.75 ±" in said
    assert "the SLO is missed: p99_tpot_ms is 2e+06 on average" in said


def test_unseen_parts_begin_after_the_search(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},3" for i in range(100)))

    def parts(**workload: Any) -> dict[str, tuple[Part, ...]]:
        run = {**RUN, "workload": {"trace": str(trace), "seed": 7, **workload}}
        return unseen_parts(tuning(run, trials=1), 4)

    poisson = {"kind": "poisson", "rate": 1.0}
    seeds = [9, 10, 11, 12]  # 7 and 8 were searched on
    found = parts(requests=30, skip=5, arrivals=poisson)
    assert found[FRESH] == tuple(Part(seed, 5) for seed in seeds)
    assert found[LATER] == (Part(9, 35), Part(10, 65), Part(11, 35), Part(12, 65))
    assert parts(requests=30, arrivals="replay") == {LATER: (Part(8, 30), Part(9, 60))}
    assert parts(requests=80, arrivals="replay") == {}
    assert parts(arrivals="replay") == {LATER: (Part(8, 50),)}
    sample = {"trace": "azure-conv-sample", "requests": 10, "seed": 0, "arrivals": "offline"}
    run = {**RUN, "workload": sample}
    later = unseen_parts(tuning(run, trials=1), 2)[LATER]
    assert later == (Part(2, 10), Part(3, 20))


def test_layouts_of_some_gpus_with_what_does_not_fit() -> None:
    document = Document("a.yaml", {**MODEL, "model": "Qwen2.5-32B"}, {})
    workload = load_workload(configured(document), Path())
    found = layouts(document, workload, Path(), pairs_of([8]))
    assert {each.parallel for each in found} == {"PP8", "PP4 x TP2", "PP2 x TP4", "TP8"}
    assert all(each.reason or sum(each.layers) == 64 for each in found)
    one = layouts(document, workload, Path(), pairs_of([1]))
    assert [each.label for each in one] == ["PP1, even"]
    assert "does not fit" in one[0].reason
    own = layouts(document, workload, Path())
    assert own[0].label == "PP4, as given"
    divisions = {each.layers for each in own}
    assert len(divisions) == len(own) > 3
    assert {(17, 17, 16, 14), (15, 16, 16, 17)} <= divisions


def test_on_other_gpus_the_run_as_it_is_gets_the_first_layout_that_fits() -> None:
    asked = tuning(MODEL, gpus=(2,))
    assert asked.default == "as given, on PP2, even"
    assert tuning(MODEL, gpus=(4,)).default == "as given"


def test_numbers_of_gpus_are_said_in_one_way() -> None:
    assert parse_gpus("4") == (4,)
    assert parse_gpus("8, 4") == (4, 8)
    assert parse_gpus("2..4,8") == (2, 3, 4, 8)
    for wrong in ("", "0", "4..2", "many", "4...8", "-1", "1..9999999999", "9" * 5000):
        with pytest.raises(UsageError, match=r"should be a number of GPUs, several \(4,8\)"):
            parse_gpus(wrong)


def test_shifts_keep_the_layers() -> None:
    assert shifted((5, 5, 5, 5), 2) == (6, 6, 5, 3)
    assert shifted((5, 5, 5, 5), -4) == (3, 4, 4, 9)


def test_a_deployment_without_a_model_keeps_its_layout() -> None:
    assert [each.label for each in tuning(POISSON).layouts] == ["as given, as given"]


@pytest.mark.parametrize(
    ("run", "gpus", "told"),
    [
        (POISSON, 4, "--gpus 4: the run's costs do not follow"),
        ({**MODEL, "kv": {"pages": 500}}, 4, r"--gpus 4: the run's kv\.pages is a number"),
        ({**MODEL, "model": "Qwen2.5-32B"}, 1, "--gpus 1: no layout fits: PP1"),
    ],
)
def test_gpus_that_no_layout_may_have(run: dict[str, Any], gpus: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        tuning(run, gpus=(gpus,))


def test_a_search_space_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "search_space", {"max_num_seqs": {"low": 5, "high": 1}})
    with pytest.raises(UsageError, match="search_space: max_num_seqs: should be a range whose low"):
        space_of(PLANTED)


def test_settings_worth_nothing_go_back_to_the_default(tmp_path: Path) -> None:
    asked = planted(1)

    candidate = Candidate(PLANTED, {"max_num_seqs": 64, "refusing": False, "idle": 0.5}, AS_GIVEN)
    with simulator(tmp_path) as who:
        found = run_search(asked, who)
        [trial] = evaluate(asked, [candidate], asked.train, who)
        winner = Tried("trial 0", candidate, trial)
        found, worth = simplified(replace(found, winner=winner), who)
    assert found.winner.candidate.params == {"max_num_seqs": 64}
    assert [each.setting for each in worth] == ["max_num_seqs", "idle"]  # the rest is the default
    seats, idle = worth
    assert (seats.value, seats.default, seats.kept) == ("64", "2", True)
    assert seats.objective_without > 2 * seats.objective
    assert (idle.value, idle.default, idle.kept) == ("0.5", "0.0", False)
    assert idle.objective_without == idle.objective == found.winner.trial.mean("mean_e2el_ms")


SLO = ("--slo", "p99_ttft_ms=500")
SMALL = ("--trials", "3", "--replications", "1", "--checks", "2", "--schedulers", "sarathi,vllm")
RANDOM = ("--set", "workload.requests=8", "--set", "workload.arrivals={kind: poisson, rate: 9}")
FILES = ("tune.json", "trials.csv", "checks.csv", "tuned.yaml", "tune.png", "tune.svg")


def test_the_winner_is_ready_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ("tune", "RUN.yaml", *SLO, *SMALL, *RANDOM)
    status, output, errors = evenflow(*arguments)
    assert (status, errors) == (0, "")
    folder = tmp_path / "out" / "RUN-tune"
    assert {path.name for path in folder.iterdir()} == {*FILES, "manifest.json", "store"}
    told = json.loads((folder / "tune.json").read_text())
    assert told["objective"] == "request_goodput"
    assert set(told["checks"]) == {"fresh seeds", "later parts"}
    assert f"best of {len((folder / 'trials.csv').read_text().splitlines()) - 1} tried" in output
    winner = yaml.safe_load((folder / "tuned.yaml").read_text())
    assert winner["workload"]["trace"] == "../../trace.csv"
    assert winner["workload"]["requests"] == 8
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert evenflow("simulate", str(folder / "tuned.yaml"), "--save", "summary")[0] == 0
    monkeypatch.chdir(tmp_path)
    before = [(folder / name).read_bytes() for name in FILES]
    assert evenflow(*arguments)[0] == 0
    assert [(folder / name).read_bytes() for name in FILES] == before
