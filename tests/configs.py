"""The config.json of models for tests, by name, and what is read of one."""

import json
from pathlib import Path
from typing import Any

import yaml

from evenflow.specs.modelspec import ModelSpec

CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def written(folder: Path, values: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def read(folder: Path, values: object) -> ModelSpec:
    return ModelSpec.from_config_json(written(folder, values))
