"""`evenflow serve` as a process of its own, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from evenflow.runtime.emulated import emulated_token
from tests.command_line import evenflow
from tests.serving import Server, expected_tokens, httpx, openai, serving

limits = pytest.importorskip("evenflow.web")
HEAD = {"content-type": "application/json"}


BEGUN = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HALVES = (b"", BEGUN[:9], BEGUN, BEGUN + b'content-length: 99\r\n\r\n{"prompt": [1')


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for many tests; ended by Ctrl-C once, it has written down all they did.

    Clients that send half a request, and stay, keep nobody waiting, nor the end.
    """
    with serving("--allowed-host", "its.name") as found, ExitStack() as stack:
        address = urlsplit(found.url)
        for index in range(40):
            half = socket.create_connection((address.hostname, address.port))
            stack.enter_context(half).sendall(HALVES[index % len(HALVES)])
        yield found
        half = socket.create_connection((address.hostname, address.port))
        stack.enter_context(half).sendall(HALVES[-1])  # the others' time may be over by now
        status, errors = found.interrupted()
        assert status == 0, errors
        assert errors == ""
        real = found.summary()["real_run"]
        assert (real["failure"], real["unfinished"]) == (None, 0)
        assert real["free_pages"] == real["total_pages"] == 400
        assert real["aborted"] == found.statuses().count("aborted")
        assert evenflow("replay", str(found.out))[0] == 0


async def stream(
    client: Any, index: int, max_tokens: int, leave_after: int | None = None
) -> tuple[str, int, str, Any, Any]:
    """Stream one request; return its id, prompt length, text, finish reason and usage."""
    prompt = [7] * (5 + 11 * index % 90)
    answer = await client.completions.create(
        model="evenflow",
        prompt=prompt,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reason, counts, chunks = "", None, None, 0
    async for chunk in answer:
        chunks += 1
        if chunk.choices:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        counts = chunk.usage or counts
        if chunks == leave_after:
            await answer.close()
            break
    return chunk.id, len(prompt), text, reason, counts


async def stream_all(server: Server, max_tokens: int, leave_after: int) -> list[Any]:
    """Stream 32 requests at once; every other one leaves, long before its last token."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        leaves = [leave_after if index % 2 else None for index in range(32)]
        limits = [900 if leave else max_tokens + index for index, leave in enumerate(leaves)]
        calls = (
            stream(client, i, *pair) for i, pair in enumerate(zip(limits, leaves, strict=True))
        )
        return await asyncio.gather(*calls)


def test_32_clients_get_their_own_tokens_and_where_half_leave_all_pages_are_free(
    server: Server,
) -> None:
    before = server.metrics()
    answers = asyncio.run(stream_all(server, 20, leave_after=3))
    assert len({answer[0] for answer in answers}) == 32
    for index, (number, prompt, text, reason, counts) in enumerate(answers):
        stayed = not index % 2
        assert text == expected_tokens(number, prompt, 20 + index if stayed else 3)
        assert reason == ("length" if stayed else None)
        if stayed:
            assert (counts.prompt_tokens, counts.completion_tokens) == (prompt, 20 + index)
    after = drained(server)
    gone = "vllm:request_success_totalabort"
    assert after[gone] - before[gone] == 16
    assert after["evenflow:kv_pages_free"] == after["evenflow:kv_pages_total"] == 400
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_metrics_have_the_types_and_histograms_that_dashboards_ask_for(server: Server) -> None:
    server.complete(prompt=[[1]] * 4, max_tokens=2)
    lines = server.http.get("/metrics").text.splitlines()
    labels = f'engine="0",model_name="{server.model}"'
    for name, kind in {
        "vllm:num_requests_running": "gauge",
        "vllm:prompt_tokens_total": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
    }.items():
        assert f"# TYPE {name} {kind}" in lines
        assert any(line.startswith(f"# HELP {name} ") for line in lines)
    whole = "vllm:e2e_request_latency_seconds"
    counts = [float(line.split()[-1]) for line in lines if line.startswith(f"{whole}_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] >= 4
    assert f"{whole}_count{{{labels}}} {counts[-1]}" in lines


def drained(server: Server) -> dict[str, float]:
    limit_s = time.monotonic() + 20
    while time.monotonic() < limit_s:
        now = server.metrics()
        if not now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]:
            return now
        time.sleep(0.02)
    raise AssertionError(now)


def test_a_client_that_does_not_stream_and_leaves_is_aborted_too(server: Server) -> None:
    gone = "vllm:request_success_totalabort"
    before = server.metrics()[gone]
    body, limits = {"prompt": [1], "max_tokens": 900}, httpx.Timeout(20, read=0.3)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=limits)
    limit_s = time.monotonic() + 20
    while server.metrics()[gone] == before and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert server.metrics()[gone] == before + 1
    assert drained(server)["evenflow:kv_pages_free"] == 400


def test_counts_with_each_chunk_as_guidellm_asks_for_them(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.client().completions.create(
        model="evenflow", prompt=[1, 2], max_tokens=3, stream=True, stream_options=options
    )
    counts = [(c.usage.prompt_tokens, c.usage.completion_tokens, len(c.choices)) for c in chunks]
    assert counts == [(2, 1, 1), (2, 2, 1), (2, 3, 1), (2, 3, 0)]


def test_several_prompts_in_one_call(server: Server) -> None:
    answer = server.client().completions.create(
        model="evenflow", prompt=[[1, 2, 3], [4], [5, 6]], max_tokens=4, temperature=0
    )
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == 6
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        assert choice.text == expected_tokens(
            answer.id, 3 - 2 * (index > 0) + (index > 1), 4, index
        )


def test_a_stop_string_ends_a_request_before_its_limit(server: Server) -> None:
    client = server.client()
    first = client.completions.create(model="evenflow", prompt=[1], max_tokens=1)
    following = int(first.id.removeprefix("cmpl-")) + 1
    third = emulated_token(following, 3)
    answer = client.completions.create(
        model="evenflow", prompt=[1], max_tokens=500, stop=[f" {third} ", "x"]
    )
    assert answer.id == f"cmpl-{following}"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == expected_tokens(answer.id, 1, 2).rstrip()
    assert answer.usage.completion_tokens == 3


def test_models_and_health(server: Server) -> None:
    (entry,) = server.client().models.list().data
    assert (entry.id, entry.object, entry.max_model_len) == ("evenflow", "model", 1000)
    assert entry.owned_by == "evenflow (emulated)"
    assert entry.root == "evenflow", "vLLM's benchmark asks for it"
    assert server.http.get("/health").status_code == 200


NO_PROMPT = "prompt: a string, a list of token ids, or a list of such prompts is right"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": 10**9}, "max_tokens", "1000000001 tokens exceed max_model_len 1000"),
        ({"prompt": [1] * 900, "max_tokens": 101}, "max_tokens", "1001 tokens exceed max_model_"),
        ({"prompt": [[1], [1] * 999], "max_tokens": 9}, "max_tokens", "1008 tokens exceed"),
        ({"prompt": [1] * 999, "max_tokens": 9, "stream": True}, "max_tokens", "1008 tokens excee"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: Input should be greater than or equal"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens: "),
        ({"max_tokens": "9"}, "max_tokens", "max_tokens: "),
        ({"n": 2}, "n", "n: Input should be 1"),
        ({"logprobs": 1}, "logprobs", "logprobs: Input should be null"),
        ({"echo": True}, "echo", "echo: Input should be False"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias: "),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty: Input should be less"),
        ({"tools": []}, "tools", "tools: "),
        ({"guided_json": "{}"}, "guided_json", "guided_json: is not supported"),
        ({"top_k": 10**30}, "top_k", "top_k: "),
        ({"priority": 1}, "priority", "priority: is not supported"),
        ({"top_p": 0}, "top_p", "top_p: Input should be greater than 0"),
        ({"temperature": -1}, "temperature", "temperature: Input should be greater than or equal"),
        ({"seed": 2**70}, "seed", "seed: "),
        ({"stop": list("abcde")}, "stop", "stop: "),
        ({"stop": ["a", ""]}, "stop", "stop.1: String should have at least 1 character"),
        ({"model": 5}, "model", "model: "),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_opt", "stream_opt"),
        ({"prompt": "text"}, "prompt", "prompt: text needs a tokenizer.json"),
        ({"prompt": []}, "prompt", "prompt: is empty"),
        ({"prompt": [1, -1]}, "prompt", NO_PROMPT),
        ({"prompt": {"a": 1}}, "prompt", NO_PROMPT),
        ({"prompt": [[1], ["a"]]}, "prompt", NO_PROMPT),
        ({"prompt": [True]}, "prompt", NO_PROMPT),
        ({"prompt": None}, "prompt", "prompt: Field required"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_the_parameter(
    server: Server, body: dict[str, Any], param: str, words: str
) -> None:
    content = json.dumps({"prompt": [1]} | body)
    answer = server.http.post("/v1/completions", content=content, headers=HEAD)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert error["message"].startswith(param) or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', 400),
        (b"\x00\x01", 400),
        (b"", 400),
        (b"[]", 400),
        (b'{"prompt": [1], "temperature": NaN}', 400),
        (b'{"prompt": [1], "temperature": 1e999}', 400),
        (b'{"a":' * 20_000, 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": [1], "stop": ["a", "\\udfff"]}', 400),
        (b'{"\\ud800": 1}', 400),
        (b'{"prompt": "' + b"a" * limits.MOST_BODY_BYTES + b'"}', 413),
    ],
    ids=lambda value: str(value[:20]) if isinstance(value, bytes) else "",
)
def test_a_body_that_is_none(server: Server, content: bytes, status: int) -> None:
    answer = server.http.post("/v1/completions", content=content, headers=HEAD)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert error["message"].isprintable()


@pytest.mark.parametrize(
    ("form", "status"),
    [
        *(("application/json", 200), ("Application/JSON; charset=utf-8", 200)),
        *(("text/plain", 415), ("application/x-www-form-urlencoded", 415), (None, 415)),
    ],
)
def test_a_page_of_another_site_cannot_post_as_a_form(
    server: Server, form: str | None, status: int
) -> None:
    headers = {} if form is None else {"content-type": form}
    content = b'{"prompt": [1], "max_tokens": 1}'
    answer = server.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert status == 200 or "application/json is right" in answer.json()["error"]["message"]


def test_a_body_that_is_announced_too_long_is_not_waited_for(server: Server) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(BEGUN + b"content-length: 99999999999\r\n\r\n{")
        assert b" 413 " in client.recv(4096).splitlines()[0]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("evil.example", 400), ("evil.example:80", 400), ("10.0.0.1", 400), ("[::1", 400)),
        *(("localhost:1", 200), ("127.0.0.1:5", 200), ("[::1]:8000", 200), ("Its.Name:5", 200)),
    ],
)
def test_who_calls_the_server_by_a_stranger_s_name_is_refused(
    server: Server, host: str, status: int
) -> None:
    answer = server.http.get("/health", headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize(("way", "path"), [("GET", "/v1/engines"), ("GET", "/v1/completions")])
def test_an_unknown_path_says_what_exists(server: Server, way: str, path: str) -> None:
    told = server.http.request(way, path).json()["error"]["message"]
    assert told.startswith(f"{way} {path}: ")
    for there in ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"):
        assert there in told


def test_openai_s_client_raises_what_it_should(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="no gpt-4; the model here is evenflow"):
        client.completions.create(model="gpt-4", prompt=[1])
    with pytest.raises(openai.BadRequestError, match="exceed max_model_len 1000") as error:
        client.completions.create(model="evenflow", prompt=[1], max_tokens=5000)
    assert error.value.code == "context_length_exceeded"
    answer = server.http.post("/v1/completions", content="{", headers=HEAD)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is no JSON: EOF")
    chats = {"model": "evenflow", "messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(openai.BadRequestError, match="a chat needs the model's chat template"):
        client.chat.completions.create(**chats)
