"""The wire format of OpenAI's completions and chats: requests and answers.

Knows no requests that are being served. A parameter that would change an answer and is not
supported is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from evenflow.errors import UsageError
from evenflow.runtime.http.answers import Delta, Generation, ServiceError
from evenflow.runtime.http.text import Codec

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
}
"""Parameters that are known and not supported, and the values with which they change nothing."""

TokenId = Annotated[int, Field(ge=0, strict=True)]
MOST_STOP_STRINGS = 4
MOST = 10**9
"""Of tokens, or of choices for one: above it is a slip, and results count in machine words."""
MaxTokens = Annotated[int, Field(ge=1, le=MOST)]
SEEDS = 2**63


WITHOUT_EFFECT_IN_CHATS: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
}
"""The same of chats only."""


class Strict(BaseModel):
    """A model that refuses unknown parameters, and text in place of numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Options of a stream; `include_usage` adds a last chunk with the token counts.

    With `continuous_usage_stats`, which is vLLM's, each chunk has those so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionBody(Strict):
    """The parameters that both kinds of call share.

    `ignore_eos`, `top_k` and `priority` are as vLLM has them. An answer's id begins with `prefix`;
    `names` are those of a whole answer and of a chunk of a stream. `opening`: what a choice of a
    stream begins with, None: nothing.
    """

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = WITHOUT_EFFECT
    prefix: ClassVar[str]
    names: ClassVar[tuple[str, str]]
    opening: ClassVar[dict[str, Any] | None] = None

    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = 0
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            _require_text(name, value)
        left = {name: value for name, value in data.items() if value is not None}
        for name in left.keys() & cls.without_effect.keys():
            values = cls.without_effect[name]
            if left[name] not in values:
                right = f"only {values[-1]} is" if values[-1] is not None else "it is not"
                raise PydanticCustomError(
                    "unsupported", "{name}: {right} supported", {"name": name, "right": right}
                )
            del left[name]
        return left

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("unsupported", "stream_options: only with stream: true")
        if not all(self.stop_strings) or len(self.stop_strings) > MOST_STOP_STRINGS:
            raise PydanticCustomError(
                "unsupported", "stop: up to four strings, none of them empty, are supported"
            )
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def generations(
        self, prompts: Sequence[list[int]], rng: np.random.Generator, max_model_len: int
    ) -> list[Generation]:
        """Return the generation of each prompt, in token ids. Without a seed, one is drawn."""
        seed = int(rng.integers(SEEDS)) if self.seed is None else self.seed
        return [
            Generation(
                prompt_ids=ids,
                max_tokens=self.most_tokens(max_model_len - len(ids)),
                temperature=self.temperature,
                top_k=max(self.top_k, 0),
                top_p=self.top_p,
                seed=seed,
                stop=self.stop_strings,
                ignore_eos=self.ignore_eos,
                priority=self.priority,
            )
            for ids in prompts
        ]

    def answer(
        self, head: Mapping[str, Any], pieces: Sequence[Delta], *, whole: bool
    ) -> dict[str, Any]:
        """Return an answer, `whole` or a chunk of a stream, under `head`: id, created, model."""
        choices = [_choice(piece, self.holds(piece.text, whole=whole)) for piece in pieces]
        return {**head, "object": self.names[not whole], "choices": choices}

    def first(self, head: Mapping[str, Any], choice: int) -> dict[str, Any] | None:
        """Return the chunk with which a choice of a stream begins; None where it has none."""
        if self.opening is None:
            return None
        choices = [_choice(Delta(choice, "", None), self.opening)]
        return {**head, "object": self.names[1], "choices": choices}

    def holds(self, text: str, *, whole: bool) -> dict[str, Any]:
        """Return the fields of a choice that hold a text."""
        return {"text": text}

    def most_tokens(self, room: int) -> int:
        """Return the limit on an answer's tokens; `room` is how many the model has left."""
        raise NotImplementedError

    def prompt_ids(self, codec: Codec) -> list[list[int]]:
        """Return the token ids of each prompt; ServiceError for one that cannot be read."""
        raise NotImplementedError


def _choice(piece: Delta, holds: Mapping[str, Any]) -> dict[str, Any]:
    reason = {"logprobs": None, "finish_reason": piece.finish_reason}
    return {"index": piece.choice, **holds, **reason}


class CompletionRequest(CompletionBody):
    """The body of /v1/completions."""

    prefix = "cmpl"
    names = ("text_completion", "text_completion")

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]

    def most_tokens(self, room: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def prompt_ids(self, codec: Codec) -> list[list[int]]:
        prompts: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not prompts:
            raise ServiceError("prompt: is empty", 400, param="prompt")
        prompt_ids: list[list[int]] = []
        for prompt in prompts:
            ids = codec.encode(prompt) if isinstance(prompt, str) else prompt
            if ids is None:
                raise ServiceError(
                    "prompt: text needs a tokenizer.json, in the model's folder or given to the "
                    "server with --tokenizer; a list of token ids is right without one",
                    400,
                    param="prompt",
                )
            _check_ids(codec, ids, "prompt")
            prompt_ids.append(list(ids))
        return prompt_ids


class TextPart(Strict):
    """A part of a message that is text; pictures and sounds are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message of a chat; the template says which roles there are."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message as a template reads it: its parts as one text, joined as vLLM joins them."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(CompletionBody):
    """The body of /v1/chat/completions; without a limit an answer may fill what the model has."""

    without_effect = {**WITHOUT_EFFECT, **WITHOUT_EFFECT_IN_CHATS}
    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")
    opening = {"delta": {"role": "assistant", "content": ""}}

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None

    def holds(self, text: str, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text}}
        return {"delta": {"content": text}}

    def most_tokens(self, room: int) -> int:
        asked = self.max_completion_tokens or self.max_tokens
        return max(room, 1) if asked is None else asked

    def prompt_ids(self, codec: Codec) -> list[list[int]]:
        try:
            ids = codec.chat([message.plain for message in self.messages])
        except UsageError as error:
            raise ServiceError(f"messages: {error}", 400, param="messages") from None
        _check_ids(codec, ids, "messages")
        return [ids]


def _check_ids(codec: Codec, ids: Sequence[int], param: str) -> None:
    if not ids:
        raise ServiceError(f"{param}: is empty", 400, param=param)
    if codec.vocab_size is not None and max(ids) >= codec.vocab_size:
        words = f"token {max(ids)} is none: the model has {codec.vocab_size}, from 0 on"
        raise ServiceError(f"{param}: {words}", 400, param=param)


def _require_text(name: str, value: object) -> None:
    """Raise for half a character, which JSON can say and no text has, anywhere in a parameter."""
    told = {"name": ascii(name)[1:-1]}
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "unsupported", "{name}: half a character is no text", told
        ) from None
    except RecursionError:
        raise PydanticCustomError("unsupported", "{name}: is nested too deeply", told) from None


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the token counts of a call."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(error: ServiceError) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}
