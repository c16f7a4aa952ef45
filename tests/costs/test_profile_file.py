"""The profile file: what is written is read; every mistake is one line with file and row."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from evenflow.costs.profile.file import Profile, read_profile, write_profile
from evenflow.errors import UsageError
from tests.command_line import mistake
from tests.places import ROOT
from tests.profiles import header, point, profile


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "p.csv"
    write_profile(path, profile([point("norm", 8, seconds=2e-5), point("norm", 1, seconds=1e-5)]))
    return path


def refusal(path: Path, before: str, after: str) -> str:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    message = mistake(lambda: read_profile(path))
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("name", ["p.csv", "p.csv.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    made = profile()
    write_profile(tmp_path / name, made)
    assert read_profile(tmp_path / name) == made
    write_profile(tmp_path / f"again-{name}", read_profile(tmp_path / name))
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


def test_a_profile_replaces_a_file_only_with_over(written: Path) -> None:
    with pytest.raises(UsageError, match="is there already; name another file"):
        write_profile(written, profile([]))
    write_profile(written, made := profile(), over=True)
    assert read_profile(written) == made


def test_the_documented_example_is_a_profile(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "profiling.md").read_text("utf-8")
    example = re.findall(r"```\n(# evenflow-profile.*?)```", document, re.DOTALL)[0]
    path = tmp_path / "example.csv"
    path.write_text(example, encoding="utf-8")
    found = read_profile(path)
    assert [each.operator for each in found.points] == ["attention_prefill", "linear_qkv"]
    assert found.header.shapes.num_kv_heads == 8


def test_points_are_sorted_so_that_two_files_compare(written: Path) -> None:
    lines = written.read_text(encoding="utf-8").splitlines()[-2:]
    assert lines == ["norm,1,,,1,1e-05,1e-05,1e-05,1", "norm,8,,,1,2e-05,2e-05,2e-05,1"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("# evenflow-profile: 1", "# evenflow-profile: 2", ", line 1: another version of the f"),
        ("# evenflow-profile: 1", "tokens,ms", ", line 1: not a profile file"),
        ("median_s", "median_ms", ", line 23: the columns should be operator,tokens"),
        ("# points: 2", "# points: 3", ": holds 2 points, its header says 3: truncated"),
        ("# dtype: bfloat16", "# dtype: fp8", ': dtype is "fp8"; it should be bfloat16 or'),
        ("# threads: 1", "# threads: many", ': threads is "many"; it should be a whole number'),
        ("# threads: 1\n", "", ': the header key "threads" is missing'),
        ("# threads: 1", "# thread: 1", ': unknown header key "thread"; did you mean "threads"?'),
        ("# threads: 1", "# device: x", ', line 8: "device" a second time'),
        ("norm,8", "nrom,8", ', line 25: unknown operator "nrom"; did you mean "norm"?'),
        ("norm,8,,", "norm,8,5,", ", line 25: norm has no context_tokens; sizes: tokens"),
        ("norm,8,,", "norm,,,", ", line 25: norm lacks tokens; sizes: tokens"),
        ("norm,8", "norm,8.5", ', line 25: tokens is "8.5"; it should be a whole number from 1'),
        ("norm,8", "norm,0", ', line 25: tokens is "0"; it should be a whole number from 1'),
        ("norm,8", "norm,1", ", line 25: the same point as in line 24"),
        ("2e-05,2e-05,2e-05", "0.0,0.0,0.0", ', line 25: median_s is "0.0"; it should be'),
        ("2e-05,2e-05,2e-05", "-1,1,1", ', line 25: median_s is "-1"; it should be seconds'),
        ("2e-05,2e-05,2e-05", "nan,1,1", ', line 25: median_s is "nan"; it should be seconds'),
        ("2e-05,2e-05,2e-05", "9999,1,1", ', line 25: median_s is "9999"; it should be seconds'),
        ("2e-05,2e-05,2e-05", "2e-05,3e-05,4e-05", ", line 25: p10_s <= median_s <= p90_s does"),
        (",2e-05,1\n", "", ", line 25: 7 columns, not 9: truncated?"),
    ],
)
def test_mistakes_in_a_file(written: Path, before: str, after: str, told: str) -> None:
    assert refusal(written, before, after).startswith(told)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.csv: no such file; `evenflow profile` writes one"):
        read_profile(tmp_path / "none.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"# evenflow-profile: 1\n" * 99)[:-12])
    with pytest.raises(UsageError, match=r"cut.csv.gz: not a readable profile"):
        read_profile(tmp_path / "cut.csv.gz")


def test_a_profile_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    twice = (point("norm", 8, seconds=1e-5),) * 2
    with pytest.raises(UsageError, match="the same point as"):
        write_profile(tmp_path / "p.csv", Profile(header(), twice))
    assert list(tmp_path.iterdir()) == []
