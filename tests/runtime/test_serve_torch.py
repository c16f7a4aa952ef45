"""A server with torch workers: what a client gets is what transformers' `generate` gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")

from tests.serving import Server, openai, serving
from tests.tiny_models import SHAPE, continued, save_checkpoint

VOCABULARY = SHAPE["vocab_size"]
PROMPTS = [
    [(3 + 5 * row + 7 * place) % VOCABULARY for place in range(4 + 9 * row)] for row in range(4)
]
NEW_TOKENS = 12


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json whose token n is the word "wn"."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}w3"
    values = {"chat_template": template, "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[tuple[Server, list[list[int]]]]:
    folder = tmp_path_factory.mktemp("llama")
    model = save_checkpoint(folder, "llama")
    expected = [continued(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    save_tokenizer(folder)
    for path in (folder / "config.json", folder / "generation_config.json"):
        values = json.loads(path.read_text()) | {"eos_token_id": [expected[1][4]]}
        path.write_text(json.dumps(values))
    run = f"""\
model: {folder}
stages: 2
costs: {{kind: affine, base_s: 0.001, per_token_s: 1e-5}}
kv: {{pages: 64, page_tokens: 4}}
workers: {{kind: torch, transport: one_process}}
scheduler: {{name: sarathi, token_budget: 16}}
"""
    with serving(run=run) as server:
        yield server, expected
        status, errors = server.interrupted()
        assert (status, server.summary()["real_run"]["free_pages"]) == (0, 64), errors


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_a_prompt_as_text_is_its_tokens_and_the_end_token_ends_it(
    served: tuple[Server, list[list[int]]],
) -> None:
    server, expected = served
    end = expected[1].index(expected[1][4])
    answer = server.client().completions.create(
        model=server.model, prompt=words(PROMPTS[1]), max_tokens=NEW_TOKENS, temperature=0
    )
    assert answer.choices[0].text == words(expected[1][:end])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == end + 1
    assert answer.usage.prompt_tokens == len(PROMPTS[1])


def test_requests_of_the_form_of_vllm_s_benchmark(served: tuple[Server, list[list[int]]]) -> None:
    server, expected = served
    body = {
        "model": server.model,
        "prompt": words(PROMPTS[2]),
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": NEW_TOKENS,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    lines = [line for line in server.complete(**body).text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(chunks) == NEW_TOKENS
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == words(expected[2])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], NEW_TOKENS)


def test_a_seed_gives_the_same_draws_again(served: tuple[Server, list[list[int]]]) -> None:
    server, expected = served
    client = server.client()

    def draw(**more: Any) -> str:
        answer = client.completions.create(
            model=server.model,
            prompt=PROMPTS[0],
            max_tokens=NEW_TOKENS,
            temperature=3.0,
            extra_body={"ignore_eos": True},
            **more,
        )
        return str(answer.choices[0].text)

    assert draw(seed=5) == draw(seed=5)
    assert len({draw(seed=5), draw(seed=6), draw(), draw(), words(expected[0])}) == 5


def test_a_token_that_the_model_does_not_know_is_refused(
    served: tuple[Server, list[list[int]]],
) -> None:
    server, _ = served
    with pytest.raises(openai.BadRequestError, match="token 97 is none: the model has 97"):
        server.client().completions.create(model=server.model, prompt=[1, 97], max_tokens=1)


def test_a_chat_is_answered_as_its_template_s_text_is(
    served: tuple[Server, list[list[int]]],
) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[chat]'")
    pytest.importorskip("jinja2")
    server, _ = served
    client, how = server.client(), {"temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(model=server.model, prompt="w5 w9 w3", max_tokens=6, **how)
    messages = [
        {"role": "system", "content": "w5"},
        {"role": "user", "content": [{"type": "text", "text": "w9"}]},
    ]
    asked = {"model": server.model, "messages": messages, **how}
    whole = client.chat.completions.create(max_completion_tokens=6, **asked)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == text.choices[0].text
    assert whole.usage == text.usage
    assert whole.object == "chat.completion"
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        max_tokens=6, stream=True, stream_options=options, **asked
    )
    opening, *chunks, last = list(stream)
    assert (opening.choices[0].delta.role, opening.choices[0].delta.content) == ("assistant", "")
    assert "".join(each.choices[0].delta.content for each in chunks) == text.choices[0].text
    assert [each.choices[0].finish_reason for each in chunks] == [None] * 5 + ["length"]
    assert (last.choices, last.usage) == ([], text.usage)
    assert {each.object for each in (opening, *chunks, last)} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.conte"),
        ({"tools": [{"type": "function"}]}, "tools: is not supported"),
        ({"logprobs": True}, "logprobs: Input should be False"),
        ({"prompt": "w1"}, "prompt: is not supported"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ],
)
def test_a_chat_that_cannot_be_served_is_a_400_that_names_the_parameter(
    served: tuple[Server, list[list[int]]], body: dict[str, Any], words: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "w1"}]} if "messages" not in body else {}
    asked = {} if not body else {"max_tokens": 2} | chat | body
    answer = served[0].http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)
