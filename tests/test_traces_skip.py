"""A later part of a trace: what is before it is counted, and nothing else is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenflow.errors import UsageError
from experiments.run_file.build import load_workload
from experiments.run_file.run import configured
from experiments.run_file.yaml_file import Document
from tests.test_points import RUN
from traces import Offline, load_trace, make_requests

ROWS = [(1.0 * i * i, 10 + i, 4 + i % 3) for i in range(20)]
SKIPPED = "skipped as asked"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{at},{prompt},{output}" for at, prompt, output in ROWS]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines, ""]))
    return path


def test_a_part_of_a_file_begins_at_time_0_and_counts_what_is_before(file: Path) -> None:
    part = load_trace(file, skip=5, limit=4)
    assert part.prompt_tokens.tolist() == [15, 16, 17, 18]
    assert part.arrival_s is not None
    assert part.arrival_s.tolist() == [0.0, 11.0, 24.0, 39.0]
    assert part.dropped == {SKIPPED: 5}
    assert part.rows_read == len(part) + sum(part.dropped.values())


def test_rows_that_a_filter_drops_are_not_among_the_skipped(file: Path) -> None:
    file.write_text(file.read_text().replace("\n0.0,10,4", "\n0.0,2000,9"))
    part = load_trace(file, skip=2, filter="vllm")
    whole = load_trace(file, filter="vllm")
    assert part.prompt_tokens.tolist() == whole.prompt_tokens[2:].tolist()
    assert part.dropped == whole.dropped | {SKIPPED: 2}
    assert part.rows_read == len(part) + sum(part.dropped.values()) == len(ROWS)


def test_a_sample_goes_on_where_a_shorter_draw_ends() -> None:
    whole = load_trace("azure-conv-sample", limit=30, seed=3)
    part = load_trace("azure-conv-sample", limit=20, skip=10, seed=3)
    assert part.prompt_tokens.tolist() == whole.prompt_tokens[10:].tolist()
    assert part.output_tokens.tolist() == whole.output_tokens[10:].tolist()
    assert part.arrival_s is not None
    assert whole.arrival_s is not None
    np.testing.assert_array_equal(part.arrival_s, whole.arrival_s[10:] - whole.arrival_s[10])
    assert part.rows_read == len(part) + sum(part.dropped.values())
    longer = make_requests(part, Offline(), 25)
    assert [r.prompt_tokens for r in longer][:20] == part.prompt_tokens.tolist()


def test_a_run_takes_the_part_that_it_is_told(file: Path) -> None:
    keys = (f"workload.trace={file}", "workload.requests=3", "workload.skip=4")
    config = configured(Document("a.yaml", RUN, {}), keys)
    loaded = load_workload(config, Path())
    assert [request.prompt_tokens for request in loaded.requests] == [14, 15, 16]
    assert loaded.trace["dropped"] == {SKIPPED: 4}


def test_to_skip_less_than_none_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"workload\.skip: should be at least 0"):
        configured(Document("a.yaml", RUN, {}), ["workload.skip=-1"])
