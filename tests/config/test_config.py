"""RUN.yaml: what is accepted, what is refused, and what a person is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import TypeAdapter

from evenflow.config.build import build
from evenflow.config.links import LinkConfig
from evenflow.config.parts import SchedulerConfig
from evenflow.config.run import RunConfig, load_config, with_
from evenflow.config.yaml_file import as_patch, read
from evenflow.core.loop import Loop
from evenflow.core.world import World
from evenflow.engines.loop import EngineLoop
from evenflow.errors import UsageError
from evenflow.experiments.figures.panels import Plot
from evenflow.experiments.figures.schema import FigureKeys
from evenflow.keys import Keys
from evenflow.study.sweep_file import SweepConfig
from tests.command_line import mistake

RUN = """\
model: Qwen2.5-32B
gpu: L20
stages: 4
link: {bandwidth_gb_s: 20.79, latency_us: 10}
costs: {kind: affine, base_s: 5e-3, per_token_s: 2e-5}
kv:
  page_tokens: 16
  pages: auto
runtime: gllm
scheduler: {name: token_throttling, iterations: 8}
workload:
  trace: azure-conv-sample
  requests: 500
  arrivals: {kind: poisson, rate: 2.0}
"""


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("RUN.yaml")
    path.write_text(RUN, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    return mistake(lambda: load_config(path, overrides))


def value_at(config: RunConfig, dotted: str) -> Any:
    value: Any = config.resolved()
    for key in dotted.split("."):
        value = value[key]
    return value


def test_values_and_defaults(run_yaml: Path) -> None:
    config = load_config(run_yaml)
    assert value_at(config, "costs.per_token_s") == 2e-5
    assert value_at(config, "kv.pages") == "auto"
    assert value_at(config, "pipelined_chunks") is None
    assert value_at(config, "workload.seed") == 0
    assert config.scheduler.params == {"iterations": 8}
    assert config.num_stages == 4


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("scheduler.max_prefill=1024", "scheduler.params.max_prefill", 1024),
        ("scheduler=sarathi", "scheduler.name", "sarathi"),
        ("scheduler=my_module:MyPolicy", "scheduler.name", "my_module:MyPolicy"),
        ("workload.arrivals=offline", "workload.arrivals.kind", "offline"),
        ("workload.arrivals={kind: replay, scale: 0.5}", "workload.arrivals.scale", 0.5),
        ("stages=[20, 16, 16, 12]", "stages", [20, 16, 16, 12]),
        ("virtual_engines=true", "virtual_engines", True),
        ("runtime={schedule_s: 1e-3}", "runtime.schedule_s", 1e-3),
        ("link=null", "link", None),
        ("kv.pages=1000", "kv.pages", 1000),
        ("kv.prefix_cache=true", "kv.prefix_cache", True),
        ("kv={swap: true, host_link: {bandwidth_gb_s: 50}}", "kv.host_link.latency_us", 0.0),
    ],
)
def test_overrides(run_yaml: Path, assignment: str, key: str, value: object) -> None:
    assert value_at(load_config(run_yaml, [assignment]), key) == value


def test_a_short_form_takes_further_keys_and_a_list_counts_the_stages(run_yaml: Path) -> None:
    keys = ["scheduler=sarathi", "scheduler.token_budget=64", "stages=[33, 31]"]
    config = load_config(run_yaml, keys)
    assert config.scheduler == SchedulerConfig(name="sarathi", params={"token_budget": 64})
    assert config.num_stages == 2


def test_a_run_with_some_keys_changed(run_yaml: Path) -> None:
    config = load_config(run_yaml)
    patch = {"scheduler.token_budget": 64, "scheduler": "sarathi", "workload.seed": 3}
    changed = with_(config, patch | {"link": "pcie-l20", "link.shared": True})
    assert changed.scheduler == SchedulerConfig(name="sarathi", params={"token_budget": 64})
    assert (changed.workload.seed, changed.kv) == (3, config.kv)
    assert changed.link == LinkConfig(name="pcie-l20", shared=True)
    assert with_(read(run_yaml), patch).workload == changed.workload
    assert with_(changed, {"scheduler.max_num_seqs": 8}).scheduler.params["token_budget"] == 64
    assert with_(config, {}) == config


@pytest.mark.parametrize(
    "path", sorted(Path("examples").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_the_keys_of_a_run_make_the_same_run(path: Path) -> None:
    if not {"stages", "workload", "scheduler"} <= read(path).data.keys():
        pytest.skip("no RUN.yaml")
    config = load_config(path)
    assert with_(config, {}).digest() == config.digest()


def test_a_patch_that_cannot_be_says_which_key(run_yaml: Path) -> None:
    config = load_config(run_yaml)
    with pytest.raises(UsageError, match=r"^set kv.pages: kv.pages: should be auto or a whole"):
        with_(config, {"kv.pages": 0})
    with pytest.raises(UsageError, match=r"^SWEEP.yaml:3: stages: should be a whole number"):
        with_(config, {"stages": 0}, {"stages": "SWEEP.yaml:3"})


@pytest.mark.parametrize(
    ("layer", "patch"),
    [
        ({"scheduler": {"max_prefill": 64}}, {"scheduler.max_prefill": 64}),
        ({"scheduler": {"name": "token_throttling", "use_wt": True}}, {"scheduler.use_wt": True}),
        ({"scheduler": "token_throttling"}, {}),
        ({"scheduler": {"name": "vllm"}}, {"scheduler": {"name": "vllm"}}),
        ({"costs": {"kind": "affine", "base_s": 1}}, {"costs.base_s": 1}),
        ({"costs": "roofline", "stages": 4}, {"costs": "roofline"}),
    ],
)
def test_a_layer_adds_to_mappings_of_one_kind(
    run_yaml: Path, layer: dict[str, Any], patch: dict[str, Any]
) -> None:
    assert as_patch(read(run_yaml).data, layer) == patch


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("gpu=[L20, 4]", "gpu.1: should be a text, not 4"),
        ("stages=0", "stages: should be a whole number of at least 1 and at most 4096, or a list"),
        ("stages=[1, 0]", "not [1, 0]"),
        ("tensor_parallel=2.0", "tensor_parallel: should be a whole number, not 2.0"),
        ("workload.arrivals.rate=-1", "workload.arrivals.rate: should be greater than 0.0, not -1"),
        ("workload.arrivals.rate=.nan", "should be a finite number, not nan"),
        ("costs.base_s=.inf", "should be a finite number, not inf"),
        ("costs.base_s=true", "costs.base_s: should be a number, not true"),
        ("costs.kind=rofline", 'costs.kind: unknown "rofline"; did you mean "roofline"?'),
        ("costs={kind: silicon, framework: vlm}", "costs.framework: should be "),
        (
            "workload.arrivals={rate: 2}",
            'the key "workload.arrivals.kind" is missing; known: replay, poisson, gamma, closed',
        ),
        ("kv.pages=true", "kv.pages: should be auto or a whole number"),
        ("goodput={ttft_ms: 2000}", "ttft, tpot, e2el, queue, in milliseconds"),
        ("kv.memory_utilization=1.2", "should be at most 1.0"),
        ("kv={swap: true, host_link: {bandwidth_gb_s: 0}}", "should be greater than 0.0, not 0"),
        ("kv={swap: true, host_link: 50}", "kv.host_link: should be a mapping of keys to values"),
        ("kv.prefix_cache=1", "kv.prefix_cache: should be true or false"),
        ("kv.prefix_cach=true", 'unknown key "kv.prefix_cach"; did you mean "prefix_cache"?'),
        ("runtime=vlm", "runtime: should be 'ideal', 'gllm', 'vllm'"),
        ("dispatch=stage1", "should be 'stage0', 'eager' or 'engine_loop'"),
        ("workload.requests=0", "workload.requests: should be at least 1, not 0"),
        ("workload.skip=-1", "workload.skip: should be at least 0"),
        ("workload.after=[{trac: x}]", 'unknown key "workload.after.0.trac"'),
        ("workload.after=[{trace: x}]", 'workload.after needs the key "kv.prefix_cache: true"'),
        ("runtime={per_row_s: 1, holds: stage1}", "should be 'engine', 'stage0' or 'nothing'"),
        ("schedulr=sarathi", 'unknown key "schedulr"; did you mean "scheduler"?'),
        ("tp=4", 'unknown key "tp"; did you mean "tensor_parallel"?'),
        ("qps=2", 'unknown key "qps"; did you mean "workload.arrivals.rate"?'),
        ("base_s=1", 'unknown key "base_s"; did you mean "costs.base_s"?'),
        ("max_num_seqs=8", 'unknown key "max_num_seqs"; did you mean "scheduler.max_num_seqs"?'),
        ("kv.pagse=3", 'unknown key "kv.pagse"; did you mean "pages"?'),
        ("scheduler={token_budget: 4}", 'the key "scheduler.name" is missing; a name of'),
        ("processes=[{}]", 'the key "processes.0.name" is missing; straggler, outage'),
        ("model=null", 'kv.pages: auto needs the key "model"; e.g. model: Llama-3.1-8B. A name'),
        ("link.bandwidth_gb_s=0", "link.bandwidth_gb_s: should be greater than 0.0, not 0"),
        ("link={latency_us: 10}", 'link needs the key "link.bandwidth_gb_s", or a name'),
        ("max_in_flight=0", "max_in_flight: should be null (the number of stages), unlimited"),
        ("workload.arrivals={kind: gamma, rate: 1, burstiness: .nan}", "greater than 0"),
        ("stages", "should be KEY=VALUE"),
        ("stages=[", "not valid YAML"),
        ("stages.x=1", '"stages" has no keys of its own'),
    ],
)
def test_refusals_of_overrides(run_yaml: Path, assignment: str, told: str) -> None:
    message = refusal(run_yaml, assignment)
    assert told in message
    assert message.startswith((f"--set {assignment}: ", "RUN.yaml: kv.pages", "RUN.yaml: workload"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("page_tokens: 16", "page_tokens: 0", "RUN.yaml:7: kv.page_tokens: should be at least 1"),
        ("  pages:", "  pagse:", 'RUN.yaml:8: unknown key "kv.pagse"'),
        ("stages: 4", "stages: four", "RUN.yaml:3: stages: should be"),
        ("stages: 4\n", "", 'RUN.yaml: the key "stages" is missing; e.g. stages: 4. Pipeline'),
        ("  trace: azure-conv-sample\n", "", 'RUN.yaml:11: the key "workload.trace" is missing'),
        ("runtime: gllm", "gpu: A100", 'RUN.yaml:9: the key "gpu" is given twice'),
        ("stages: 4", "stages: [4", "RUN.yaml:4: not valid YAML"),
        (RUN, "", "RUN.yaml: the file is empty"),
        (RUN, "- a list", "RUN.yaml:1: should be a mapping"),
        ("stages: 4", "stages: &a [*a]", "RUN.yaml: nested too deep"),
    ],
)
def test_refusals_of_files(run_yaml: Path, old: str, new: str, told: str) -> None:
    run_yaml.write_text(RUN.replace(old, new), encoding="utf-8")
    assert refusal(run_yaml).startswith(told)


def mappings_of(annotation: Any) -> Iterator[type[Keys]]:
    """Yield the mappings that a key takes, and those that their keys take."""
    if isinstance(annotation, type) and issubclass(annotation, Keys):
        yield annotation
        for field in annotation.model_fields.values():
            yield from mappings_of(field.annotation)
    for inner in get_args(annotation):
        yield from mappings_of(inner)


def test_every_key_that_is_needed_has_an_example_that_is_right() -> None:
    mappings = set(mappings_of(tuple[RunConfig, SweepConfig, FigureKeys, Plot]))
    checked = 0
    for mapping in mappings:
        for key, field in mapping.model_fields.items():
            if field.is_required() and key != "kind":
                assert field.examples, (mapping, key)
                kind = TypeAdapter(Annotated[field.annotation, field])
                assert kind.validate_python(field.examples[0]) is not None
                checked += 1
    assert checked == 31


def test_all_mistakes_are_told(run_yaml: Path) -> None:
    run_yaml.write_text(
        RUN.replace("stages: 4", "stages: x")
        .replace("500", "-5")
        .replace("runtime:", "runtme:")
        .replace("  pages:", "  pagse:")
    )
    message = refusal(run_yaml)
    assert message.startswith("4 mistakes: (1) ")
    for place, told in (
        (3, "stages: should be"),
        (8, 'unknown key "kv.pagse"; did you mean "pages"?'),
        (9, 'unknown key "runtme"; did you mean "runtime"?'),
        (13, "workload.requests: should be at least 1, not -5"),
    ):
        assert f") RUN.yaml:{place}: {told}" in message


def test_a_misspelt_key_is_not_also_missing(run_yaml: Path) -> None:
    run_yaml.write_text(RUN.replace("stages: 4", "stagse: 4"))
    assert refusal(run_yaml).startswith('RUN.yaml:3: unknown key "stagse"; did you mean "stages"?')
    run_yaml.write_text(RUN.replace("stages: 4", "stagse: 4").replace("  trace:", "  trade:"))
    assert refusal(run_yaml).startswith("2 mistakes: ")


def test_a_file_that_is_no_text(run_yaml: Path) -> None:
    run_yaml.write_bytes(b"\xff\xfe\x00")
    assert refusal(run_yaml).startswith("RUN.yaml: ")
    assert refusal(run_yaml.with_name("none.yaml")) == "none.yaml: no such file"
    assert refusal(Path(".")) == ".: is a folder; a file is right"


def test_the_digest_is_that_of_the_meaning(run_yaml: Path) -> None:
    digest = load_config(run_yaml).digest()
    run_yaml.write_text(f"# a remark\nmax_in_flight: null\n{RUN}", encoding="utf-8")
    assert load_config(run_yaml).digest() == digest
    assert load_config(run_yaml, ["workload.seed=1"]).digest() != digest


@pytest.mark.parametrize(
    ("scheduler", "loop"),
    [
        ("sglang", EngineLoop),
        ("trtllm", EngineLoop),
        ("vllm_v1", EngineLoop),
        ("{name: vllm_v1, async_scheduling: false}", Loop),
        ("sarathi", Loop),
    ],
)
def test_a_policy_that_goes_with_one_loop_only_has_it(
    run_yaml: Path, scheduler: str, loop: type[Loop]
) -> None:
    config = load_config(run_yaml, [f"scheduler={scheduler}"])
    world = build(config, run_yaml.parent).world
    assert isinstance(world, World)
    assert (world.loop, world.dispatch) == (loop, "stage0")


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ([], "v2"),
        (["virtual_engines=1"], "v2"),
        (["dispatch=engine_loop"], "v2"),
        (["dispatch=eager"], False),
        (["dispatch=stage0"], False),
        (["virtual_engines=2"], False),
        (["virtual_engines=true"], False),
        (["kv={swap: true, host_link: {bandwidth_gb_s: 20}}"], False),
    ],
)
def test_vllm_v1_runs_ahead_unless_chosen_or_its_decodes_cannot(
    run_yaml: Path, keys: list[str], mode: object
) -> None:
    config = load_config(run_yaml, ["scheduler=vllm_v1", *keys])
    assert config.in_step is (mode is False)
    policy = build(config, run_yaml.parent).world.make_scheduler()
    assert policy.async_scheduling == mode


ON_A_GPU = ["costs=roofline", "runtime=null"]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["scheduler=vllm_v1"], "vllm-0.19"),
        (["scheduler={name: vllm_v1, async_scheduling: false}"], "vllm-0.12"),
        (["scheduler=vllm_v1", "dispatch=eager"], "vllm-0.12"),
        (["scheduler=vllm_v1", "costs={kind: affine, base_s: 1, per_token_s: 0}"], "ideal"),
        (["scheduler=trtllm"], "trtllm-1.2"),
        (["scheduler={name: trtllm, version: '1.0'}"], "trtllm-1.0"),
        (["scheduler=sglang"], "sglang-0.5"),
        (["scheduler=sarathi"], "ideal"),
        (["scheduler=sarathi", "costs={kind: profile, path: p.csv}"], "profile"),
    ],
)
def test_an_engines_policy_has_the_cpu_time_of_its_engine_unless_given(
    run_yaml: Path, keys: list[str], named: str
) -> None:
    config = load_config(run_yaml, [*ON_A_GPU, *keys])
    assert config.cpu_time == named
    assert f"CPU time {named} (default)" in config.setup()
    assert load_config(run_yaml, [*ON_A_GPU, *keys, "runtime=gllm"]).cpu_time == "gllm"
