"""The tables of docs/engines.md, from the journals that are found, replayed.

    EVENFLOW_SHARED=... python -m tools.engines_table

Ours are in tests/journals; others are read from $EVENFLOW_SHARED/engines, and where there are none
their rows stay as they are.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from evenflow.errors import UsageError
from evenflow.experiments.recordings import (
    FORMS,
    form_of,
    of_engines,
    replay_engines,
)
from evenflow.experiments.recordings.journal import Event, Form, ReplayOutcome, first_line
from evenflow.report.tables import markdown_table

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "engines.md"
OWN = ROOT / "tests" / "journals"
SHARED = Path(os.environ.get("EVENFLOW_SHARED", ROOT.parent / "shared")) / "engines"

HEADS = ("engine", "version", "recorded", "stages", "journals", "steps equal", "requests to 1 ns")


def _vllm(config: Event) -> Iterator[str]:
    """Yield how a journal's engine ran, in words; the others likewise."""
    runner = f"asynchronous, runner V{1 + bool(config.get('v2_runner'))}"
    yield runner if config.get("async_scheduling") else "synchronous"
    yield from ["prefix caching"] * bool(config.get("prefix_caching"))
    yield from ["chunk by chunk"] * (config.get("full_isl") is False)
    yield from ["short chunks"] * bool(config.get("long_prefill_token_threshold"))
    yield from ["whole prompts"] * (config.get("chunked_prefill") is False)
    yield from ["priorities"] * (config.get("policy") == "priority")
    cadence = config["version"] != "0.32.0" and config.get("prefill_schedule_interval", 1) > 1
    yield from ["prefill cadence"] * cadence


def _sglang(config: Event) -> Iterator[str]:
    yield "overlapped" if config["overlap"] else "not overlapped"
    yield from ["mixed chunks"] * bool(config.get("mixed_chunk"))
    yield from ["whole prompts"] * (config["chunked_prefill_size"] is None)
    yield from ["speculation"] * bool(config.get("speculative"))
    yield from [f"{each} server" for each in [config.get("disaggregation_mode")] if each]
    yield from ["radix cache"] * bool(config["radix"])


def _trtllm(config: Event) -> Iterator[str]:
    yield {"pp": "pipeline", "simple": "not overlapped"}.get(config["loop"], "overlapped")
    yield from ["1.0's"] * (config.get("waits_first") is False)
    policy = config["capacity_policy"]
    yield from [policy] * (policy != "GUARANTEED_NO_EVICT")
    yield from ["chunks"] * bool(config.get("chunking"))


def _gllm(config: Event) -> Iterator[str]:
    yield "pages enough" if config["pages"] >= 4000 else "pages too few"


MODES: Mapping[str, Callable[[Event], Iterator[str]]] = {
    "vLLM V1": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _trtllm,
    "gLLM": _gllm,
}
"""What says how an engine ran, by its name."""


def rows(journals: Iterable[tuple[Path, ReplayOutcome | UsageError]]) -> str:
    """Return a line of the table for each engine, version and mode."""
    found: dict[tuple[str, str, str], list[tuple[Event, ReplayOutcome | UsageError]]] = defaultdict(
        list
    )
    for path, outcome in journals:
        form, version, _ = form_of(path)
        config = {**first_line(path), "version": version}
        key = form.FACTS.name, version, ", ".join(MODES[form.FACTS.name](config))
        found[key].append((config, outcome))
    lines = []
    for key, group in sorted(found.items()):
        stages = sorted({config.get("pp", config.get("depth", 1)) for config, _ in group})
        done = [outcome for _, outcome in group if isinstance(outcome, ReplayOutcome)]
        equal, steps = sum(each.equal for each in done), sum(each.steps for each in done)
        timed = sum(each.timed for each in done)
        refused = f", {len(group) - len(done)} not modelled" * (len(done) < len(group))
        read, times = f"{len(group)}{refused}", f"{timed:,}" if timed else "no times"
        told = ", ".join(map(str, stages)), read, f"{equal:,} of {steps:,}", times
        lines.append([*key, *told])
    return markdown_table(HEADS, lines)


def rules() -> str:
    """Return a table of what is compared of each engine, and what is not covered."""
    heads = ("engine", "policy", "compared in each step: rules", "not covered")
    return markdown_table(heads, map(_rules_of, FORMS.values()))


def _rules_of(form: Form) -> tuple[str, ...]:
    compared = "; ".join(f"*{name}*: {rule}" for name, rule in form.FACTS.rules.items())
    return form.FACTS.name, f"`{form.FACTS.policy}`", compared, form.FACTS.not_covered


def blocks() -> Iterator[tuple[str, str]]:
    """Return the parts of the document that are made, by name."""
    yield "rules", rules()
    yield "own", rows(replay_engines(of_engines(OWN), None))
    folders = filter(Path.is_dir, sorted(SHARED.glob("*-*")))
    shared = [path for folder in folders for path in of_engines(folder)]
    if shared:
        yield "shared", rows(replay_engines(shared, None))


def written(document: str, name: str, table: str) -> str:
    """Return a document with another table between the marks of this name."""
    start, stop = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    return re.sub(f"{start}.*?{stop}", lambda _: f"{start}{table}{stop}", document, flags=re.DOTALL)


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    for block, made in blocks():
        text = written(text, block, made)
    DOCUMENT.write_text(text, encoding="utf-8")
