"""Tuning: the space is right, the search finds what is planted, unseen data is unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenflow.config.build import load_workload
from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.errors import UsageError
from evenflow.results.bubbles import CAUSES
from evenflow.schedulers import POLICIES, create, parameters, policy
from evenflow.schedulers.sarathi import Sarathi
from evenflow.study.deployments import (
    AS_GIVEN,
    Candidate,
    layouts,
    pairs_of,
    parse_gpus,
    shifted,
)
from evenflow.study.points import Record
from evenflow.study.searches import Range
from evenflow.study.slo import parse_slo
from evenflow.study.trials import Part, Trial
from evenflow.study.tune import (
    FRESH,
    GLLM,
    LATER,
    TUNED,
    Tried,
    Tuned,
    Tuning,
    Wish,
    checked,
    prepare,
    run_search,
    sentences,
    simplified,
    space_of,
    survives,
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
    wish = {"trials": trials, "checks": 3, "schedulers": [PLANTED]}
    return tuning(run, objective="mean_e2el_ms", **wish)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    with simulator(tmp_path_factory.mktemp("store")) as who:
        return run_search(planted(24), who)


@pytest.mark.parametrize("name", POLICIES)
def test_the_ends_of_every_search_space_are_accepted(name: str) -> None:
    space = space_of(name)
    assert space
    assert set(space) <= set(parameters(policy(name)))
    for key, parameter in space.items():
        ends = [parameter.at(0), parameter.at(1)] if isinstance(parameter, Range) else parameter
        for value in ends:
            facts = {"prefill_s": lambda tokens: 0.0, "decode_s": lambda rows, context: 0.0}
            create(name, {key: value}, max_model_len=4096, **facts)


def test_the_search_finds_what_is_planted_and_refuses_to_cheat(
    found: Tuned, tmp_path: Path
) -> None:
    best = found.best.candidate.params
    assert best["max_num_seqs"] >= 10
    assert not best["refusing"]
    mean = "mean_e2el_ms"
    assert found.best.trial.mean(mean) < 0.5 * found.default.trial.mean(mean)
    cheats = [each for each in found.tried if each.candidate.params.get("refusing")]
    assert cheats
    assert all(each.trial.mean("failed") > 0 for each in cheats)
    with simulator(tmp_path, 2) as other:  # another executor, and a store that has nothing yet
        assert run_search(found.tuning, other) == found


def test_what_was_found_is_checked_on_unseen_data_and_explained(
    found: Tuned, tmp_path: Path
) -> None:
    with simulator(tmp_path) as who:
        tuned = checked(found, who)
    assert list(tuned.checks) == [FRESH, LATER]
    for check in tuned.checks.values():
        assert list(check) == [TUNED, "as given", GLLM]
        assert not set(check[TUNED].parts) & set(found.tuning.train)
        assert survives(check, "mean_e2el_ms", "as given")
    assert set(tuned.bubbles) == {TUNED, "as given"}
    assert tuned.bubbles[TUNED]["computing"] > 0
    assert tuned.points["name"].to_list()[:2] == ["as given", GLLM]
    assert tuned.points[f"{PLANTED}.max_num_seqs"].isna().sum() == 2  # the baselines
    assert len(tuned.table) == 3 * 3 * 2  # contenders, parts, checks
    said = "\n".join(sentences(tuned))
    assert "fresh seeds, against as given: the gain survives: mean_e2el_ms -" in said
    assert "share of the GPU time, against the run as it is: " in said


def trial(values: list[float], *metrics: str) -> Trial:
    return Trial({}, tuple(Record("", dict.fromkeys(metrics, value)) for value in values))


BASE = [10.0, 20.0, 30.0, 40.0]


@pytest.mark.parametrize(
    ("values", "metric", "better", "beyond"),
    [
        ([11.0, 21.1, 31.2, 41.0], "request_goodput", True, True),
        ([12.0, 19.0, 33.0, 39.0], "request_goodput", True, False),
        ([11.0, 21.1, 31.2, 41.0], "mean_ttft_ms", False, False),
    ],
)
def test_a_gain_survives_beyond_its_interval_only(
    values: list[float], metric: str, better: bool, beyond: bool
) -> None:
    check = {TUNED: trial(values, metric), "as given": trial(BASE, metric)}
    assert (check[TUNED].above(check["as given"], metric).mean > 0) == (better or not beyond)
    assert survives(check, metric, "as given") == beyond


def test_a_gain_that_does_not_survive_is_told_plainly(found: Tuned) -> None:
    told = ("mean_e2el_ms", "p99_tpot_ms")
    other = trial([1e6 * value for value in BASE], *told)
    tuned = trial([8e6, 21e6, 27e6, 41e6], *told)
    none = {"computing": 1.0, **dict.fromkeys(CAUSES, 0.0)}
    checks = {FRESH: {TUNED: tuned, "as given": other, GLLM: other}}
    bubbles = dict.fromkeys((TUNED, "as given"), none)
    said = "\n".join(sentences(replace(found, checks=checks, bubbles=bubbles)))
    assert "fresh seeds, against as given: THE GAIN DOES NOT SURVIVE: mean_e2el_ms -750,000" in said
    assert "the SLO is missed: p99_tpot_ms is 2.425e+07 on average" in said


def test_unseen_parts_begin_after_the_search(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", *(f"{i},{10 + i},3" for i in range(100)))

    def parts(checks: int = 4, **workload: Any) -> dict[str, tuple[Part, ...]]:
        run = {**RUN, "workload": {"trace": str(trace), "seed": 7, **workload}}
        return unseen_parts(tuning(run, trials=1, checks=checks))

    poisson = {"kind": "poisson", "rate": 1.0}
    assert parts(requests=30, skip=5, arrivals=poisson) == {
        FRESH: (Part(9, 5), Part(10, 5), Part(11, 5), Part(12, 5)),  # searched on 7 and 8
        LATER: (Part(9, 35), Part(10, 65), Part(11, 35), Part(12, 65)),
    }
    assert parts(requests=30, arrivals="replay") == {LATER: (Part(8, 30), Part(9, 60))}
    assert parts(requests=80, arrivals="replay") == {}
    assert parts(arrivals="replay") == {LATER: (Part(8, 50),)}
    sample = {"trace": "azure-conv-sample", "requests": 10, "seed": 0, "arrivals": "offline"}
    assert parts(2, **sample)[LATER] == (Part(2, 10), Part(3, 20))


def test_layouts_of_some_gpus_with_what_does_not_fit() -> None:
    document = Document("a.yaml", {**MODEL, "model": "Qwen2.5-32B"}, {})
    workload = load_workload(configured(document), Path())
    found = layouts(document, workload, Path(), pairs_of([8]))
    assert {each.parallel for each in found} == {"PP8", "PP4 x TP2", "PP2 x TP4", "TP8"}
    assert all(each.reason or sum(each.layers) == 64 for each in found)
    (one,) = layouts(document, workload, Path(), pairs_of([1]))
    assert one.label == "PP1, even"
    assert "does not fit" in one.reason
    own = layouts(document, workload, Path())
    assert own[0].label == "PP4, as given"
    divisions = {each.layers for each in own}
    assert len(divisions) == len(own) > 3
    assert {(17, 17, 16, 14), (15, 16, 16, 17)} <= divisions
    assert shifted((5, 5, 5, 5), 2) == (6, 6, 5, 3)
    assert shifted((5, 5, 5, 5), -4) == (3, 4, 4, 9)


def test_on_other_gpus_the_run_as_it_is_gets_the_first_layout_that_fits() -> None:
    assert tuning(MODEL, gpus=(2,)).default == "as given, on PP2, even"
    assert tuning(MODEL, gpus=(4,)).default == "as given"
    assert [each.label for each in tuning(POISSON).layouts] == ["as given, as given"]  # no model


def test_numbers_of_gpus_are_said_in_one_way() -> None:
    for text, numbers in (("4", (4,)), ("8, 4", (4, 8)), ("2..4,8", (2, 3, 4, 8))):
        assert parse_gpus(text) == numbers
    for wrong in ("", "0", "4..2", "many", "4...8", "-1", "1..9999999999", "9" * 5000):
        with pytest.raises(UsageError, match=r"should be a number of GPUs, several \(4,8\)"):
            parse_gpus(wrong)


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
        [trial] = asked.trials([candidate], asked.train, who)
        best = Tried("trial 0", candidate, trial)
        found = simplified(replace(run_search(asked, who), best=best), who)
    assert found.best.candidate.params == {"max_num_seqs": 64}
    seats, idle = found.worth  # the rest is the default
    assert seats[:3] == ("max_num_seqs", "64", "2")
    assert idle[:3] == ("idle", "0.5", "0.0")
    assert (seats.kept, idle.kept) == (True, False)
    assert seats.objective_without > 2 * seats.objective
    assert idle.objective_without == idle.objective == found.best.trial.mean("mean_e2el_ms")


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
