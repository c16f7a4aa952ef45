"""Whatever is wrong with a trace: one line with the file, the place and what would be right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evenflow.errors import UsageError
from tests.command_line import mistake, refused
from traces import load_trace
from traces.formats import read_entry

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
ROW = AZURE + "2023-11-16 18:15:47,"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
MOON = '{"timestamp": 0, "input_length": 7, "output_length": 5}\n'
TALK = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty; expected a header or JSON"),
        (" \n\n", "the file is empty"),
        (VIDUR, "no rows"),
        ("a,b,c\n1,2,3\n", "line 1: unknown format"),
        ("TIMESTAMP,ContextTokens\n", "the nearest is azure, which also needs GeneratedTokens"),
        ('{"timestamp": 1, "input_length": 2}\n', "is mooncake, which also needs output_le"),
        (ROW + "-1,44\n", "line 3: ContextTokens is '-1'; expected a whole"),
        (ROW + "1,nan\n", "line 3: GeneratedTokens is 'nan'; expected a whole"),
        (ROW + "1,\n", "line 3: GeneratedTokens is ''; expected a whole"),
        (ROW + "1,2.5\n", "line 3: GeneratedTokens is '2.5'"),
        (ROW + "1,inf\n", "line 3: GeneratedTokens is 'inf'"),
        (ROW + "1,1e300\n", "line 3: GeneratedTokens is '1e300'"),
        (AZURE + "16 November,1,2\n", "3: TIMESTAMP is '16 November'; expected a time such as"),
        (AZURE + "2023-13-16 18:15:47,1,2\n", "line 3: TIMESTAMP is '2023-13-16 18:15:47'"),
        (AZURE + "\n2023-11-16 18:1", "line 4: 1 fields; expected 3, as in the header"),
        (AZURE + '2023-11-16 18:15:47,"1,2\n', "line 3: 2 fields; expected 3"),
        (VIDUR + "-0.5,1,2\n", "line 2: arrived_at is '-0.5'; expected a time"),
        (VIDUR + "nan,1,2\n", "line 2: arrived_at is 'nan'; expected a time"),
        (VIDUR + "later,1,2\n", "line 2: arrived_at is 'later'; expected a time"),
        (VIDUR + "1,0,2\n2,1,0\n", "no request is left; dropped: 1 no prompt tokens, 1 no output"),
        (MOON + '{"timestamp": 0, "inp', "line 2: not a JSON object on one line, perhaps trunc"),
        (MOON + "[1]\n", "line 2: [1]; expected a JSON object"),
        (MOON + '{"timestamp": 0, "input_length": 7}\n', 'line 2: no column "output_length" among'),
        (MOON.replace("7", "true"), "line 1: input_length is True; expected a whole number"),
        (MOON.replace("7", "7.5"), "line 1: input_length is 7.5; expected a whole number"),
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
        ({"format": "mooncake"}, "line 1: not a JSON object"),
        ({"format": "sharegpt"}, "starts with 'TIMESTAMP"),
        ({"format": "azur"}, 'format "azur" is unknown; did you mean "azure"? known: '),
        ({"filter": "vlm"}, 'filter "vlm" is unknown; did you mean "vllm"'),
        ({"limit": 0}, "0 requests of a trace; expected at least 1"),
        ({"skip": -1}, "-1 requests of a trace to skip; expected 0 or more"),
        ({"skip": 1}, "no request is left; dropped: 1 skipped as asked"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
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
    whole = gzip.compress((VIDUR + rows).encode())
    for broken in (whole[: len(whole) // 2], whole[:200] + b"garbage" + whole[207:]):
        path.write_bytes(broken)
        with refused("damaged or truncated gzip"):
            load_trace(path)


def test_a_gzip_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.formats.FREE_BYTES", 1 << 20)
    path = tmp_path / "t.csv.gz"
    for more in (b"\n", b"7"):
        path.write_bytes(gzip.compress(VIDUR.encode() + b"0,10,5" + more * (3 << 20), 1))
        with refused("it unpacks to more than 100 times its size"):
            load_trace(path)
    path.write_bytes(gzip.compress((VIDUR + "0,10,5\n" * 10**5).encode()))
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
