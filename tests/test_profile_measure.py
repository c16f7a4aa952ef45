"""`evenflow profile` and `profile check` on this CPU, with settings so small that it is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")

from evenflow.costs.profile.cost import HOST, profile_cost  # noqa: E402
from evenflow.costs.profile.file import OPERATORS, read_profile  # noqa: E402
from evenflow.errors import UsageError  # noqa: E402
from evenflow.specs.model import ModelSpec  # noqa: E402
from profiler import Settings, check_profile  # noqa: E402
from profiler.check import errors_table  # noqa: E402
from profiler.host import Service, detokenise_points  # noqa: E402
from profiler.timed_runs import MIN_ROUNDS  # noqa: E402
from runtime.torch import timed  # noqa: E402
from runtime.torch.timed import profile_model, timed_stage  # noqa: E402
from tests.command_line import complaint, evenflow  # noqa: E402
from tests.virtual_run import serve_with_known_host  # noqa: E402

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
NOT_MEASURED = {"device_copy", "layer", "model_prefill", "all_reduce"}
NOT_MEASURED |= {"cpu_detokenise", "cpu_sample"}


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
        profile_model(config, path, Settings(minutes=0.001, max_tokens=32, max_rows=4))
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

    settings = Settings(minutes=0.001, max_tokens=32, max_rows=4)
    out = tmp_path / "profile.csv"
    spare_processes(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(timed.TimedStage, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            profile_model(config, out, settings)
    assert not out.exists()
    kept = out.with_name("profile.csv.journal").read_text().count('"shot"')
    assert kept > 0
    told: list[float] = []
    profile_model(config, out, settings, lambda done, left_s: told.append(done))
    assert told[0] > 3 * (told[1] - told[0]), "it starts with what was kept, not with nothing"
    assert read_profile(out).points


def test_a_shard_is_measured_with_its_all_reduce(config: Path, tmp_path: Path) -> None:
    settings = Settings(minutes=0.001, tensor_parallel=2, max_tokens=16, max_rows=2)
    profile_model(config, tmp_path / "p.csv", settings)
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
    low_s, high_s = (sorted(point.median_s for point in points)[end] for end in (0, -1))
    assert 4 * low_s <= whole_s - alone_s <= 4 * high_s, "two layers, two all-reduces each"
    rows = check_profile(
        tmp_path / "p.csv", timed_stage, batches=4, repeats=2, layers=2, tensor_parallel=2
    )
    assert rows[-1].operator == "stage"


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
        (["--model", "{config}", "--out", "{folder}/no/p.csv"], "there is no folder"),
        (["--model", "{folder}/none.json", "--out", "{folder}/p.csv"], "none.json"),
        (["--model", "{config}", "--out", "{folder}"], "is a folder; the name of a file is right"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        profile_model(config, tmp_path / "p.csv", Settings("cuda"))


@pytest.mark.gpu
def test_cuda_is_measured_by_the_same_code(config: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    out = tmp_path / "p.csv"
    profile_model(config, out, Settings("cuda", minutes=0.05, max_tokens=32, max_rows=4))
    assert read_profile(out).header.tile_tokens in (1, 64, 128, 256)
    assert check_profile(out, timed_stage, batches=6, repeats=3, layers=2)[-1].operator == "stage"
