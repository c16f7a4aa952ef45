"""The wire format of OpenAI's completions: what a client may ask, and what it is answered.

Knows no requests that are being served. A parameter that would change an answer and is not
supported is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from runtime.http.answers import Generation, Piece, ServiceError
from runtime.http.text import Codec

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
SEEDS = 2**63


class StreamOptions(BaseModel):
    """What a stream has beside text; `include_usage` adds a last chunk with the token counts.

    With `continuous_usage_stats`, which is vLLM's, each chunk has those so far.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionRequest(BaseModel):
    """The body of /v1/completions. `ignore_eos` and `top_k` are as vLLM has them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] = 16
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = 0
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        left = {name: value for name, value in data.items() if value is not None}
        for name in left.keys() & WITHOUT_EFFECT.keys():
            values = WITHOUT_EFFECT[name]
            if left[name] not in values:
                right = f"only {values[-1]} is" if values[-1] is not None else "it is not"
                raise PydanticCustomError(
                    "unsupported", "{name}: {right} supported", {"name": name, "right": right}
                )
            del left[name]
        return left

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
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

    def generations(self, codec: Codec, rng: np.random.Generator) -> list[Generation]:
        """Return what is asked of each prompt; ServiceError for a prompt that cannot be read.

        Without a seed, one is drawn.
        """
        seed = int(rng.integers(SEEDS)) if self.seed is None else self.seed
        return [
            Generation(
                prompt_ids=ids,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_k=max(self.top_k, 0),
                top_p=self.top_p,
                seed=seed,
                stop=self.stop_strings,
                ignore_eos=self.ignore_eos,
            )
            for ids in self._prompt_ids(codec)
        ]

    def _prompt_ids(self, codec: Codec) -> list[list[int]]:
        prompts: Sequence[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not prompts:
            raise ServiceError("prompt: is empty", 400, param="prompt")
        prompt_ids: list[list[int]] = []
        for prompt in prompts:
            ids = _encoded(codec, prompt) if isinstance(prompt, str) else prompt
            if ids is None:
                raise ServiceError(
                    "prompt: text needs a tokenizer.json, in the model's folder or given to the "
                    "server with --tokenizer; a list of token ids is right without one",
                    400,
                    param="prompt",
                )
            if not ids:
                raise ServiceError("prompt: is empty", 400, param="prompt")
            if codec.vocab_size is not None and max(ids) >= codec.vocab_size:
                words = f"token {max(ids)} is none: the model has {codec.vocab_size}, from 0 on"
                raise ServiceError(f"prompt: {words}", 400, param="prompt")
            prompt_ids.append(list(ids))
        return prompt_ids


def _encoded(codec: Codec, text: str) -> list[int] | None:
    """Return the token ids of a prompt; ServiceError for half a character, which JSON can say."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"prompt: no text: {error.reason} at {error.start}"
        raise ServiceError(message, 400, param="prompt") from None
    return codec.encode(text)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the token counts of a call."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion(head: Mapping[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the body of an answer, or a chunk of a stream, under `head`: id, created, model."""
    choices = [
        {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        for piece in pieces
    ]
    return {**head, "object": "text_completion", "choices": choices}


def error_body(error: ServiceError) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": told}
