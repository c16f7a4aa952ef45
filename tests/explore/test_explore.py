"""The page of `explore`: what it may ask, what it is told, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shlex
from base64 import b64decode
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from evenflow.config.yaml_file import assign, document_of, value_of
from evenflow.errors import UsageError
from evenflow.explore.document import Given, edited, given
from evenflow.explore.workers import WorkerPool, lines_of
from tests.command_line import RUN, complaint, done, table
from tests.places import ROOT

server = pytest.importorskip("evenflow.explore.server")
TestClient = pytest.importorskip("starlette.testclient").TestClient

WORKLOAD = {"trace": "sharegpt-sample", "requests": 60, "arrivals": {"kind": "poisson", "rate": 4}}
SLIDES = "# a short one\n" + RUN.replace("pages: 200}", "pages: 200} # few")


@pytest.fixture
def run(folder: Path) -> Given:
    Path("RUN.yaml").write_text(SLIDES)
    return given(Path("RUN.yaml"), [], "", ["p99_ttft_ms=500"])


def told(run: Given, name: str, question: dict[str, Any], *more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    lines_of(run, (name, question, more), lambda each: found.append(each) if each else None)
    return found


def looked(run: Given, **question: Any) -> dict[str, Any]:
    (message,) = told(run, "look", {"text": run.text, **question})
    return message


# -- the document ----------------------------------------------------------------------------------

SCALARS = st.integers(-5, 5) | st.booleans() | st.sampled_from(["word", "# no", "a: b", "", "null"])
NAMES = st.sampled_from(["kv", "scheduler", "costs", "pages", "name", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@drawn(
    st.dictionaries(NAMES, VALUES, min_size=1),
    st.lists(NAMES, min_size=1, max_size=3),
    VALUES,
    st.booleans(),
)
def test_a_text_in_which_a_key_is_set_says_that_and_nothing_else(
    data: dict[str, Any], keys: list[str], value: Any, flow: bool
) -> None:
    text = "# first\n" + yaml.safe_dump(data, default_flow_style=flow)
    document = document_of(text, "RUN.yaml")
    try:
        wanted = assign(document, keys, value, "here").data
    except UsageError:  # below a number there are no keys
        with pytest.raises(UsageError):
            edited(text, ".".join(keys), value)
    else:
        assert document_of(edited(text, ".".join(keys), value), "RUN.yaml").data == wanted


def test_a_slider_changes_its_key_and_leaves_comments(run: Given) -> None:
    document = looked(run, set={"kv.pages": 300, "scheduler.watermark": 0.05})["document"]
    assert document["text"] == SLIDES.replace("200} # few", "300} # few").replace(
        "token_budget: 64}", "token_budget: 64, watermark: 0.05}"
    )
    values = {each["key"]: each["value"] for each in document["schedulers"][0]}
    assert values["scheduler.watermark"] == 0.05


def test_the_command_simulates_what_the_page_shows(run: Given) -> None:
    question = {
        "text": run.text,
        "set": {"workload.arrivals.scale": 30, "scheduler.token_budget": 32},
    }
    document = looked(run, **question)["document"]
    runs = [
        each["run"]
        for each in told(run, "simulate", {"text": document["text"]}, 0)
        if "run" in each
    ]
    assert (runs[-1]["requests"], runs[-1]["of"]) == (20, 20)
    done(*shlex.split(document["command"])[1:], "--out", "out")
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["mean_ttft_ms"] > 50
    for key, value in runs[-1]["summary"].items():
        if key != "request_goodput":  # within the limits of --slo, which a summary does not know
            assert value == pytest.approx(summary[key])


def test_another_scheduler_starts_with_its_own_parameters(run: Given) -> None:
    document = looked(run, set={"scheduler.name": "token_throttling"})["document"]
    assert "scheduler: {name: token_throttling}\n" in document["text"]
    assert told(run, "simulate", {"text": document["text"]}, 0)[-1]["run"]["requests"] == 20


def test_sides_have_schedulers_of_their_own(folder: Path) -> None:
    run = given(Path("RUN.yaml"), [], "sarathi,{name: vllm_v1, max_num_seqs: 8}", [])
    question = {"others": run.question.others, "set": {"others.0.max_num_seqs": 16}}
    document = looked(run, **question)["document"]
    assert document["others"] == [{"name": "vllm_v1", "max_num_seqs": 16}]
    assert "token_budget: 64" in document["text"]
    assert {each["key"] for each in document["schedulers"][1]} >= {"others.0.max_num_seqs"}
    other = json.dumps({"name": "vllm_v1", "max_num_seqs": 16})
    assert shlex.split(document["command"])[-1] == f"sarathi,{other}"
    question |= {"set": {"others.0.name": "orca"}}
    assert looked(run, **question)["document"]["others"] == [{"name": "orca"}]


def test_the_command_has_equal_sides_once_and_defaults_beside_parameters(folder: Path) -> None:
    def command(schedulers: str) -> list[str]:
        run = given(Path("RUN.yaml"), [], schedulers, [])
        document = looked(run, others=run.question.others)["document"]
        return shlex.split(document["command"])

    equal = command("sarathi,{name: sarathi, token_budget: 64}")
    assert equal == ["evenflow", "simulate", "RUN.yaml"]
    assert command("sarathi,vllm,vllm")[-1] == "sarathi,vllm"
    words = command("sarathi,sarathi")
    assert words[-1] == 'sarathi,{"name": "sarathi"}'
    done(*words[1:], "--out", "out")
    assert Path("out/sarathi-defaults/summary.json").exists()


def test_sides_are_simulated_as_the_command_compares_them(folder: Path) -> None:
    Path("RUN.yaml").write_text(
        "model: Llama-3.1-8B\ngpu: H100\nstages: 2\nscheduler: vllm_v1\n"
        "workload: {trace: azure-conv-sample, requests: 20, arrivals: {kind: poisson, rate: 8}}\n"
    )
    run = given(Path("RUN.yaml"), [], "vllm_v1,sglang", [])
    question = {"text": run.text, "others": run.question.others}
    page = told(run, "simulate", question, 1)[-1]["run"]
    document = looked(run, others=run.question.others)["document"]
    done(*shlex.split(document["command"])[1:], "--out", "out")
    compared = json.loads(Path("out/sglang/summary.json").read_text())
    assert "CPU time vllm-0.19 (default)" in page["setup"]
    assert page["summary"]["mean_ttft_ms"] == pytest.approx(compared["mean_ttft_ms"])


def test_a_mistake_is_told_as_the_command_line_tells_it(run: Given) -> None:
    rows = table((ROOT / "tests" / "mistakes.txt").read_text(encoding="utf-8"))
    simulated = [words for words, _ in rows if words[:2] == ["simulate", "RUN.yaml"]]
    known = [words for words in simulated if len(words) == 4 and "policy_" not in words[3]][::3]
    assert len(known) > 10
    for *_, assignment in known:
        key, _, value = assignment.partition("=")
        try:
            text = edited(run.text, key, value_of(value, key))
        except UsageError:  # it is no YAML that a text could have there
            continue
        question = {"text": text}
        looked_at, simulated = told(run, "look", question), told(run, "simulate", question, 0)
        error = next(each for each in [*looked_at, *simulated] if "error" in each)
        Path("RUN.yaml").write_text(text)
        if "has to be on the command line" not in error["error"]:
            assert error["error"] == complaint("simulate", "RUN.yaml")


HOSTILE = [
    {"model": "/etc/passwd"},
    {"workload.trace": "../../secret.csv"},
    {"workload.trace": "secret.csv"},
    {"workload.trace": "-"},
    {"scheduler": "os:system"},
    {"scheduler": "evil.py:Evil"},
    {"scheduler": {"name": "td_pipe", "predictor": {"kind": "classifier", "path": "secret.csv"}}},
    {"costs": {"kind": "profile", "path": "secret.csv"}},
]


@pytest.mark.parametrize("new", HOSTILE)
def test_a_page_names_no_file_and_no_module(run: Given, new: dict[str, Any]) -> None:
    Path("secret.csv").write_text("arrived_at\n")
    Path("evil.py").write_text("raise SystemExit('imported')")
    before = looked(run)["document"]["text"]
    key, value = next(iter(new.items()))
    for question in ({"set": new}, {"text": edited(before, key, value)}):
        assert "has to be on the command line" in looked(run, **question)["error"]


def test_what_the_command_line_names_is_right_on_the_page(folder: Path) -> None:
    Path("mine.py").write_text(
        "from evenflow import Plan, Prefill\n"
        "from evenflow.schedulers.limits import Range\n"
        "class Mine:\n"
        "    search_space = {'most': Range(1, 8)}\n"
        "    def __init__(self, most: int = 4): self.most = most\n"
        "    def schedule(self, view):\n"
        "        waiting = [Prefill(p.request_id, p.remaining) for p in view.prompts]\n"
        "        return Plan(waiting[: self.most], decodes=view.ready_decodes)\n"
    )
    run = given(Path("RUN.yaml"), [], "mine.py:Mine", [])
    (controls,) = looked(run)["document"]["schedulers"]
    assert [each["key"] for each in controls] == ["scheduler.name", "scheduler.most"]
    question = {"text": run.text, "set": {"scheduler.most": 2}}
    assert told(run, "simulate", question, 0)[-1]["run"]["requests"] == 20


def test_the_link_between_machines_is_chosen_as_the_one_within(folder: Path) -> None:
    keys = ["model=Qwen2.5-32B", "gpu=L20", "stages=4", "costs=roofline", "link=pcie-l20"]
    run = given(Path("RUN.yaml"), [*keys, "nodes={gpus: 2, link: ethernet-10g}"], "", [])
    found = {each["key"]: each for each in looked(run)["document"]["controls"]}
    assert found["nodes.link"]["value"] == "ethernet-10g"
    assert {"ethernet-100g", "ethernet-10g"} <= {*found["nodes.link"]["choices"]}
    assert found["nodes.link"]["words"] == "Between neighbouring machines."
    faster = looked(run, set={"nodes.link": "ethernet-100g"})["document"]["text"]
    assert "nodes: {gpus: 2, link: ethernet-100g}" in faster


# -- pictures --------------------------------------------------------------------------------------


def test_a_first_picture_is_of_the_same_run(folder: Path) -> None:
    run = given(Path("RUN.yaml"), [f"workload={json.dumps(WORKLOAD)}", "kv.pages=2000"], "", [])
    messages = told(run, "simulate", {"text": run.text}, 0)
    first, whole = (each["run"] for each in messages if "run" in each)
    assert (first["requests"], whole["requests"], first["of"]) == (16, 60, 60)
    names = [name for name, *_ in whole["figures"]]
    assert names == [
        "causes",
        "tokens-0",
        "tokens-0-steady",
        *(f"latency-{each}" for each in ("ttft", "tpot", "itl", "e2el")),
        "queue-0",
        "queue-1",
        "kv",
    ]
    ((_, timeline),) = whole["timelines"]
    ids = memoryview(b64decode(timeline["prompt_ids"])).cast("I").tolist()
    assert set(ids) == set(range(60))
    assert sum(memoryview(b64decode(timeline["prompt_counts"])).cast("I")) == len(ids)


def test_a_trace_that_changes_is_read_again(run: Given) -> None:
    text = run.text.replace("sharegpt-sample", "log.csv")
    named = replace(run, text=text, names=run.names | {"log.csv"})
    workload = {"trace": "log.csv", "arrivals": "offline"}
    for requests in (1, 2):
        Path("log.csv").write_text("prompt_tokens,output_tokens\n" + "9,2\n" * requests)
        found = told(named, "simulate", {"text": text, "set": {"workload": workload}}, 0)
        assert found[-1]["run"]["requests"] == requests


def test_a_sweep_of_a_slider_has_an_interval_of_three_seeds(run: Given) -> None:
    question = {"text": run.text.replace("arrivals: replay", "arrivals: {kind: poisson, rate: 9}")}
    (message,) = told(run, "try_value", question, "scheduler.token_budget", 32)
    mean, half = message["point"]["metrics"]["mean_ttft_ms"]
    assert mean > half > 0


# -- the server ------------------------------------------------------------------------------------


async def tells_itself(task: Any) -> AsyncGenerator[bytes]:
    yield json.dumps({"document": {"text": "", "others": [{}]}, "told": task}).encode() + b"\n"


@pytest.fixture
def client(run: Given) -> Any:
    app = server.make_app(run, "secret", tells_itself)
    return TestClient(app, base_url="http://127.0.0.1")


QUESTION = {"question": {"text": "", "others": [], "set": {}}}


def test_only_who_has_the_token_is_answered(client: Any) -> None:
    assert client.get("/").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.post("/simulate", json=QUESTION).status_code == 403
    assert client.post("/sweep", json=QUESTION, headers={"x-token": "secre"}).status_code == 403
    assert client.get("/simulate?token=secret").status_code == 405
    assert client.get("/docs").status_code == 404


def test_the_page_fetches_nothing_from_elsewhere(client: Any) -> None:
    page = client.get("/?token=secret")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(
        r"<(script|img|link|iframe)[^>]*(src|href)=|@import|url\(", page.text.split("<body>")[1]
    )


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"question": 3}', b'{"question": {"text": 3}}', b"[" * 9999]
)
def test_what_is_no_question_is_refused(client: Any, body: bytes) -> None:
    answer = client.post("/simulate", content=body, headers={"x-token": "secret"})
    assert (answer.status_code, answer.text) == (400, "no question of this page; reload it\n")


def test_all_sides_are_simulated_at_once(client: Any) -> None:
    answer = client.post("/simulate", json=QUESTION, headers={"x-token": "secret"})
    tasks = [json.loads(each)["told"] for each in answer.text.splitlines()]
    assert tasks[0] == ["look", QUESTION["question"], []]
    assert sorted(task[2] for task in tasks[1:]) == [[0], [1]]
    sweep = {**QUESTION, "key": "kv.pages", "values": list(range(26))}
    answer = client.post("/sweep", json=sweep, headers={"x-token": "secret"})
    assert "at most 25 values" in answer.json()["error"]


def test_a_left_question_stops_and_a_process_that_does_not_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.explore.workers.STOP_LIMIT_S", 0.3)
    Path("slow.py").write_text(
        "import time\nclass Slow:\n    def schedule(self, view): time.sleep(60)\n"
    )
    run = given(Path("RUN.yaml"), [], "sarathi,slow.py:Slow", [])
    text = edited(run.text, "workload", WORKLOAD | {"requests": 50_000})
    long = ("simulate", {"text": text.replace("pages: 200", "pages: 9000")}, (0,))
    stuck = ("simulate", {"text": edited(run.text, "scheduler", "slow.py:Slow")}, (0,))
    look = ("look", {"text": run.text}, ())

    async def ask() -> AsyncGenerator[list[bytes]]:
        processes = WorkerPool(run, 1)
        processes.start()
        try:
            for _ in range(3):
                async with aclosing(processes.lines(long)) as lines:
                    assert json.loads(await anext(lines))["run"]["requests"] == 16
            yield [each async for each in processes.lines(look)]
            with suppress(TimeoutError):
                await asyncio.wait_for(anext(processes.lines(stuck)), 0.1)
            yield [each async for each in processes.lines(look)]
        finally:
            processes.end()

    async def answers() -> list[list[bytes]]:
        return [each async for each in ask()]

    first, again = asyncio.run(answers())
    assert first == again
    assert list(json.loads(first[0])) == ["document"]
    assert not active_children()


# -- a page without a server -----------------------------------------------------------------------


def inside(page: Path) -> Any:
    found = re.search(r"const page = (\{.*?\}), byId", page.read_text(), re.S)
    assert found is not None
    data = json.loads(found[1])
    return data["axes"], json.loads(gzip.decompress(b64decode(data["points"])))


def test_a_page_has_every_point_of_its_sliders_inside(folder: Path) -> None:
    words = ["--vary", "scheduler.token_budget=32,64", "--vary", "kv.pages=6,200"]
    busy = ["--set", "workload.arrivals={kind: replay, scale: 30}"]
    done("explore", "RUN.yaml", "--out", "page.html", *words, *busy)
    axes, points = inside(Path("page.html"))
    assert [(axis["values"], axis["value"]) for axis in axes] == [([32, 64], 64), ([6, 200], 200)]
    assert sorted(points) == ["0,0", "0,1", "1,0", "1,1"]
    ttft_ms = {at: point["runs"][0]["summary"]["mean_ttft_ms"] for at, point in points.items()}
    assert ttft_ms["1,0"] > ttft_ms["1,1"]
    assert Path("page.html").stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("vary", "right"),
    [
        ("kv.pages", "one of scheduler.name, scheduler.token_budget"),
        ("kv.pages=", "such as kv.pages=1000,2000"),
        ("kv.pages=[1]", "such as kv.pages=1000,2000"),
        ("kv.pages=80,80", "--vary kv.pages=80,80: should have each value once"),
        ("kv.pages=0", "kv.pages: should be auto or a whole number"),
        ("kv.pages=90 --vary kv.pages=80,70", "--vary kv.pages: is there twice; give all its"),
        (f"kv.pages={','.join(map(str, range(1, 300)))}", "299 points; at most 200 are right"),
    ],
)
def test_points_that_cannot_be_are_refused(folder: Path, vary: str, right: str) -> None:
    if vary == "kv.pages":
        vary = "kv.paegs"
    assert right in complaint("explore", "RUN.yaml", "--out", "page.html", "--vary", *vary.split())
    assert not Path("page.html").exists()


def test_a_page_has_its_place_before_a_point_is_simulated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.explore.still.simulated", None)
    line = complaint("explore", "RUN.yaml", "--out", "no/page.html")
    assert line == "no/page.html: cannot be written: No such file or directory"


def test_a_page_is_written_over_no_file(folder: Path) -> None:
    Path("page.html").write_text("mine")
    line = complaint("explore", "RUN.yaml", "--out", "page.html")
    assert line == "page.html: is there already; name another file"
    assert Path("page.html").read_text() == "mine"
