"""The JSON schemas of RUN.yaml and SWEEP.yaml take what the code takes."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from experiments.run_file.run import RunConfig
from experiments.run_file.schema import schema
from experiments.run_file.yaml_file import Loader
from experiments.study.sweep_file import SweepConfig

ROOT = Path(__file__).parent.parent
SCHEMAS = {"RUN.yaml": schema(RunConfig), "SWEEP.yaml": schema(SweepConfig)}
OF_EXAMPLES = {
    "RUN.yaml": ("quickstart", "systems/", "tune/", "validate/"),
    "SWEEP.yaml": ("sweep/",),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_examples_keep_the_schema_and_misspelt_keys_do_not(name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    validator.check_schema(SCHEMAS[name])
    found = [
        path
        for path in (ROOT / "examples").rglob("*.yaml")
        if path.relative_to(ROOT / "examples").as_posix().startswith(OF_EXAMPLES[name])
    ]
    assert found
    for path in found:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader)
        validator.validate(document)
        assert not validator.is_valid({**document, "stagse": 4}), path
