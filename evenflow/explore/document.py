"""Question of a page: its RUN.yaml, the schedulers beside it, and changes by sliders.

What the page sends is checked here: it names only files and modules of the command line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from evenflow.config import yaml_file
from evenflow.config.files import texts_of
from evenflow.config.run import RunConfig, configured, with_
from evenflow.errors import UsageError
from evenflow.keys import Keys
from evenflow.study.compare import on_one_engine, parse_schedulers, with_name
from evenflow.study.slo import Condition, parse_slo

MOST_SIDES = 4
"""Schedulers that are shown side by side."""


class Question(Keys):
    """Question of a page: a RUN.yaml, schedulers beside its own, and keys to set before."""

    text: str
    """The text of the RUN.yaml."""
    others: list[dict[str, Any]] = Field(default=[])
    """Schedulers that are shown beside its own: names and parameters."""
    set: dict[str, Any] = Field(default={})
    """New values of keys of the RUN.yaml; `others.0.KEY` is one of the first scheduler beside."""


@dataclass(frozen=True, slots=True)
class Given:
    """Words of the command line: a run's file and text, schedulers beside its own, limits.

    `original` is the file's text without what `--set` and `--schedulers` say. `names` are all words
    in it, and the only ones of files and modules that are right.
    """

    file: Path
    original: str
    text: str
    others: tuple[Mapping[str, Any], ...]
    slo: tuple[Condition, ...]
    names: frozenset[str]

    @property
    def question(self) -> Question:
        """The page as it opens."""
        return Question(text=self.text, others=[dict(each) for each in self.others])


def given(file: Path, sets: Sequence[str], schedulers: str, slo: Sequence[str]) -> Given:
    """Return the run, schedulers and limits to explore; UsageError for invalid ones."""
    text = original = yaml_file.read_text(file)
    document = yaml_file.document_of(text, str(file))
    for each in sets:
        text = _set(text, each)
    entries = list(map(with_name, parse_schedulers(schedulers)))
    if entries:
        named = yaml_file.long_form("scheduler", document.data.get("scheduler"))
        if entries[0] != {"name": (named or {}).get("name")}:  # which keeps its parameters
            text = edited(text, "scheduler", entries[0])
    limits = tuple(parse_slo(slo)) if slo else ()
    others = tuple(entries[1:])
    data = [yaml_file.document_of(text, str(file)).data, *others]
    names = frozenset(word for each in data for _, word in texts_of(each))
    found = Given(file, original, text, others, limits, names)
    settled(found, found.question)
    return found


def _set(text: str, assignment: str) -> str:
    before = yaml_file.document_of(text, "the run")
    dotted = assignment.partition("=")[0].strip()
    value: Any = yaml_file.override(before, assignment).data
    for key in dotted.split("."):
        value = value[key]
    return edited(text, dotted, value)


@dataclass(frozen=True, slots=True)
class Settled:
    """Question of a page, checked: its text and schedulers with the new values, and the runs."""

    document: yaml_file.Document
    text: str
    others: list[dict[str, Any]]
    configs: Sequence[RunConfig]

    def command(self, given: Given) -> str:
        """Return the command line that simulates the same."""
        start = yaml_file.document_of(given.original, str(given.file))
        patch = yaml_file.as_patch(start.data, self.document.data)
        same = _same(start, patch, configured(self.document))
        file = str(given.file) if same else "RUN.yaml"  # which the page lets one download
        sets = [f"--set {shlex.quote(f'{k}={_json(v)}')}" for k, v in patch.items() if same]
        if len(named := self._named()) == 1:
            return " ".join(["evenflow simulate", shlex.quote(file), *sets])
        schedulers = f"--schedulers {shlex.quote(','.join(named))}"
        return " ".join(["evenflow compare", shlex.quote(file), schedulers, *sets])

    def _named(self) -> list[str]:
        """Return the schedulers as `--schedulers` takes them; equal runs are there once."""
        own = self.configs[0].scheduler  # whose parameters are in the file, or set
        found = {_json(self.configs[0].resolved()): own.name}
        for each, config in zip(self.others, self.configs[1:], strict=True):
            bare = len(each) == 1 and not (each["name"] == own.name and own.params)
            found.setdefault(_json(config.resolved()), each["name"] if bare else _json(each))
        return list(found.values())


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _same(start: yaml_file.Document, patch: Mapping[str, Any], config: RunConfig) -> bool:
    """Say whether a patch of the given file makes this run; a key that was taken out it cannot."""
    try:
        return configured(yaml_file.patched(start, patch)).resolved() == config.resolved()
    except UsageError:
        return False


def settled(given: Given, question: Question) -> Settled:
    """Check what a page asks for; UsageError in the command line's words."""
    text, name = question.text, given.file.name
    if len(text) > yaml_file.MOST_BYTES:
        raise UsageError(
            f"{name}: has more than {yaml_file.MOST_BYTES} bytes; a shorter file is right"
        )
    others = [dict(each) for each in question.others]
    if len(others) >= MOST_SIDES:
        raise UsageError(f"--schedulers: at most {MOST_SIDES} side by side are right")
    yaml_file.document_of(text, name)  # before anything is changed in it
    for dotted, value in question.set.items():
        if side := side_of(dotted, len(others)):
            others[side - 1] = _with(others[side - 1], dotted.split(".", 2)[2], value)
        elif dotted == "scheduler.name":  # whose parameters are not another's
            text = edited(text, "scheduler", {"name": value})
        else:
            text = edited(text, dotted, value)
    document = yaml_file.document_of(text, name)
    _refuse_names(given, name, document.data)
    for each in others:
        _refuse_names(given, "--schedulers", {"scheduler": each})
    configs = [configured(document)]
    configs += [with_(document, {"scheduler": each}) for each in others]
    return Settled(document, text, others, on_one_engine(configs))


def side_of(dotted: str, most: int) -> int:
    """Return whose key it is: 0, the run's own, or the position of a scheduler beside it."""
    found = re.fullmatch(r"others\.(\d)\..+", dotted)
    return int(found[1]) + 1 if found and int(found[1]) < most else 0


def _with(scheduler: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {"name": value} if key == "name" else {**scheduler, key: value}


def _refuse_names(given: Given, name: str, data: Mapping[str, Any]) -> None:
    """Raise a UsageError for a file or a module that the command line did not name."""
    for key, word in texts_of(data):
        if word and word not in given.names and _leads_somewhere(word, given.file.parent):
            raise UsageError(
                f'{name}: {key}: "{word}" is not a name that the page may give; a file or a module '
                "has to be on the command line"
            )


def _leads_somewhere(word: str, beside: Path) -> bool:
    try:
        return (
            word == "-"
            or any(mark in word for mark in "/\\:")
            or Path(yaml_file.find(word, beside)).exists()
        )
    except (OSError, ValueError):  # of a name that no file can have
        return True


def question_of(data: Any) -> Question:
    """Return what a page asks for, from its JSON; UsageError for anything else."""
    try:
        return Question.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"the page: {error.errors()[0]['loc']} is wrong; reload it") from None


def edited(text: str, dotted: str, value: Any) -> str:
    """Return the text with a `dotted.key` set to plain data; UsageError where it cannot be.

    Where no small change says it, all of it is written anew, without comments.
    """
    keys = dotted.split(".")
    wanted = yaml_file.assign(yaml_file.document_of(text, "the run"), keys, value, dotted).data
    for changed in _changes(text, keys, value):
        with suppress(yaml.YAMLError):
            if yaml.load(changed, yaml_file.Loader) == wanted:
                return changed
    return yaml_file.in_blocks(wanted)


def _changes(text: str, keys: Sequence[str], value: Any) -> Iterator[str]:
    """Yield texts that may say it: the value replaced, or the key added to its mapping."""
    node: yaml.Node | None = yaml_file.Loader(text).get_single_node()
    left = list(keys)
    while left and isinstance(node, yaml.MappingNode):
        below = next((held for key, held in node.value if key.value == left[0]), None)
        if below is None:
            break
        node, _ = below, left.pop(0)
    assert node is not None  # `document_of` has read a mapping
    start, end = node.start_mark.index, node.end_mark.index
    end = start + len(text[start:end].rstrip())
    before = text[:start] + " " * (start == end)  # nothing is written there
    if not left:
        yield before + yaml_file.in_a_line(value) + text[end:]
    elif isinstance(node, yaml.ScalarNode):
        known = (
            {yaml_file.SHORT_FORMS.get(keys[-len(left) - 1], ""): node.value} if node.value else {}
        )
        yield before + yaml_file.in_a_line(known | _nested(left, value)) + text[end:]
    elif isinstance(node, yaml.MappingNode):
        entry = yaml_file.in_a_line(_nested(left, value))[1:-1]
        if node.flow_style:
            yield f"{text[: end - 1].rstrip()}, {entry}{text[end - 1 :]}"
        else:
            line_end = text.find("\n", end)
            line_end = len(text) if line_end < 0 else line_end
            indent = " " * node.value[0][0].start_mark.column
            yield f"{text[:line_end]}\n{indent}{entry}{text[line_end:]}"


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = keys
    return {head: _nested(rest, value) if rest else value}
