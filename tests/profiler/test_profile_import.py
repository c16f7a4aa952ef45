"""Importers: Vidur's CSVs and total lengths, made here in those layouts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evenflow.costs import RooflineCost, decode_work, prefill_work
from evenflow.costs.profile.cost import profile_cost
from evenflow.costs.profile.file import Profile, read_profile
from evenflow.errors import UsageError
from evenflow.profiler.importers import import_files
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu
from tests.command_line import complaint, evenflow, mistake
from tests.profiles import TINY

MLP = (
    *("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)
SHAPES = {"n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_expanded_embd": 128}


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def mlp_row(tokens: int, ranks: int = 1, **times: float) -> dict[str, object]:
    base = {name: 0.001 * (index + 1) for index, name in enumerate(MLP)} | times
    return {f"time_stats.{name}.median": time for name, time in base.items()} | {
        **SHAPES,
        "num_tokens": tokens,
        "num_tensor_parallel_workers": ranks,
    }


def attention_row(
    batch: int, chunk: int, context: int, time: float, **shapes: int
) -> dict[str, object]:
    return {
        "time_stats.attn_prefill.median": time if chunk else "",
        "time_stats.attn_decode.median": "" if chunk else time,
        "time_stats.attn_kv_cache_save.median": 0.002,
        "n_embd": 64,
        "n_q_head": 4,
        "n_kv_head": 2,
        "num_tensor_parallel_workers": 1,
        "batch_size": batch,
        "prefill_chunk_size": chunk,
        "kv_cache_size": context,
        "is_prefill": bool(chunk),
    } | shapes


def link_row(
    operator: str, workers: int, size: int, time: float, per_node: int
) -> dict[str, object]:
    sizes = {"num_workers": workers, "size": size, "devices_per_node": per_node}
    return {f"time_stats.{operator}.median": time, **sizes}


@pytest.fixture
def vidur(tmp_path: Path) -> list[Path]:
    prompts = [attention_row(1, c, k, 0.01 + 1e-6 * c * k) for c in (64, 128) for k in (0, 256)]
    prompts.append(attention_row(2, 512, 0, 9.0))  # several prompts at once: none of our points
    steps = [attention_row(b, 0, k, 0.01 + 1e-6 * b * k) for b in (1, 8) for k in (64, 512)]
    reduces = [link_row("all_reduce", n, s, n * s * 1e-6, n) for n in (2, 4) for s in (1024, 4096)]
    across = [link_row("all_reduce", 2, 1024, 9.0, 1)]
    sends = [link_row("send_recv", 2, size, 1e-6 * size, 2) for size in (1024, 4096)]
    return [
        write(tmp_path / "mlp.csv", [mlp_row(512), mlp_row(1), mlp_row(512, emb=0.003)]),
        write(tmp_path / "attention.csv", prompts + steps),
        write(tmp_path / "all_reduce.csv", reduces + across),
        write(tmp_path / "send_recv.csv", sends),
    ]


def imported(paths: list[Path]) -> Profile:
    return import_files(paths, TINY, "NVIDIA A40", "bfloat16").profile


def test_vidur_operators_become_ours_in_seconds(vidur: list[Path]) -> None:
    made = imported(vidur)
    seconds = {each.operator: each.median_s for each in made.points if each.tokens == 512}
    expected = {"linear_qkv": 3e-6, "linear_o": 5e-6, "linear_up": 7e-6, "linear_down": 9e-6}
    expected |= {"norm": (2 + 6) / 2 * 1e-6 + 10e-6, "embedding": 2e-6}  # twice: 1 and 3 us
    assert {name: seconds[name] for name in expected} == pytest.approx(expected)
    assert made.of("embedding")[1].repeats == 2
    step = {(each.tokens, each.context_tokens): each for each in made.of("attention_decode")}
    assert set(step) == {(1, 64), (1, 512), (8, 8 * 64), (8, 8 * 512)}
    assert step[8, 4096].median_s == pytest.approx(1e-5 + 1e-9 * 8 * 512)
    assert [each.tokens for each in made.of("attention_prefill")] == [64, 64, 128, 128]
    assert [each.tokens for each in made.of("kv_write")] == [1, 8, 64, 128]


def test_of_several_placements_the_one_in_a_node_counts(vidur: list[Path]) -> None:
    made = imported(vidur)
    reduces = {each.size_bytes: each.median_s for each in made.of("all_reduce", 2)}
    assert reduces == pytest.approx({1024: 2.048e-6, 4096: 8.192e-6})
    assert [each.size_bytes for each in made.of("transfer")] == [1024, 4096]


def test_an_imported_profile_predicts_with_the_rest_filled_in(vidur: list[Path]) -> None:
    made = imported(vidur)
    with pytest.raises(UsageError, match="lacks head, sample; measure them, or say"):
        profile_cost(made, TINY, (4,))
    whole = RooflineCost(Deployment(TINY, gpu("A40"), (4,)))
    cost = profile_cost(made, TINY, (4,), fill=whole)
    linears = (3 + 5 + 7 + 9 + 2 * 14 + 4 + 8 + 2) * 1e-6
    attention = 1e-5 + 1e-9 * 8 * 512
    expected = 4 * (linears + attention)
    assert cost.times(decode_work(8, 8 * 512))[0] == pytest.approx(expected, rel=0.05)
    assert cost.times(prefill_work(128, 256))[0] > cost.times(prefill_work(128))[0]


def test_the_command_writes_a_profile_and_says_what_is_not_in_it(
    vidur: list[Path], tmp_path: Path, shared: Path
) -> None:
    out = tmp_path / "p.csv.gz"
    lengths = shared / "profiles" / "tdpipe_L20-Llama-13B.csv"
    arguments = ["profile", "import", str(lengths), "--model", "Llama2-13B", "--device", "L20"]
    status, output, errors = evenflow(*arguments, "--out", str(out))
    assert status == 0, errors
    assert "not in it: attention_prefill, attention_decode, embedding" in output + errors
    assert len(read_profile(out).of("model_prefill")) == 2048
    line = complaint(*arguments, vidur[0], "--out", tmp_path / "both.csv")
    assert "mlp.csv: not for the layers of Llama2-13B; it has" in line
    before = vidur[0].read_bytes()
    assert "mlp.csv: is there already" in complaint(*arguments, "--out", vidur[0])
    assert vidur[0].read_bytes() == before


def test_times_of_zero_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.csv", [mlp_row(1, mlp_act=0.0), mlp_row(8), mlp_row(64)])
    found = import_files([path], TINY, "A40", "bfloat16")
    assert found.zeros == 1
    assert [each.tokens for each in found.profile.of("activation")] == [8, 64]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"a": 1}], "no layout that can be imported; it should have one of the columns"),
        ([mlp_row(8, emb=-1.0)], ', line 2: time_stats.emb.median is "-1.0"; it should be milli'),
        ([mlp_row(8, emb=float("nan"))], ', line 2: time_stats.emb.median is "nan"; it should'),
        ([mlp_row(8) | {"num_tokens": "x"}], ', line 2: num_tokens is "x"; it should be a whole'),
        ([mlp_row(8) | {"n_embd": 65}], "not for the layers of tiny; it has hidden_size 65, "),
        ([attention_row(1, 64, 0, 0.1, n_q_head=8)], "not for the layers of tiny; it has hidden"),
        ([{"Total Length": 1, "Execute Time": "fast"}], ', line 2: Execute Time is "fast"; it sho'),
        ([{"Total Length": 1, "Execute Time": 1e-6}], "times in another unit?"),
        (
            [{"Total Length": "inf", "Execute Time": 1}],
            ', line 2: Total Length is "inf"; it should',
        ),
        ([{"Total Length": 1, "Execute Time": "1" * 200_000}], "not a readable table (field"),
    ],
)
def test_mistakes_in_foreign_files(
    tmp_path: Path, rows: list[dict[str, object]], told: str
) -> None:
    path = write(tmp_path / "foreign.csv", rows)
    message = mistake(lambda: imported([path]))
    assert message.startswith(str(path))
    assert told in message


def test_a_truncated_foreign_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.csv", [mlp_row(8), mlp_row(16)])
    path.write_text(path.read_text("utf-8")[:-9], encoding="utf-8")
    with pytest.raises(UsageError, match=r"mlp.csv, line 3: not as many cells as columns"):
        imported([path])
    path.write_text("Total Length,Execute Time\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"mlp.csv: holds no rows"):
        imported([path])
