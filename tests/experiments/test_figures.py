"""Figures: their YAML, what a user sets of them, the files of one, errors of one line."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from evenflow.config.run import RunConfig, configured, with_
from evenflow.config.yaml_file import Document
from evenflow.errors import LostProcessError, UsageError
from evenflow.experiments.figures import names
from evenflow.experiments.figures.cases import datasets, pairs, served
from evenflow.experiments.figures.make import chosen, make, make_all, maker, write_claims
from evenflow.experiments.figures.schema import check_like, load_plan
from evenflow.experiments.figures.study import Drawing, footnote, machine_words
from evenflow.specs.gpu import gpus, link, machines
from evenflow.study.points import Store
from evenflow.study.sweep_file import load_sweep
from tests.command_line import complaint, evenflow, table
from tests.figure_studies import plan_of, study_of
from tests.places import ROOT


@pytest.mark.parametrize("name", names())
def test_every_figure_has_keys_that_fit_and_a_module(name: str) -> None:
    plan = plan_of(name.replace("-", "_"))
    assert callable(maker(plan))
    assert set(plan.keys.quick) <= set(plan.keys.study), "quick replaces numbers of the study"


def test_a_number_set_by_hand_holds_in_a_coarse_pass_too() -> None:
    assert plan_of("gllm_10", quick=True).study["requests"] == 1000
    assert plan_of("gllm_10", "study.requests=7", quick=True).study["requests"] == 7


def test_a_machine_may_be_set_to_null_beside_another_card() -> None:
    plan = plan_of("sarathi_3", "gpu=A100-80G", "machine=null")
    assert plan.by_hand == {"gpu": "A100-80G", "machine": None}


LIKE = [
    (3, 2),
    (1, 0.5),
    ([1.5], [1, 2]),
    ([["L20", "m"]], [["L20", "m"]]),
    ({"a": "b"}, {"c": "d"}),
]
LIKE += [(None, None), ([1, 2], None)]
UNLIKE = [(0, 2), (2.5, 2), (True, 2), ("x", 2), ([], [1, 2]), (3, [1, 2]), (["x"], [1, 2])]
UNLIKE += [(["L20"], [["L20", "m"]]), ({}, {"c": "d"}), ("x", {"c": "d"}), ({"a": 1}, {"c": {}})]
UNLIKE += [(2, None)]


def test_numbers_are_of_the_kind_that_the_figure_has() -> None:
    for value, known in LIKE:
        check_like(value, known, "study.x=...")
    for value, known in UNLIKE:
        with pytest.raises(UsageError, match="should be "):
            check_like(value, known, "study.x=...")


def test_names_choose_one_or_a_whole_paper() -> None:
    assert [plan.name for plan in chosen(["gllm-12"], (), quick=False)] == ["gllm-12"]
    assert "gllm-12" in [plan.name for plan in chosen(["gllm"], (), quick=False)]


def test_every_gpu_has_a_machine_whose_links_are_known() -> None:
    used = {spec.machine for spec in gpus()}
    assert used <= {spec.name for spec in machines()}
    for spec in machines():
        assert all(link(name) for name in (spec.link, spec.network, spec.all_reduce or spec.link))


def test_a_run_that_names_no_link_has_those_of_its_host_and_says_so() -> None:
    """As a figure has them; a link that is given, and all that affine costs know of, stay."""
    keys = {"model": "Qwen2.5-32B", "gpu": "L20", "stages": 2, "tensor_parallel": 2}
    rest = {"scheduler": "vllm", "workload": {"trace": "azure-conv-sample"}}

    def run(**more: Any) -> RunConfig:
        return configured(Document("run", {**keys, **rest, **more}, {}))

    assert run().wires == ("pcie-l20", None, None)
    assert run(machine="tdpipe-l20").wires == ("pcie-l20", None, "allreduce-l20")
    assert run(link="socket-73g").wires == ("socket-73g", None, None)
    assert run(costs={"kind": "affine", "base_s": 1, "per_token_s": 0}).wires == (None,) * 3
    assert run().setup() == (
        "simulated: Qwen2.5-32B on 4 x L20, PP2 x TP2, machine pcie-l20 (default), link pcie-l20, "
        "all-reduce allreduce-pcie-gen4 (default), CPU time ideal (default), "
        "costs roofline (default)"
    )
    named = with_(run(), {"link": {"name": "pcie-l20", "latency_us": 5}, "runtime": "vllm"})
    assert (
        "link pcie-l20 5 us, all-reduce allreduce-pcie-gen4 5 us (default), CPU time vllm,"
        in named.setup()
    )
    assert with_(run(), {"gpu": "H100"}).wires.link == "nvlink-h100"


def test_another_gpu_leaves_the_links_of_the_first(tmp_path: Path) -> None:
    study = study_of("sarathi_11", tmp_path, "gpu=H100")
    rest = {"workload": {"trace": "sharegpt-sample"}, "scheduler": "sarathi"}
    for one in served(study):
        words = machine_words(study.config(one.keys, rest))
        assert words.startswith("H100 over nvlink-h100")
    own = "gpu={name: X, fp16_tflops: 1, memory_bandwidth_gb_s: 1, memory_gb: 1}"
    study = study_of("gllm_12", tmp_path, own)
    (pair, *_) = pairs(study).values()
    words = machine_words(study.config(study.system("gLLM"), pair))
    assert words == "X over links that take no time"
    kept = study_of("sarathi_11", tmp_path, "gpu=H100", "link=pcie-l20")
    assert kept.plan.run.data["link"] == "pcie-l20"


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


AFFINE = ("costs={kind: affine, base_s: 0.01, per_token_s: 0.001}", "kv={pages: 1000}")


def test_the_published_limits_or_multiples_of_the_predicted_iteration(tmp_path: Path) -> None:
    known = {each.label: each for each in served(study_of("sarathi_11", tmp_path))}
    llama = known["LLaMA2-70B TP4-PP2"]
    assert (llama.slo_s["strict"], llama.budgets["relaxed"]) == (1.0, 1536)
    assert llama.keys["gpu"] == "A40"
    (own,) = served(study_of("sarathi_10", tmp_path, *AFFINE, "model=Qwen2.5-7B"))
    assert own.label == "Qwen2.5-7B"
    assert own.slo_s == pytest.approx({"strict": 5 * 0.042, "relaxed": 25 * 0.042})


def test_deployments_and_data_sets_follow_what_is_set(tmp_path: Path) -> None:
    hardware = ("gpu=H100", "tensor_parallel=4", "max_model_len=4096", "costs.tile_tokens=64")
    study = study_of("sarathi_10", tmp_path, *hardware)
    known = served(study)
    assert [one.label for one in known] == ["Mistral-7B TP4", "Yi-34B TP4"]
    assert {one.keys["gpu"] for one in known} == {"H100"}
    assert all(one.keys["costs"] == {"tile_tokens": 64} for one in known)
    assert all(one.slo_s["strict"] != 0.1 for one in known), "5 reference iterations"
    assert {each["max_model_len"] for each in datasets(study).values()} == {4096}
    traced = study_of("sarathi_10", tmp_path, "workload.trace=azure-conv-sample")
    assert list(datasets(traced)) == ["azure-conv-sample"]


def test_what_is_set_holds_in_every_system_that_has_it(tmp_path: Path) -> None:
    given = "scheduler.token_budget=512", "runtime=ideal", "systems.vLLM.scheduler.max_num_seqs=7"
    study = study_of("gllm_12", tmp_path, *given)
    (pair, *_) = pairs(study).values()
    budgets = {
        label: study.config(study.system(label), pair).scheduler.params.get("token_budget")
        for label in study.labels
    }
    assert budgets == {"gLLM": None, "vLLM": None, "vLLM V0": 512, "SGLang": None}
    assert {study.system(label)["runtime"] for label in study.labels} == {"ideal"}
    assert study.keys_of("vLLM")["scheduler"]["max_num_seqs"] == 7
    assert study.keys_of("vLLM")["dispatch"] == "engine_loop", "as published"


@pytest.mark.parametrize(
    ("given", "counts", "layouts"),
    [
        (["stages=2", "tensor_parallel=2"], [1, 2, 4], [(1, 1), (1, 2), (2, 2)]),
        (["stages=3"], [1, 2, 3], [(1, 1), (2, 1), (3, 1)]),
        (["stages=8"], [1, 2, 4, 8], [(1, 1), (2, 1), (4, 1), (8, 1)]),
        (["stages=[20, 28]"], [1, 2], [(1, 1), ([20, 28], 1)]),
    ],
)
def test_pipelines_keep_the_ranks_of_a_stage_and_listed_layers(
    given: list[str], counts: list[int], layouts: list[Any], tmp_path: Path
) -> None:
    study = study_of("gllm_12", tmp_path, *given)
    assert study.gpu_counts == counts
    systems = [study.system("gLLM", n) for n in counts]
    assert [(each["stages"], each["tensor_parallel"]) for each in systems] == layouts
    assert [study.system("SGLang", n)["tensor_parallel"] for n in counts] == counts
    assert study.system("SGLang")["tensor_parallel"] == study.gpus == counts[-1]


def test_a_wrong_study_has_slower_kernels_and_other_seeds(tmp_path: Path) -> None:
    studies = [study_of("gllm_15", tmp_path, wrong=wrong) for wrong in (None, 8)]
    run = {"model": "Qwen2.5-32B", "gpu": "L20", "workload": {"trace": "sharegpt-sample"}}
    scales = [study.config(study.system("gLLM"), run).scale for study in studies]
    assert scales[0].costs == 1 < scales[1].costs
    assert not {*studies[0].seeds} & {*studies[1].seeds}


AS_THEY_ARE = """gllm_8 gllm_11 sarathi_3 sarathi_4 sarathi_5 sarathi_6
sarathi_9 sarathi_13 sarathi_14 sarathi_table3 tdpipe_2 tdpipe_9 tdpipe_10 tdpipe_12
blog_fragmentation"""
SMALL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(AS_THEY_ARE.split(), ()),
    "gllm_1": ("study.batches=10", "study.loads=[0.5]"),
    "gllm_10": ("study.loads=[0.5, 1]", "study.pairs=[[L20, Qwen2.5-14B]]"),
    "gllm_12": ("study.pairs=[[L20, Qwen2.5-14B]]",),
    "gllm_14": ("study.loads=[0.5, 1]",),
    "gllm_15": ("study.loads=[1.0]",),
    "gllm_16": ("study.loads=[1.0]", "study.vary={min_prefill: [16, 32]}"),
    "sarathi_1": ("study.rates=[0.5]",),
    "sarathi_12": ("model=Mistral-7B", "study.limits=1"),
    "sarathi_table4": ("study.capacity_requests=60", "study.loads=[0.5]"),
    "tdpipe_6": ("study.all_tokens=[64]",),
    "tdpipe_11": ("study.pairs=[[L20, Qwen2.5-32B]]",),
    "tdpipe_13": ("study.ratios=[0.5]",),
    "tdpipe_14": ("workload.requests=2000",),
    "blog_batching": ("study.seats=[4]",),
    "blog_chunking": ("study.all_chunks=[1024]", "study.decodes=2"),
    "blog_disaggregation": ("study.rates=[2]",),
}
"""One of each kind, or of each code behind it, made small."""

CLAIMED = {
    "tdpipe-stealing-example": {"average": [116, 114, 114, 114], "submitted": [80, 114, 114, 114]}
}


def made(name: str, folder: Path, *overrides: str) -> tuple[dict[str, Any], Drawing]:
    """Return what is told of a figure, made with few requests, and the figure."""
    few = {"requests": 40 if name.startswith("sarathi") else 10, "seeds": [0]}
    known = plan_of(name).keys.study
    short = [f"study.{key}={value}" for key, value in few.items() if key in known]
    plan = plan_of(name, *short, *SMALL[name], *overrides, quick=True)
    with ThreadPoolExecutor(1) as executor:
        drawing = make(plan, folder, Store(folder / "points"), executor)
    return dict(json.loads((folder / f"{plan.name}.json").read_text())), drawing


SOON = "gllm_1 gllm_8 gllm_12 gllm_16 sarathi_4 sarathi_table3 tdpipe_2 tdpipe_12 blog_batching"
"""One of each code behind figures; `make test-all` makes all."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in SOON.split() else pytest.param(name, marks=pytest.mark.long)
        for name in SMALL
    ],
)
def test_a_small_one_is_made(name: str, tmp_path: Path) -> None:
    about, drawing = made(name, tmp_path)
    assert about["title"]
    assert len(drawing.table)
    assert set(drawing.shown or ()) <= set(drawing.table)
    written = {path.suffix for path in tmp_path.glob(f"{name.replace('_', '-')}.*")}
    assert written == {".png", ".svg", ".csv", ".json"}
    for claim_id, ours in about["claims"].items():
        assert CLAIMED.get(claim_id, ours) == ours
    if name == "tdpipe_11":
        assert drawing.table[drawing.table.gpus == 1].error.str.contains("does not fit").all()
        assert drawing.table[drawing.table.gpus > 1].error.isna().all()


def test_a_figure_writes_its_files_and_a_claim_is_compared_in_its_own_set_up_only(
    tmp_path: Path,
) -> None:
    about, drawing = made("gllm_12", tmp_path, "link=ethernet-100g", "stages=2")
    assert about["says"].keys() == {"kv.memory_utilization", "systems.vLLM", "machine"}
    assert "set by hand: study.requests=10" in drawing.figure.get_suptitle().replace("\n", " ")
    assert about["facts"]["requests"] == 10
    assert about["facts"]["kv_pages"]
    assert about["facts"]["machines"] == ["L20 over ethernet-100g"]
    assert about["claims"] == {}, "not the set-up of the paper"
    assert {answer.verdict for answer in write_claims(tmp_path)} == {"not run"}
    assert (tmp_path / "claims.csv").read_text().startswith("claim,"), "no rows, but their names"
    made("tdpipe_9", tmp_path)
    found = {answer.claim.id: answer for answer in write_claims(tmp_path)}
    assert found["tdpipe-stealing-example"].verdict == "exact"
    text = (tmp_path / "claims.md").read_text()
    assert "another set-up, so that no claim is compared" in text
    assert "not run" not in text
    assert "nan" not in text
    assert text.count("tdpipe-stealing-example") == 1
    assert "31 claims are of other figures." in text


def test_a_coarse_pass_has_no_verdict_and_other_readings_stand_beside(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        for requests in ("study.requests=9", "study.requests=10"):
            plan = plan_of("tdpipe_13", requests, "study.seeds=[0]", quick=requests.endswith("9"))
            make(plan, tmp_path, Store(tmp_path / "points"), executor)
            found = [each for each in write_claims(tmp_path) if each.ours is not None]
            verdicts = {each.verdict for each in found}
            assert len(found) == 2
            text = (tmp_path / "claims.md").read_text()
            assert (verdicts == {"too short to tell"}) == plan.quick
            assert ("tdpipe-13: a coarse pass, --set study.requests=9" in text) == plan.quick
    assert "equation 2's bubble on each later stage: " in (tmp_path / "claims.md").read_text()


@pytest.mark.parametrize(
    ("name", "assignment", "published"),
    [
        ("gllm_12", "study.requests=5", True),
        ("gllm_12", "stages=4", True),  # as it is
        ("gllm_12", "stages=8", False),
        ("gllm_12", "kv.memory_utilization=0.8", False),
        ("gllm_12", "systems.vLLM=pp_hb", False),
        ("sarathi_9", "study.prompt_tokens=[1024]", False),
    ],
)
def test_the_published_set_up_is_known(name: str, assignment: str, published: bool) -> None:
    assert plan_of(name, assignment).published is published


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
    assert footnote(facts, "It differs.") == (
        "costs: roofline; traces: A a, B b; kv pages: 1 .. 11 (11 values). It differs."
    )


MINE = """\
title: "Speed by budget, {requests} requests"
source: my own
run: {stages: 2, costs: {kind: affine, base_s: 0.01, per_token_s: 0.001}, kv: {pages: 400},
      workload: {trace: sharegpt-sample, arrivals: offline}}
systems: {ours: {scheduler: sarathi}}
study: {requests: 5, seeds: [0, 1], budgets: [64, 512]}
vary: [budget]
axes: {budget: {key: scheduler.token_budget}}
over: {reference: {budget: 64}, of: {gain: total_token_throughput}}
plot:
  panels: [{kind: lines, x: budget, y: {gain: ours}, legend: {}}]
"""


def test_a_figure_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{MINE}claims: {{sarathi-tile: {{take: gain}}}}\n")
    folder = tmp_path / "out"
    arguments = "figures", str(tmp_path / "mine.yaml"), "--out", str(folder)
    status, out, _ = evenflow(*arguments, "--set", "study.requests=4")
    assert status == 0
    assert "mine.png" in out
    (heads,) = (line.split() for line in out.splitlines() if "seed" in line)
    assert heads == ["budget", "seed", "gain", "error"], "of 60 columns those that are drawn"
    found = pd.read_csv(folder / "mine.csv")
    assert list(found.columns[:2]) == ["budget", "seed"]
    assert list(found.columns[-2:]) == ["error", "gain"]
    assert found.gain[:2].tolist() == [1, 1]
    assert set(found.completed) == {4}
    assert "sarathi-tile" in out, "a claim that no paper's figure in the folder answers"
    about = json.loads((folder / "mine.json").read_text())
    assert answered(folder, "sarathi-tile") == pytest.approx(found.gain.mean())
    about["claims"]["sarathi-tile"] = 1.32
    (folder / "sarathi-14.json").write_text(json.dumps(about))
    assert answered(folder, "sarathi-tile") == 1.32, "a paper's figure goes first"


@pytest.mark.parametrize("name", ["own_policy:Mine", "./own_policy.py:Mine"])
def test_a_figure_of_ones_own_may_have_a_policy_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from evenflow.schedulers.sarathi import Sarathi\nclass Mine(Sarathi): ...\n"
    Path("own_policy.py").write_text(code)
    Path("mine.yaml").write_text(
        MINE.replace("scheduler: sarathi", f'scheduler: "{name}"').replace("[0, 1]", "[0]")
    )
    assert evenflow("figures", "mine.yaml", "--out", "out", "--format", "svg")[0] == 0
    assert list(pd.read_csv("out/mine.csv").completed) == [5, 5]
    assert not Path("out/mine.png").exists()


def answered(folder: Path, claim_id: str) -> float:
    return next(float(each.ours) for each in write_claims(folder) if each.claim.id == claim_id)


STUDIES = sorted((ROOT / "examples/studies").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_is_a_sweep_or_a_figure_that_can_be_made(path: Path) -> None:
    if "parameters:" in path.read_text():
        sweep = load_sweep(path)
        sweep.study.build(sweep.known[-1])
        assert len(sweep.known) == len(sweep.chosen), "the run as it is is one of the points"
    else:
        assert callable(maker(load_plan(path)))


def test_rows_with_lists_are_shown_once() -> None:
    """`measure: stalls` and `micro_batches` keep lists, and a row for each seed."""
    table = pd.DataFrame({"rate": [1, 1, 2], "tokens": [[3], [3], [3]]})
    assert next(iter(Drawing(Figure(), table).told())) == "2 rows: rate, tokens"


def test_a_figure_may_be_like_another(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    plot = "plot: {height: 3}"
    (tmp_path / "other.yaml").write_text(f"title: x\nsource: y\nlike: mine\n{plot}\n")
    mine, other = (load_plan(tmp_path / name).keys for name in ("mine.yaml", "other.yaml"))
    assert other.plot == {**mine.plot, "height": 3}
    assert (other.title, other.study) == ("x", mine.study)
    assert not load_plan(tmp_path / "other.yaml").of_a_paper
    (tmp_path / "mine.yaml").write_text(f"{MINE}claims: {{sarathi-tile: {{take: gain}}}}\n")
    assert load_plan(tmp_path / "other.yaml").keys.claims == {}, "they are not inherited"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("run: {stages", "ran: {stages", 'unknown key "ran"'),
        ("vary: [budget]", "vary: [budget, load]", "KeyError: 'rates'"),
        ("vary: [budget]", "vary: []", "the figure has no cases; give vary"),
        ("vary: [budget]", "vary: [speed]", "vary: speed: should be one of load, pair"),
        ("kind: lines", "kind: pie", "'bars', 'stack', 'lying', 'lines', 'tokens', 'stages'"),
        ("x: budget, y: {gain: ours}, ", "", "kind: lines needs the key"),
        ("x: budget", "x: budgets", "budgets"),
        ("stages: 2", "stages: two", "stages"),
        ("source: my own", "source: my own\nlike: mine", "mine.yaml:3: like: the figure would be"),
        ("source: my own", "source: my own\nlike: nothing", "nothing.yaml: no such file"),
        ("panels: [{kind", "panels: 3 #", "panels"),
        ("vary: [budget]", "vary: [budget]\nmeasure: none", "none: no such function"),
        (
            "vary: [budget]",
            "vary: [budget]\nmeasure: micro_batches",
            "args: measure micro_batches needs columns, not none; it takes columns, first, batches",
        ),
        ("plot:", "claims: {sarathi-tiles: {take: gain}}\nplot:", 'did you mean "sarathi-tile"?'),
        (
            "reference: {budget: 64}",
            "reference: {budget: {a: 1}}",
            "over.reference.budget: should be a text, a number, true, false or null, not {'a': 1}",
        ),
        (
            "plot:",
            "claims: {sarathi-tile: {take: gain, where: {system: [[a]]}}}\nplot:",
            "claims.sarathi-tile.where.system: should be a text",
        ),
        ("plot:", "claims: {x: {tke: gain}}\nplot:", 'unknown key "claims.x.tke"; did you mean'),
    ],
)
def test_mistakes_in_ones_own_are_one_line(old: str, new: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE.replace(old, new))
    where = str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "out")
    status, _, errors = evenflow("figures", *where)
    assert (status, errors.count("\n")) == (2, 1)
    assert words in errors


MISTAKES = table("""\
## figures
gllm-112 | gllm-12
gllm-12 --executor threads | dask
## figures --quick gllm-12 study.seeds=[0]
study.rate=1 | study.requests
gpu=L-20 | L20
nonsense=1 | nonsense
study.requests=-1 | study.requests=-1: should be
kv.pages=-1 | kv.pages=-1
stages=0 | stages: should be a whole number of at least 1
study.pairs=[[L20]] | is none; write [GPU, model] or [GPU, model, machine]
study.pairs=[L20] | should be a list that is not empty, like [[L20, Qwen2.5-14B, tdpipe-l20]
scheduler.nope=3 | none of gLLM, vLLM, vLLM V0, SGLang has it
scheduler=vllm | give --set systems.LABEL=NAME
workload.requests=9 | give --set study.requests=..., in place of 4000
systems.gLLM=nothing | nothing: no such system
model=Falcon-180B | Falcon-180B does not fit
## figures --quick
sarathi-13 study.deployments.Falcon-180B.slo_s.relaxed=0.5 | the relaxed limit on P99 TBT
sarathi-13 study.deployments.Falcon-180B.slo_s.strict=6.0 | the relaxed limit on P99 TBT
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


class Dead(Executor):
    """An executor whose processes are gone."""

    def submit(self, *_: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool())
        return future


@pytest.mark.parametrize("asked", [["gllm-15"], ["gllm-15", "gllm-10"], ["sarathi-10"]])
def test_a_worker_that_dies_ends_all_figures_with_the_line_that_says_how_to_go_on(
    asked: list[str], tmp_path: Path
) -> None:
    with pytest.raises(LostProcessError, match=r"^a worker died.* the same command goes on"):
        make_all(chosen(asked, (), quick=True), tmp_path, Dead())
