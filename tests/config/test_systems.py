"""Every system of the papers runs from its keys, and the table, document and examples agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from evenflow.config.build import build, load_workload
from evenflow.config.run import load_config
from evenflow.config.systems import PublishedSystem, systems
from evenflow.costs import prefill_work
from evenflow.results.metrics import summarize
from evenflow.sim import simulate
from tests.places import ROOT
from tools.reference import systems_table

EXAMPLES = ROOT / "examples" / "systems"
EACH = pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)


def example(system: PublishedSystem) -> Path:
    return EXAMPLES / f"{system.name}.yaml"


@EACH
def test_a_system_serves_every_request(system: PublishedSystem) -> None:
    config = load_config(example(system), ["workload.requests=12", "workload.arrivals=offline"])
    built = build(config, ROOT, load_workload(config, ROOT))
    summary = summarize(simulate(built.world))
    assert summary["completed"] == 12


@EACH
def test_the_example_is_the_common_deployment_with_the_keys_of_the_table(
    system: PublishedSystem,
) -> None:
    common = yaml.safe_load(example(systems()[0]).read_text(encoding="utf-8"))
    plain = {"scheduler": "sarathi", "runtime": "ideal"}
    expected = common | plain | yaml.safe_load(system.keys)
    assert yaml.safe_load(example(system).read_text(encoding="utf-8")) == expected


def test_examples_and_names_are_one_to_one() -> None:
    names = [system.name for system in systems()]
    assert sorted(names) == sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    assert len({system.title for system in systems()}) == len(names) == len(set(names))


def test_the_document_has_the_table() -> None:
    assert systems_table() in (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")


def test_a_stage_of_four_gpus_pays_for_its_messages() -> None:
    """TD-Pipe, figure 6: on L20, most of what four GPUs could save goes into the all-reduce."""
    config = load_config(EXAMPLES / "tp_sb.yaml")
    costs = build(config, ROOT).world.costs
    fewer = load_config(EXAMPLES / "tp_sb.yaml", ["tensor_parallel=2"])
    work = prefill_work(2048)
    gain = build(fewer, ROOT).world.costs.times(work)[0] / costs.times(work)[0]
    assert 1 < gain < 1.5
