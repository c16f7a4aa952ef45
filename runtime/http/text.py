"""Tokens to text and back, for clients: with a tokenizer.json, or as numbers where there is none.

Knows no requests. Text of a token may come with a later one, as a character can take several
tokens. What may be the beginning of a stop string is held back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError
from evenflow.files import load_tokenizer

NO_CHAT = (
    "a chat needs the model's chat template: a tokenizer.json with its tokenizer_config.json "
    "beside it, in the model's folder or given to the server with --tokenizer"
)
UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""


class Codec:
    """Encoder and decoder of text, by the tokenizer.json at `path`.

    Without one, and for `made_up` tokens, however prompts are read, a token is written as its
    number and a space. Most clients time a token by its text, and random tokens have none, or half
    a character. The model knows token ids below `vocab_size` (None: any); `end_ids` end a text.
    """

    def __init__(
        self,
        path: Path | None = None,
        vocab_size: int | None = None,
        end_ids: frozenset[int] = frozenset(),
        *,
        made_up: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self._made_up = made_up
        self._path = path
        self._tokenizer: Any = None if path is None else load_tokenizer(path)

    def check(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raise a UsageError for a prompt that is empty, or has a token that the model has not."""
        for ids in prompts:
            if not ids:
                raise UsageError("is empty")
            if self.vocab_size is not None and max(ids) >= self.vocab_size:
                right = f"the model has {self.vocab_size}, from 0 on"
                raise UsageError(f"token {max(ids)} is none: {right}")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt; UsageError without a tokenizer."""
        if self._tokenizer is None:
            raise UsageError("text needs a tokenizer.json; --tokenizer, or token ids, is right")
        return list(self._tokenizer.encode(text).ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat, up to where the answer begins; UsageError if it cannot."""
        templated = self._templated  # a mistake in the files is none of the messages
        try:
            text = templated.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # a template is code, and refuses what it does not know
            raise UsageError(f"the chat template refuses them: {error}") from None

    @cached_property
    def _templated(self) -> Any:
        """The tokenizer of transformers, with the chat template that lies beside our file."""
        if self._path is None:
            raise UsageError(NO_CHAT)
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            hint = "pip install jinja2 transformers, where the server runs"
            raise UsageError(f"a chat template needs transformers: {hint}") from None
        folder, own = self._path.parent, self._tokenizer
        with _readable(folder / "tokenizer_config.json"):
            found = PreTrainedTokenizerFast.from_pretrained(
                folder, tokenizer_object=own, local_files_only=True
            )
        template = found.chat_template  # several have names
        if not isinstance(template.get("default") if isinstance(template, dict) else template, str):
            raise UsageError(NO_CHAT)
        return found

    def stream(self) -> TextStream:
        return TextStream(None if self._made_up else self._tokenizer)


class TextStream:
    """The text of one output, as its tokens come; with no `tokenizer`, their numbers.

    Decodes the tokens since the last certain text again, with the tokens before it as context. A
    decoder may treat the first token of a text differently, so the context stays in front. NOTE:
    the library's own DecodeStream raises on bytes that are no text, as random weights write.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # tokens in front, with their text out

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        if self._tokenizer is None:
            return f"{token} "
        self._ids.append(token)
        text = self.rest()
        if not text or text.endswith(UNFINISHED):
            return ""
        del self._ids[: self._context]
        self._context = len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text that is not out yet, as it is."""
        if self._tokenizer is None:
            return ""
        out = self._tokenizer.decode(self._ids[: self._context])
        whole: str = self._tokenizer.decode(self._ids)
        return whole[len(out) :]


class StopStrings:
    """Cuts a text where the first of some strings begins; holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._kept = max(map(len, strings), default=1) - 1
        self._held = ""

    def push(self, text: str, *, ends: bool = False) -> tuple[str, bool]:
        """Return the text that is certain, all of it at the end, and whether a string cuts it."""
        self._held += text
        begins = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if begins:
            return self._held[: min(begins)], True
        certain = len(self._held) if ends else max(len(self._held) - self._kept, 0)
        out, self._held = self._held[:certain], self._held[certain:]
        return out, False


def end_ids(folder: Path) -> frozenset[int]:
    """Return the end-of-sequence tokens that a Hugging Face folder names, if it names some."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        with _readable(path):
            values: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            if (end := values.get("eos_token_id")) is not None:
                return frozenset(end if isinstance(end, list) else [end])
    return frozenset()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, OSError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot read it: {error}") from None
