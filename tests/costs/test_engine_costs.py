"""AIConfigurator's engine as costs: near it, a stage's own layers, kept, refusals in a line."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evenflow.core.batch import Span, Work
from evenflow.costs import decode_work, prefill_work
from evenflow.costs.aiconfigurator.cost import engine_cost, question
from evenflow.costs.aiconfigurator.engine import LayerSteps, answer
from evenflow.costs.silicon import tables
from evenflow.errors import UsageError
from evenflow.specs.modelspec import ModelSpec
from tests.profiles import deployed

pytest.importorskip("aiconfigurator_core", reason="pip install -e '.[silicon]'")

TINY = ModelSpec("tiny", 2, 2048, 16, 8, 128, 6144, 32000, 32768, 1e4)


@pytest.fixture(autouse=True)
def _kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp() / "engine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield
    answer.cache_clear()


def some_work(rng: random.Random) -> Work:
    """Return a chunk, decodes, or both, of random sizes."""
    tokens, start = round(2 ** rng.uniform(0, 13)), rng.choice((0, round(2 ** rng.uniform(4, 15))))
    rows, context = round(2 ** rng.uniform(0, 9)), round(2 ** rng.uniform(4, 15))
    kind = rng.choice(("chunk", "decodes", "both"))
    chunks = () if kind == "decodes" else (Span(start, start + tokens),)
    rows = 0 if kind == "chunk" else rows
    return Work(chunks, tokens * len(chunks), rows, rows * context, rows + len(chunks))


def engine_s(engine: LayerSteps, layers: int, work: Work) -> float:
    """Return the engine's own seconds of a whole model, its operators added up."""
    tokens = work.prefill_tokens + work.decode_tokens
    ops = engine._prompt(tokens) if work.chunks else engine._step(tokens, 1)
    attention = [
        op for span in work.chunks for op in engine._prompt(span.stop - span.start, span.start)
    ]
    if work.decode_tokens:
        attention += engine._step(work.decode_tokens, work.decode_context // work.decode_tokens)
    ends = [op for op in engine._prompt(tokens) if "embedding" in op[0]]
    ends += [op for op in engine._step(work.sampled_rows, 1) if "logits" in op[0]]
    own = sum(ms for name, ms, _ in ops if not engine._is_apart(name))
    attends = sum(ms for name, ms, _ in attention if name in engine._attending)
    return (layers * (own + attends) + sum(ms for _, ms, _ in ends)) / 1e3


def test_tables_are_within_a_percent_of_the_engine_at_random_micro_batches() -> None:
    deployment = deployed(TINY, "A100-80G")
    cost = engine_cost(deployment, "vllm")
    engine = LayerSteps(question(deployment, TINY, "a100_sxm", "vllm", None))
    rng = random.Random(3)
    works = [some_work(rng) for _ in range(100)]
    off = [abs(sum(cost.times(work)) / engine_s(engine, 2, work) - 1) for work in works]
    assert np.median(off) < 0.01
    assert np.quantile(off, 0.99) < 0.05


def test_a_stage_takes_the_time_of_its_own_layers() -> None:
    whole = engine_cost(deployed(TINY, "A100-80G"), "vllm")
    parts = engine_cost(deployed(TINY, "A100-80G", [1, 1]), "vllm")
    for work in (prefill_work(512), decode_work(16, 16 * 700)):
        first, last = parts.times(work)
        assert sum(whole.times(work)) == pytest.approx(first + last)
        assert last > first  # the LM head is wider than the embedding takes


def test_an_answer_is_kept_in_a_file_under_the_hash_of_the_question() -> None:
    asked = question(deployed(TINY, "A100-80G"), TINY, "a100_sxm", "vllm", None)
    found = answer(asked)
    answer.cache_clear()
    path = Path(os.environ["XDG_CACHE_HOME"], "evenflow", "aiconfigurator", f"{asked.key()}.json")
    path.write_text(json.dumps(found | {"head": [[1, 7.0, 0.0]]}))
    assert answer(asked)["head"] == [[1, 7.0, 0.0]]
    path.unlink()


@pytest.mark.parametrize(
    ("model", "gpu", "version", "words"),
    [
        ("Qwen3-8B", "L20", None, "no measurements of L20; .*roofline"),
        ("Qwen3-8B", "A100-80G", "9.9.9", "a100_sxm with vllm: .*9.9.9"),
        ("Gemma-2-9B", "H100", None, "no gemma2 models, of which Gemma-2-9B is one"),
    ],
)
def test_what_the_package_lacks_is_refused_in_a_line(
    model: str, gpu: str, version: str | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        engine_cost(deployed(model, gpu), "vllm", version)
    assert "\n" not in str(refused.value)


def test_without_the_package_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install aiconfigurator-core"):
        engine_cost(deployed(TINY, "A100-80G"), "trtllm")
