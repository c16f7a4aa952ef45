"""The newest release of each engine, recorded under random loads and replayed: is it still as here?

    python -m tools.engines_today [--runs 60] [--seed N]

Fetches the newest package of each engine from the index, records what its own scheduler decides
(`make engines` makes the environments), and replays it by the newest rules that are known. A line
of the table in docs/engines.md is an engine's version; of one that differs, what differs first and
the files that changed since the recorded version follow. Exit status 1 if any differs.
"""

from __future__ import annotations

import filecmp
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from evenflow.experiments.recordings import FORMS, gllm, of_engines, replay_engines, sglang, vllm
from evenflow.experiments.recordings.journal import ReplayOutcome
from evenflow.report.tables import markdown_table
from tools.engines_table import DOCUMENT, ROOT, written
from tools.recordings import arguments

HEADS = ("engine", "release", "on", "random loads", "steps equal", "%", "seed")


class Source(NamedTuple):
    """An engine's package, the environment and the recorder for it, and what of it decides."""

    mark: str
    package: str
    python: str
    recorder: str
    runs: int
    """How many recordings `--runs 1` makes."""
    decides: tuple[str, ...]


SOURCES = (
    Source(
        vllm.FACTS.mark,
        "vllm",
        ".venv-vllm/bin/python",
        "tools.vllm_record",
        1,
        ("vllm/v1/core/**/*.py", "vllm/v1/engine/core.py", "vllm/v1/request.py"),
    ),
    Source(
        sglang.FACTS.mark,
        "sglang",
        ".venv-sglang/bin/python",
        "tools.sglang_loads",
        1,
        ("sglang/srt/managers/**/sched*.py", "sglang/srt/mem_cache/**/*.py"),
    ),
    Source(gllm.FACTS.mark, "gllm-rt", sys.executable, "tools.gllm_package", 6, ("gllm/*.py",)),
)


def newest(source: Source) -> str:
    """Return the newest release of an engine on the index."""
    told = _pip(source, "index", "versions", source.package)
    found = re.match(rf"{source.package} \((.+?)\)", told)
    assert found is not None, told
    return found[1]


def fetched(source: Source, version: str, folder: Path) -> Path:
    """Return a folder with a release unpacked; of vLLM only what Python runs, as it needs CUDA."""
    package = source.package
    _pip(source, "download", "--no-deps", "--dest", str(folder), f"{package}=={version}")
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
    unpacked = folder / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        compiled = [name for name in names if package == "vllm" and name.endswith(".so")]
        archive.extractall(unpacked, {*names} - {*compiled})
    wheel.unlink()
    return unpacked


def _pip(source: Source, *words: str) -> str:
    command = [source.python, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, check=True, cwd=ROOT, text=True, stdout=subprocess.PIPE).stdout


def changed(source: Source, old: Path, new: Path) -> list[str]:
    """Return the files that decide and are not the same in two releases."""
    names = {
        str(path.relative_to(folder))
        for folder in (old, new)
        for pattern in source.decides
        for path in folder.glob(pattern)
    }
    _, differing, missing = filecmp.cmpfiles(old, new, names, shallow=False)
    return sorted([*differing, *missing])


def recorded(source: Source, package: Path, journals: Path, runs: int, seed: int) -> str:
    """Record random loads of a release; return why that failed, or nothing."""
    command = [source.python, "-W", "ignore", "-m", source.recorder, "--package", str(package)]
    command += ["--out", str(journals), "--runs", str(runs // source.runs), "--seed", str(seed)]
    run = subprocess.run(
        command, check=False, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    found = len(of_engines(journals))
    if found == runs:
        return ""
    return f"{found} of {runs} loads recorded: {(run.stderr.strip().splitlines() or ['?'])[-1]}"


def report(source: Source, runs: int, seed: int, folder: Path) -> tuple[list[str], list[str]]:
    """Return a line of the table for the newest release, and what is to be said of it below."""
    engine, version = FORMS[source.mark].FACTS, newest(source)
    package = fetched(source, version, folder)
    journals, known = folder / source.package, engine.versions[-1]
    why = recorded(source, package, journals, runs, seed)
    found = list(replay_engines(of_engines(journals), None, known))
    done = [one for _, one in found if isinstance(one, ReplayOutcome)]
    equal, steps = (sum(getattr(one, name) for one in done) for name in ("equal", "steps"))
    share = f"{100 * equal / steps:.6g}" if steps else "0"
    day = datetime.now(UTC).date().isoformat()
    line = [engine.name, version, day, str(len(found)), f"{equal:,} of {steps:,}", share, str(seed)]
    unlike = [
        f"{path.name}: {one.difference if isinstance(one, ReplayOutcome) else one}"
        for path, one in found
        if not (isinstance(one, ReplayOutcome) and one.difference is None)
    ]
    said = unlike[:1] + [why] * bool(why)
    if said and version != known:
        files = changed(source, fetched(source, known, folder), package)
        said += [f"changed since {known}: {', '.join(files) or 'none of the files that decide'}"]
    return line, [f"{engine.name} {version}, {words}" for words in said]


def table(document: str, lines: Sequence[Sequence[str]], said: Sequence[str]) -> str:
    """Return the document with these lines in its table, beside those of other releases."""
    old = re.search("<!-- today -->\n(.*?)<!-- end of today -->", document, re.DOTALL)
    assert old is not None
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in old[1].splitlines()]
    kept = {(row[0], row[1]): row for row in cells[2:] if len(row) == len(HEADS)}
    kept |= {(line[0], line[1]): list(line) for line in lines}
    below = "".join(f"\n- {each}" for each in said)
    return written(document, "today", markdown_table(HEADS, sorted(kept.values())) + below)


def main() -> None:
    options = arguments("Record the newest release of each engine, and replay it.").parse_args()
    lines, said = [], []
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            line, words = report(source, options.runs, options.seed, Path(folder))
        print(*line, *words, sep="; ", flush=True)
        lines.append(line)
        said += words
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(table(text, lines, said), encoding="utf-8")
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
