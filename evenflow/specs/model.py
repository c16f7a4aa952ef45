"""Models by name: the table, the names that people write, and a config.json by its path.

Knows which formats a name says; the shapes are those of a `ModelSpec`.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from evenflow.errors import UsageError, instead_of
from evenflow.specs.hybrids import unlike_layers
from evenflow.specs.modelspec import ModelSpec, in_precision
from evenflow.specs.tables import read_rows

VARIANTS = re.compile(r"^Meta-|-(Instruct|Chat|Base|hf|it|\d{4})(?=-|$)", re.IGNORECASE)
"""Parts of a name that tell no shape: `Meta-Llama-3.1-8B-Instruct` is a Llama-3.1-8B."""

QUANTIZED = re.compile(r"-(FP8|AWQ|GPTQ-Int4|GPTQ-Int8)(-dynamic)?$", re.IGNORECASE)

WRITTEN = {"fp8": "fp8", "awq": "int4_wo", "gptq-int4": "int4_wo", "gptq-int8": "int8_wo"}
"""What names the format of the matrices: FP8 of Qwen, Z.ai and StepFun has a scale a block, others
one a matrix. An NVFP4 name does not say whether attention is in it, so that needs the file."""


@cache
def models() -> Mapping[str, ModelSpec]:
    """Return the table of models (`models.csv`): those of the papers and common ones since.

    Each is in its repository's format. Llama-3.1-100B is the 405B cut to 30 of its 126 layers,
    which gives the size that the gLLM paper names.
    """
    return {name: _in_table(name) for name in _rows()}


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return {row["name"]: row for row in read_rows("models", ModelSpec)}


@cache
def _in_table(name: str) -> ModelSpec:
    return _of_row(**_rows()[name])


def _of_row(name: str, source: str, **shape: Any) -> ModelSpec:
    """Return the model of a row: its shape, or else the config.json beside the table."""
    if shape:
        return of_shape(name=name, source=source, **shape)
    return ModelSpec.from_config_json(kept_config(source)).changed(name=name, source=source)


def of_shape(*, dense_layers: Any = 0, full_every: Any = 0, **shape: Any) -> ModelSpec:
    """Return a model whose first `dense_layers` layers have no experts.

    Every `full_every`-th (0: none) attends to all tokens, where others have a window.
    """
    spec, dense, every = ModelSpec(**shape), int(dense_layers), int(full_every)
    layers = range(spec.num_layers)
    experts = [layer >= dense for layer in layers]
    full = [every > 0 and (layer + 1) % every == 0 for layer in layers]
    return spec.of_layers(unlike_layers(experts, full))


def kept_config(source: str) -> Path:
    """Return where the table has the config.json of a repository."""
    return Path(__file__).with_name("configs") / f"{source.rpartition('/')[2]}.json"


def listed(name_or_path: str | Path) -> str | None:
    """Return the name under which the table has a model, None for a path and for what it lacks.

    People write names with the organisation and the variant, `Qwen/Qwen3-32B-FP8`,
    `meta-llama/Llama-3.1-70B-Instruct`; a file or folder of that name goes first.
    """
    wanted, table = str(name_or_path), _rows()
    if wanted in table:
        return wanted
    if Path(wanted).exists():
        return None
    by_shape = {_shape_name(row["source"]): name for name, row in table.items()}
    by_shape |= {_shape_name(name): name for name in table}
    return by_shape.get(_shape_name(wanted))


def _shape_name(name: str) -> str:
    return VARIANTS.sub("", QUANTIZED.sub("", name.rpartition("/")[2])).lower()


def _quantized_as(written: str, spec: ModelSpec) -> ModelSpec:
    """Return a model in the format that the end of its name says, if it says one."""
    said = QUANTIZED.search(written)
    if said is None:
        return spec
    if spec.quantization:
        return spec.changed(expert_quantization="")
    found = WRITTEN[said[1].lower()]
    if found == "fp8" and written.startswith(("Qwen/", "zai-org/", "stepfun-ai/")):
        found = "fp8_block"
    return spec.changed(quantization=found)


def model(
    name_or_path: str | Path, dtype: str | None = None, kv_dtype: str | None = None
) -> ModelSpec:
    """Return the model of that name in the table, or read the config.json at that path.

    In the formats given, as `in_precision`, and else its own. UsageError lists the names, nearest
    first.
    """
    name = listed(name_or_path)
    if name is not None:
        found = _quantized_as(str(name_or_path), _in_table(name))
        return in_precision(found, dtype, kv_dtype)
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".json":
        return ModelSpec.from_config_json(path, dtype, kv_dtype)
    known = instead_of(str(name_or_path).rpartition("/")[2], _rows())
    raise UsageError(f'unknown model "{name_or_path}", and no such file; {known}')
