"""Attack Evenflow with what nobody sane gives it: `python -m tools.fuzz [--cases N] [--seed S]`.

Six classes, N cases each: odd values at keys of the examples' files (`keys`), odd files where a
file is read (`files`), odd options of commands (`options`), hostile texts at keys of figures
(`figures`), odd HTTP clients (`http`), and random worlds whose tables are judged by themselves
(`worlds`). Right is status 0, or one line of error, status 2 and nothing left behind; wrong is a
traceback, a warning, a hang, a character that steers the terminal, a table that cannot be, or a
figure that runs anything. Each failure is a line; exit status 1 if there is one. Commands run in
this process, with 6 GB of memory.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from evenflow.cli.app import app
from evenflow.config.run import RunConfig
from evenflow.report.echo import STEERS
from evenflow.study import points
from evenflow.study.sweep_file import SweepConfig
from tests.quick import Inline
from tools.fuzz_http import RUN, flipped, http
from tools.fuzz_worlds import drawn_world, pairs_of, world_of, write_trace, wrong_tables

ROOT = Path(__file__).parent.parent
MEMORY_BYTES = 6 * 2**30
LIMIT_CPU_S, LIMIT_S = 40.0, 120.0
LONGEST_LINE = 1300
FEW = ("--set", "workload.requests=3")

VALUES = (
    *("null", "true", "0", "-1", "1", "3", "1.5", "1e308", "-1e308", "5e-324", ".nan", ".inf"),
    *("''", "' '", "x", "[]", "{}", "[1]", "[[]]", "{a: 1}", "[null]", "{1: 2}", "{? [a] : 1}"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1e12", "0200", "1:30"),
    *("2001-01-01", "2001-01-01T00:00:00Z", "!!python/object:os.system x", "&a [*a]", "*nowhere"),
    *("[1, 2", "{a: 1, a: 2}", "'\\0'", '"\\ud800"', "é", "=", "<<: 1", "json:loads", "os:nothing"),
    *("/dev/zero", "/", "..", "/proc/self/mem", "nowhere.csv", "a" * 5000, "9" * 5000, "[" * 900),
    *("{kind: affine}", "{kind: roofline}", "{name: sarathi}", "{name: vllm, x: 1}", "[4096]"),
)


class HangError(BaseException):
    """A command that takes longer than any should."""


def _hangs(*_: object) -> None:
    raise HangError


# -- one command, judged --------------------------------------------------------------------------


def judged(arguments: list[str], folder: Path) -> str | None:
    """Run a command in a folder; return what is wrong with how it ends, or None."""
    before = set(folder.rglob("*"))
    signal.setitimer(signal.ITIMER_PROF, LIMIT_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        done = CliRunner().invoke(app, arguments)
    except HangError:
        return "hangs"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not isinstance(done.exception, SystemExit | None):
        where = done.exc_info[2] if done.exc_info else None
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = "" if where is None else f" in {where.tb_frame.f_code.co_qualname}"
        return f"{type(done.exception).__name__}: {str(done.exception)[:100]}{place}"
    if steers := STEERS.search(done.output):
        return f"prints {steers[0]!r}"
    errors, new = done.stderr, set(folder.rglob("*")) - before
    left = {path.name for path in new if "points" not in path.parts}  # which are kept on purpose
    if "Warning" in errors or "Traceback" in errors:
        return f"says {errors[:200]!r}"
    if done.exit_code == 0:
        return None
    if done.exit_code != 2:
        return f"status {done.exit_code}: {errors[:100]!r}"
    if errors.count("\n") != 1 or not errors.startswith("error: ") or len(errors) > LONGEST_LINE:
        return f"{errors.count(chr(10))} lines, {len(errors)} letters: {errors[:100]!r}"
    return f"leaves {sorted(left)[:3]}" if left - {"__pycache__"} else None


# -- odd values at keys ---------------------------------------------------------------------------


def keys(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield cases of a value at a key of an example, both drawn."""
    files = sorted((ROOT / "examples").rglob("*.yaml"))
    files = [file for file in files if "workload.requests: [" not in file.read_text()]
    places = {file: sorted({*_schema_keys(file), *_own_keys(_read(file))}) for file in files}
    for number in range(count):
        file, value = rng.choice(files), rng.choice(VALUES)
        key = rng.choice(places[file])
        is_sweep = _is_sweep(file)
        few = ["--set", "run.workload.requests=3"] if is_sweep else [*FEW]
        command = ["sweep" if is_sweep else "simulate", str(file), *few, "--set", f"{key}={value}"]
        out = folder / f"out-{number}"
        how = [] if is_sweep else ["--save", "summary"]
        if is_sweep:
            command += ["--set", "parameters={scheduler.token_budget: [64]}"][: 2 * (number % 2)]
        told = judged([*command, *how, "--out", str(out)], folder)
        shutil.rmtree(out, ignore_errors=True)
        yield f"{file.relative_to(ROOT)} --set {key}={value[:60]!r}", told


def _read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _is_sweep(file: Path) -> bool:
    return "parameters" in _read(file)


def _own_keys(document: Any, above: str = "") -> Iterator[str]:
    if isinstance(document, Mapping):
        for key, inner in document.items():
            yield f"{above}{key}"
            yield from _own_keys(inner, f"{above}{key}.")


def _schema_keys(file: Path) -> Iterator[str]:
    kind = SweepConfig if _is_sweep(file) else RunConfig
    schema = kind.model_json_schema()
    yield from _properties(schema, schema.get("$defs", {}), "", 3)


def _properties(part: Any, known: Mapping[str, Any], above: str, depth: int) -> Iterator[str]:
    """Yield the dotted keys that a part of a schema has, as deep as that."""
    if "$ref" in part:
        part = known[part["$ref"].rsplit("/", 1)[1]]
    for name, inner in part.get("properties", {}).items():
        yield f"{above}{name}"
        if depth:
            yield from _properties(inner, known, f"{above}{name}.", depth - 1)
    for choice in (*part.get("anyOf", ()), *part.get("oneOf", ())):
        yield from _properties(choice, known, above, depth)


# -- odd files ------------------------------------------------------------------------------------

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,5\n1,20,3\n"
TALKS = '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]'
MOONCAKE = '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n'
MOE = """{"architectures": ["DeepseekV3ForCausalLM"],
 "model_type": "deepseek_v3", "hidden_size": 64,
 "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
 "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8,
 "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
 "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
 "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "sliding_window": 128}"""
BENCH = """{"completed": 2, "duration": 1.5, "request_rate": "inf", "input_lens": [10, 20],
 "output_lens": [3, 2], "ttfts": [0.1, 0.2], "itls": [[0.01, 0.02], [0.03]], "errors": ["", ""]}"""
ROLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "RUN.yaml": (RUN, ("simulate", "RUN.yaml")),
    "t.csv": (TRACE, ("simulate", "RUN.yaml")),
    "talks.json": (TALKS, ("simulate", "RUN.yaml", "--set", "workload.trace=talks.json")),
    "m.jsonl": (MOONCAKE, ("traces", "info", "m.jsonl")),
    "model/config.json": (
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}',
        ("simulate", "RUN.yaml", "--set", "model=model"),
    ),
    "profile.json": (
        '{"version": 1}',
        ("simulate", "RUN.yaml", "--set", "costs={kind: profile, path: profile.json}"),
    ),
    "SWEEP.yaml": ("run: RUN.yaml\nparameters: {kv.pages: [9]}\n", ("sweep", "SWEEP.yaml")),
    "run/decisions.jsonl.gz": ("", ("replay", "run")),
    "engine.jsonl.gz": ('{"engine": "vllm"}\n', ("replay", "engine.jsonl.gz")),
    ".partial-x/records.blocks": ('{"depth": 1}\n[{}, {}]\n', ("recover", ".")),
    "out/manifest.json": ('{"files": {}}', ("simulate", "RUN.yaml", "--out", "out")),
    "moe/config.json": (MOE, ("simulate", "RUN.yaml", "--set", "model=moe")),
    "run/summary.json": ('{"duration": 1.0}', ("diff", "run", "run")),
    "bench.json": (BENCH, ("calibrate", "RUN.yaml", "bench.json", "--set", "dispatch=engine_loop")),
    "policy.py": (
        "class P:\n    def schedule(self, view):\n        return None\n",
        ("simulate", "RUN.yaml", "--set", "scheduler=policy:P"),
    ),
}


def _is_folder(path: Path, _: bytes, __: random.Random) -> None:
    path.mkdir()


def _is_pipe(path: Path, _: bytes, __: random.Random) -> None:
    os.mkfifo(path)


def _is_link(to: str) -> Callable[[Path, bytes, random.Random], None]:
    def make(path: Path, _: bytes, __: random.Random) -> None:
        path.symlink_to(path.name if to == "itself" else to)

    return make


def _is(change: Callable[[bytes, random.Random], bytes]) -> Callable[..., None]:
    def make(path: Path, whole: bytes, rng: random.Random) -> None:
        path.write_bytes(change(whole, rng))

    return make


def _shuffled(whole: bytes, rng: random.Random) -> bytes:
    parts = re.split(rb"([,:\s{}\[\]])", whole)
    rng.shuffle(parts)
    return b"".join(parts)


NUMBERS = (
    *(b"-1", b"1e999", b"NaN", b"Infinity", b"null"),
    *(b"true", b'"1"', b"9" * 400, b"0.5", b"[]"),
)

ODDITIES: tuple[Callable[..., None], ...] = (
    _is_folder,
    _is_pipe,
    *map(_is_link, ("itself", "nowhere", "/dev/zero", "/dev/null", "/etc", "/proc/self/mem")),
    _is(lambda whole, rng: b""),
    _is(lambda whole, rng: whole[: rng.randrange(len(whole) + 1)]),
    _is(lambda whole, rng: rng.randbytes(rng.randint(1, 5000))),
    _is(lambda whole, rng: bytes(rng.randint(1, 5000))),
    _is(lambda whole, rng: whole.decode().encode("utf-16")),
    _is(lambda whole, rng: b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n")),
    _is(lambda whole, rng: whole.replace(b"\n", b"\r")),
    _is(lambda whole, rng: whole * 50),
    _is(lambda whole, rng: whole + b"9" * 10**6),
    _is(lambda whole, rng: b"[" * 10**5 + whole),
    _is(lambda whole, rng: b'{"a":' * 10**4 + whole),
    _is(lambda whole, rng: b"\n" * 10**6 + whole),
    _is(lambda whole, rng: gzip.compress(whole)[: rng.randint(1, 60)]),
    _is(lambda whole, rng: gzip.compress(flipped(whole, rng))),
    _is(lambda whole, rng: gzip.compress(gzip.compress(whole))),
    _is(lambda whole, rng: gzip.compress(whole + b"\n" + b"[" * 10**5 + b"\n")),
    _is(lambda whole, rng: re.sub(rb"\d+", lambda _: rng.choice(NUMBERS), whole)),
    _is(flipped),
    _is(_shuffled),
)


def files(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield cases of an odd file in a role, all pairs first and then drawn ones."""
    pairs = list(itertools.product(ROLES, range(len(ODDITIES))))
    rng.shuffle(pairs)
    for number in range(count):
        role, oddity = pairs[number] if number < len(pairs) else rng.choice(pairs)
        place = folder / f"f{number}"
        for name in {"RUN.yaml", "t.csv", role}:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(ROLES[name][0])
        (place / role).unlink()
        ODDITIES[oddity](place / role, ROLES[role][0].encode() or b"{}\n", rng)
        os.chdir(place)
        told = judged([*ROLES[role][1]], place)
        os.chdir(folder)
        shutil.rmtree(place)
        sys.path[:] = [entry for entry in sys.path if entry != str(place)]
        sys.modules.pop("policy", None)
        yield f"{role}: oddity {oddity}", told


# -- odd values of options ------------------------------------------------------------------------

SIMULATE = ("simulate", "RUN.yaml", "--save", "requests", "--out", "out")
PLAN = ("plan", "RUN.yaml", "--gpus", "1", "--slo", "p99_ttft_ms=900", "--rate", "1")
SWEEP = ("sweep", "SWEEP.yaml", "--out", "out", "--set", "parameters={")
OPTIONS: tuple[tuple[str, ...], ...] = (
    *((*SIMULATE, option) for option in ("--window", "--save", "--format")),
    (*SIMULATE, "--advise", "--set"),
    *((*PLAN, option) for option in ("--gpus", "--slo", "--rate", "--price", "--budgets")),
    *((*PLAN, option) for option in ("--schedulers", "--replications", "--max-median-queue-s")),
    *(SWEEP for _ in range(3)),
    *(("schema",), ("init",), ("diff", "."), ("diff", "out"), ("calibrate", "RUN.yaml")),
    *(("run", "RUN.yaml", "--out", "out", "--engine"), ("validate", "RUN.yaml", "--engine")),
)
ODD_OPTIONS = (
    *("0..1", "1..0", "..", "1..", "..1", "nan..1", "0..inf", "1..1", "-1..1", "0..1e308", "0...1"),
    *("1,1", ",", "1,,2", "4..64", "64..4", "1..1e9", "2x", "x", "-2x", "nanx", "0x", "1e400x"),
    *("p99_ttft_ms=nan", "p99_ttft_ms=", "=1", "nothing=1", "p99_ttft_ms=-1", "p99_ttft_ms=1=1"),
    *("sarathi,sarathi", "sarathi,", "kv.pages=9", "workers={kind: vllm}", "costs=null"),
    *("kv.pages,stages: [[9, 1], [9]]}", "kv.pages,stages: [[9, 1], [30, 2]]}", "kv.pages: []}"),
    *("kv.pages,kv.pages: [[9, 9]]}", "kv.pages: [9], kv.pages,stages: [[9, 1]]}", "',': [[1]]}"),
)


def options(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield cases of a command whose last word is odd."""
    for number in range(count):
        place = folder / f"o{number}"
        place.mkdir()
        for name in ("RUN.yaml", "t.csv", "SWEEP.yaml"):
            (place / name).write_text(ROLES[name][0])
        command = rng.choice(OPTIONS)
        joined = command is SWEEP
        values = ODD_OPTIONS[-6:] if joined else (*ODD_OPTIONS[:-6], *VALUES)
        value = rng.choice(values)
        words = [*command[:-1], command[-1] + value] if joined else [*command, value]
        os.chdir(place)
        told = judged(words, place)
        kept = (place / "t.csv").exists() and (place / "RUN.yaml").read_text() == RUN
        os.chdir(folder)
        shutil.rmtree(place)
        yield " ".join(words)[:200], told if kept else "loses a file"


# -- hostile texts in figures ---------------------------------------------------------------------

FIGURE = """\
title: "{requests} requests"
source: mine
differs: nothing
run: {stages: 2, costs: {kind: affine, base_s: 0.01, per_token_s: 0.001}, kv: {pages: 400},
      workload: {trace: t.csv, arrivals: offline}, scheduler: sarathi}
systems: {ours: {scheduler: sarathi}, theirs: vllm_v1}
study: {requests: 2, seeds: [0], budgets: [64, 512], kept: [64], pairs: [[L20, Qwen2.5-14B]]}
quick: {requests: 2}
vary: [budget, system]
axes: {budget: {key: scheduler.max_num_seqs, words: "{:g} seats"}}
columns: [budget, system]
measure: shares
args: {}
over: {reference: {system: ours}, of: {gain: total_token_throughput}}
shown: [budget, system, gain]
claims: {tdpipe-superlinear: {take: gain, where: {system: theirs}}}
plot:
  height: 2
  title: "{system}"
  let: {twice: 2 * gain, seats: gain / 1}
  legend: {title: "{requests}", loc: upper left, fontsize: 7}
  common: {x: budget, y: {twice: "{system}"}, hue: [system]}
  panels:
    - kind: bars
      where: gain > 0 and system in ['ours', 'theirs']
      each: [system]
      write: "{:.2f}"
      strong: 64 seats
      line: 1.0
      bands: {fair: [0.9, 1.1]}
      axes: {title: "{system}", ylabel: over ours, ylim: [0, null], yscale: linear}
"""
NUMBERED = "sarathi_4", "sarathi_9", "sarathi_14", "sarathi_table3", "tdpipe_9", "tdpipe_10"
"""Figures of ours that take iterations apart, which is fast."""

HOSTILE: tuple[Any, ...] = (
    *("@pd.io.common.os.system('touch ran')", "__import__('os').system('touch ran')", "@gain"),
    *("gain.map(print)", "gain.__class__", "9**9**9", "-" * 290 + "1", "(" * 140 + "1" + ")" * 140),
    *("not " * 70 + "1", "'a' * 999999999", "[gain] * 99999999", "gain" + " * gain" * 1000),
    *("[x for x in gain]", "lambda: 1", "(x := 1)", "f'{gain}'", "gain if gain else 1", "1 << 99"),
    *("gain == None", "gain / 0", "1 / 0", "system + 1", "gain in system", "`gain`", "{kept[0]}"),
    *("{gain.__class__.__init__}", "{x.a}", "{:999999999d}", "{gain!r}", "{gain:{gain}}", "{gain}"),
    *("{}", "{0}", "{__class__}", "%999999999d", "{requests:>999999999}", "{requests[__class__]}"),
    *("{", "}", "$x^$", "$" + "{" * 200, "$\\frac{1}{0", "\x1b]0;x\a\x1b[2J", "\u202e", "[/b]"),
    *("=cmd|'x'!A0", "os.system", "measures.np", "cases.importlib", "..app", "own._decodes"),
    *("overview", "own.played", "panels.draw", "measures.__loader__", "os:system", "a" * 5000),
    *("\n", "\r\n", "\ud800", "é\u4e2d", "", " ", None, True, -1, 0, 1e308, float("nan"), 10**30),
    *([], [1], [[1]], {}, {"a": 1}, {"kind": [1]}),
)
EVENTS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}


def figures(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield figures' files with a hostile text or value at a key."""
    ran: list[str] = []
    sys.addaudithook(
        lambda event, args: (
            ran.append(str(args[0])) if event in EVENTS and args[0] != "git" else None
        )
    )
    ours = [ROOT / f"experiments/figures/{name}.yaml" for name in NUMBERED]
    for number in range(count):
        base = yaml.safe_load(FIGURE) if number % 6 else _read(rng.choice(ours))
        path, value = rng.choice(sorted(_paths(base), key=str)), rng.choice(HOSTILE)
        place = folder / f"g{number}"
        (place / "out/points").mkdir(parents=True)
        (place / "t.csv").write_text(TRACE)
        (place / "mine.yaml").write_text(json.dumps(_with(base, path, value)))
        os.chdir(place)
        told = judged(["figures", "mine.yaml", "--quick", "--out", "out"], place)
        if ran:
            told = f"runs {ran}"
        tables = [text.read_text() for text in place.glob("out/*.csv")]
        if told is None and any(re.search("^=|,=", text) for text in tables):
            told = "writes a formula"
        ran.clear()
        os.chdir(folder)
        shutil.rmtree(place)
        yield f"{'.'.join(map(str, path))}: {value!r}"[:200], told


def _paths(document: Any) -> Iterator[tuple[Any, ...]]:
    """Yield where the values of a document are; an empty text at the end is the name of a key."""
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in inside:
        yield (key,)
        if isinstance(document, dict):
            yield (key, "")
        if isinstance(value, dict | list):
            yield from ((key, *below) for below in _paths(value))


def _with(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a document with a value, or with a text in place of the name of a key."""
    head, *rest = path
    changed: Any = dict(document) if isinstance(document, dict) else list(document)
    if rest == [""]:
        changed[str(value)] = changed.pop(head)
    else:
        changed[head] = _with(document[head], tuple(rest), value) if rest else value
    return changed


# -- random worlds, judged by their tables --------------------------------------------------------


def worlds(rng: random.Random, count: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield random worlds; wrong is a table that no pipeline could have written."""
    tried: Counter[Any] = Counter()
    ran: set[Any] = set()
    runs = 0
    for number in range(count):
        place = folder / f"w{number}"
        place.mkdir()
        drawn = drawn_world(rng, tried)
        world, rows = world_of(drawn), write_trace(rng, place)
        (place / "RUN.yaml").write_text(json.dumps(world))
        out = place / "out"
        told = judged(["simulate", str(place / "RUN.yaml"), "--out", str(out)], place)
        if out.exists():
            ran |= pairs_of(drawn)
            runs += 1
        if told is None and out.exists():
            told = wrong_tables(out, world, rows)
        yield f"{json.dumps(world)} on {rows}"[:3000], told
        shutil.rmtree(place)
    print(f"{runs} of {count} worlds ran, with {len(ran)} pairs of choices", file=sys.stderr)


CLASSES = {each.__name__: each for each in (keys, files, options, figures, worlds, http)}


def main(arguments: list[str] | None = None) -> int:
    """Run the classes that are asked for; print what fails, and how many of how many did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(CLASSES))
    asked = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _hangs)
    warnings.simplefilter("always")
    points.processes = lambda *_: Inline()
    failed = 0
    for name in asked.only.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            wrong = 0
            for case, told in CLASSES[name](random.Random(asked.seed), asked.cases, Path(scratch)):
                if told is not None:
                    wrong += 1
                    print(f"{name}: {case}: {told}", flush=True)
            os.chdir(ROOT)
        print(f"{name}: {wrong} of {asked.cases} cases are wrong", flush=True)
        failed += wrong
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
