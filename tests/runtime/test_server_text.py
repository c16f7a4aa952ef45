"""Text of tokens as they come: numbers, characters of several tokens, stop strings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.errors import UsageError
from evenflow.runtime.http.text import Codec, StopStrings, end_ids
from tests.amounts import many

PARTS = st.lists(st.text("ab", max_size=3), max_size=12)
STRINGS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: Any) -> Path:
    """A byte-level tokenizer of 256 tokens and one special one, as a file."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(tokenizers.models.BPE({w: i for i, w in enumerate(words)}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(["<end>"])
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    found.save(str(path))
    return path


def text_of(codec: Codec, tokens: Sequence[int]) -> list[str]:
    stream = codec.stream()
    return [*(stream.push(token) for token in tokens), stream.rest()]


def test_without_a_tokenizer_a_token_is_its_number() -> None:
    assert text_of(Codec(), [3, 14, 0]) == ["3 ", "14 ", "0 ", ""]
    with pytest.raises(UsageError, match="text needs a tokenizer"):
        Codec().encode("three")


TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{% if message.role == "tool" %}\
{{ raise_exception("no tools") }}{% endif %}[{{ message.role }}]{{ message.content }}\
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é?"}]


def test_a_chat_is_what_the_template_of_the_model_makes_of_it(
    tokenizer: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[chat]'")
    pytest.importorskip("jinja2")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.read_bytes())
    with pytest.raises(UsageError, match="a chat needs the model's chat template"):
        Codec(path).chat(CHAT)
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    for template, bos in (
        (TEMPLATE, "<end>"),
        (named, {"__type": "AddedToken", "content": "<end>"}),
    ):
        values = {"chat_template": template, "bos_token": bos}
        path.with_name("tokenizer_config.json").write_text(json.dumps(values))
        codec = Codec(path, made_up=True)
        text = "<end>[system]be brief[user]é?[assistant]"
        assert codec.chat(CHAT) == codec.encode(text)
        assert codec.chat(CHAT)[0] == 256, "the special token is one"
    with pytest.raises(UsageError, match="the chat template refuses them: no tools"):
        codec.chat([{"role": "tool", "content": ""}])
    path.with_name("chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Codec(path).chat(CHAT) == codec.encode("be brief")
    path.with_name("tokenizer_config.json").write_text("[")
    with pytest.raises(UsageError, match=r"tokenizer_config.json: cannot read it"):
        Codec(path).chat(CHAT)


def test_a_character_comes_with_its_last_token(tokenizer: Path) -> None:
    codec = Codec(tokenizer)
    ids = codec.encode("é🙂!")
    assert text_of(codec, ids) == ["", "é", "", "", "", "🙂", "!", ""]
    assert text_of(codec, ids[:3]) == ["", "é", "", "\ufffd"], "what never gets complete is shown"
    assert text_of(codec, [*ids[-1:], 256]) == ["!", "", ""], "special tokens are no text"


@settings(max_examples=many(150))
@given(text=st.text(max_size=30))
def test_the_pieces_are_the_text(tokenizer: Path, text: str) -> None:
    codec = Codec(tokenizer)
    ids = codec.encode(text)
    assert "".join(text_of(codec, ids)) == text


@given(ids=st.lists(st.integers(0, 255), max_size=30))
def test_random_bytes_are_no_error(tokenizer: Path, ids: list[int]) -> None:
    text_of(Codec(tokenizer), ids)


@given(PARTS, STRINGS)
def test_stop_strings_cut_where_the_first_of_them_begins(
    parts: list[str], strings: list[str]
) -> None:
    stop, out, ended, whole = StopStrings(strings), "", False, ""
    expected = "".join(parts)
    for part in parts:
        text, ended = stop.push(part)
        out, whole = out + text, whole + part
        begins = [whole.find(string) for string in strings if string in whole]
        assert ended == bool(begins), "it ends as soon as one is complete"
        if ended:
            expected = whole[: min(begins)]
            break
    assert out + ("" if ended else stop.push("", ends=True)[0]) == expected


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stop = StopStrings(["END"])
    assert [stop.push(part) for part in ("on E", "N", "or EN", "D!")] == [
        ("on", False),
        (" ", False),
        ("ENor ", False),
        ("", True),
    ]
    plain = StopStrings([])
    assert plain.push("all of it") == ("all of it", False)


def test_a_folder_s_own_files_say_where_a_text_ends(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == set()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_ids(tmp_path) == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_ids(tmp_path) == {5, 6}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"config\.json: cannot read it"):
        end_ids(tmp_path)


def test_made_up_tokens_are_numbers_whatever_reads_the_prompts(tokenizer: Path) -> None:
    codec = Codec(tokenizer, made_up=True)
    assert codec.encode("né") == Codec(tokenizer).encode("né")
    assert text_of(codec, [195, 31_999]) == ["195 ", "31999 ", ""]
    with pytest.raises(UsageError, match=r"none\.json: no such file"):
        Codec(tokenizer.with_name("none.json"))
