"""What others build on: names where the architecture says they are, and keys that are explained."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from evenflow.config.run import RunConfig
from evenflow.config.schema import schema
from evenflow.config.yaml_file import Loader
from evenflow.study.sweep_file import SweepConfig
from tests.places import ROOT
from tools.reference import reference

DOCS = ROOT / "docs"
SCHEMAS = {"RUN.yaml": schema(RunConfig), "SWEEP.yaml": schema(SweepConfig)}

HOUSE = {
    "evenflow.types": {"Request", "Chunk", "MicroBatch", "View", "Plan", "Scheduler"},
    "evenflow.specs": {"ModelSpec", "GpuSpec", "LinkSpec", "Deployment"},
    "evenflow.core.kv": {"PagePool"},
    "evenflow.core.batcher": {"Batcher"},
    "evenflow.costs": {"StageCost"},
    "evenflow.results.run": {"RunResult"},
    "evenflow.results.metrics": {"summarize"},
    "evenflow.results.bubbles": {"attribute"},
    "evenflow.config.run": {"load_config"},
}
LATER = {
    "sim": ("PooledWorld", "Timing", "TransferLink", "simulate_timed"),
    "traces": (
        "PREDICTORS",
        "Predictor",
        "convert",
        "fit",
        "info",
        "make_predictor",
        "train",
        "with_predictions",
    ),
}
"""Names that a package loads when they are asked for."""


@pytest.mark.parametrize("module", HOUSE)
def test_a_name_is_imported_from_its_module(module: str) -> None:
    assert HOUSE[module] <= set(dir(importlib.import_module(module)))


@pytest.mark.parametrize("package", LATER)
def test_a_name_that_few_runs_need_is_there_when_it_is_asked_for(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in LATER[package])
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


UNITS = re.compile(
    r"_(s|us|tokens|bytes|per_token|gb_s|gb|tflops|share|len|factor|efficiency|utilization)\b"
    r"|\b([Ss]econds|[Mm]icroseconds|milliseconds|GiB|bytes|operations|[Tt]okens|[Pp]ages|requests"
    r"|Requests|rows|GPUs|[Pp]ipelines|stages?|Cores|[Mm]icro-batch(es)?|share|ratio|times"
    r"|probability|adapters|[Nn]umber|[Ss]teps|unit|points|clients|draws|Dollars|Policies|stage|rounds|reach)\b"
)
"""What tells a number's unit, in a key's name or in its description."""


def keys(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each key of a file, with the mapping it is in."""
    whole = SCHEMAS[name]
    for title, mapping in {name: whole, **whole["$defs"]}.items():
        for key, value in mapping.get("properties", {}).items():
            yield title, key, value


def is_number(value: dict[str, Any]) -> bool:
    kinds = {value.get("type"), *(each.get("type") for each in value.get("anyOf", ()))}
    return bool(kinds & {"integer", "number"})


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_key_says_what_it_is_and_each_number_its_unit(name: str) -> None:
    """In the text below it in its class, as each parameter of a policy."""
    untold = [f"{title}.{key}" for title, key, value in keys(name) if not value["description"]]
    assert not untold
    bare = [
        f"{title}.{key}"
        for title, key, value in keys(name)
        if is_number(value) and key != "seed" and not UNITS.search(f"{key} {value['description']}")
    ]
    assert not bare


def test_the_committed_reference_is_that_of_the_code() -> None:
    """`make reference` writes these files anew."""
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == reference(SCHEMAS)
    for name, whole in SCHEMAS.items():
        path = DOCS / f"{name.removesuffix('.yaml').lower()}.schema.json"
        assert json.loads(path.read_text(encoding="utf-8")) == whole


OF_EXAMPLES = {
    "RUN.yaml": ("bursty", "quickstart", "systems/", "validate/"),
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
