"""The fit on Vidur's linear operators: it finds the efficiencies a file was made with, and the
bundled ones of A40 are near rows of the published file."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from evenflow.costs.formulas import Rates, linear_s
from evenflow.errors import UsageError
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model
from tools.calibrate_vidur import Layers, errors, fit, main, read_layers
from tools.efficiencies import Efficiencies, bundled

LLAMA, A40 = model("Llama2-70B"), gpu("A40")
THEIRS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
OTHERS = (
    *("emb", "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act"),
    "add",
)

PUBLISHED_MS = {
    (4096, 1): (5.9755, 4.696, 35.424, 16.8845),
    (3840, 1): (5.686, 4.453, 29.3645, 15.7035),
    (3584, 1): (5.595, 4.2685, 27.6685, 14.4765),
    (32, 1): (0.33, 0.263, 1.741, 0.894),
    (16, 1): (0.315, 0.2865, 1.7005, 0.869),
    (8, 1): (0.311, 0.281, 1.687, 0.843),
    (4, 1): (0.309, 0.278, 1.679, 0.84),
    (1, 1): (0.307, 0.246, 1.833, 0.814),
    (4096, 2): (3.068, 2.5735, 17.341, 8.2325),
    (3840, 2): (2.9235, 2.253, 14.511, 7.5605),
    (16, 4): (0.09, 0.067, 0.4885, 0.2475),
    (8, 4): (0.087, 0.066, 0.4785, 0.241),
    (4, 4): (0.087, 0.066, 0.473, 0.238),
    (1, 4): (0.083, 0.06, 0.428, 0.207),
    (4096, 8): (0.708, 0.68, 3.9945, 2.1565),
    (3840, 8): (0.696, 0.612, 3.4965, 1.873),
}
"""Medians of 16 rows of the file that the module names, by (tokens, ranks), in its order."""


def write_file(path: Path, times_ms: dict[tuple[int, int], tuple[float, ...]]) -> Path:
    shapes = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672}
    with path.open("w", newline="") as file:
        names = [f"time_stats.{name}.median" for name in (*THEIRS, *OTHERS)]
        writer = csv.writer(file)
        writer.writerow([*names, *shapes, "num_tokens", "num_tensor_parallel_workers"])
        for (tokens, ranks), times in times_ms.items():
            writer.writerow([*times, *(0.01 for _ in OTHERS), *shapes.values(), tokens, ranks])
    return path


def test_the_fit_finds_what_a_file_was_made_with(tmp_path: Path) -> None:
    made = Efficiencies(0.7, 0.8, 5e-5)
    rates = Rates(A40.fp16_tflops * 1e12 * made.compute, A40.memory_bandwidth_gb_s * 1e9 * 0.8)
    times = {
        (tokens, ranks): tuple(
            1e3 * (linear_s(tokens, shape, 2, 128, rates) + made.per_layer_overhead_s / 4)
            for shape in LLAMA.linear_shapes(ranks)
        )
        for tokens in (1, 16, 64, 128, 256, 512, 2048)
        for ranks in (1, 4)
    }
    layers = read_layers(write_file(tmp_path / "mlp.csv", times), LLAMA)
    assert len(layers.sizes) == 14
    assert fit(layers, A40) == pytest.approx(made, rel=1e-3)
    assert errors(layers, A40, made).mean < 1e-9


def test_the_bundled_efficiencies_are_near_published_rows() -> None:
    """5.1 % on average, where docs/costs.md has 4.1 % on the whole file."""
    seconds = np.array([sum(times) / 1e3 for times in PUBLISHED_MS.values()])
    layers = Layers(LLAMA, list(PUBLISHED_MS), seconds)
    assert errors(layers, A40, bundled(A40)).mean == pytest.approx(0.051, abs=0.001)


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write_file(tmp_path / "mlp.csv", PUBLISHED_MS))])
    printed = capsys.readouterr().out
    assert "16 sizes" in printed
    assert "| bundled | 0.736 | 0.764 | 28.0 us | 5.1% |" in printed


def test_a_file_without_the_operators_is_one_line(tmp_path: Path) -> None:
    zeros = {(1, 1): (0.0, 1.0, 1.0, 1.0)}
    with pytest.raises(UsageError, match="no number of tokens has all of linear_qkv"):
        read_layers(write_file(tmp_path / "mlp.csv", zeros), LLAMA)
