"""What only a GPU shows, acted on a CPU: lanes behind their launches, pairs that meet late."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
pytest.importorskip("zmq", reason="needs pyzmq: pip install -e '.[runtime]'")

from evenflow.errors import UsageError  # noqa: E402
from evenflow.experiments.validation import validate  # noqa: E402
from evenflow.profiler import outside  # noqa: E402
from evenflow.runtime.kinds import notes_of, workers_of  # noqa: E402
from evenflow.runtime.real import job_of  # noqa: E402
from evenflow.runtime.serve import Workers  # noqa: E402
from evenflow.runtime.torch import carriers, settings  # noqa: E402
from evenflow.runtime.torch.carriers import SentPages  # noqa: E402
from evenflow.runtime.torch.inputs import _groups, _Seen, batch_inputs  # noqa: E402
from evenflow.runtime.torch.model import (  # noqa: E402
    Rope,
    drawn_by,
    sample,
)
from evenflow.runtime.torch.weights import random_stage  # noqa: E402
from evenflow.runtime.torch.worker import TorchWorker, warm_up  # noqa: E402
from evenflow.runtime.wire import Activation, Draw, Piece  # noqa: E402
from evenflow.runtime.worker import Place  # noqa: E402
from evenflow.specs.model import model  # noqa: E402
from evenflow.study.runs import Job  # noqa: E402
from tests.tiny_models import Operations  # noqa: E402

SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SMALL |= {"intermediate_size": 48, "vocab_size": 97, "dtype_bytes": 4}


class LaggingLane:
    """Computes nothing of what is launched before the end of the `with` block."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], Any]] = []
        self.is_open = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_open = True
        yield
        for compute in self.launched:
            compute()
        self.launched.clear()
        self.is_open = False


class Hop:
    """Hands out its memory; once nobody holds that, the stage before writes NaN there."""

    def __init__(self, lane: LaggingLane) -> None:
        self.memory = torch.ones(4)
        self.lane = lane
        self.given_in_lane = False

    def expect(self, num_tokens: int) -> None: ...

    def fetch(self, key: str) -> None: ...

    def take(self) -> Any:
        handed = self.memory[:]
        weakref.finalize(handed, self.memory.fill_, float("nan"))
        return handed

    def give(self, hidden: Any) -> str:
        self.given_in_lane = self.lane.is_open
        self.gave = hidden.clone()
        return ""


class Doubling:
    """A stage whose one kernel reads its input when the lane comes to it."""

    device, is_first, is_last = torch.device("cpu"), False, False

    def __init__(self, lane: LaggingLane, memory: Any) -> None:
        self.lane, self.memory = lane, memory

    def forward(self, inputs: Any, batch: Any, kv: Any) -> Any:
        assert inputs.data_ptr() == self.memory.data_ptr()
        out = torch.empty(4)
        self.lane.launched.append(lambda: torch.mul(self.memory, 2, out=out))
        return out


def test_what_a_stage_was_given_is_held_until_its_lane_is_done() -> None:
    lane = LaggingLane()
    hop = Hop(lane)
    place = Place(1, 3, 16, 4, "")
    worker = TorchWorker(place, Doubling(lane, hop.memory), None, hop)
    worker._computing = lane
    batch = batch_inputs([Piece(0, 0, 4, True, [0])], 16, torch.device("cpu"))
    worker.execute(batch, Activation(0, [], 16), 0.0)
    assert hop.gave.tolist() == [2.0] * 4  # not NaN
    assert hop.memory.isnan().all()  # held no longer than that
    assert hop.given_in_lane


class Meetings:
    """Stands for torch.distributed with NCCL: the first message of a pair waits for both sides."""

    def __init__(self, depth: int) -> None:
        self.sides = {stage: threading.Barrier(2, timeout=5) for stage in range(1, depth)}
        self.met: dict[tuple[int, str], str] = {}

    def _meet(self, stage: int, side: str) -> Meetings:
        if (stage, side) not in self.met:
            self.met[stage, side] = threading.current_thread().name
            self.sides[stage].wait()
        return self

    def irecv(self, number: Any, src: int) -> Meetings:
        return self._meet(src + 1, "receives")

    def isend(self, number: Any, dst: int) -> Meetings:
        return self._meet(dst, "sends")

    def wait(self) -> None: ...


def test_all_pairs_have_met_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from one thread, the one that makes the worker; none by the thread of the beats."""
    meetings = Meetings(4)
    monkeypatch.setattr(carriers, "distributed", meetings)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # so that it is as before afterwards
    stages = [
        threading.Thread(
            target=SentPages, args=(Place(n, 4, 16, 4, ""), "nccl", torch.empty(0), 8), name=str(n)
        )
        for n in range(4)
    ]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join(5)
    receives = {(n, "receives"): str(n) for n in range(1, 4)}
    assert meetings.met == receives | {(n, "sends"): str(n - 1) for n in range(1, 4)}


def test_the_inputs_of_a_micro_batch_cross_in_one_copy() -> None:
    """Two chunks, one of them with context, and decodes in three groups of context."""
    spans = [(0, 5), (7, 12), (0, 1), (9, 10), (30, 31)]
    rows = [Piece(at, *span, True, list(range(8))) for at, span in enumerate(spans)]
    with Operations() as seen:
        batch = batch_inputs(rows, 4, torch.device("meta"), ids=[0] * 13)
    assert [len(each) for each in batch.reaches[0]] == [2, 3]
    assert {len(batch.ids), len(batch.positions), len(batch.slots)} == {13}
    assert len([name for name in seen.names if "copy" in name]) == 1


def test_a_window_leaves_pages_unread() -> None:
    """Seven keys of pages of four: at most three pages, whatever came before; a mask in them."""
    rows = [Piece(0, 40, 43, True, list(range(20))), Piece(1, 30, 31, True, list(range(8)))]
    batch = batch_inputs(rows, 4, torch.device("cpu"), windows=(0, 7))
    (chunk,), (decode,) = batch.reaches[7]
    assert (chunk.pages.tolist(), chunk.context) == ([8, 9, 10], 43 - 32)
    assert decode.pages.tolist() == [6, 7]
    assert decode.mask.flatten().nonzero().flatten().tolist() == list(range(24 - 24, 31 - 24))
    (chunk,), (decode,) = batch.reaches[0]
    assert (len(chunk.pages), len(decode.pages), int(decode.mask.sum())) == (11, 8, 31)


def test_warming_up_meets_all_that_is_served() -> None:
    """No operation comes first while serving, of any mixture of chunks and decodes."""
    spec = replace(model("Llama-3.1-8B"), **SMALL)
    stage = random_stage(spec, Rope(10000.0), 0, 2)
    kv = stage.kv_pages(32, 4)
    with Operations() as warm:
        warm_up(stage, kv)
    with Operations() as serving:
        for rows in (
            [(0, 9), (7, 1), (3, 4)],
            [(0, 1), (30, 1)],
            [(5, 6)],
            [(0, 3)],
            [(90, 1), (2, 1), (40, 30), (0, 17)],
        ):
            pieces = [
                Piece(row, start, start + length, row != 1, list(range(32)))
                for row, (start, length) in enumerate(rows)
            ]
            ends = [piece for piece in pieces if piece.last]
            draws = drawn_by(
                [Draw(0, 0.8, row, 0.5, 0) for row in range(len(ends))], [1] * len(ends)
            )
            count = sum(length for _, length in rows)
            batch = stage.inputs(pieces, 4, [1] * count, draws)
            sample(stage.forward(batch.ids, batch, kv), batch.draws)
    assert set(serving.names) <= set(warm.names)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that there is a GPU, of which 20 GiB are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(settings, "free_bytes", lambda device: [20 * 2**30])


def job_on_a_gpu(folder: Path, *keys: str) -> Job:
    (folder / "RUN.yaml").write_text(
        "model: Llama-3.1-8B\nstages: 2\nscheduler: sarathi\nkv: {pages: 100}\n"
        "costs: {kind: affine, base_s: 0.01, per_token_s: 0}\n"
        "workers: {kind: torch, device: cuda, weights: random, transport: gloo}\n"
        "workload: {trace: azure-conv-sample, requests: 5, arrivals: offline}\n"
    )
    return job_of(folder / "RUN.yaml", keys)


def workers_on_a_gpu(folder: Path, *keys: str) -> Workers:
    job = job_on_a_gpu(folder, *keys)
    return workers_of(job.config, job.built(), folder)


def test_a_copy_within_a_gpu_is_no_transfer(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_copies_s", lambda size, repeats: [1e-6] * repeats)
    made = outside.copy_points([1024, 4096], 3)
    assert [(each.operator, each.size_bytes) for each in made] == [
        ("device_copy", 1024),
        ("device_copy", 4096),
    ]


def test_a_validation_refuses_stages_that_take_turns_on_a_gpu(
    tmp_path: Path, one_gpu: None
) -> None:
    with pytest.raises(UsageError, match="2 stages of gloo on 1 GPU: processes take turns there"):
        validate(job_on_a_gpu(tmp_path), 1)
    assert not workers_on_a_gpu(tmp_path, "stages=1").facts["notes"]
    workers = workers_on_a_gpu(tmp_path, "workers.transport=one_process")
    (note,) = notes_of({"workers": workers.facts})
    assert "each is slower while another computes; costs are of a stage that" in note


def test_stages_that_share_a_gpu_divide_its_memory(tmp_path: Path, one_gpu: None) -> None:
    """Of 20 GiB nine tenths may be used: 15 of weights, and 3 of KV pages, 2 MiB each."""
    assert len(workers_on_a_gpu(tmp_path, "kv.pages=1500").settings) == 2
    with pytest.raises(
        UsageError, match=r"15\.0 GiB of weights and 3\.1 of KV pages, 18\.0 are free"
    ):
        workers_on_a_gpu(tmp_path, "kv.pages=1600")
    halves = [(0, 16), (16, 32)]
    asked = model("Llama-3.1-8B"), halves, 16 * 1600, "bfloat16"
    settings.require_memory(*asked, [10 * 2**30, 10 * 2**30])
    with pytest.raises(UsageError, match=r"8\.0 are free on GPU 1"):
        settings.require_memory(*asked, [10 * 2**30, 8 * 2**30])


def test_short_decodes_are_one_group_where_a_group_costs_more_than_their_padding() -> None:
    seen = [_Seen(at, 1, 16 * pages, range(pages)) for at, pages in enumerate((1, 2, 3, 9, 40))]
    assert [group[0] for group in _groups(seen)] == [[0], [1], [2], [3], [4]]
    # 50 pages padded at most: five rows of up to 8 pages are one group, longer ones are as before
    assert [group[0] for group in _groups(seen, 50)] == [[0, 1, 2], [3], [4]]
    assert len(_groups(seen, 50)[0][1]) == 3 * 3
    assert [group[0] for group in _groups(seen, 1000)] == [[0, 1, 2, 3, 4]]
