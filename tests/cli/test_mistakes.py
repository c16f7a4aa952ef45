"""A user's mistake, in any command: one clear line, exit status 2, nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from evenflow.config.run import load_config
from evenflow.errors import MOST_LETTERS, instead_of
from tests.command_line import HEAD, RUN, evenflow, refusal, spawn, table
from tests.places import ROOT

pytestmark = pytest.mark.usefixtures("folder")

MISTAKES = table((ROOT / "tests" / "mistakes.txt").read_text(encoding="utf-8"))
"""What is typed, and what is told."""


POLICY = """\
from evenflow.types import Plan, Prefill

class Policy:
    def __init__(self, width: int = 1):
        {constructor}

    def schedule(self, view):
        {schedule}
"""


def write_policy(name: str, schedule: str, constructor: str = "pass") -> str:
    """Write a module with a policy; return how it is named in a run."""
    text = POLICY.format(constructor=constructor, schedule=schedule)
    Path(f"policy_{name}.py").write_text(text, encoding="utf-8")
    return f"policy_{name}:Policy"


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_what_is_typed(words: list[str], told: str) -> None:
    Path("empty.csv").touch()
    Path("broken.py").write_text("1 / 0")
    Path("greedy.py").write_text("class Greedy: ...")
    Path("hollow").mkdir()
    Path("foreign").mkdir()
    Path("foreign/summary.json").write_text('{"provenance": 1}')
    for name, number, part in (("worded", '"lots"', "{}"), ("listed", "1", "[[]]")):
        made = f'{{"config": {{}}, "runtime": {part}}}'
        Path(name).mkdir()
        Path(f"{name}/summary.json").write_text(f'{{"busy_share": {number}, "provenance": {made}}}')
    write_policy("made", "return Plan()", constructor="{}['key']")
    write_policy("exits_late", "return Plan()", constructor="raise SystemExit(0)")
    write_policy("closes_late", "return Plan()", constructor="raise GeneratorExit")
    Path("policy_exits.py").write_text("import sys\nsys.exit(0)")
    Path("policy_closes.py").write_text("raise GeneratorExit")
    Path("closes.py").write_text("raise GeneratorExit")
    Path("policy_syntax.py").write_text("class Policy(:")
    assert told in refusal(*words)


COMMANDS = ["simulate", "compare", "diff", "check", "sweep", "capacity", "figures", "run", "serve"]
COMMANDS += ["replay", "validate", "schedulers", "profile", "profile import", "profile check"]
COMMANDS += [f"traces {name}" for name in ("info", "fit", "convert", "predict")]
WITHOUT_ARGUMENTS = {"figures", "schedulers", "profile"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_where_to_read_what_is_right(command: str) -> None:
    told = f"No such option: --xyzzy (evenflow {command} --help)"
    assert told in refusal(*command.split(), "--xyzzy")
    if command not in WITHOUT_ARGUMENTS:
        assert f"(evenflow {command} --help)" in refusal(*command.split())


@pytest.mark.parametrize("group", ["", "traces"])
def test_no_command_at_all_shows_the_help(group: str) -> None:
    status, output, errors = evenflow(*group.split())
    assert (status, errors) == (2, "")
    assert f"Usage: evenflow {group}" in output


def test_the_configuration_itself_is_right() -> None:
    status, output, errors = evenflow("simulate", "RUN.yaml", "--save", "summary")
    assert (status, errors) == (0, "")
    assert output.endswith("out/RUN\n")


ALIASES = "gpu: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)
MERGES = "gpu: &a0 {x: 1}\n" + "".join(
    f"k{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)
)
RUNS = [
    (None, "RUN.yaml: no such file"),
    ("stages: \x00\n", "RUN.yaml: not valid YAML: unacceptable character #x0000"),
    (RUN.replace("stages: 2", "stages: 02"), "RUN.yaml:1: 02 is 2 to some readers of YAML and 2"),
    (RUN + "? [a]\n: 1\n", "RUN.yaml:6: a list or a mapping as a key; one word or number is"),
    (RUN + "gpu: {{a: 1}: 2}\n", "RUN.yaml:6: a list or a mapping as a key"),
    (RUN + ALIASES, "RUN.yaml:6: more than 100000 values, counting what aliases repeat"),
    (
        RUN + "x: &a {}\ngpu: {<<: *a, <<: *a}\n",
        'RUN.yaml:7: the key "<<" is given twice; << takes a list of several',
    ),
    (RUN + MERGES, "more than 100000 values, counting what aliases repeat"),
    (RUN + "#" * 2**20, "RUN.yaml: has more than 1048576 bytes"),
    (RUN.replace("pages: 200", "pages: auto"), 'kv.pages: auto needs the key "model"'),
]
TRACES = [
    (None, 'trace "trace.csv" is neither a file nor a bundled sample; known: arxiv-16k-sample'),
    ("", "trace trace.csv"),
    (HEAD + "0.0,10,5\n1.0,-3,5\n", "trace trace.csv, line 3: num_prefill_tokens is '-3'"),
    ("num_prefill_tokens,num_decode_tokens\n10,5\n", "the trace has no arrival times"),
    (
        "arrived_at,num_prefill_tokens,num_decode_tokens,num_prefill_tokens\n0,10,5,9\n",
        'trace trace.csv, line 1: the column "num_prefill_tokens" is there twice',
    ),
    (
        '{"timestamp": 0, "input_length": 9, "output_length": 2, "input_length": 3}\n',
        "trace trace.csv, line 1: not a JSON object on one line, perhaps truncated (the key ",
    ),
    (
        '[{"input_token_length": 1, "output_token_length": 1, "input_token_length": 2}]',
        'trace trace.csv, entry 1: the key "input_token_length" is given twice',
    ),
    (HEAD + "0,10,5\n1e308,10,5\n", "workload: the last request would arrive after 1e+308 s"),
    (HEAD + f"0,10,5\n1{'0' * 15},10,5\n", "would arrive after 1e+15 s; at most 1e+12 s is right"),
]
FILES = [("RUN.yaml", *row) for row in RUNS] + [("trace.csv", *row) for row in TRACES]
ABSENT = [row for row in FILES if row[1] is None]  # compare reads as simulate does


@pytest.mark.parametrize(
    ("command", "file", "text", "told"),
    [*(("simulate", *row) for row in FILES), *(("compare", *row) for row in ABSENT)],
)
def test_what_a_file_holds(command: str, file: str, text: str | None, told: str) -> None:
    if text is None:
        Path(file).unlink()
    else:
        Path(file).write_text(text, encoding="utf-8")
    schedulers = ["--schedulers", "sarathi,vllm"] if command == "compare" else []
    assert told in refusal(command, "RUN.yaml", *schedulers)


PROMISES = [
    ("raises", "return 1 / 0", " raised ZeroDivisionError: division by zero"),
    ("says_nothing", "return None", " returned None, not a Plan"),
    ("other", "return Plan([Prefill(10**6, 1)])", " prefills request 1000000, which is not"),
    ("many", "return Plan([Prefill(0, 10**6)])", ", request 0: prefills 1000000 of 20 tokens"),
    ("negative", "return Plan([Prefill(0, -1)])", ", request 0: prefills -1 of 20 tokens"),
    ("not_ready", "return Plan(decodes=5)", " takes 5 decodes of 0 ready"),
    ("stalls", "return Plan()", " stalls at 0 s"),
    ("sleeps", "return Plan(wake_at_s=view.now_s + 1)", " stalls at 1001.8 s: nothing"),
    ("leaves", "raise SystemExit(0)", " raised SystemExit: 0"),
    ("shuts", "raise GeneratorExit", " raised GeneratorExit (policy_shuts.py:8: raise Gen"),
    ("shuts_later", "yield Plan()\n        raise GeneratorExit", " raised GeneratorExit (pol"),
    ("cancels", "raise __import__('asyncio').CancelledError(1)", " raised CancelledError: 1"),
    ("unsaid", "raise type('Odd', (Exception,), {'__str__': None})", " raised Odd: <Odd>"),
    ("unseen", "return type('Odd', (), {'__repr__': None})()", " returned <Odd>, not a Plan"),
    ("line", "return view.waiting[:1]", "(policy_line.py:8: return view.waiting[:1])"),
    ("typo", "return view.waitng", 'did you mean "waiting"?'),
    ("pair", "return Plan([(0, 5)])", " plans (0, 5) as a prefill; Prefill(request_id, tokens)"),
    ("half", "return Plan([Prefill(0, 12.5)])", " plans 12.5 as the tokens to prefill of requ"),
    ("all", "return Plan(decodes='all')", " plans 'all' as the decodes to take; a list of request"),
    ("one", "return Plan(Prefill(0, 5))", " plans 0 as a prefill; Prefill(request_id, tokens)"),
    ("a_set", "return Plan({Prefill(0, 5)})", " as the prefills; a list of Prefill(request_id"),
    ("untaken", "return Plan()", "not taken: 0 decodes, 1 prompts, with "),
]
ELSEWHERE = [row for row in PROMISES if row[0] in ("raises", "leaves", "stalls")]


@pytest.mark.parametrize(
    ("command", "name", "schedule", "told"),
    [
        *(("simulate --set scheduler=", *row) for row in PROMISES),
        *(("compare --schedulers sarathi,", *row) for row in ELSEWHERE),  # in a process of its own
    ],
)
def test_a_policy_that_breaks_its_promise(
    command: str, name: str, schedule: str, told: str
) -> None:
    line = refusal(*f"{command}{write_policy(name, schedule)} RUN.yaml".split())
    assert "policy Policy" in line
    assert told in line


@pytest.mark.filterwarnings("error")  # of a coroutine that nobody awaits
@pytest.mark.parametrize("body", ["return Plan()", "yield Plan()"])
def test_an_async_policy_is_one_line(body: str) -> None:
    name = write_policy("async_policy", body)
    path = Path(f"{name.partition(':')[0]}.py")
    path.write_text(path.read_text().replace("    def schedule", "    async def schedule"))
    right = "policy Policy: schedule is async; a plain def is right"
    assert refusal("simulate", "RUN.yaml", "--set", f"scheduler={name}") == right


def test_a_policy_that_stalls_in_a_pool() -> None:
    policy = write_policy("of_pool", "return Plan()")
    for name in ("prefill", "decode"):
        system = f"scheduler={{name: distserve, {name}: {{scheduler: '{policy}'}}}}"
        assert "policy Policy stalls at " in refusal("simulate", "RUN.yaml", "--set", system)


def test_a_failed_run_leaves_an_earlier_one_as_it_was() -> None:
    evenflow("simulate", "RUN.yaml", "--save", "requests")
    earlier = {path: path.read_bytes() for path in Path("out/RUN").iterdir()}
    names = {"summary.json", "requests.csv", "manifest.json", "wall_clock.json"}
    assert {path.name for path in earlier} == names
    refusal("simulate", "RUN.yaml", "--set", "workload.requests=21")
    assert {path: path.read_bytes() for path in Path("out/RUN").iterdir()} == earlier


@pytest.mark.parametrize("name", ["missing.yaml", "RUN.yaml"])
def test_as_a_process_of_its_own(name: str) -> None:
    policy = write_policy("process", "raise RuntimeError('two\\nlines')")
    process = spawn("simulate", name, "--set", f"scheduler={policy}")
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert not Path("out").exists()


CONFIG = json.dumps({"config": {"stages": 2}, "folder": "."}).encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        (b"not gzip", "cannot read it"),
        (gzip.compress(b"", mtime=0), "no first line"),
        (gzip.compress(b"[]\n", mtime=0), "no first line with a configuration"),
        (gzip.compress(b"{\n", mtime=0), "1: not a line of JSON"),
        (gzip.compress(b"[" * 100_000, mtime=0), "1: not a line of JSON"),
        (gzip.compress(CONFIG, mtime=0), "a configuration of evenflow None"),
        (gzip.compress(CONFIG, mtime=0)[:-12], "Compressed file ended"),
    ],
)
def test_a_folder_that_holds_no_record(content: bytes | None, told: str) -> None:
    if content is not None:
        Path("decisions.jsonl.gz").write_bytes(content)
    assert told in refusal("replay", ".")


def test_a_pipe_is_no_journal() -> None:
    os.mkfifo("decisions.jsonl.gz")
    assert "no such file" in refusal("replay", ".")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([["add", 0, float("nan"), 5, 3, None, None]], "2: not a line of JSON"),
        ([["add", 0, 0.0, -5, 3, None, None]], "2: no entry of a journal: a request of -5 prompt"),
        ([["add", "x", "y", "z", 3, None, None]], "2: no entry of a journal: ['add', 'x'"),
        ([["add", 0]], "2: no entry of a journal: ['add', 0]"),
        ([["next", "soon", None]], "2: no entry of a journal: ['next', 'soon', None]"),
        ([["next", 0.0, [5, 5]]], "2: no entry of a journal"),
        ([["abort", [1]]], "2: no entry of a journal: ['abort', [1]]"),
        ([["abort", 5]], "entry 0 (abort): cannot follow those before it: request 5 is not"),
        ([["complete", 0.0, 5, [], []]], "entry 0 (Completed): cannot follow those before it"),
        ([["add", 0, 0.0, 5, 3, None, None]] * 2, "entry 1 (Added): cannot follow those before it"),
    ],
)
def test_a_record_that_no_run_wrote(lines: list[Any], told: str) -> None:
    head = {"config": load_config(Path("RUN.yaml")).resolved(), "folder": "."}
    record = gzip.compress("\n".join(map(json.dumps, [head, *lines])).encode())
    Path("decisions.jsonl.gz").write_bytes(record)
    line = refusal("replay", ".")
    assert line.startswith("decisions.jsonl.gz")
    assert told in line


DEEP = "[" * 3000
LONG = "x" * 5000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--set", f"model={DEEP}"], "nested too deep"),
        (["--set", f"kv.pages={'9' * 5000}"], "a number of 5000 letters; at most 40 is right"),
        (["--set", f"kv.pages=0x{'f' * 5000}"], "a number of 5002 letters; at most 40 is right"),
        (["--set", f"scheduler={LONG}"], "xxx"),
        (["--set", f"workload.trace={LONG}"], "xxx"),
        (["--set", f"model={LONG}"], "xxx"),
        (["--set", f"gpu={LONG}"], "xxx"),
        (["--set", f"workload.{LONG}=1"], "xxx"),
        (["--set", f"scheduler.{LONG}=1"], "xxx"),
        (["--set", f"workload.trace={'two words ' * 500}"], "two words"),
        (["--out", "o" * 300], "File name too long"),
        (["--set", f"workload.trace={'t' * 300}"], "File name too long"),
    ],
)
def test_a_line_stays_a_line_whatever_is_long(words: list[str], told: str) -> None:
    line = refusal("simulate", "RUN.yaml", *words)
    assert told in line
    assert len(line) <= MOST_LETTERS + 3


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_what_is_no_file_is_not_read(name: str) -> None:
    os.mkfifo("pipe")
    told = f"{name}: is a pipe or a device; a file is right"
    assert told in refusal("simulate", name)
    for key in ("workload.trace", "model"):
        assert told in refusal("simulate", "RUN.yaml", "--set", f"{key}={name}")
    profile = f"costs={{kind: profile, path: {name}}}"
    keys = ("model=Qwen2.5-32B", "gpu=L20", profile)
    words = [word for key in keys for word in ("--set", key)]
    assert told in refusal("simulate", "RUN.yaml", *words)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "config.json: nested too deep"),
        ('{"hidden_size": 1, "hidden_size": 2}', 'the key "hidden_size" is given twice'),
        (f'{{"hidden_size": {"9" * 5000}}}', "config.json: not a JSON file (Exceeds the limit"),
    ],
)
def test_a_model_file_that_cannot_be(text: str, told: str) -> None:
    Path("config.json").write_text(text, encoding="utf-8")
    words = ("model=config.json", "gpu=L20", "costs=roofline")
    assert told in refusal(
        "simulate", "RUN.yaml", *(part for word in words for part in ("--set", word))
    )


def test_of_many_names_the_nearest_are_listed() -> None:
    known = [*"abcdefghijklmnopqrstuvwxyz", "kv_waste_share", "kv_pages"]
    assert instead_of("abc", "zyx") == "known: x, y, z"
    line = instead_of("kv_waste", known)
    assert line.startswith('did you mean "kv_waste_share"? known: kv_waste_share, kv_pages, w, ')
    assert line.endswith(" and 16 more")
