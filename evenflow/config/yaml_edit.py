"""Change a key in the text of a YAML file and leave the rest, comments included, as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import yaml

from evenflow.config.yaml_file import SHORT_FORMS, Loader, assign, document_of


def edited(text: str, dotted: str, value: Any) -> str:
    """Return the text with a `dotted.key` set to plain data; UsageError where it cannot be.

    Where no small change says it, all of it is written anew, without comments.
    """
    keys = dotted.split(".")
    wanted = assign(document_of(text, "the run"), keys, value, dotted).data
    for changed in _changes(text, keys, value):
        with suppress(yaml.YAMLError):
            if yaml.load(changed, Loader) == wanted:
                return changed
    return yaml.safe_dump(wanted, sort_keys=False, default_flow_style=None, width=100)


def _changes(text: str, keys: Sequence[str], value: Any) -> Iterator[str]:
    """Yield texts that may say it: the value replaced, or the key added to its mapping."""
    node: yaml.Node | None = Loader(text).get_single_node()
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
        yield before + _written(value) + text[end:]
    elif isinstance(node, yaml.ScalarNode):
        known = {SHORT_FORMS.get(keys[-len(left) - 1], ""): node.value} if node.value else {}
        yield before + _written(known | _nested(left, value)) + text[end:]
    elif isinstance(node, yaml.MappingNode):
        entry = _written(_nested(left, value))[1:-1]
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


def _written(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()
