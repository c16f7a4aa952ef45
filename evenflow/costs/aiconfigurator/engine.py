"""Asks AIConfigurator's compiled engine for the steps of one layer, and keeps the answers.

Each question is sampled once, and kept in a file under its hash. Knows configs and parallel
layouts; no stage and no micro-batch. The engine's times are milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evenflow.costs.silicon.tables import package_folder
from evenflow.errors import UsageError
from evenflow.files import write_whole

QUANT = "hf_quant_config"
"""The file, and the key of ours, with what a checkpoint says of its formats beside config.json."""

MEASURED = ("silicon", "mixed", "estimated")
"""What the engine calls an answer from its tables: alone, with a formula beside, or a difference of
two (products less the search for their inputs' scale)."""

FAR = 65536
"""Tokens of context that change the time of attention, and not that of a state."""

STEPS = ((1, 64), (4, 256), (16, 1024), (64, 4096), (256, 16384), (2048, 65536))
"""Steps in which numbers of tokens are sampled, up to the number beside, and one token beyond each,
where another tile begins."""


def _halved(low: int, high: int) -> list[int]:
    """Return the powers of two from 2**low to 2**high, and the middles between them."""
    powers = [2**power for power in range(low, high + 1)]
    return sorted({*powers, *(size + size // 2 for size in powers[:-1])})


CHUNKS, ROWS, CONTEXTS = _halved(0, 15), _halved(0, 11), _halved(4, 18)

FORM = 1
"""Of what is kept; another number makes what was kept before old."""

Op = tuple[str, float, str]
"""Name, milliseconds, and where they are from."""

Answer = dict[str, Any]
"""Rows of numbers by part. A size, its seconds, and those of them without a measurement: `layer`
beside prompts, its `experts` apart, `alone` of decodes alone, `embedding`, `head`. Tokens, their
context, and seconds of attention: `prompts`, `steps`; and whether these were mostly measured."""


@dataclass(frozen=True, slots=True)
class LayerQuestion:
    """Question about one layer on one rank, as the difference of two models.

    `config`: config.json of the model up to that layer; `less`: up to the layer before, "" for the
    first. `experts`: slices of each expert, and ranks that experts are spread over. `formats`: the
    engine's names. `products`: matrices (inputs, outputs) that the engine's layer lacks. `dense`
    leaves experts out.
    """

    system: str
    framework: str
    version: str | None
    config: str
    less: str
    ranks: int
    groups: int
    experts: tuple[int, int]
    formats: tuple[tuple[str, str], ...]
    products: tuple[tuple[int, int], ...] = ()
    dense: bool = False

    def key(self) -> str:
        """Return the key in the cache: a hash of the question and the package's version."""
        parts = [FORM, version("aiconfigurator-core"), asdict(self)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=64)
def answer(question: LayerQuestion) -> Answer:
    """Return the answer to a question, from the cache of answers if it is there.

    UsageError where the package is missing, or has no such model, version or measurement.
    """
    package_folder()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "evenflow" / "aiconfigurator" / f"{question.key()}.json"
    with suppress(OSError, ValueError):
        kept: Answer = json.loads(path.read_text(encoding="utf-8"))
        return kept
    found = _sampled(question)
    with suppress(OSError, UsageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found))
    return found


def _sampled(question: LayerQuestion) -> Answer:
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        return LayerSteps(question).answer()
    except Exception as error:  # the package raises what its parts raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = lines[0].split(" at /")[0]  # whose folder it is says nothing
        raise UsageError(
            f"costs: aiconfigurator, {question.system} with {question.framework}: {what}"
        ) from error


class LayerSteps:
    """Seconds of one layer: AIConfigurator's of a model with the layer, minus of one without."""

    def __init__(self, question: LayerQuestion) -> None:
        self.question = question
        configs = filter(None, (question.config, question.less))
        self._with, *self._without = [self._compiled(config) for config in configs]
        self._products = self._made()
        near = (*self._prompt(64), *self._step(8, 64))
        far = (*self._prompt(64, FAR), *self._step(8, FAR))
        pairs = zip(near, far, strict=True)
        self._attending = {op for (op, one, _), (_, other, _) in pairs if one != other}

    def _compiled(self, config: str) -> Any:
        """Return the engine of a config.json, which it reads from a folder."""
        from aiconfigurator_core.sdk.engine import EngineHandle

        asked, values = self.question, json.loads(config)
        said = values.pop(QUANT, None)
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
            if said:
                (Path(folder) / f"{QUANT}.json").write_text(json.dumps(said), encoding="utf-8")
            return EngineHandle.compile(
                folder,
                asked.system,
                asked.framework,
                backend_version=asked.version,
                tp_size=asked.ranks,
                attention_dp_size=asked.groups,
                moe_tp_size=asked.experts[0],
                moe_ep_size=asked.experts[1],
                **dict(asked.formats),
            )

    def _made(self) -> str:
        """Return the products that the engine's layer lacks, in its JSON; "" for none."""
        from aiconfigurator_core.sdk import common, operations
        from aiconfigurator_core.sdk.engine import build_ops_json

        name = dict(self.question.formats).get("gemm_quant_mode", "bfloat16")
        mode = common.GEMMQuantMode[name]
        shapes = self.question.products
        made = [operations.GEMM(f"product_{i}", 1, n, k, mode) for i, (k, n) in enumerate(shapes)]
        return build_ops_json(made) if made else ""

    def answer(self) -> Answer:
        """Return the times at all sampled sizes."""
        found: Answer = {name: [] for name in ("layer", "alone", "experts", "embedding", "head")}
        for size in _sizes():
            prompt, step = [*self._prompt(size)], [*self._step(size, 1)]
            found["layer"].append(
                [size, *_sum(prompt, lambda op: not (self._is_apart(op) or _is_expert(op)))]
            )
            found["alone"].append([size, *_sum(step, lambda op: not self._is_apart(op))])
            found["experts"].append([size, *_sum(prompt, _is_expert)])
            found["embedding"].append([size, *_sum(prompt, lambda op: "embedding" in op)])
            found["head"].append([size, *_sum(step, lambda op: "logits" in op)])
        prompts = {(n, at): self._prompt(n, at) for n in CHUNKS for at in (0, *CONTEXTS)}
        steps = {(n, at): self._step(n, at) for n in ROWS for at in (1, *CONTEXTS)}
        for name, points in (("prompts", prompts), ("steps", steps)):
            sums = [[*at, *_sum(ops, self._attending.__contains__)] for at, ops in points.items()]
            found[name] = [point[:3] for point in sums]
            unmeasured_s = math.fsum(point[3] for point in sums)
            found[f"{name}_measured"] = 2 * unmeasured_s < math.fsum(point[2] for point in sums)
        return found

    def _prompt(self, tokens: int, start: int = 0) -> list[Op]:
        """Return the operators of one chunk of a prompt, after `start` tokens of it."""
        context = self._added(
            lambda engine: engine.run_static_per_op(
                batch_size=1, isl=start + tokens, osl=1, prefix=start, mode="static_ctx"
            )[0]
        )
        return context + self._extra(tokens)

    def _step(self, rows: int, context: int) -> list[Op]:
        """Return the operators of a decode step of rows with `context` tokens each."""
        return self._added(
            lambda engine: engine.decode_step_per_op(rows, context, 2)
        ) + self._extra(rows)

    def _added(self, asked: Callable[[Any], Iterable[tuple[str, float, float, str]]]) -> list[Op]:
        ops = [(name, ms, source) for name, ms, _, source in asked(self._with)]
        for engine in self._without:
            ops += [(op, -ms, source) for op, ms, _, source in asked(engine) if not _is_end(op)]
        mlp = ("_moe", "_shared_", "_router_") if self.question.dense else ()
        return [op for op in ops if not any(word in op[0] for word in mlp)]

    def _extra(self, tokens: int) -> list[Op]:
        if not self._products:
            return []
        size = {"is_context": True, "batch_size": 1, "s": tokens}
        found = self._with.evaluate_ops_json(self._products, **size)
        return [(name, ms, source) for name, ms, _, source in found]

    def _is_apart(self, op: str) -> bool:
        return op in self._attending or _is_end(op)


def _is_end(op: str) -> bool:
    """Say whether an operator is outside the layers: embedding, LM head, a hop between stages."""
    return any(word in op for word in ("embedding", "logits", "p2p"))


def _is_expert(op: str) -> bool:
    return "_moe" in op


def _sum(ops: Iterable[Op], wanted: Callable[[str], bool]) -> tuple[float, float]:
    """Return seconds of operators, and which operators lack a measurement."""
    found = [(ms / 1e3, source) for name, ms, source in ops if wanted(name)]
    unmeasured = (seconds for seconds, source in found if source not in MEASURED)
    return math.fsum(seconds for seconds, _ in found), math.fsum(unmeasured)


def _sizes() -> list[int]:
    sizes, start = set[int](), 0
    for step, stop in STEPS:
        sizes |= {size + one for size in range(start + step, stop + 1, step) for one in (0, 1)}
        start = stop
    return sorted(sizes)
