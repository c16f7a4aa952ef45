"""Torch workers on a GPU: each mode in which several stages share it gives the CPU's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
pytest.importorskip("zmq", reason="needs pyzmq: pip install -e '.[runtime]'")

from tests.command_line import complaint, write_inputs  # noqa: E402
from tests.tiny_models import save_checkpoint  # noqa: E402
from tools.gpu_report import MODES, Scale, check_tokens  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("stages", [1, 2])
def test_tokens_of_every_mode_are_those_of_the_cpu(stages: int, tmp_path: Path) -> None:
    rows = check_tokens(tmp_path, Scale("cuda", stages=(stages,)))
    assert len(rows) == (len(MODES) if stages > 1 else 1)
    assert all(row["equal"] for row in rows)


def test_what_one_gpu_cannot_do_names_what_it_can(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    save_checkpoint(tmp_path / "model", "llama", num_hidden_layers=99)
    run = tmp_path / "RUN.yaml"
    run.write_text(run.read_text().replace("stages: 2", "stages: 99\nmodel: model"))
    workers = "workers={kind: torch, device: cuda, transport: nccl}"
    line = complaint("run", run, "--set", workers)
    assert "nccl needs a GPU for each of the 99 stages" in line
    assert "gloo or one_process is right" in line
