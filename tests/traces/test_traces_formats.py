"""Every format, on files of a few rows whose lengths and times are known."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from evenflow.config.build import load_workload
from evenflow.config.run import configured
from evenflow.config.yaml_file import Document
from evenflow.core.batcher import Batcher
from evenflow.core.kv import PagePool
from evenflow.errors import UsageError
from evenflow.files import _read_once
from evenflow.schedulers import create
from evenflow.traces import FORMATS, Offline, Replay, Trace, load_trace, make_requests
from evenflow.traces.formats import read_entry, timestamp
from evenflow.traces.lines import CHUNK_CHARACTERS
from tests.command_line import mistake, refused
from tests.study.test_points import RUN

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-11 23:59:59.500000+00:00,1452,3\n"
    "2024-05-12 00:00:00+00:00,584,3\n"
    "2024-05-12 00:00:00.001163+00:00,862,38\n"
)
AZURE_2025 = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2025-01-01 00:00:00.5,1,100,10\n2025-01-01 00:00:01.5,0,200,20\n"
)
LENGTHS = "num_prefill_tokens,num_decode_tokens\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,374,44\n4.25,396,109\n"
BYTE_ORDER_MARK_AND_SPACES = "\ufeff" + VIDUR.replace(",", ", ")
SARATHI = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n9,1,10,9\n"
)
BURST_6 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,10,0,10,API log\n118,GPT-4,20,5,25,API log\n"
)
BURST_8 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,,1.5,GPT-4,472,18,490,API log\n19440111.5,7,2,GPT-4,1,2,3,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2999, "input_length": 8, "output_length": 9, "hash_ids": [0]}\n\n'
)
LLMSERVINGSIM = (
    '{"input_toks": 2358, "output_toks": 531, "arrival_time_ns": 46926808}\n'
    '{"input_toks": 1034, "output_toks": 769, "arrival_time_ns": 347938951}\n'
)
BAILIAN = (
    '{"chat_id": 1, "timestamp": 0.0, "input_length": 33, "output_length": 8, "hash_ids": [1,2,3]}'
    '\n{"chat_id": 2, "timestamp": 20.5, "input_length": 16, "output_length": 9, "hash_ids": [1]}\n'
)
DISTSERVE = "prompt_len,output_len,start_time\n55,4,0.0\n829,170,0.05782478302717209\n"
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,0.25,1,100,7\n1,2,0,1.0,1,50,8\n"
)
TD_PIPE = json.dumps(
    [
        {"input": "a", "input_token_length": 7, "output_token_length": 9, "predict_mean_len": 8.5},
        {"input": "b", "input_token_length": 3, "output_token_length": 0, "predict_mean_len": 1},
    ]
)


class Case(NamedTuple):
    """A file's text, and what must be read from it."""

    format: str
    text: str
    prompts: list[int]
    outputs: list[int]
    arrival_s: list[float] | None = None


CASES = [
    Case("azure", AZURE_2023, [374, 396, 879], [44, 109, 55], [0.0, 4.314579, 4.541877]),
    Case("azure", AZURE_2024, [1452, 584, 862], [3, 3, 38], [0.0, 0.5, 0.501163]),
    Case("azure", AZURE_2025, [100, 200], [10, 20], [0.0, 1.0]),
    Case("vidur", VIDUR, [374, 396], [44, 109], [0.0, 2.75]),
    Case("vidur", BYTE_ORDER_MARK_AND_SPACES, [374, 396], [44, 109], [0.0, 2.75]),
    Case("vidur", SARATHI, [74, 9], [918, 1]),
    Case("burstgpt", BURST_6, [472, 20], [18, 5], [0.0, 113.0]),
    Case("burstgpt", BURST_8, [472, 1], [18, 2], [0.0, 1.5]),
    Case("mooncake", MOONCAKE, [700, 8], [5, 9], [0.0, 2.999]),
    Case("bailian", BAILIAN, [33, 16], [8, 9], [0.0, 20.5]),
    Case("llmservingsim", LLMSERVINGSIM, [2358, 1034], [531, 769], [0.0, 0.301012143]),
    Case("distserve", DISTSERVE, [55, 829], [4, 170], [0.0, 0.05782478302717209]),
    Case("splitwise-sim", SPLITWISE, [100, 50], [7, 8], [0.0, 0.75]),
    Case("sharegpt", TD_PIPE, [7], [9]),
]


def times_of(trace: Trace) -> list[float] | None:
    return None if trace.arrival_s is None else trace.arrival_s.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.format)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_each_format_is_detected_and_read(tmp_path: Path, case: Case, packed: bool) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(case.text.encode()) if packed else case.text.encode())
    trace = load_trace(path)
    assert trace.format == case.format
    assert trace.prompt_tokens.tolist() == case.prompts
    assert trace.output_tokens.tolist() == case.outputs
    assert times_of(trace) == case.arrival_s
    assert load_trace(path, format=case.format).prompt_tokens.tolist() == case.prompts


def test_every_format_has_a_case() -> None:
    assert {case.format for case in CASES} == set(FORMATS)


def loaded(folder: Path, text: str, **options: Any) -> Trace:
    path = folder / "t.csv"
    path.write_text(text)
    return load_trace(path, **options)


@pytest.mark.parametrize(
    ("text", "dropped", "kept"),
    [
        (BURST_6, {"failed: no response": 1}, 2),
        (LENGTHS + "0,5\n5,0\n5,5\n", {"no prompt tokens": 1, "no output tokens": 1}, 1),
        (LENGTHS + "374.0,4.4e1\n", {}, 1),  # whole numbers written as floats are lengths
    ],
)
def test_rows_that_are_no_requests_are_dropped_and_counted(
    tmp_path: Path, text: str, dropped: dict[str, int], kept: int
) -> None:
    trace = loaded(tmp_path, text)
    assert (trace.dropped, len(trace)) == (dropped, kept)
    assert trace.rows_read == kept + sum(dropped.values())


def test_rows_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    trace = loaded(tmp_path, "arrived_at," + LENGTHS + "5,1,10\n3,2,20\n5,3,30\n4,4,40\n")
    assert times_of(trace) == [0, 1, 2, 2]
    assert trace.prompt_tokens.tolist() == [2, 4, 1, 3]  # equal times keep the file's order
    assert trace.output_tokens.tolist() == [20, 40, 10, 30]
    assert trace.reordered == 2


def test_a_limit_counts_kept_requests_and_stops_reading(tmp_path: Path) -> None:
    trace = loaded(tmp_path, AZURE_2024 + "what follows is never looked at\n", limit=3)
    assert (len(trace), trace.rows_read) == (3, 3)
    assert loaded(tmp_path, BURST_6, limit=2).prompt_tokens.tolist() == [472, 20]


def test_the_filters_of_vllm_and_gllm(tmp_path: Path) -> None:
    lengths = [(3, 9), (9, 3), (1025, 9), (1024, 1024), (1024, 1025), (4, 4), (8, 513)]
    text = LENGTHS + "".join(f"{prompt},{output}\n" for prompt, output in lengths)
    vllm = loaded(tmp_path, text, filter="vllm")
    assert vllm.prompt_tokens.tolist() == [1024, 4, 8]
    assert vllm.dropped == {
        "prompt under 4 tokens": 1,
        "output under 4 tokens": 1,
        "prompt over 1024 tokens": 1,
        "prompt + output over 2048 tokens": 1,
    }
    gllm = loaded(tmp_path, text, filter="gllm")
    assert gllm.prompt_tokens.tolist() == [4]
    assert gllm.dropped["output over 512 tokens"] == 3


def test_timestamps_keep_all_their_digits_and_their_zone() -> None:
    assert timestamp("t", "1970-01-01 00:00:01.123456789") == 1_123_456_789
    assert timestamp("t", "1970-01-01T02:00:01+02:00") == timestamp("t", "1970-01-01 00:00:01")
    assert timestamp("t", "1970-01-01 00:00:00.5Z") == 500_000_000


def test_provenance_is_the_hash_of_the_file(tmp_path: Path) -> None:
    trace = loaded(tmp_path, VIDUR)
    assert (trace.path, trace.name) == (str(tmp_path / "t.csv"), "t.csv")
    assert trace.sha256 == hashlib.sha256(VIDUR.encode()).hexdigest()


def test_a_huge_file_is_hashed_by_its_size_and_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.traces.lines.WHOLE_FILE_HASH_BYTES", 10)
    monkeypatch.setattr("evenflow.traces.lines.PREFIX_HASH_BYTES", 60)
    ends = "1,1\n2,2\n", "1,1\n2,3\n", "1,1\n2,3\n4,4\n"
    hashes = [loaded(tmp_path, LENGTHS + 12 * "9,9\n" + rows).sha256 for rows in ends]
    assert hashes[0] == hashes[1] != hashes[2]
    assert str(hashes[0]).startswith("size+64MiB:")


def words(text: str) -> int:
    return len(text.split())


def conversation(*turns: str) -> dict[str, Any]:
    return {"id": "x_0", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_sharegpt_text_takes_the_first_two_turns() -> None:
    assert read_entry(conversation("a b c", "d e", "f"), words)[1:5] == (3, 2, "", "a b c")
    assert read_entry(conversation("a"), words).dropped == "fewer than two turns"


def test_sharegpt_entries_longer_than_a_chunk(tmp_path: Path) -> None:
    long_text = "x" * (2 * CHUNK_CHARACTERS)
    entry = {"input": long_text, "output_token_length": 1}
    entries = [entry | {"input_token_length": number} for number in (1, 2, 3)]
    assert loaded(tmp_path, json.dumps(entries, indent=1)).prompt_tokens.tolist() == [1, 2, 3]


def test_sharegpt_with_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    entries = [conversation("a b a b a", "b b b b"), conversation("a"), conversation("a", "")]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([*entries, conversation("a", "a b b b b b")]))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        trace = load_trace(path, tokenizer=given)
        assert trace.prompt_tokens.tolist() == [5, 1]
        assert trace.output_tokens.tolist() == [4, 6]
        assert trace.dropped == {"fewer than two turns": 1, "no output tokens": 1}
    assert load_trace(path, tokenizer=tmp_path, filter="vllm").prompt_tokens.tolist() == [5]


# -- a later part of a trace ----------------------------------------------------------------------

ROWS = [(1.0 * i * i, 10 + i, 4 + i % 3) for i in range(20)]
SKIPPED = "skipped as asked"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{at},{prompt},{output}\n" for at, prompt, output in ROWS]
    path.write_text("arrived_at," + LENGTHS + "".join(lines))
    return path


def test_a_part_of_a_file_begins_at_time_0_and_counts_what_is_before(file: Path) -> None:
    part = load_trace(file, skip=5, limit=4)
    assert part.prompt_tokens.tolist() == [15, 16, 17, 18]
    assert times_of(part) == [0.0, 11.0, 24.0, 39.0]
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


def test_what_clients_allow_is_read_and_kept_in_order(tmp_path: Path) -> None:
    rows = (
        "arrived_at,num_prefill_tokens,num_decode_tokens,max_new\n2.0,7,3,9\n1.0,5,4,\n3.0,6,2,2\n"
    )
    requests = make_requests(loaded(tmp_path, rows), Offline())
    assert [request.max_new_tokens for request in requests] == [None, 9, 2]
    assert [request.output_limit for request in requests] == [4, 9, 2]
    path = str(tmp_path / "t.csv")
    keys = {"workload": {"trace": path, "max_new": 3}}
    config = configured(Document("a.yaml", RUN | keys, {}))
    allowed = load_workload(config, tmp_path).requests
    assert [request.max_new_tokens for request in allowed] == [4, 9, 2]


def test_a_priority_of_a_trace_reaches_the_policy_by_arrival(tmp_path: Path) -> None:
    rows = "arrived_at,num_prefill_tokens,num_decode_tokens,priority\n2.0,7,3,-1\n1.0,5,4,\n"
    requests = make_requests(loaded(tmp_path, rows), Replay())
    assert [request.priority for request in requests] == [0, -1]
    policy = create("vllm_v1", {"scheduling_policy": "priority", "async_scheduling": False})
    batcher = Batcher(policy, PagePool(4, 16), depth=1, max_in_flight=1, max_model_len=99)
    for request in requests:
        batcher.add(request)
    assert [(each.request_id, each.priority) for each in batcher.view.waiting] == [(1, -1), (0, 0)]


# -- logs of one's own ----------------------------------------------------------------------------

LOG_ROWS = [(1700000000.5, 10, 5), (1700000001.75, 20, 6), (1700000004.5, 30, 7)]
OPENAI = ("request_time", "prompt_tokens", "completion_tokens")


def log_of(names: tuple[str, str, str], layout: str, factor: float = 1.0) -> str:
    rows = [{names[0]: at * factor, names[1]: n, names[2]: m} for at, n, m in LOG_ROWS]
    if layout == "jsonl":
        return "\n".join(map(json.dumps, rows))
    if layout == "json":
        return json.dumps(rows, indent=1)
    lines = [names, *(tuple(map(str, row.values())) for row in rows)]
    return "\n".join(layout.join(line) for line in lines)


def is_the_log(trace: Trace) -> None:
    assert trace.format == "log"
    assert trace.prompt_tokens.tolist() == [10, 20, 30]
    assert trace.output_tokens.tolist() == [5, 6, 7]
    assert times_of(trace) == [0.0, 1.25, 4.0]


@pytest.mark.parametrize("layout", [",", ";", "\t", "jsonl", "json"])
@pytest.mark.parametrize("factor", [1, 1000, 10**6], ids=["s", "ms", "us"])
def test_a_log_with_openais_names_is_read_in_any_layout(
    layout: str, factor: int, tmp_path: Path
) -> None:
    is_the_log(loaded(tmp_path, log_of(OPENAI, layout, factor)))
    mine = log_of(("at", "in", "out"), layout, factor)
    columns = {"arrival": "at", "prompt": "in", "output": "out"}
    is_the_log(loaded(tmp_path, mine, columns=columns))


def test_a_log_of_parquet_is_read(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = pandas.DataFrame(LOG_ROWS, columns=OPENAI)
    table["request_time"] = pandas.to_datetime(table["request_time"], unit="s", utc=True)
    table.to_parquet(tmp_path / "log.parquet")
    is_the_log(load_trace(tmp_path / "log.parquet"))
    whole = (tmp_path / "log.parquet").read_bytes()
    (tmp_path / "log.parquet").write_bytes(whole[:-40])
    with refused("damaged or truncated Parquet"):
        load_trace(tmp_path / "log.parquet")


def test_usage_inside_a_record_is_found(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    rows = [{"created": 1700000000 + n, "usage": usage} for n in range(2)]
    trace = loaded(tmp_path, "\n".join(map(json.dumps, rows)))
    assert (trace.prompt_tokens.tolist(), times_of(trace)) == ([10, 10], [0.0, 1.0])


@pytest.mark.parametrize(
    ("unit", "times"),
    [
        ("s", ("0.5", "3")),
        ("ms", ("500", "3000")),
        ("us", ("500000", "3000000")),
        ("iso", ("2024-05-11T10:00:00.5Z", "2024-05-11 12:00:03+0200")),
    ],
)
def test_the_unit_of_times_is_as_given(unit: str, times: tuple[str, str], tmp_path: Path) -> None:
    text = "at,prompt_tokens,output_tokens\n" + "".join(f"{at},1,1\n" for at in times)
    columns = {"arrival": "at"}
    assert times_of(loaded(tmp_path, text, columns=columns, time_unit=unit)) == [0.0, 2.5]
    if unit != "iso":
        named = text.replace("at,", f"at_{unit},", 1)
        columns = {"arrival": f"at_{unit}"}
        assert times_of(loaded(tmp_path, named, columns=columns)) == [0.0, 2.5]


def test_a_unit_that_makes_a_strange_rate_is_doubted(tmp_path: Path) -> None:
    rows = "".join(f"{200 * n},10,5\n" for n in range(20))
    text = "arrival_time,prompt_tokens,output_tokens\n" + rows
    (doubt,) = loaded(tmp_path, text).doubts
    assert "the trace's times make 0.005 requests a second" in doubt
    assert loaded(tmp_path, text, time_unit="ms").doubts == ()


def test_times_of_two_units_by_their_size_are_refused(tmp_path: Path) -> None:
    """Nanoseconds from 0, of which those beyond 100 s are as large as ms since 1970."""
    text = "time,prompt_tokens,output_tokens\n0,1,1\n50000000000,1,1\n150000000000,1,1\n"
    with refused("line 4: time is '150000000000', ms since 1970 by its size, as time_unit is not"):
        loaded(tmp_path, text)
    assert times_of(loaded(tmp_path, text, time_unit="ns")) == [0.0, 50.0, 150.0]


ZONED, BARE = "2023-11-16T18:15:46Z", "2023-11-16 18:15:46"
CALENDAR = "a calendar time"


@pytest.mark.parametrize(
    ("before", "then", "says"),
    [
        (ZONED, BARE, f"line 2: at is '{BARE}', {CALENDAR} without a zone, and a row before"),
        (BARE, ZONED, f"line 2: at is '{ZONED}', {CALENDAR} with a zone, and a row before"),
        (12, BARE, f"{CALENDAR} without a zone, and a row before has s since 1970 by its size"),
        (ZONED, 1.5, f"time_unit is not given, and a row before has {CALENDAR} with a"),
    ],
)
def test_times_of_two_kinds_are_refused(
    tmp_path: Path, before: object, then: object, says: str
) -> None:
    rows = ({"at": time, "prompt_tokens": 7, "output_tokens": 3} for time in (before, then))
    with refused(says):
        loaded(tmp_path, "\n".join(map(json.dumps, rows)), columns={"arrival": "at"})


def test_a_row_without_a_time_among_others_is_refused(tmp_path: Path) -> None:
    lengths = {"num_prefill_tokens": 7, "num_decode_tokens": 3}
    rows = lengths | {"arrived_at": 0}, lengths, lengths | {"arrived_at": 2}
    with refused("line 2: arrived_at is None, no time, and a row before has a time in s; expected"):
        loaded(tmp_path, "\n".join(map(json.dumps, rows)))


def test_a_log_without_a_time_in_its_first_row_has_none_in_others(tmp_path: Path) -> None:
    lengths = {"prompt_tokens": 7, "output_tokens": 3}
    rows = lengths, lengths | {"timestamp": 2}
    with refused("line 2: timestamp is there, and the first record has no time"):
        loaded(tmp_path, "\n".join(map(json.dumps, rows)))


def test_a_quote_that_stays_open_swallows_no_rows(tmp_path: Path) -> None:
    text = 'prompt_tokens,output_tokens,note\n7,3,"open\n8,4,\n9,5,\n'
    with refused("line 2: not readable as csv (unexpected end of data)"):
        loaded(tmp_path, text)


@pytest.mark.parametrize("name", ["timestamp_ms", "arrival_ms", "start_time_ms"])
def test_a_usual_time_may_end_in_its_unit(name: str, tmp_path: Path) -> None:
    text = f"{name},prompt_tokens,output_tokens\n250,1,1\n1500,1,1\n"
    assert times_of(loaded(tmp_path, text)) == [0.0, 1.25]


def test_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    first = {"ts": 1, "model": "m", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    trace = loaded(tmp_path, json.dumps(first), columns={"prompt": "usage.prompt_tokens"})
    assert trace.arrival_s is None
    assert trace.unread == ["ts", "model"]


def test_bad_rows_are_skipped_counted_and_the_first_five_named(tmp_path: Path) -> None:
    bad = ["1,,5", "2,10", "3,10,-1", "later,10,5", "5,1.5,5", "6,x,5"]
    text = "arrival_s,prompt_tokens,output_tokens\n0,10,5\n" + "\n".join(bad) + "\n7,20,6\n"
    with refused("line 3: prompt_tokens is ''"):
        loaded(tmp_path, text)
    trace = loaded(tmp_path, text, on_bad_row="skip")
    assert times_of(trace) == [0.0, 7.0]
    ((reason, count),) = trace.dropped.items()
    assert count == 6
    assert [f"line {n}: " in reason for n in range(3, 9)] == [True] * 5 + [False]


def test_a_run_maps_the_columns_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("t;in;out\n500;10;5\n3000;x;6\n4000;20;6\n")
    keys = {"columns": {"arrival": "t", "prompt": "in", "output": "out"}, "on_bad_row": "skip"}
    part = {"trace": str(tmp_path / "log.csv"), "time_unit": "ms", "arrivals": "replay"}
    config = configured(Document("a.yaml", RUN | {"workload": part | keys}, {}))
    workload = load_workload(config, tmp_path)
    found = [(r.arrival_s, r.prompt_tokens) for r in workload.requests]
    assert found == [(0.0, 10), (3.5, 20)]
    assert list(workload.trace["dropped"].values()) == [1]


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_trace_may_come_on_stdin(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "-":
        _read_once.cache_clear()
        text = io.TextIOWrapper(io.BytesIO(VIDUR.encode()))
        monkeypatch.setattr("sys.stdin", text)
        trace = load_trace(name)
        assert (trace.path, times_of(trace)) == ("-", [0.0, 2.75])
        assert trace.sha256 == hashlib.sha256(VIDUR.encode()).hexdigest()
    else:
        reading, writing = os.pipe()
        os.write(writing, VIDUR.encode())
        os.close(writing)
        assert times_of(load_trace(f"/dev/fd/{reading}")) == [0.0, 2.75]
        os.close(reading)
    _read_once.cache_clear()


def test_a_pipe_that_gives_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _read_once.cache_clear()
    monkeypatch.setattr("evenflow.files.MOST_PIPED", 8)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(VIDUR.encode())))
    with refused("gives more than 8 bytes; a file is right"):
        load_trace("-")


# -- whatever is wrong: one line with the file, the place and what would be right -----------------

ONE_ROW = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
SECOND = ONE_ROW + "2023-11-16 18:15:47,"
TIMED = "arrived_at," + LENGTHS
MOON = '{"timestamp": 0, "input_length": 7, "output_length": 5}\n'
ENTRY = '{"input_token_length": 3, "output_token_length": 1}'
TALK = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty; expected a header or JSON"),
        (" \n\n", "the file is empty"),
        (TIMED, "no rows"),
        ("a,b,c\n1,2,3\n", "line 1: unknown format"),
        ("TIMESTAMP,ContextTokens\n", "the nearest is azure, which also needs GeneratedTokens"),
        ('{"timestamp": 1, "input_length": 2}\n', "is mooncake, which also needs output_le"),
        (SECOND + "-1,44\n", "line 3: ContextTokens is '-1'; expected a whole"),
        (SECOND + "1,nan\n", "line 3: GeneratedTokens is 'nan'; expected a whole"),
        (SECOND + "1,\n", "line 3: GeneratedTokens is ''; expected a whole"),
        (SECOND + "1,2.5\n", "line 3: GeneratedTokens is '2.5'"),
        (SECOND + "1,inf\n", "line 3: GeneratedTokens is 'inf'"),
        (SECOND + "1,1e300\n", "line 3: GeneratedTokens is '1e300'"),
        (ONE_ROW + "16 November,1,2\n", "3: TIMESTAMP is '16 November'; expected a time such as"),
        (ONE_ROW + "2023-13-16 18:15:47,1,2\n", "line 3: TIMESTAMP is '2023-13-16 18:15:47'"),
        (ONE_ROW + "\n2023-11-16 18:1", "line 4: 1 fields; expected 3, as in the header"),
        (ONE_ROW + '2023-11-16 18:15:47,"1,2\n', "line 3: not readable as csv (unexpected end"),
        (LENGTHS.strip() + ",max_new\n7,3,2\n", "2: max_new is 2; expected at least the 3 tokens"),
        (LENGTHS.strip() + ",priority\n7,3,0.5\n", "line 2: priority is '0.5'; expected"),
        (TIMED + "-0.5,1,2\n", "line 2: arrived_at is '-0.5'; expected a time"),
        (TIMED + "nan,1,2\n", "line 2: arrived_at is 'nan'; expected a time"),
        (TIMED + "later,1,2\n", "line 2: arrived_at is 'later'; expected a time"),
        (TIMED + "1,0,2\n2,1,0\n", "no request is left; dropped: 1 no prompt tokens, 1 no output"),
        (MOON + '{"timestamp": 0, "inp', "line 2: not a JSON object on one line, perhaps trunc"),
        (MOON + "[1]\n", "line 2: [1]; expected a JSON object"),
        (MOON + '{"timestamp": 0, "input_length": 7}\n', 'line 2: no column "output_length" among'),
        (MOON.replace("7", "true"), "line 1: input_length is True; expected a whole number"),
        (MOON.replace("7", "7.5"), "line 1: input_length is 7.5; expected a whole number"),
        (MOON.replace("5", '5, "hash_ids": [1, 2, 3]').replace("7", "2"), "ids: 3 for 2 tokens"),
        (MOON.replace("0", "null"), "line 1: timestamp is None; expected a time"),
        (MOON.replace("5", "NaN"), "line 1: output_length is nan; expected a whole number"),
        (MOON.replace("5", '5, "hash_ids": 3'), "line 1: hash_ids is 3; expected a list of whole"),
        (MOON.replace("5", '5, "hash_ids": [true]'), "hash_ids is [True]; expected a list of wh"),
        ("[]", "no rows"),
        ("[1, 2]", "entry 1: 1; expected conversations, or input_token_length and"),
        (json.dumps(TALK), "entry 1: text without lengths; give tokenizer: the path of a tok"),
        ('[{"input_token_length": 3, "output_token_length": -1}]', "entry 1: output_token_length"),
        ('[{"input_token_length": 3, "output_token_length": 1}', 'truncated JSON; expected "]"'),
        ('[{"input_token_length": 3, "output_tok', "entry 1: not valid JSON, or truncated"),
        (f"[{ENTRY}{ENTRY}]", 'entry 1: \'{"input_token_length\' follows; expected "," or "]"'),
        (f"[{ENTRY},,{ENTRY}]", "entry 2: not valid JSON, or truncated (Expecting value"),
        (f"[,{ENTRY}]", "entry 1: not valid JSON, or truncated (Expecting value"),
        (f"[{ENTRY},]", 'entry 2: "]" after a comma; expected one more'),
        ('[{"input_token_length": 3, "output_token_length": 1}][]', "goes on after its JSON array"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_bad_content(tmp_path: Path, text: str, says: str, packed: bool) -> None:
    path = tmp_path / "trace.x"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    message = mistake(lambda: load_trace(path))
    assert says in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "splitwise-sim"}, 'line 1: no column "arrival_timestamp" among TIMESTAMP, C'),
        ({"format": "mooncake"}, 'line 1: no column "timestamp" among TIMESTAMP, C'),
        ({"format": "sharegpt"}, "starts with 'TIMESTAMP"),
        ({"format": "azur"}, 'format "azur" is unknown; did you mean "azure"? known: '),
        ({"filter": "vlm"}, 'filter "vlm" is unknown; did you mean "vllm"'),
        ({"limit": 0}, "0 requests of a trace; expected at least 1"),
        ({"skip": -1}, "-1 requests of a trace to skip; expected 0 or more"),
        ({"columns": {"prompt": "a"}}, "columns needs output: the name of the column with those"),
        ({"columns": {"prompt": "a", "output": "b"}}, 'no column "a" among TIMESTAMP'),
        ({"columns": {"prompt": "a"}, "format": "azure"}, "give columns, or format"),
        ({"format": "log"}, "columns needs prompt"),
        ({"skip": 1}, "no request is left; dropped: 1 skipped as asked"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(ONE_ROW)
    with refused(says):
        load_trace(path, **options)


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path, says in (
        (tmp_path / "no.csv", f'"{tmp_path}/no.csv" is neither a file nor'),
        ("azure-conv-smple", 'neither a file nor a bundled sample; did you mean "az'),
        (tmp_path, f"{tmp_path}: a directory; give one trace file"),
        (binary, "binary.csv: not UTF-8 text"),
    ):
        with pytest.raises(UsageError, match=says):
            load_trace(path)
    with pytest.raises(UsageError, match="a sample; it takes no format and no filter"):
        load_trace("azure-conv-sample", filter="vllm")


def test_a_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    rows = "".join(f"{n},{n * n % 977 + 1},{n * n % 463 + 1}\n" for n in range(9999))
    whole = gzip.compress((TIMED + rows).encode())
    for broken in (whole[: len(whole) // 2], whole[:200] + b"garbage" + whole[207:]):
        path.write_bytes(broken)
        with refused("damaged or truncated gzip"):
            load_trace(path)


def test_a_gzip_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.traces.lines.FREE_BYTES", 1 << 20)
    path = tmp_path / "t.csv.gz"
    for more in (b"\n", b"7"):
        path.write_bytes(gzip.compress(TIMED.encode() + b"0,10,5" + more * (3 << 20), 1))
        with refused("it unpacks to more than 100 times its size"):
            load_trace(path)
    path.write_bytes(gzip.compress((TIMED + "0,10,5\n" * 10**5).encode()))
    assert load_trace(path).rows_read == 10**5


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(TALK))
    with pytest.raises(UsageError, match=r"no such file; give a local tokenizer.json"):
        load_trace(path, tokenizer=tmp_path / "nowhere")
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    with pytest.raises(UsageError, match=r"not a tokenizer.json|needs tokenizers"):
        load_trace(path, tokenizer=tmp_path)


def test_turns_without_text() -> None:
    with pytest.raises(ValueError, match="expected objects with a text value"):
        read_entry({"conversations": [{"value": 1}, "b"]}, len)
