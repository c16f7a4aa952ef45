"""What a user sets of a figure: links of hosts, systems, numbers, claims, errors of one line."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evenflow.errors import UsageError
from evenflow.specs.gpu import gpus
from experiments.figures.axes import datasets, pairs, served
from experiments.figures.facts import footnote, machine_words
from experiments.figures.layers import with_host
from experiments.figures.make import FOLDER, make, write_claims
from experiments.figures.schema import check_like, load_plan
from experiments.figures.style import COLORS, colors_of
from experiments.run_file.links import HOSTS
from experiments.run_file.run import RunConfig, configured, with_
from experiments.run_file.yaml_file import Document
from experiments.study.points import Store
from tests.command_line import complaint, evenflow, table
from tests.figure_studies import study_of

# -- hosts ----------------------------------------------------------------------------------------


def test_every_gpu_has_a_host() -> None:
    assert set(HOSTS) == {gpu.name for gpu in gpus()}


def test_a_run_gets_the_links_of_its_host_and_keeps_its_own() -> None:
    run = {"gpu": "L20", "stages": 4}
    assert with_host(run) == {
        **run,
        "link": "pcie-l20",
        "costs": {"kind": "roofline", "all_reduce": "allreduce-l20"},
    }
    assert with_host(run | {"link": "socket-73g"}) == run | {"link": "socket-73g"}
    slow = with_host(run | {"link": {"latency_us": 99}})
    assert slow["link"] == {"name": "pcie-l20", "latency_us": 99}
    one = {"gpu": "A100-80G", "stages": 1, "costs": {"kind": "roofline", "all_reduce": "pcie-l20"}}
    assert with_host(one) == one
    assert with_host({"gpu": "H100", "stages": 4})["link"] == "nvlink-h100"
    affine = {"gpu": "L20", "stages": 2, "costs": {"kind": "affine"}}
    assert with_host(affine) == affine


def test_a_gpu_of_ones_own_needs_a_link_where_there_are_several() -> None:
    own = {"name": "X", "fp16_tflops": 1, "memory_bandwidth_gb_s": 1, "memory_gb": 1}
    assert with_host({"gpu": own, "stages": 1}) == {"gpu": own, "stages": 1}
    with pytest.raises(UsageError, match="gpu X: its links are not known; give --set link=NAME"):
        with_host({"gpu": own, "stages": 2})


def test_a_run_that_names_no_link_has_those_of_its_host_and_says_so() -> None:
    """As a figure has them; a link that is given, and all that affine costs know of, stay."""
    keys = {"model": "Qwen2.5-32B", "gpu": "L20", "stages": 2, "tensor_parallel": 2}
    rest = {"scheduler": "vllm", "workload": {"trace": "azure-conv-sample"}}

    def run(**more: Any) -> RunConfig:
        return configured(Document("run", {**keys, **rest, **more}, {}))

    assert run().wires == ("pcie-l20", None, "allreduce-l20")
    assert run(link="socket-73g").wires == ("socket-73g", None, None)
    assert run(costs={"kind": "affine", "base_s": 1, "per_token_s": 0}).wires == (None,) * 3
    assert run().setup() == (
        "simulated: Qwen2.5-32B on 4 x L20, PP2 x TP2, link pcie-l20 (default), all-reduce "
        "allreduce-l20 (default), CPU time ideal (default), costs roofline (default)"
    )
    named = with_(run(), {"link": {"name": "pcie-l20", "latency_us": 5}, "runtime": "vllm"})
    assert "link pcie-l20 5 us, all-reduce over the same (default), CPU time vllm," in named.setup()
    assert with_(run(), {"gpu": "H100"}).wires.link == "nvlink-h100"


def test_another_gpu_leaves_the_links_of_the_first(tmp_path: Path) -> None:
    study = study_of("sarathi_11", tmp_path, "gpu=H100")
    for one in served(study):
        config = study.config(one.keys, {"workload": {"trace": "sharegpt-sample"}}, SARATHI)
        assert machine_words(config).startswith("H100 over nvlink-h100")
    kept = study_of("sarathi_11", tmp_path, "gpu=H100", "link=pcie-l20")
    assert kept.plan.run.data["link"] == "pcie-l20"


SARATHI = {"scheduler": "sarathi"}

# -- limits ---------------------------------------------------------------------------------------

OWN = "study.deployments.Falcon-180B.slo_s"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([f"{OWN}.strict=0.3"], {"strict": 0.3}),
        ([f"{OWN}={{strict: 0.3, relaxed: 9.0}}"], {"strict": 0.3, "relaxed": 9.0}),
        ([], {}),
    ],
)
def test_limits_set_by_hand_hold_beside_other_hardware_and_the_rest_are_by_the_rule(
    tmp_path: Path, given: list[str], kept: dict[str, float]
) -> None:
    slow = "nodes={gpus: 4, link: {name: ethernet-100g, latency_us: 100}}"
    by_rule = served(study_of("sarathi_13", tmp_path, slow))[0].slo_s
    assert by_rule["relaxed"] == pytest.approx(5 * by_rule["strict"])
    assert served(study_of("sarathi_13", tmp_path, slow, *given))[0].slo_s == {**by_rule, **kept}


@pytest.mark.parametrize("own", [f"{OWN}.relaxed=0.5", f"{OWN}.strict=6.0"])
def test_a_relaxed_limit_below_the_strict_one_is_refused(tmp_path: Path, own: str) -> None:
    with pytest.raises(UsageError, match="Falcon-180B: the relaxed limit on P99 TBT"):
        served(study_of("sarathi_13", tmp_path, own))


# -- systems --------------------------------------------------------------------------------------


def test_what_is_set_holds_in_every_system_that_has_it(tmp_path: Path) -> None:
    study = study_of("gllm_12", tmp_path, "scheduler.token_budget=512", "runtime=ideal")
    budgets = {
        label: study.config(
            study.system(label), next(iter(pairs(study).values()))
        ).scheduler.params.get("token_budget")
        for label in study.plan.keys.systems
    }
    assert budgets == {"gLLM": None, "vLLM": 512, "SGLang": None}
    assert {study.system(label)["runtime"] for label in study.plan.keys.systems} == {"ideal"}


def test_a_key_of_one_published_system_can_be_set(tmp_path: Path) -> None:
    study = study_of("gllm_12", tmp_path, "systems.vLLM.scheduler.max_num_seqs=7")
    assert study.keys_of("vLLM")["scheduler"]["max_num_seqs"] == 7
    assert study.keys_of("vLLM")["virtual_engines"] is True


def test_pipelines_keep_the_ranks_of_a_stage_and_listed_layers(tmp_path: Path) -> None:
    study = study_of("gllm_12", tmp_path, "stages=2", "tensor_parallel=2")
    assert study.gpu_counts == [1, 2, 4]
    assert [
        (study.system("gLLM", n)["stages"], study.system("gLLM", n)["tensor_parallel"])
        for n in study.gpu_counts
    ] == [(1, 1), (1, 2), (2, 2)]
    assert study.system("SGLang")["tensor_parallel"] == 4
    assert study_of("gllm_12", tmp_path, "stages=3").gpu_counts == [1, 2, 3]
    listed = study_of("gllm_12", tmp_path, "stages=[20, 28]")
    assert listed.system("gLLM")["stages"] == [20, 28]


def test_deployments_and_data_sets_follow_what_is_set(tmp_path: Path) -> None:
    study = study_of("sarathi_10", tmp_path, "gpu=H100", "tensor_parallel=4", "max_model_len=4096")
    labels = [one.label for one in served(study)]
    assert labels == ["Mistral-7B TP4", "Yi-34B TP4"]
    assert all(one.slo_s["strict"] != 0.1 for one in served(study)), "5 reference iterations"
    assert {each["max_model_len"] for each in datasets(study).values()} == {4096}
    traced = study_of("sarathi_10", tmp_path, "workload.trace=azure-conv-sample")
    assert list(datasets(traced)) == ["azure-conv-sample"]


def test_labels_side_by_side_have_colours_of_their_own() -> None:
    assert COLORS["TD-Pipe"] == COLORS["gLLM"]
    found = colors_of(["TD-Pipe", "PP+HB", "gLLM", "unheard of"])
    assert len(set(found.values())) == 4
    assert found["PP+HB"] == COLORS["PP+HB"]


# -- claims and words -----------------------------------------------------------------------------

TINY = ("study.requests=15", "study.seeds=[0]", "study.pairs=[[L20, Qwen2.5-14B]]")


def test_a_claim_is_compared_in_its_own_set_up_only(tmp_path: Path) -> None:
    for name, assignment, published in (
        ("gllm_12.yaml", "study.requests=5", True),
        ("gllm_12.yaml", "stages=4", True),  # as it is
        ("gllm_12.yaml", "stages=8", False),
        ("gllm_12.yaml", "kv.memory_utilization=0.8", False),
        ("gllm_12.yaml", "systems.vLLM=vllm_v1", False),
        ("sarathi_9.yaml", "study.prompt_tokens=[1024]", False),
    ):
        assert load_plan(FOLDER / name, (assignment,)).published is published, assignment
    plan = load_plan(FOLDER / "gllm_12.yaml", (*TINY, "link=ethernet-100g", "stages=2"))
    with ThreadPoolExecutor(1) as executor:
        drawing = make(plan, tmp_path, Store(tmp_path / "points"), executor)
    assert "set by hand: study.requests=15" in drawing.figure.get_suptitle().replace("\n", " ")
    about = json.loads((tmp_path / "gllm-12.json").read_text())
    assert about["claims"] == {}
    assert about["facts"]["machines"] == ["L20 over ethernet-100g"]
    assert {answer.verdict for answer in write_claims(tmp_path)} == {"not run"}
    assert "another set-up, so that no claim is compared" in (tmp_path / "claims.md").read_text()


def test_a_footnote_has_words_for_everything() -> None:
    facts = {
        "costs": {"kind": "roofline"},
        "traces": {"A": "a", "B": "b"},
        "kv_pages": list(range(1, 12)),
        "pairs": [["L20", "x"]],
        "quick": False,
        "rates": None,
        "set": ["stages=8"],
        "published_set_up": False,
    }
    words = footnote(facts, "It differs.")
    assert words == (
        "costs: roofline; traces: A a, B b; kv pages: 1 .. 11 (11 values). It differs."
    )


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "known", "fits"),
    [
        (3, 2, True),
        (0, 2, False),
        (2.5, 2, False),
        (True, 2, False),
        ("x", 2, False),
        (1, 0.5, True),
        ([1.5], [1, 2], True),
        ([], [1, 2], False),
        (3, [1, 2], False),
        (["x"], [1, 2], False),
        ([["L20", "m"]], [["L20", "m"]], True),
        (["L20"], [["L20", "m"]], False),
        ({"a": "b"}, {"c": "d"}, True),
        ({}, {"c": "d"}, False),
        ("x", {"c": "d"}, False),
        ({"a": 1}, {"c": {}}, False),
        (None, None, True),
        ([1, 2], None, True),
        (2, None, False),
    ],
)
def test_numbers_are_of_the_kind_that_the_figure_has(value: Any, known: Any, fits: bool) -> None:
    if fits:
        check_like(value, known, "study.x=...")
    else:
        with pytest.raises(UsageError, match="should be "):
            check_like(value, known, "study.x=...")


MISTAKES = table("""\
## figures
gllm-112 | gllm-12
gllm-12 --executor threads | dask
## figures --quick gllm-12 study.seeds=[0]
study.rate=1 | study.requests
gpu=L21 | L20
nonsense=1 | nonsense
study.requests=-1 | study.requests=-1: should be
kv.pages=-1 | kv.pages=-1
stages=0 | stages: should be a whole number of at least 1
scheduler.nope=3 | none of gLLM, vLLM, SGLang has it
scheduler=vllm | give --set systems.LABEL=NAME
workload.requests=9 | give --set study.requests=..., in place of 4000
systems.gLLM=nothing | nothing: no such system
model=Falcon-180B | Falcon-180B does not fit
## figures --quick
sarathi-12 study.seeds=[0] scheduler.max_num_seqs=9 | the figure compares 128, 32, 64
gllm-10 study.seeds=[0] study.rates=2 | should be null, or a list of numbers above 0
gllm-14 study.seeds=[0] study.limits=[5] | no figure comes of it (TypeError
""")


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_a_mistake_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    status, _, errors = evenflow(*words, "--out", str(tmp_path / "out"))
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: ")
    assert told in errors
    assert not list((tmp_path / "out").glob("*.png"))


def test_one_line_for_several_figures(tmp_path: Path) -> None:
    words = ("figures", "gllm-1", "gllm-4", "--set", "stages=0", "--out", tmp_path)
    line = complaint(*words, prints="gllm-1: not made\ngllm-4: not made\n")
    assert line.startswith("2 of 2 figures failed: gllm-1, gllm-4: stages: should be")
