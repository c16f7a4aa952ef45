"""Change the core in 300 places, one at a time, and see which changes the tests notice.

A mutant is one small edit of a file of MODULES: a comparison, an operator, a constant, a condition,
what is returned, a statement left out. The seed draws them from all such places. Each mutant gets
a process of its own, forked from one that has imported the libraries and none of Evenflow; a stage
of tests runs in it until one fails, the next stage only where none did. What comes out is kept in
OUT/results.jsonl, so that a run that was stopped goes on. Mutants that no test can notice are in
tests/equivalent_mutants.yaml, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).parent.parent
MODULES = (
    "evenflow/core",
    "evenflow/engines",
    "evenflow/results/metrics.py",
    "evenflow/schedulers",
)
LIBRARIES = ("hypothesis", "matplotlib.figure", "pandas", "pydantic", "pytest", "rich", "simpy")
FIRST = {
    "kv": "kv kv_memory prefix_cache",
    "batcher": "batcher limits",
    "queues": "batcher kv_memory",
    "decodes": "batcher speculation",
    "loop": "runtime_driver vllm balance",
    "compiling": "compiling",
    "metrics": "metrics slo",
    "td_pipe": "td_pipe",
    "sglang": "sglang",
    "token_throttling": "token_throttling gllm_code",
    "trtllm": "trtllm",
    "view": "trtllm vllm",
    "vllm": "vllm",
}
"""The tests that notice most of what changes in a module, by its name; else those of its limits."""
THEN = (
    "batcher kv limits policies metrics slo kv_memory balance td_pipe token_throttling gllm_code "
    "vllm sglang speculation disaggregated timeline config",
    "plain closed_forms plain_pools runtime_driver prefix_cache engine_journals",
    "abort_properties kv_properties invariants bubbles_properties ends counterfactual replicas "
    "data_parallel",
)
CPU_S, WALL_S, MEMORY_BYTES = (15, 40, 90, 160), 1800, 6 << 30
"""What a mutant may take, about four times what it takes when nothing is changed, in each stage of
tests; one that takes more is noticed."""

OTHERS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
}
for one, other in (
    *((ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot), (ast.And, ast.Or)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div)),
):
    OTHERS |= {one: (other,), other: (one,)}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """An edit: `new` in place of the bytes [start, stop) of `path`, which begin on `line`."""

    path: str
    line: int
    start: int
    stop: int
    new: str

    def source(self) -> bytes:
        text = (ROOT / self.path).read_bytes()
        return text[: self.start] + self.new.encode() + text[self.stop :]

    @property
    def key(self) -> tuple[str, str, str]:
        """The path, and what the lines of the edit and the one above are before and after it.

        It names the mutant as long as these lines stay, wherever they move.
        """
        text = (ROOT / self.path).read_bytes()
        first = text.rfind(b"\n", 0, text.rfind(b"\n", 0, self.start)) + 1
        rest = len(text) - text.find(b"\n", self.stop)
        before, after = (
            " ".join(each[first : len(each) - rest].decode().split())
            for each in (text, self.source())
        )
        return self.path, before, after


UNCHANGED = Mutant("evenflow/core/batcher.py", 1, 0, 0, "")
"""What every test has to let pass; met first, or a test that always fails would notice all."""


def swapped(node: Any) -> Iterator[tuple[Any, str]]:
    """Return an expression or `x += y` with another operator."""
    if isinstance(node, ast.Compare):
        for index, sign in enumerate(node.ops):
            for other in OTHERS[type(sign)]:
                ops = [*node.ops[:index], cast(Any, other)(), *node.ops[index + 1 :]]
                yield node, f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        for other in OTHERS.get(type(node.op), ()):
            text = ast.unparse(type(node)(**vars(node) | {"op": cast(Any, other)()}))
            yield node, text if isinstance(node, ast.AugAssign) else f"({text})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, f"({ast.unparse(node.operand)})"


def variants(node: Any) -> Iterator[tuple[Any, str]]:
    """Return what may change of a node, and into what."""
    yield from swapped(node)
    match node:
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield from ((node, f"{number + 1}"), (node, f"({number - 1})"))
        case ast.Name(id=name) if name in NAMES:
            yield node, NAMES[name]
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "False"):
            yield node, "return None"
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "pass"
        case ast.If() | ast.While() | ast.IfExp():
            if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
                yield node.test, f"not {ast.unparse(node.test)}"


def nodes(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Walk over what may change: no annotation, no text; whole statements in functions only."""
    inside = inside or isinstance(node, ast.FunctionDef)
    if isinstance(node, ast.JoinedStr):
        return
    if inside or not isinstance(node, ast.Assign | ast.Expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes(child, inside)


def mutants_of(path: Path) -> Iterator[Mutant]:
    starts = [0]
    for line in path.read_bytes().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in nodes(ast.parse(path.read_bytes())):
        for place, new in variants(node):
            start = starts[place.lineno - 1] + place.col_offset
            stop = starts[place.end_lineno - 1] + place.end_col_offset
            yield Mutant(path.relative_to(ROOT).as_posix(), place.lineno, start, stop, new)


def drawn(count: int, seed: int, among: Sequence[str] = MODULES) -> list[Mutant]:
    """Return `count` of all mutants; where code changes, most of those drawn stay the same."""
    paths = [ROOT / name for name in among]
    files = [file for path in paths for file in sorted(path.rglob("*.py")) or [path]]
    every = [mutant for file in files for mutant in mutants_of(file)]
    print(f"{count} of {len(every)} mutants, seed {seed}")
    return sorted(every, key=lambda mutant: sha256(f"{seed}{mutant.key}".encode()).digest())[:count]


def stages(path: str) -> Iterator[list[str]]:
    """Return the files of tests that a mutant meets, stage by stage, none twice."""
    files = {file.stem.removeprefix("test_"): file for file in ROOT.glob("tests/**/test_*.py")}
    first = FIRST.get(Path(path).stem, "limits policies")
    if not path.startswith(MODULES):
        first = " ".join(near(path, files))
    for names in (first, *THEN):
        yield [str(files.pop(name)) for name in names.split() if name in files]


def near(path: str, files: dict[str, Path]) -> list[str]:
    """Return the tests that import a module or what stands beside it, the nearest first."""
    package, _, name = path.removesuffix(".py").removesuffix("/__init__").rpartition("/")
    package = package.replace("/", ".")
    module = re.compile(rf"from {package}\.{name}[. ]|from {package} import .*\b{name}\b")
    beside = re.compile(rf"from {package}[. ]|import {package}\b")
    texts = {stem: file.read_text(encoding="utf-8") for stem, file in files.items()}
    direct = [stem for stem, text in texts.items() if module.search(text)]
    return direct + [stem for stem, text in texts.items() if beside.search(text)]


def meet(mutant: Mutant, answer: int, last_stage: int) -> None:
    """Run the tests with the mutant in place of its file; write which noticed it."""
    import pytest

    class Noticed:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                os.write(answer, report.nodeid.encode())

        pytest_collectreport = pytest_runtest_logreport

    unchanged, changed = SourceFileLoader.get_code, ROOT / mutant.path

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        if Path(loader.path) != changed:
            return unchanged(loader, name)
        return compile(mutant.source(), changed, "exec", dont_inherit=True)

    cast(Any, SourceFileLoader).get_code = get_code
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestWarning"]
    limits = CPU_S if mutant.path.startswith(MODULES) else [WALL_S] * len(CPU_S)
    for cpu_s, stage in list(zip(limits, stages(mutant.path), strict=True))[:last_stage]:
        used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + cpu_s, -1))
        if code := pytest.main([*options, *stage], plugins=[Noticed()]):
            os.write(answer, f" ({code})".encode())
            return


def outcomes(
    mutants: Sequence[Mutant], parallel: int, last_stage: int
) -> Iterator[tuple[Any, str]]:
    """Run every mutant, `parallel` at a time; return the test that noticed each, "" for none."""
    running: dict[int, tuple[Mutant, int]] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < parallel:
            mutant = waiting.pop()
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    os.setsid()
                    silent = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(silent, 1)
                    os.dup2(silent, 2)
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                    signal.alarm(WALL_S)
                    meet(mutant, write, last_stage)
                finally:
                    os._exit(0)
            os.close(write)
            running[pid] = mutant, read
        pid, status = os.wait()
        mutant, read = running.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests may have started
        noticed = os.read(read, 4096).decode().strip()
        os.close(read)
        yield mutant, noticed or ("limits" if os.WIFSIGNALED(status) else "")


def report(mutants: Sequence[Mutant], known: dict[tuple[str, str, str], str]) -> bool:
    """Print the score and the survivors; return whether it is high enough."""
    reasons = yaml.safe_load((ROOT / "tests/equivalent_mutants.yaml").read_text(encoding="utf-8"))
    equal = {(each["path"], each["before"], each["after"]) for each in reasons}
    survivors = [mutant for mutant in mutants if not known[mutant.key]]
    others = [mutant for mutant in survivors if mutant.key not in equal]
    for mutant in others:
        path, before, after = mutant.key
        print(f"- path: {path}  # {mutant.line}")
        print(f"  before: {json.dumps(before)}\n  after: {json.dumps(after)}")
    by = Counter(known[mutant.key].split("::")[0] for mutant in mutants)
    print(", ".join(f"{name or 'nobody'} {count}" for name, count in by.most_common()))
    killed, equivalent = len(mutants) - len(survivors), len(survivors) - len(others)
    print(
        f"{killed} of {len(mutants)} noticed ({killed / len(mutants):.1%}), {equivalent} "
        f"equivalent ({equivalent / len(mutants):.1%}), {len(others)} survive"
    )
    return killed >= 0.92 * len(mutants) and equivalent <= 0.04 * len(mutants)


def main() -> int:
    """Draw, meet, report; 1 where fewer than 92 % are noticed or over 4 % called equivalent."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--among", nargs="+", default=MODULES, help="files and folders to change")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--stages", type=int, default=4, help="of tests; fewer are faster")
    parser.add_argument("--out", type=Path, default=ROOT / "mutants-out")
    parser.add_argument("--again", action="store_true", help="meet the survivors anew")
    options = parser.parse_args()
    mutants = drawn(options.count, options.seed, options.among)
    options.out.mkdir(exist_ok=True)
    results = options.out / "results.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    known = {tuple(key): noticed for key, noticed in map(json.loads, lines)}
    met = {key for key, noticed in known.items() if noticed or not options.again}
    todo = [mutant for mutant in mutants if mutant.key not in met]
    os.environ |= {"CI": "true", "HYPOTHESIS_PROFILE": "mutants", "OPENBLAS_NUM_THREADS": "1"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, results.open("a", encoding="utf-8") as file:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if todo and (failed := next(outcomes([UNCHANGED], 1, options.stages))[1]):
            print(f"error: {failed} fails where nothing is changed; mend it first", file=sys.stderr)
            return 2
        for index, (mutant, noticed) in enumerate(
            outcomes(todo, options.parallel, options.stages), 1
        ):
            known[mutant.key] = noticed
            print(json.dumps([mutant.key, noticed]), file=file, flush=True)
            print(f"{index}/{len(todo)} {mutant.path}:{mutant.line} {noticed or 'SURVIVES'}")
    return not report(mutants, known)


if __name__ == "__main__":
    sys.exit(main())
