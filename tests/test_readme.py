"""Every example of the README and of docs/ works as it stands there.

A fenced block is an example by its language: `yaml` is checked against the schema, `python` is run,
`text` after it is what it prints, `console` has its `$` lines run. `title="NAME"` after the
language saves the block under that name for the blocks after it. Blocks of one document share a
folder, which also holds examples/.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from evenflow.config.run import RunConfig
from evenflow.experiments.figures.schema import load_plan
from evenflow.study.sweep_file import SweepConfig
from tests.command_line import evenflow
from tests.places import ROOT
from tools.site_links import on_page_content, on_page_markdown

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SET_UP_COMMANDS = {"git", "cd", "pip", "python", "python3", "source"}


class Example(NamedTuple):
    language: str
    title: str | None
    text: str


def examples(document: str) -> list[Example]:
    found = []
    for language, info, text in FENCE.findall(document):
        title = re.search(r'title="(.+)"', info)
        found.append(Example(language, title.group(1) if title else None, text))
    return found


def check_yaml(text: str, folder: Path) -> None:
    """A sweep, a figure, a configuration, or some keys of one laid over that of the demo."""
    given = yaml.safe_load(text)
    if "plot" in given:
        (folder / "figure.yaml").write_text(text, encoding="utf-8")
        load_plan(folder / "figure.yaml")
        return
    if "parameters" in given:
        SweepConfig.model_validate(given)
        return
    demo = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))
    RunConfig.model_validate({**demo, **given})


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def in_folder(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of a command, run in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "path", [*sys.path])
        try:
            return evenflow(*arguments)
        finally:  # another document's policies may have the same module's name
            for name, module in [*sys.modules.items()]:
                if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
                    del sys.modules[name]


def lines(text: str) -> list[str]:
    """Return the lines of an output; how long it took here is not compared."""
    return [re.sub(r"\bin [\d,.]+ s\b", "in N s", line.rstrip()) for line in text.splitlines()]


def check_console(text: str, folder: Path) -> None:
    """Run the `$ evenflow` lines, whose output has the lines shown, and gives the very error."""
    for command, shown in re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", text, re.MULTILINE):
        program, *arguments = shlex.split(command, comments=True)
        if program == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(arguments) <= set(targets), command
        elif program == "evenflow":
            status, *printed = in_folder(folder, *arguments)
            told = "".join(printed)
            assert status == (2 if "error:" in shown else 0), f"{command}\n{told}"
            if "error:" in shown:
                assert shown.strip() in told
            else:
                assert set(lines(shown)) <= {*lines(told), "..."}, told
        else:
            assert program in SET_UP_COMMANDS, f"this test cannot run: {command}"


def check(document: str, folder: Path) -> None:
    printed = ""
    for example in examples(document):
        if example.language == "text" and printed:
            assert [line.rstrip() for line in printed.splitlines()] == example.text.splitlines()
        printed = ""
        if example.title:
            path = folder / example.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(example.text, encoding="utf-8")
        if example.language == "yaml":
            check_yaml(example.text, folder)
        elif example.language == "python":
            done = run(folder, example.title) if example.title else run(folder, "-c", example.text)
            assert done.returncode == 0, f"{example.text}\n{done.stdout}"
            printed = done.stdout
        elif example.language == "console":
            check_console(example.text, folder)


QUICK = "README.md", "bubbles.md", "traces.md"
"""Documents whose examples `make test` runs; `make test-all` runs those of all."""


def by_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documents() -> list[Any]:
    long = [() if path.name in QUICK else pytest.mark.long for path in DOCUMENTS]
    return [
        pytest.param(path, marks=marks, id=by_name(path))
        for path, marks in zip(DOCUMENTS, long, strict=True)
    ]


@pytest.mark.parametrize("path", documents())
def test_the_examples_of_a_document_work(path: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    check(path.read_text(encoding="utf-8"), tmp_path)


def anchors(document: Path) -> set[str]:
    """Return what the headings of a document are called in links, as GitHub does it."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def words_of(path: Path) -> str:
    """Return a document without its code."""
    text = path.read_text(encoding="utf-8")
    if path in NOTEBOOKS:
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", [*DOCUMENTS, *NOTEBOOKS], ids=by_name)
def test_the_links_of_a_document_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", words_of(path)):
        name, _, anchor = link.partition("#")
        if not name.startswith("http"):
            there = path.parent / name if name else path
            assert there.exists(), link
            assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_the_site_reads_the_head_of_each_block(path: Path) -> None:
    """With a value that is not in quotes it shows the block, and prose below, as something else."""
    heads = [info for _, info, _ in FENCE.findall(path.read_text(encoding="utf-8"))]
    assert [head for head in heads if not re.fullmatch(r'( \w+="[^"]*")*', head)] == []


def sentences(document: str) -> list[int]:
    """Return the words of each sentence; code, tables, headings and pictures are left out."""
    text = re.sub(r"```.*?```", "", document, flags=re.DOTALL)
    text = re.sub(r"^\s*[|#!<].*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^\s*(?:-|\d+\.)\s", " . ", text, flags=re.MULTILINE)
    parts = re.split(r"(?<=[.:?!])\s+|\n\n| \. ", text)
    return [words for part in parts if (words := len(part.split())) > 2]


def test_sentences_are_counted_without_code_tables_and_addresses() -> None:
    page = "# A title of words\n\nOne two three. [Four](five.md) five six:\n\n- seven eight nine\n"
    assert sentences(page + "\n| a b c |\n\n```sh\nnot a word here\n```\n") == [3, 3, 3]


def test_the_site_says_it_in_12000_words_and_short_sentences() -> None:
    """Evidence, which lists runs, is not counted, but its sentences are as short."""
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    words = 0
    for section in yaml.safe_load(f"nav:{listed}")["nav"]:
        for name in re.findall(r"[\w/-]+\.md", str(section)):
            counts = sentences((ROOT / "docs" / name).read_text(encoding="utf-8"))
            assert median(counts) <= 14, name
            words += sum(counts) if "Evidence" not in section else 0
    assert words <= 12_000


@pytest.mark.parametrize(
    "document",
    [
        "```yaml\nstagse: 4\n```\n",
        "```python\nraise ValueError\n```\n",
        "```python\nprint(1)\n```\n```text\n2\n```\n",
        "```console\n$ make nothing\n```\n",
        "```console\n$ evenflow simulate missing.yaml\n```\n",
        "```console\n$ evenflow simulate missing.yaml\nerror: something else\n```\n",
        "```console\n$ evenflow links\nno link\n```\n",
        "```console\n$ frobnicate\n```\n",
    ],
)
def test_an_example_that_does_not_work_is_found(document: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(document, tmp_path)


@pytest.mark.parametrize(
    ("link", "there", "nowhere"),
    [
        ("[`a`](../sim/tandem.py#L3)", "[`a`](https://x/blob/main/sim/tandem.py)", "`a`"),
        ("[b](kv.md)", "[b](kv.md)", "[b](kv.md)"),
        ("![c](../README.md)", "![c](../README.md)", "![c](../README.md)"),
        ("[d](../missing.py)", "[d](../missing.py)", "[d](../missing.py)"),  # mkdocs complains
    ],
)
def test_on_the_site_a_link_out_of_docs_leads_to_the_repository(
    link: str, there: str, nowhere: str
) -> None:
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(ROOT / "docs" / "tour.md")))
    for repository, expected in (("https://x", there), ("", nowhere)):
        config = SimpleNamespace(docs_dir=str(ROOT / "docs"), repo_url=repository)
        assert on_page_markdown(link, page, config) == expected


def test_on_the_site_a_link_of_a_notebook_leads_to_the_page() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="cookbook/2.ipynb"))
    html = '<a href="../docs/kv.md#x">a</a> <a href="3-tp-or-pp.ipynb">b</a>'
    shown = '<a href="../kv.html#x">a</a> <a href="3-tp-or-pp.html">b</a>'
    assert on_page_content(html, page) == shown
    assert on_page_content(html, SimpleNamespace(file=SimpleNamespace(src_uri="kv.md"))) == html
