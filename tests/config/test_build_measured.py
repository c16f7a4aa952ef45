"""Costs from measured operators in a configuration: provenance, and every refusal."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import evenflow.runtime.torch.settings
from evenflow.cli.terminal import show
from evenflow.config.build import build, load_workload
from evenflow.config.run import RunConfig, load_config
from evenflow.costs import decode_work, prefill_work
from evenflow.costs.profile.file import TIME_COLUMNS, ProfilePoint, write_profile
from evenflow.profiler.outside import Service, host_points
from evenflow.results.metrics import summarize
from evenflow.runtime.kinds import notes_of, workers_of
from evenflow.runtimes import RuntimeOverheads
from evenflow.sim import World, simulate
from evenflow.study.fair import left_out
from evenflow.study.runs import Job, run_job
from tests.command_line import mistake
from tests.configs import CONFIGS, written
from tests.profiles import point, points, profile
from tests.virtual_run import serve_with_known_host


def measured_config(folder: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run in a folder where the tiny model lies, too."""
    written(folder, CONFIGS["llama"])
    path = folder / "RUN.yaml"
    path.write_text(
        "model: Llama-3.1-8B\nstages: 2\nscheduler: sarathi\n"
        "workload: {trace: azure-conv-sample, requests: 5, "
        "arrivals: {kind: poisson, rate: 2.0}}\nmax_model_len: 2048\nkv: {pages: 2000}\n",
        encoding="utf-8",
    )
    return load_config(path, overrides)


def test_a_run_on_a_profile_says_where_its_seconds_come_from(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.csv", profile(dtype="float16"))
    keys = ["model=config.json", "gpu=null", "costs={kind: profile, path: p.csv}"]
    config = measured_config(tmp_path, *keys, "kv.pages=500")
    assert "PP2, links as the profile has them, of no time where it has none" in config.setup()
    outcome = run_job(Job(config, load_workload(config, tmp_path), tmp_path))
    source = outcome.result.provenance["cost_source"]
    assert source["kind"] == "profile"
    assert (source["device"], source["driver"]) == ("NVIDIA L20", "550.1")
    assert source["libraries"] == "torch 2.4.0"
    assert source["filled_in"] == []
    assert len(source["sha256"]) == 64
    assert 0 <= source["extrapolated_share"] <= 1


@pytest.mark.parametrize(
    ("keys", "dtype", "notes"),
    [
        (["workers.dtype=bfloat16"], "bfloat16", []),
        ([], "float16", ["the model runs in float16, and p.csv was measured in bfloat16"]),
        (["model=Llama-3.1-8B", "costs={kind: affine, base_s: 1, per_token_s: 0}"], "bfloat16", []),
    ],
)
def test_workers_take_the_dtype_of_the_model_and_compare_it_with_the_profile(
    keys: list[str], dtype: str, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
    monkeypatch.setattr(evenflow.runtime.torch.settings, "free_bytes", lambda device: [])
    write_profile(tmp_path / "p.csv", profile())
    own = ["model=config.json", "costs={kind: profile, path: p.csv}", "gpu=null"]
    config = measured_config(tmp_path, *own, "workers={kind: torch, weights: random}", *keys)
    workers = workers_of(config, build(config, tmp_path), tmp_path)
    assert workers.settings[0].dtype == workers.facts["dtype"] == dtype
    assert notes_of({"workers": workers.facts}) == notes


def measured_hops() -> list[ProfilePoint]:
    """A byte takes a nanosecond, after 2 ms."""
    return [point("transfer", size_bytes=size, seconds=2e-3 + 1e-9 * size) for size in (128, 65536)]


def mean_e2el_ms(folder: Path, found: list[ProfilePoint], *keys: str) -> float:
    write_profile(folder / "p.csv", profile(found, dtype="float16"), over=True)
    own = ["model=config.json", "gpu=null", "costs={kind: profile, path: p.csv}"]
    config = measured_config(folder, *own, *keys)
    summary = run_job(Job(config, load_workload(config, folder), folder)).summary
    return float(summary["mean_e2el_ms"])


HOST = ("cpu_message", "cpu_schedule", "cpu_prepare", "cpu_sample", "cpu_detokenise")


def measured_host() -> list[ProfilePoint]:
    """A millisecond each and 10 us a row; of a prompt alone 9 ms, and 10 us a token."""
    lines = [(name, 1e-3) for name in HOST] + [("cpu_prompt", 9e-3)]
    return [
        point(name, size, seconds=base_s + 1e-5 * size) for name, base_s in lines for size in (1, 8)
    ]


OF_A_RUN = {each.operator for each in points() + measured_hops() + measured_host()}


@pytest.mark.parametrize("operator", sorted(OF_A_RUN))
def test_every_operator_of_a_profile_moves_the_result(operator: str, tmp_path: Path) -> None:
    found = points() + measured_hops() + measured_host()
    slower = [
        each._replace(**{name: 3 * getattr(each, name) for name in TIME_COLUMNS})
        if each.operator == operator
        else each
        for each in found
    ]
    assert mean_e2el_ms(tmp_path, slower) > 1.0001 * mean_e2el_ms(tmp_path, found)


def test_measured_transfers_are_the_hops_unless_there_is_a_link(tmp_path: Path) -> None:
    mean_e2el_ms(tmp_path, points() + measured_hops())
    own = ["model=config.json", "gpu=null", "costs={kind: profile, path: p.csv}"]
    for keys, latency_s in (([], 2e-3), (["link={bandwidth_gb_s: 1, latency_us: 5}"], 5e-6)):
        world = build(measured_config(tmp_path, *own, *keys), tmp_path).world
        assert world.link.latency_s == pytest.approx(latency_s)
        assert world.link.per_token_s == pytest.approx(64 * 2 * 1e-9)


def test_measured_cpu_time_is_the_hosts_unless_there_is_a_runtime(tmp_path: Path) -> None:
    with_host = points() + measured_host()
    keys = "runtime={schedule_s: 5.e-3, per_row_s: 5.e-5, per_new_request_s: 3.95e-3, "
    keys += "per_prompt_token_s: 1.e-5}"
    measured_ms = mean_e2el_ms(tmp_path, with_host)
    assert measured_ms == pytest.approx(mean_e2el_ms(tmp_path, points(), keys), rel=1e-9)
    ideal_ms = mean_e2el_ms(tmp_path, with_host, "runtime=ideal")
    assert measured_ms > 1.1 * ideal_ms
    assert ideal_ms == mean_e2el_ms(tmp_path, points())


def test_a_real_run_is_predicted_from_what_its_service_measured(tmp_path: Path) -> None:
    """The driver's clock is virtual, and what its host takes is known."""
    service = Service(2, serve_with_known_host, crosses=True)
    sizes = {"rows": [1, 4, 16], "prompts": [16, 64, 512], "token_bytes": 128, "repeats": 9}
    found = points() + host_points(service, **sizes)
    write_profile(tmp_path / "p.csv", profile(found, dtype="float16"))
    own = ["model=config.json", "gpu=null", "costs={kind: profile, path: p.csv}"]
    load = ["workload.requests=60", "workload.arrivals={kind: poisson, rate: 6}"]
    config = measured_config(tmp_path, *own, *load)
    world = build(config, tmp_path, load_workload(config, tmp_path)).world
    runs = serve_with_known_host(world)[0], simulate(world)
    served, predicted = map(summarize, runs)
    ideal = summarize(simulate(replace(world, overheads=RuntimeOverheads())))
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p99_tpot_ms"):
        assert predicted[name] == pytest.approx(served[name], rel=1e-6), name
    assert ideal["mean_tpot_ms"] < 0.85 * served["mean_tpot_ms"]


def test_a_run_far_off_the_grid_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = [each for each in points() if (each.tokens or 0) >= 8]
    write_profile(tmp_path / "p.csv", profile(wide, dtype="float16"))
    keys = ["model=config.json", "gpu=null", "costs={kind: profile, path: p.csv, fill: null}"]
    config = measured_config(tmp_path, *keys, "kv.pages=500")
    outcome = run_job(Job(config, load_workload(config, tmp_path), tmp_path))
    show(left_out(outcome.result.provenance))
    assert re.search(r"costs: \d\d % of the predicted time", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["gpu=null", "costs={kind: profile, path: none.csv}"], "none.csv: no such file"),
        (["gpu=null", "costs={kind: profile, path: p.csv, fill: roofline}"], "costs.fill needs"),
        (["gpu=A40", "costs={kind: profile, path: p.csv}"], "but the run's gpu is A40; profile"),
        (["gpu=L20", "costs={kind: silicon}"], 'costs: silicon has no measurements of "L20"'),
        (["gpu=null", "costs=silicon"], 'costs.kind: silicon needs the key "gpu"'),
        (["gpu=null", "costs={kind: profile}"], 'the key "costs.path" is missing'),
    ],
)
def test_measured_costs_that_cannot_be(tmp_path: Path, keys: list[str], told: str) -> None:
    write_profile(tmp_path / "p.csv", profile(dtype="float16"))
    keys = ["model=config.json", *keys, "kv.pages=500"]
    assert told in mistake(lambda: build(measured_config(tmp_path, *keys), tmp_path))


def test_silicon_costs_name_device_and_versions(tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    keys = ["model=Llama-3.1-8B", "gpu=H100", "costs={kind: silicon, framework: sglang}"]
    built = build(measured_config(tmp_path, *keys), tmp_path)
    source = built.cost_source
    assert source["kind"] == "silicon"
    assert source["framework"] == "sglang"
    assert source["device"].startswith("NVIDIA H100")
    assert source["package"].startswith("aiconfigurator-core 0.")


@pytest.mark.parametrize("groups", [1, 2])
def test_micro_batches_with_prompts_take_their_scale(tmp_path: Path, groups: int) -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")
    keys = ["model=Mixtral-8x7B", "gpu=H100", f"data_parallel={groups}"]

    def seconds(costs: str) -> list[list[float]]:
        world = build(measured_config(tmp_path, *keys, f"costs={costs}"), tmp_path).world
        assert isinstance(world, World)
        return [world.costs.times(work) for work in (prefill_work(300), decode_work(4, 4000))]

    (prompt, step), (slower, same) = map(
        seconds, ("{kind: silicon}", "{kind: silicon, prompt_scale: 1.5}")
    )
    assert slower == pytest.approx([1.5 * each for each in prompt])
    assert same == step
