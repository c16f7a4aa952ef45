"""`evenflow profile` and `profile check` on this CPU, with settings so small that it is quick."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")

from evenflow.costs import decode_work  # noqa: E402
from evenflow.costs.profile.cost import HOST, profile_cost  # noqa: E402
from evenflow.costs.profile.file import OPERATORS, Profile, read_profile  # noqa: E402
from evenflow.errors import UsageError  # noqa: E402
from evenflow.profiler.check import check_profile, errors_table  # noqa: E402
from evenflow.profiler.outside import Service, detokenise_points  # noqa: E402
from evenflow.profiler.profile import ProfileSettings  # noqa: E402
from evenflow.profiler.timed_runs import MIN_ROUNDS  # noqa: E402
from evenflow.runtime import profiled as timed  # noqa: E402
from evenflow.runtime.profiled import profile_model, timed_stage  # noqa: E402
from evenflow.specs.modelspec import ModelSpec  # noqa: E402
from tests.command_line import (  # noqa: E402
    START_S,
    complaint,
    evenflow,
    gone,
    group,
    mistake,
)
from tests.configs import CONFIGS  # noqa: E402
from tests.virtual_run import serve_with_known_host  # noqa: E402

CONFIG = CONFIGS["profiled"]
QUICK = ProfileSettings(minutes=0.001, max_tokens=32, max_rows=4, beside=0)
QUICKER = replace(QUICK, max_tokens=16, layers=1)
NOT_MEASURED = {
    *("device_copy", "layer", "model_prefill", "all_reduce", "attention_decode_uneven"),
    *("cpu_detokenise", "cpu_sample", "router", "experts", "linear_q_up", "linear_kv_up"),
    *(name for name in OPERATORS if "_window" in name),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def profile_path(config: Path) -> Path:
    path = config.parent / "profile.csv"
    with pytest.MonkeyPatch.context() as patch:
        spare_processes(patch)
        profile_model(config, path, QUICK)
    return path


def spare_processes(patch: pytest.MonkeyPatch) -> None:
    """Let a host serve whose times are known, on a virtual clock, so that no processes do."""
    patch.setattr(timed, "service_of", lambda *_: Service(2, serve_with_known_host, True))


def test_a_profile_has_every_operator_and_where_it_is_from(profile_path: Path) -> None:
    profile = read_profile(profile_path)
    header = profile.header
    assert {point.operator for point in profile.points} == set(OPERATORS) - NOT_MEASURED
    assert (header.device_kind, header.dtype, header.threads) == ("cpu", "float32", 1)
    assert header.libraries.startswith("torch ")
    assert "through 2 layers" in header.grid
    assert "marks make a stage " in header.grid
    stage_points = [point for point in profile.points if point.operator == "attention_decode"]
    assert all(point.repeats >= MIN_ROUNDS - 1 for point in stage_points)
    assert not profile_path.with_name("profile.csv.journal").exists()


def test_a_profile_predicts_its_model(profile_path: Path, config: Path) -> None:
    spec = ModelSpec.from_config_json(config)
    cost = profile_cost(read_profile(profile_path), spec, [1, 1])
    assert all(0 < seconds < 1 for seconds in cost.times(timed.Shape(((16, 8),), (5, 9)).work()))


def test_check_compares_operators_and_the_stage(profile_path: Path) -> None:
    rows = check_profile(profile_path, timed_stage, batches=12, repeats=4, layers=2)
    assert [row.operator for row in rows][-1] == "stage"
    assert {row.operator for row in rows} >= {"linear_up", "attention_decode", "head"}
    assert all(row.batches <= 12 and 0 <= row.median <= row.p95 for row in rows)
    table = errors_table(rows)
    assert len(table.splitlines()) == len(rows) + 2


def test_a_mixture_is_measured_and_predicted(config: Path, tmp_path: Path) -> None:
    """Layers of experts, with norms of heads; its check runs layers of the same shapes."""
    mixture = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    own, out = tmp_path / "config.json", tmp_path / "p.csv"
    own.write_text(json.dumps(CONFIG | mixture | {"moe_intermediate_size": 48}))
    profile = unserved(own, out, QUICK)
    measured = {point.operator for point in profile.points}
    assert measured >= {"router", "experts"}
    assert not measured & {"linear_up", "linear_down", "activation"}
    seconds = {point.tokens: point.median_s for point in profile.of("experts")}
    assert seconds[32] > seconds[1], "32 tokens wake eight experts, one wakes two"
    share = re.search(r"routers chose (\d+)% of the experts", profile.header.grid)
    assert share
    assert 60 < int(share[1]) < 110
    rows = check_profile(out, timed_stage, batches=8, repeats=3, layers=2, beside=0)
    assert {row.operator for row in rows} == {*measured, "stage"}
    refused = mistake(lambda: profile_cost(profile, ModelSpec.from_config_json(config), [2]))
    assert "qk_norm True, not False; num_experts 8, not 0" in refused


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_latent_attention_is_measured_and_predicted(
    tmp_path: Path, q_lora_rank: int | None
) -> None:
    """DeepSeek-V2, whose positions are scaled in a way that is not served."""
    latents = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    latents |= {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    latents |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": q_lora_rank}
    yarn = {"model_type": "deepseek_v2", "rope_scaling": {"rope_type": "yarn", "factor": 40}}
    own, out = tmp_path / "config.json", tmp_path / "p.csv"
    own.write_text(json.dumps(CONFIG | latents | yarn))
    profile = profile_model(own, out, QUICKER)
    measured = {point.operator for point in profile.points}
    assert measured >= {"linear_qkv", "linear_kv_up", "linear_o", "linear_up", "experts"}
    assert ("linear_q_up" in measured) == (q_lora_rank is not None)
    assert "through 2 layers" in profile.header.grid
    assert "nothing served" in profile.header.grid
    rows = check_profile(out, timed_stage, batches=4, repeats=2, layers=1, beside=0)
    assert {row.operator for row in rows} == {*measured, "stage"}


def test_windows_are_measured_beside_layers_that_see_all(tmp_path: Path) -> None:
    """One layer measured is asked for: two are, one of each kind."""
    own, out = tmp_path / "config.json", tmp_path / "p.csv"
    types = ["sliding_attention", "full_attention"]
    windows = {"model_type": "mistral", "sliding_window": 16, "layer_types": types}
    own.write_text(json.dumps(CONFIG | windows))
    profile = unserved(own, out, QUICKER)
    assert "through 2 layers" in profile.header.grid
    for name in ("attention_prefill", "attention_decode"):
        names = name, f"{name}_window"
        sizes = [[point.key[2:] for point in profile.of(each)] for each in names]
        assert sizes[0] == sizes[1] != [], "the same micro-batches ran through both"
    cost = profile_cost(profile, ModelSpec.from_config_json(own), [1, 1])
    near, far = (cost.times(decode_work(4, 4 * context)) for context in (20, 5000))
    assert far[0] == near[0]
    assert 0 < cost.extrapolated_share < 1, "of the layer that sees all"
    rows = check_profile(out, timed_stage, batches=8, repeats=3, layers=1, beside=0)
    assert {row.operator for row in rows} >= {"attention_decode", "attention_decode_window"}


def test_products_of_8_bit_floats_are_measured_where_torch_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = tmp_path / "config.json", tmp_path / "p.csv"
    fp8 = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"}
    own.write_text(json.dumps(CONFIG | fp8))
    values, matrix = torch.randn(5, 64), torch.randn(48, 64)
    try:
        narrow = timed.Linear(matrix).in_8_bits()(values)
        header = unserved(own, out, replace(QUICKER, layers=4)).header
        assert (header.dtype, header.shapes.quantization) == ("bfloat16", "fp8")
        assert profile_cost(read_profile(out), ModelSpec.from_config_json(own), [2]).depth == 1
        assert check_profile(out, timed_stage, batches=2, repeats=1, layers=2, beside=0)
        wide = values @ matrix.T
        assert 0.01 < (narrow - wide).norm() / wide.norm() < 0.06, "three bits of mantissa"
        own.write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
        told = mistake(
            lambda: profile_cost(read_profile(out), ModelSpec.from_config_json(own), [2])
        )
        assert "measured in fp8, and the model is in its own dtype" in told
        own.write_text(json.dumps(CONFIG | fp8))
    except NotImplementedError:
        pass

    def lacking(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_scaled_mm", lacking)
    refused = mistake(lambda: profile_model(own, tmp_path / "no.csv", ProfileSettings()))
    assert "weights in fp8 need torch._scaled_mm of 64 x 128 on the cpu" in refused


def unserved(model: Path, out: Path, settings: ProfileSettings) -> Profile:
    """Measure a profile without a pipeline that serves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "service_of", lambda *_: None)
        return profile_model(model, out, settings)


def test_an_interrupted_profile_goes_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = timed.TimedStage.prepare
    calls = 0

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise KeyboardInterrupt
        return prepare(self, *arguments)

    out = tmp_path / "profile.csv"
    spare_processes(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(timed.TimedStage, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            profile_model(config, out, QUICK)
    assert not out.exists()
    kept = out.with_name("profile.csv.journal").read_text().count('"shot"')
    assert kept > 0
    told: list[float] = []
    profile_model(config, out, QUICK, lambda done, left_s: told.append(done))
    assert told[0] > 3 * (told[1] - told[0]), "it starts with what was kept, not with nothing"
    assert read_profile(out).points


@pytest.mark.long
def test_a_shard_is_measured_with_its_all_reduce(config: Path, tmp_path: Path) -> None:
    profile_model(config, tmp_path / "p.csv", replace(QUICKER, tensor_parallel=2, max_rows=2))
    profile = read_profile(tmp_path / "p.csv")
    spec = ModelSpec.from_config_json(config)
    sizes = [16 * 64 * 4, 64 * 4]
    assert {point.size_bytes for point in profile.of("all_reduce", 2)} >= set(sizes)
    assert {point.size_bytes for point in profile.of("transfer")} >= set(sizes)
    assert all(1e-5 < point.median_s < 1 for point in profile.points if point.operator in HOST)
    assert not profile.of("linear_up", 1)
    work = timed.Shape(((8, 0),)).work()
    whole_s = profile_cost(profile, spec, [2], 2).times(work)[0]
    alone_s = profile_cost(profile, spec, [2], 2, with_all_reduces=False).times(work)[0]
    points = profile.of("all_reduce", 2)
    low_s, high_s = (sorted(point.mean_s for point in points)[end] for end in (0, -1))
    assert 3.999 * low_s <= whole_s - alone_s <= 4.001 * high_s, "two layers, two all-reduces each"
    rows = check_profile(
        tmp_path / "p.csv", timed_stage, batches=4, repeats=2, layers=2, tensor_parallel=2
    )
    assert rows[-1].operator == "stage"


@pytest.mark.long
def test_the_command_measures_and_checks(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_processes(monkeypatch)
    out = str(tmp_path / "p.csv")
    limits = ["--max-tokens", "32", "--max-rows", "4"]
    options = ["--model", str(config), "--minutes", "0.001", *limits]
    status, printed, complaints = evenflow("profile", *options, "--out", out)
    assert (status, complaints) == (0, "")  # no progress where nobody watches
    assert printed.splitlines()[-1] == out
    status, printed, complaints = evenflow(
        "profile", "check", out, "--batches", "4", "--repeats", "2"
    )
    assert (status, complaints) == (0, "")
    assert printed.splitlines()[-1].startswith("stage ")
    assert "over 4 random micro-batches" in read_profile(out).header.checked


def test_detokenising_is_measured_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    points = detokenise_points(tmp_path / "tokenizer.json", [1, 8], 3)
    assert [(point.operator, point.tokens) for point in points] == [
        ("cpu_detokenise", 1),
        ("cpu_detokenise", 8),
    ]
    assert all(point.median_s > 0 for point in points)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"not a tokenizer\.json"):
        detokenise_points(tmp_path / "tokenizer.json", [1], 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --model PATH"),
        (["--model", "{config}", "--out", "{folder}/no/p.csv"], "cannot be written: No such"),
        (["--model", "{folder}/none.json", "--out", "{folder}/p.csv"], "none.json"),
        (["--model", "{config}", "--out", "{folder}"], "is there already; name another"),
        (["--model", "{config}", "--out", "{folder}/p.csv", "--device", "tpu"], "tpu"),
        (["--model", "{config}", "--out", "{folder}/p.csv", "--tensor-parallel", "3"], "3 ranks"),
        (["--model", "{config}", "--out", "{folder}/p.csv", "--threads", "999"], "--threads 999"),
        (["--model", "{config}", "--out", "{folder}/p.csv", "--minutes", "-1"], "minutes"),
        (["check", "{folder}/none.csv"], "no such file"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, config: Path, tmp_path: Path
) -> None:
    given = [text.format(config=config, folder=tmp_path) for text in arguments]
    assert words in complaint("profile", *given)
    assert not (tmp_path / "p.csv").exists()


def test_a_profile_of_another_machine_is_not_checked(profile_path: Path, tmp_path: Path) -> None:
    lines = profile_path.read_text().splitlines(keepends=True)
    lines[1] = "# device: Some other CPU\n"
    (tmp_path / "p.csv").write_text("".join(lines))
    with pytest.raises(UsageError, match='measured on "Some other CPU"'):
        check_profile(tmp_path / "p.csv", timed_stage)


def test_shapes_that_are_no_model_name_the_file(profile_path: Path, tmp_path: Path) -> None:
    text, path = profile_path.read_text(), tmp_path / "p.csv"
    path.write_text(text.replace("# points:", "# num_experts: 4\n# points:"))
    told = mistake(lambda: check_profile(path, timed_stage))
    assert told.startswith(f"{path}: experts_per_token is 0;")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        profile_model(config, tmp_path / "p.csv", ProfileSettings("cuda"))


@pytest.mark.gpu
def test_cuda_is_measured_by_the_same_code(config: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    out = tmp_path / "p.csv"
    profile_model(config, out, ProfileSettings("cuda", minutes=0.05, max_tokens=32, max_rows=4))
    assert read_profile(out).header.tile_tokens in (1, 64, 128, 256)
    assert check_profile(out, timed_stage, batches=6, repeats=3, layers=2)[-1].operator == "stage"


@pytest.mark.long
def test_ranks_that_measure_outlive_no_parent() -> None:
    minutes = (
        "from evenflow.profiler.outside import *; all_reduce_points('cpu', 2, [1 << 20], 10**5)"
    )
    here = {"cwd": ROOT, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", minutes], **here) as measuring:
        try:
            limit_s = time.monotonic() + START_S
            while len(group(measuring)) < 4:  # with the tracker of resources
                assert time.monotonic() < limit_s, "the ranks do not start"
                time.sleep(0.05)
        finally:
            measuring.kill()
    assert gone(measuring)
