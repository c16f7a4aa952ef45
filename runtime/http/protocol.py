"""The wire format of OpenAI's completions and chats: requests and answers.

Knows no requests that are being served. A parameter that would change an answer and is not
supported is refused, never ignored. Of those, only values that change nothing are in the models.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from evenflow.errors import UsageError
from evenflow.runtime.http.text import Codec
from evenflow.runtime.wire import Draw

MOST = 10**9
"""Of tokens, or of choices for one: above it is a slip, and results count in machine words."""
SEEDS = 2**63

TokenId = Annotated[int, Field(ge=0)]
MaxTokens = Annotated[int, Field(ge=1, le=MOST)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=4),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class ServiceError(Exception):
    """A refusal of a request, with OpenAI's code, the HTTP status and the wrong `param`."""

    def __init__(
        self, message: str, status: int, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Delta(NamedTuple):
    """A token's addition to the answer number `choice`; `finish_reason` with the last one."""

    choice: int
    text: str
    finish_reason: str | None


class Strict(BaseModel):
    """A model that refuses unknown parameters, and text in place of numbers; null is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        is_body = isinstance(data, dict)
        return {k: v for k, v in data.items() if v is not None} if is_body else data


class StreamOptions(Strict):
    """Options of a stream: token counts in a last chunk, or (vLLM's option) in all chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionBody(Strict):
    """The parameters that both kinds of call share; `ignore_eos` and `top_k` are vLLM's.

    An answer's id begins with `prefix`. `names` are those of a whole answer and of a chunk of a
    stream. `prompts_are` is the parameter with the prompts.
    """

    prefix: ClassVar[str]
    prompts_are: ClassVar[str]
    names: ClassVar[tuple[str, str]]

    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST)] = 0
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    user: str | None = None

    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    repetition_penalty: One = 1
    min_p: Zero = 0

    def draw(self, request_id: int) -> Draw | None:
        """Return how a request's tokens are drawn, None: greedily; without a seed, by any."""
        seed = random.randrange(SEEDS) if self.seed is None else self.seed
        how = self.temperature, max(self.top_k, 0), self.top_p, seed
        return Draw(request_id, *how) if self.temperature else None

    def answer(
        self, head: Mapping[str, Any], pieces: Sequence[Delta], *, whole: bool
    ) -> dict[str, Any]:
        """Return an answer, `whole` or a chunk of a stream, under `head`: id, created, model."""
        choices = [
            {
                "index": piece.choice,
                **self.holds(piece.text, whole=whole),
                "logprobs": None,
                "finish_reason": piece.finish_reason,
            }
            for piece in pieces
        ]
        return {**head, "object": self.names[not whole], "choices": choices}

    def opening(self, head: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the chunk with which a stream begins, if it has one."""
        return None

    def holds(self, text: str, *, whole: bool) -> dict[str, Any]:
        """Return the fields of a choice that hold a text."""
        return {"text": text}

    def most_tokens(self, room: int) -> int:
        """Return the limit on an answer's tokens; `room` is how many the model has left."""
        return max(room, 1) if self.max_tokens is None else self.max_tokens

    def prompt_ids(self, codec: Codec) -> list[list[int]]:
        """Return the token ids of each prompt; ServiceError for one that cannot be read."""
        try:
            prompts = self.encoded(codec)
            codec.check(prompts)
        except UsageError as error:
            param = self.prompts_are
            raise ServiceError(f"{param}: {error}", 400, param=param) from None
        return prompts

    def encoded(self, codec: Codec) -> list[list[int]]:
        """Return the token ids of each prompt; UsageError if the codec has none for it."""
        raise NotImplementedError


class CompletionRequest(CompletionBody):
    """The body of /v1/completions."""

    prefix = "cmpl"
    prompts_are = "prompt"
    names = ("text_completion", "text_completion")

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: MaxTokens | None = 16
    logprobs: None = None

    def encoded(self, codec: Codec) -> list[list[int]]:
        prompts: Any = self.prompt
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        return [codec.encode(each) if isinstance(each, str) else each for each in prompts]


class TextPart(Strict):
    """A part of a message that is text; pictures and sounds are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message of a chat; the template says which roles there are."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart]

    @property
    def plain(self) -> dict[str, str]:
        """The message as a template reads it: its parts as one text, joined as vLLM joins them."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(CompletionBody):
    """The body of /v1/chat/completions; without a limit an answer may fill what the model has."""

    prefix = "chatcmpl"
    prompts_are = "messages"
    names = ("chat.completion", "chat.completion.chunk")

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: Literal[False] = False

    def opening(self, head: Mapping[str, Any]) -> dict[str, Any]:
        chunk = self.answer(head, [Delta(0, "", None)], whole=False)
        chunk["choices"][0]["delta"]["role"] = "assistant"
        return chunk

    def holds(self, text: str, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text}}
        return {"delta": {"content": text}}

    def most_tokens(self, room: int) -> int:
        return self.max_completion_tokens or super().most_tokens(room)

    def encoded(self, codec: Codec) -> list[list[int]]:
        return [codec.chat([message.plain for message in self.messages])]


def first_of(error: ValidationError) -> ServiceError:
    """Return the first thing that is wrong with a body, and where."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ServiceError(f"the body is no JSON: {first['ctx']['error']}", 400)
    where, words = ".".join(map(str, first["loc"])), first["msg"]
    if first["type"] == "extra_forbidden":
        words = "is not supported"
    elif where.startswith("prompt") and first["type"] != "missing":
        where = "prompt"
        words = "a string, a list of token ids, or a list of such prompts is right"
    return ServiceError(f"{where}: {words}" if where else words, 400, param=where or None)
