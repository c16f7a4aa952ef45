"""The capacity of small deployments, against closed forms; its files; every kind of bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.build import load_workload
from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.yaml_file import Document
from evenflow.errors import UsageError
from evenflow.study.capacity import (
    Capacity,
    CapacityQuestion,
    capacity_of,
    facts,
    knee_rows,
    sentences,
)
from evenflow.study.deployments import on_gpus
from evenflow.study.points import Record
from evenflow.study.rates import RateFound, TriedRate, own_rate, rate_patch
from evenflow.study.slo import num_gpus, parse_slo
from evenflow.study.trials import Trial
from tests.command_line import done, refusal, rows_of, write_trace
from tests.study.test_points import RUN
from tests.sweeps import simulator

QUEUE = {
    **RUN,
    "stages": 1,
    "costs": {"kind": "affine", "base_s": 0.1, "per_token_s": 0.0},
    "scheduler": {"name": "sarathi", "max_num_seqs": 1},
    "workload": {"trace": "ones.csv", "arrivals": {"kind": "poisson", "rate": 3.0}},
}
"""One server, 0.1 s a request: each is one prompt token and one output token (M/D/1)."""


def queue(folder: Path, *overrides: str, requests: int) -> RunConfig:
    write_trace(folder / "ones.csv", *["0,1,1"] * requests)
    return configured(Document("a.yaml", QUEUE, {}), overrides)


def capacity(folder: Path, config: RunConfig, *slo: str, **more: Any) -> Capacity:
    question = CapacityQuestion(config, tuple(parse_slo(slo)), folder, **more)
    with simulator(folder / "points") as who:
        return capacity_of(question, who, curve=(0.5, 2.0))


@pytest.mark.long
def test_the_mean_wait_of_a_queue_gives_its_capacity(tmp_path: Path) -> None:
    # M/D/1: mean wait = u s / (2 (1 - u)); a mean of s is reached at a utilisation u of 2/3.
    config = queue(tmp_path, "workload.requests=1500", requests=6000)
    found = capacity(tmp_path, config, "mean_queue_ms=100", replications=4, tolerance=0.04)
    assert found.status == "found"
    assert found.rate.n == 4
    assert found.rate.half_width < 0.1 * 20 / 3
    assert abs(found.rate.mean - 20 / 3) < found.rate.half_width + 0.04 * 20 / 3
    for below, above in found.at_knee():
        assert not below.failed
        assert above.failed == ("mean_queue_ms",)
        assert above.rate <= 1.04 * below.rate
    attained = {each.rate: each.values["attainment"] for each in found.measured}
    assert attained[found.curve[0]] > attained[found.curve[1]]
    assert facts(found)["limited_by"] == {"mean_queue_ms": 4}
    assert "95 %" in sentences(found)[0]
    assert len(found.points) == len(found.measured)
    assert set(found.points["misses"]) == {"", "mean_queue_ms"}


def test_margins_end_where_the_capacity_does_and_what_says_otherwise_is_noise() -> None:
    """Searched: 4 requests/s kept, 4.2 missed. The curve misses 3 and keeps 4.1 and 5."""
    rates = {3.0: False, 4.0: True, 4.1: True, 4.2: False, 5.0: True}
    labels, beside = {"replication": 0}, {"completed": 9, "mean_e2el_ms": 100.0}
    runs = []
    for rate, kept in rates.items():
        values = {**beside, "mean_queue_ms": 90.0 if kept else 110.0}
        failed = () if kept else ("mean_queue_ms",)
        runs.append(TriedRate(rate, failed, 1.0, 9, Trial(labels, (Record("", values),))))
    config = configured(Document("a.yaml", {**QUEUE, "kv": {"pages": 9}}, {}))
    question = CapacityQuestion(config, tuple(parse_slo(["mean_queue_ms=100"])))
    found = Capacity(question, (RateFound("found", 4.0, 4.2, (), 9),), tuple(runs))
    assert [each.rate for each in found.contradictions] == [3.0, 5.0]
    (margin,) = found.decision.margins
    assert (margin.kept_up_to, margin.missed_from, margin.missed_value) == (4.1, 4.2, 110.0)


def test_all_rates_see_the_same_requests_and_the_same_draws(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.csv", "0,5,5", "1,6,7", "5,8,9", "7,3,3")
    kinds = (
        ("azure-conv-sample", "{kind: poisson, rate: 2}"),
        ("azure-conv-sample", "{kind: gamma, rate: 2, burstiness: 0.3}"),
        ("trace.csv", "{kind: replay, scale: 2}"),
    )
    for trace, arrivals in kinds:
        keys = (f"workload.trace={trace}", "workload.requests=4", f"workload.arrivals={arrivals}")
        config = configured(Document("a.yaml", RUN, {}), keys)
        plain = load_workload(config, tmp_path).requests
        start = own_rate(config.workload.arrivals, plain)
        for rate in (start, 3 * start):
            patch = rate_patch(config.workload.arrivals, rate, start)
            requests = load_workload(with_(config, patch), tmp_path).requests
            for one, other in zip(requests, plain, strict=True):
                assert one.arrival_s * rate / start == pytest.approx(other.arrival_s)
                assert one.prompt_tokens == other.prompt_tokens
                assert one.output_tokens == other.output_tokens


def command(folder: Path, requests: int, *arguments: str, **keys: Any) -> tuple[str, Any]:
    """Return what the command prints of a queue, and what it writes as capacity.json."""
    queue(folder, requests=requests)
    (folder / "RUN.yaml").write_text(json.dumps(QUEUE | keys))
    output = done("capacity", str(folder / "RUN.yaml"), *arguments, "--out", str(folder / "out"))
    return output, json.loads((folder / "out" / "capacity.json").read_text())


@pytest.mark.long
def test_the_command_ends_where_the_queue_grows_though_no_limit_is_touched(tmp_path: Path) -> None:
    """Ten a second are served; an overload is told from a tenth more on."""
    output, told = command(tmp_path, 1000, "--slo", "preemptions=1")
    assert 10 < told["capacity_requests_per_s"] < 11.2
    assert told["limited_by"] == {"overloaded": 1}
    assert "what fails first above it: overloaded" in output


def test_a_short_run_is_told(tmp_path: Path) -> None:
    found = capacity(tmp_path, queue(tmp_path, requests=40), "p99_ttft_ms=1500")
    assert found.status == "found"
    assert any("run length matters" in line for line in sentences(found))


def test_the_price_of_a_capacity(tmp_path: Path) -> None:
    keys = ("gpu=L20", "stages=4", "tensor_parallel=2", "replicas={count: 3}")
    config = configured(Document("a.yaml", RUN, {}), keys)
    assert num_gpus(config) == 4 * 2 * 3
    keys = ("gpu=L20", "stages=4", "scheduler={name: distserve, prefill: {gpu: H100, stages: 1}}")
    assert num_gpus(configured(Document("a.yaml", RUN, {}), keys)) == 4
    config = queue(tmp_path, requests=300)
    found = capacity(tmp_path, config, "mean_queue_ms=100", per_hour=6.0)
    cost = facts(found)["per_dollar"]
    assert cost["requests_per_dollar"] == pytest.approx(600 * found.rate.mean)
    assert cost["dollars_per_million_tokens"] == pytest.approx(
        6.0 / (3600 * found.rate.mean * 2 / 1e6)
    )


def test_the_command_writes_its_answer(tmp_path: Path) -> None:
    arguments = ["--slo", "mean_queue_ms=100", "--set", "gpu=L20", "--tolerance", "0.2"]
    arguments += ["--price", "0.5"]
    output, told = command(tmp_path, 120, *arguments)
    out = tmp_path / "out"
    assert "capacity: " in output
    files = ("capacity.json", "capacity.png", "capacity.svg", "rates.csv", "report.html")
    assert {path.name for path in out.iterdir()} == {*files, "manifest.json", "store"}
    assert told["status"] == "found"
    assert told["per_dollar"]["dollars_per_hour"] == 0.5
    rows = rows_of(out / "rates.csv")
    [capacity_rate] = told["rates"]
    missed = {float(row["rate"]): row["misses"] for row in rows}
    assert missed[capacity_rate] == ""
    assert missed[told["fails_at"][0]] == "mean_queue_ms"
    assert {row["failed"] for row in rows} == {"0"}
    before = [(out / name).read_bytes() for name in files]
    stored = sorted((out / "store").rglob("*"))
    command(tmp_path, 120, *arguments)
    assert sorted((out / "store").rglob("*")) == stored
    assert [(out / name).read_bytes() for name in files] == before


def test_a_limit_below_the_service_time_is_never_kept(tmp_path: Path) -> None:
    output, told = command(tmp_path, 60, "--slo", "mean_ttft_ms=90")
    assert output.splitlines()[0].startswith("no rate keeps the SLO: at ")
    assert (told["status"], told["capacity_requests_per_s"]) == ("never", None)
    assert (tmp_path / "out" / "capacity.png").stat().st_size > 0


@pytest.mark.usefixtures("folder")
def test_too_few_requests_are_a_mistake_too() -> None:
    """Answers of 500 tokens, each begun at once: all 30 are there before one is done."""
    write_trace(Path("long.csv"), *["0,1,500"] * 30)
    Path("RUN.yaml").write_text(json.dumps(QUEUE | {"scheduler": "sarathi"}))
    words = ("capacity", "RUN.yaml", "--slo", "p99_itl_ms=900", "--out", "out")
    words += ("--set", "workload.trace=long.csv")
    line = refusal(*words, leaves=["out/store"])
    assert "too few to find a capacity" in line
    assert line.endswith(", or also limit the queue (--max-median-queue-s 2)")
    line = refusal(*words, "--max-median-queue-s", "99", leaves=["out/store"])
    assert "all requests arrive before one is served; give more, like" in line
    assert "also limit the queue" not in line


def test_rates_of_requests(tmp_path: Path) -> None:
    config = queue(tmp_path, requests=10)
    requests = load_workload(config, tmp_path).requests
    assert own_rate(config.workload.arrivals, requests) == 3.0
    with pytest.raises(UsageError, match="arrive at once"):
        own_rate(
            configured(Document("a", QUEUE, {}), ["workload.arrivals=replay"]).workload.arrivals,
            [replace(request, arrival_s=0.0) for request in requests],
        )


def test_of_what_is_refused_a_capacity_counts_the_offer_and_charges_what_is_served(
    tmp_path: Path,
) -> None:
    """One in ten of the queue's requests is longer than the model takes."""
    config = queue(tmp_path, "max_model_len=8", requests=300)
    served = capacity(tmp_path, config, "mean_queue_ms=100", per_hour=6.0)
    rows = (f"0,{9 if index % 10 == 0 else 1},1" for index in range(300))
    write_trace(tmp_path / "ones.csv", *rows)
    found = capacity(tmp_path, config, "mean_queue_ms=100", per_hour=6.0)
    assert served.rate.mean < found.rate.mean < 1.3 * served.rate.mean
    first, said, *_ = sentences(found)
    assert first == (
        "NOT FAIR: 30 of 300 requests (10.0%) were refused or given up; the first: 10 tokens "
        "exceed max_model_len 8"
    )
    assert f"{0.9 * found.rate.mean:.4g} of them served" in said
    told = facts(found)
    assert (told["requests_asked"], told["completed"], told["failed"]) == (300, 270, 30)
    assert "failed" not in facts(served)
    cost = told["per_dollar"]["requests_per_dollar"]
    assert cost == pytest.approx(0.9 * 600 * found.rate.mean)
    assert knee_rows(found)[-1][:3] == ("completed", "300 asked", "270")
    offered = {each.rate: each.values["offered_requests_per_s"] for each in found.measured}
    assert offered[found.rate.mean] == pytest.approx(found.rate.mean, rel=0.1)


def test_a_limit_on_what_no_request_has_is_kept_by_none(tmp_path: Path) -> None:
    found = capacity(tmp_path, queue(tmp_path, requests=60), "p99_tpot_ms=1")
    assert sentences(found)[0].endswith("there is no p99_tpot_ms: no completed request has one")
    assert facts(found)["at_lowest_rate"] == {"p99_tpot_ms": None}


def test_gpus_are_replicas_of_the_run_s_own_pipeline() -> None:
    config = configured(Document("a.yaml", {**RUN, "stages": 2}, {}))
    four = on_gpus(config, (4,)).replicas
    assert four is not None
    assert (four.count, four.router) == (2, "least_outstanding")
    for wrong in ((3,), (4, 8)):
        with pytest.raises(UsageError, match="one number is right, a multiple of the 2 GPUs"):
            on_gpus(config, wrong)
