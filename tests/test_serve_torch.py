"""A server with torch workers: what a client gets is what transformers' `generate` gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'evenflow[torch]'")

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


def test_clients_get_the_tokens_of_transformers(served: tuple[Server, list[list[int]]]) -> None:
    server, expected = served
    answer = server.client().completions.create(
        model=server.model,
        prompt=PROMPTS,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert [choice.text for choice in answer.choices] == [words(tokens) for tokens in expected]
    assert answer.usage.completion_tokens == NEW_TOKENS * len(PROMPTS)


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
