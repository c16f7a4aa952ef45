"""What the reader of a figure has to know of its runs: in words, and under the picture."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from evenflow.schedulers import POOLED, policy
from experiments.figures.layers import gpu_name
from experiments.run_file.links import link_words
from experiments.run_file.run import RunConfig

IN_THE_PICTURE = (
    "pairs",
    "metrics",
    "deployments",
    "datasets",
    "variants",
    "readings",
    "published_set_up",
)
"""Facts that the panels and the title show, or the data file; the footnote does without."""

TITLE_CHARACTERS_PER_INCH, NOTE_CHARACTERS_PER_INCH = 10.5, 15.5
LINE_INCHES = 0.125
MOST_VALUES, MOST_CHARACTERS = 9, 60


def policy_words(config: RunConfig) -> str:
    """Return a policy with its parameters, and its cap on running requests, given or not."""
    params = config.scheduler.params
    if (cap := _default_cap(config.scheduler.name)) is not None:
        params = {"max_num_seqs": cap} | params
    return " ".join(
        (config.scheduler.name, *(f"{key} {_brief(value)}" for key, value in params.items()))
    )


def _default_cap(name: str) -> int | None:
    if name in POOLED:
        return None
    cap = inspect.signature(policy(name)).parameters.get("max_num_seqs")
    return None if cap is None else cap.default


def machine_words(config: RunConfig) -> str:
    """Return a run's GPU with its links, in words."""
    assert config.gpu is not None  # or there is no machine
    if config.link is None:
        return gpu_name(config.gpu)
    words = f"{gpu_name(config.gpu)} over {link_words(config.link)}"
    if config.nodes is not None:
        words += f" in machines of {config.nodes.gpus}, {link_words(config.nodes.link)} between"
    all_reduce = getattr(config.costs, "all_reduce", None)
    return words if all_reduce is None else f"{words}, all-reduce {link_words(all_reduce)}"


def brief_reasons(errors: Sequence[str]) -> list[str]:
    """Return why runs failed, each reason once and cut to a few words."""
    found = dict.fromkeys(errors)
    return list(
        dict.fromkeys(textwrap.shorten(e, MOST_CHARACTERS, placeholder=" ...") for e in found)
    )


def annotate(figure: Figure, title: str, note: str) -> None:
    """Put a title above and a footnote below, in lines as wide as the figure; add their height."""
    across, high = figure.get_size_inches()
    above = textwrap.wrap(title, int(across * TITLE_CHARACTERS_PER_INCH))
    below = textwrap.wrap(note, int(across * NOTE_CHARACTERS_PER_INCH))
    figure.set_figheight(high + LINE_INCHES * (len(below) + 1.5 * (len(above) - 1)))
    figure.suptitle("\n".join(above), fontsize=11)
    figure.supxlabel("\n".join(below), fontsize=7, color="0.3")


def footnote(facts: Mapping[str, Any], differs: str) -> str:
    """Return the facts as one text, and how the figure differs from the paper's."""
    shown = {
        name: value
        for name, value in facts.items()
        if name not in IN_THE_PICTURE and value not in (None, [], {}, False)
        if name != "set" or facts["published_set_up"]
    }
    words = (
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')}: {_brief(value)}"
        for name, value in shown.items()
    )
    return f"{'; '.join(words)}. {differs}".strip()


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        if list(value) == ["kind"]:
            return str(value["kind"])
        if any(isinstance(each, Mapping) for each in value.values()):
            return ", ".join(map(str, value))
        return ", ".join(f"{key} {_brief(each)}" for key, each in value.items())
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if len(value) > MOST_VALUES:
        return f"{_brief(value[0])} .. {_brief(value[-1])} ({len(value)} values)"
    return (" | " if any(isinstance(each, str) for each in value) else ", ").join(
        map(_brief, value)
    )
