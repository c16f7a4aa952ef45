"""A user's mistake, in any command: one clear line, exit status 2, nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.app import MOST_LETTERS
from experiments.run_file.run import load_config
from tests.command_line import HEAD, RUN, evenflow, refusal, spawn, table

pytestmark = pytest.mark.usefixtures("folder")

ROOT = Path(__file__).parent.parent
MISTAKES = table("""\
## simulate RUN.yaml
workload.requests=0 | workload.requests: should be at least 1, not 0
workload.requests=21 | 21 requests asked of trace trace.csv, which has 20
workload.arrivals.rate=2 | unknown key "workload.arrivals.rate"
'workload.arrivals={kind: poisson, rate: -1}' | should be greater than 0.0, not -1
workload.format=azur | azure
workload.filter=vlm | did you mean "vllm"?
model=Qwen2.5-33B | unknown model "Qwen2.5-33B", and no such file; did you mean
model=Qwen2.5-32B gpu=L21 | unknown gpu "L21"; did you mean "L20"? known: A100-40G
model=Qwen2.5-32B 'gpu={name: X, memory_gb: 4}' | gpu: a key is missing
model=Qwen2.5-32B link=pcie | unknown link "pcie"
'kv={pages: 9, swap: true, host_link: {bandwidth_gb_s: 50}}' | kv.swap needs the key "mo
kv.swap=true | kv.swap needs the key "kv.host_link"
'kv.host_link={bandwidth_gb_s: 50}' | kv.host_link needs the key "kv.swap: true"
'scheduler={name: static, padded: 1}' | padded should be true or false, not 1
'workload={trace: azure-conv-sample, requests: 9, conversations: true}' |
    trace azure-conv-sample: conversations: true does not apply
model=Qwen2.5-32B 'stages=[30, 30]' | [30, 30] add up to 60 layers; the model has 64
model=Qwen2.5-32B stages=65 | 65 stages for 64 layers
model=Qwen2.5-32B gpu=L20 stages=1 kv.pages=auto | Qwen2.5-32B does not fit
scheduler=sarathy | unknown scheduler 'sarathy'
scheduler.token_budgte=3 | token_budget
scheduler.token_budget=0 | token_budget
scheduler.token_budget=many | token_budget should be a whole number or 'auto', not "many"
scheduler.token_budget=1.5 | token_budget should be a whole number or 'auto', not 1.5
scheduler.watermark=.nan | watermark should be a finite number, not nan
scheduler.tbt_slo_s=-1 | scheduler sarathi: tbt_slo_s should be greater than 0.0, not -1
'scheduler={name: td_pipe, future_points: []}' |
    td_pipe: future_points should be numbers of decode steps in rising order, not []
'scheduler={name: td_pipe, future_points: [1.5]}' |
    numbers of decode steps in rising order, not [1.5]
scheduler.max_num_seqs=true | max_num_seqs should be a whole number, not true
scheduler=nowhere:Policy | cannot import 'nowhere'
scheduler=./nowhere.py:Policy | scheduler ./nowhere.py: no such file
scheduler=./greedy.py:Gredy | ./greedy.py has no class 'Gredy'
scheduler=./broken.py:Policy | scheduler ./broken.py: cannot import it (ZeroDivisionError: div
dtype=fp9 | dtype: should be 'bfloat16', 'float16', 'fp8'
model=Qwen2.5-32B gpu=A100 | unknown gpu "A100"; there are A100-40G, A100-80G
--window 5..x | --window: give the seconds A..B, such as 10..12.5 or 0..inf: not 5..x
--window 9..3 | --window: give the seconds A..B, such as 10..12.5 or 0..inf: not 9..3
--out RUN.yaml | RUN.yaml: is a file; give a folder with --out
--out RUN.yaml/below | RUN.yaml/below: cannot write there: Not a directory
scheduler=json:Nothing | json has no class 'Nothing'
scheduler=distserv | did you mean 'distserve'?
scheduler.name=distserve | distserve: unknown key "token_budget"; known: decode
'scheduler={name: distserve, prefil: {}}' | did you mean "prefill"?
'scheduler={name: distserve, mixed: {}}' | unknown key "mixed"
'scheduler={name: distserve, prefill: {stage: 1}}' | did you mean "stages"?
'scheduler={name: distserve, decode: {stages: 0}}' |
    scheduler distserve: decode.stages: should be null, a whole number of at least 1
'scheduler={name: splitwise, mixed: {borrow_tokens: -1}}' stages=3 |
    mixed.borrow_tokens: should be at least 0, not -1
'scheduler={name: distserve, watermark: 1}' | watermark: should be less than 1.0, not 1
'scheduler={name: distserve, transfer_link: {latency_us: 3}}' |
    transfer_link needs the key "transfer_link.bandwidth_gb_s", or a name
'scheduler={name: distserve, transfer_link: {bandwidth_gb_s: 3}}' |
    scheduler distserve: a transfer_link needs the KV's size: give kv_bytes_per_token
'scheduler={name: distserve, transfer_link: pcie, kv_bytes_per_token: 1}' | unknown link "pcie"
scheduler=distserve stages=1 |
    scheduler distserve: no GPU is left for the prefill pool of the 1; give the run more
'scheduler={name: distserve, prefill: {stages: 2}, decode: {stages: 2}}' |
    the pools take 4 GPUs (prefill 2, decode 2); the run has 2: stages 2 x tensor_parallel 1
'scheduler={name: distserve, prefill: {tensor_parallel: 2}}' stages=6 |
    the prefill pool's 3 GPUs are no whole number of stages of 2
'scheduler={name: distserve, decode: {scheduler: splitwise}}' |
    decode.scheduler: splitwise is itself made of pools
'scheduler={name: distserve, decode: {scheduler: sarathy}}' |
    scheduler distserve: decode pool: unknown scheduler 'sarathy' (did you mean
'scheduler={name: distserve, prefill: {scheduler: {name: vllm, watermark: 3}}}' |
    scheduler distserve: prefill pool: scheduler vllm: watermark should be less than 1.0, not 3
'scheduler={name: distserve, decode: {costs: roofline}}' |
    decode pool: its part of the run: costs.kind: roofline needs the key "model"
'scheduler={name: distserve, decode: {pages: auto}}' | kv.pages: auto needs the key
scheduler=distserve virtual_engines=true | virtual_engines: not with distserve
model=Qwen2.5-32B gpu=L20 kv.pages=auto scheduler=distserve |
    scheduler distserve: prefill pool: Qwen2.5-32B does not fit
'replicas={count: 0}' | replicas.count: should be at least 1, not 0
'replicas={count: 2, router: random}' | replicas.router: should be 'round_robin', 'least_out
replicas=3 | replicas: should be a mapping of keys to values, not 3
dispatch=engine_loop 'scheduler={name: sglang, chunked_prefill_size: 1000}' |
    chunked_prefill_size 1000 is no multiple of kv.page_tokens, 16
## simulate RUN.yaml model=Qwen2.5-32B gpu=L20 stages=4 link=pcie-l20 costs=roofline
split=balnced | split: should be 'even' or 'balanced', not "balnced"
split=balanced 'stages=[16, 16, 16, 16]' | split: balanced: stages lists the layers alr
expert_parallel=true | expert_parallel: Qwen2.5-32B has no experts
data_parallel=2 | data_parallel: Qwen2.5-32B has no experts to share; use replicas
data_parallel=2 virtual_engines=true | virtual_engines: false
tensor_parallel=3 | tensor_parallel: 3 ranks cannot share the 40 heads
'nodes={link: socket-73g}' | the key "nodes.gpus" is missing
'nodes={gpus: 2, lnk: x}' | unknown key "nodes.lnk"; did you mean "link"?
'nodes={gpus: 2, link: socket}' | unknown link "socket"
stages=1 tensor_parallel=8 'nodes={gpus: 3, link: socket-73g}' |
    nodes: 8 tensor-parallel GPUs do not fill nodes of 3 evenly
stages=2 tensor_parallel=2 'nodes={gpus: 3, link: socket-73g}' |
    nodes: 3 GPUs hold no whole number of stages of 2 GPUs each
link.shared=true 'nodes={gpus: 2, link: socket-73g}' |
    link.shared: there is no one link for all stages where there are nodes
'costs={kind: roofline, cuda_graph_sizes: [0]}' | should be at least 1, not 0
'costs={kind: roofline, cuda_graph_sizes: [4, 2]}' | must be numbers of tokens that ascend
'costs={kind: roofline, graph_layer_overhead_s: 1e-5}' | needs the key "costs.cuda_graph
'costs={kind: roofline, expert_imbalance: 0.5}' | should be at least 1.0, not 0.5
'costs={kind: roofline, all_reduce: {}}' | all_reduce needs the key "all_reduce.bandwid
'costs={kind: roofline, all_reduce: {points: [[1]]}}' | a pair [bytes, microseconds]
'costs={kind: roofline, all_reduce: {points: [[2, 1], [1, 1]]}}' | sizes must grow
'speculative={k: 3, acceptance: 0.5}' | needs the key "speculative.draft_cost_share" or
'speculative={k: 3, acceptance: 2, draft_cost_share: 0}' | should be at most 1.0, not 2
'speculative={k: 0, acceptance: 1, draft_cost_share: 0}' | speculative.k: should be at l
'speculative={k: 1, acceptance: 1, draft_model: Qwen}' | unknown model "Qwen"
'speculative={k: 16, acceptance: 1, draft_cost_share: 0}' |
    speculative: a step of k + 1 = 17 tokens needs pages of at least as many, not 16
speculative.k=20 | the key "speculative.acceptance" is missing
## simulate RUN.yaml model=Qwen2.5-32B gpu=L20
'speculative={k: 1, acceptance: 0.5, draft_model: Qwen2.5-0.5B}' |
    speculative.draft_model: its costs need costs.kind: roofline or silicon
'speculative={k: 1, acceptance: 0.5, draft_model: mtp}' | Qwen2.5-32B has no layer that predicts
'speculative={k: 2, acceptance: [0.5], draft_cost_share: 0}' | acceptance has 1 numbers; k = 2 is
## compare RUN.yaml --schedulers
'' | nothing is named
sarathi,sarathi | sarathi is there twice
sarathi --systems gLLM | no such system; did you mean "gllm"
gLLM | gLLM: is a system; --systems gllm is right
'sarathi,{token_budget: 3}' | should be a name, or a mapping with a name
'[' | should be like
sarathi,sarathy | unknown scheduler 'sarathy'
## tune RUN.yaml
| no limit is given
--slo p99_tft_ms=500 | did you mean "p99_ttft_ms"
--slo p99_ttft_ms=500 --objective speed | --objective speed
--slo p99_itl_ms=5 --objective request_goodput | needs limits of requests
--slo p99_ttft_ms=500 --trials 0 | --trials 0
--slo p99_ttft_ms=500 --checks 1 | --checks 1
--slo p99_ttft_ms=500 --replications 0 | --replications 0
--slo p99_ttft_ms=500 --seed -1 | --seed -1
--slo p99_ttft_ms=500 --gpus 4 | --gpus 4: the run's costs do not follow
--slo p99_ttft_ms=500 --trials 100001 | '--trials': Input should be less than or equal to 100000
--slo p99_ttft_ms=500 --checks 1000000000 | '--checks': Input should be less than or equal to 100000
--slo p99_ttft_ms=500 --schedulers sarahti | unknown scheduler 'sarahti'
--slo p99_ttft_ms=500 --schedulers , | names no scheduler
--slo p99_ttft_ms=500 --schedulers vllm,vllm | there twice
--slo p99_ttft_ms=500 --executor cloud | --executor cloud
--slo p99_ttft_ms=500 workload.trace=empty.csv | empty.csv
--slo p99_ttft_ms=500 workload.requests=50 | 50 requests
--slo p99_ttft_ms=500 workload.skip=20 | no request is left
--slo p99_ttft_ms=500 workload.skip=19 | cannot be divided
--slo p99_ttft_ms=500 kv.pages=1 | none of its requests can be served
## tune
none.yaml --slo p99_ttft_ms=500 | none.yaml: no such file
## capacity RUN.yaml
--slo p99_itl=200 | did you mean "p99_itl_ms"
--slo p99_itl_ms=0 | should be METRIC=LIMIT
--slo output_throughput=10 | grows with the rate
--slo attainment=0.9 | needs limits of requests
| no limit is given
--max-median-queue-s -2 | above 0
--slo p99_itl_ms=200 --tolerance 0 | --tolerance 0
--slo p99_itl_ms=200 --replications 0 | --replications 0
--slo p99_itl_ms=200 --replications 1000000000 | Input should be less than or equal to 100000
--slo p99_itl_ms=200 --replications 2 | --replications 2: all would be alike
--slo p99_itl_ms=200 --executor cloud | --executor cloud
--slo p99_itl_ms=200 scheduler=sarahti | unknown scheduler
--slo p99_itl_ms=200 workload.trace=none.csv | none.csv
--slo p99_itl_ms=200 workload.trace=empty.csv | empty.csv
--slo p99_itl_ms=200 workload.requests=1 | give more requests
--slo p99_itl_ms=200 workload.arrivals=offline | has no rate
--slo p99_itl_ms=200 kv.pages=1 | none of its requests can be served
--slo p99_itl_ms=200 --per-dollar none.yaml | no such file
--slo p99_itl_ms=200 --per-dollar empty.csv | the file is empty
--slo p99_itl_ms=200 --per-dollar prices.yaml | names no gpu
--slo p99_itl_ms=200 --per-dollar prices.yaml gpu=L20 | price of L20 is missing
--slo p99_itl_ms=200 --per-dollar free.yaml | free.yaml:2: H100
--slo p99_itl_ms=200 --gpus 4,8 | --gpus 4,8: one number is right, a multiple of the 2 GPUs
--slo p99_itl_ms=200 --out RUN.yaml | RUN.yaml: is a file; give a folder with --out
## plan RUN.yaml
| --gpus: says how many there may be, such as --gpus 4..64
--gpus 4 | no limit is given
--gpus 4..x --slo p99_ttft_ms=500 | --gpus 4..x: should be a number of GPUs, several (4,8) or a
--gpus 0 --slo p99_ttft_ms=500 | --gpus 0: should be a number of GPUs
--gpus 64..4 --slo p99_ttft_ms=500 | --gpus 64..4: should be a number of GPUs
--gpus 2 --slo p99_tft_ms=500 model=Qwen2.5-0.5B gpu=L20 | did you mean "p99_ttft_ms"?
--gpus 2 --slo p99_ttft_ms=500 workload.trace=empty.csv | empty.csv
## plan
none.yaml --gpus 4 --slo p99_ttft_ms=500 | none.yaml: no such file
hollow --gpus 4 --slo p99_ttft_ms=500 | hollow: is a folder; a file is right
##
sweep RUN.yaml | RUN.yaml: holds a run, and a SWEEP.yaml is right: the keys run and parameters
compare RUN.yaml --systems nosuch | --systems nosuch: no such system; known: distserve
init RUN.yaml | RUN.yaml: is there already; name another file
calibrate RUN.yaml none.json | none.json: cannot be read (No such file or directory)
calibrate RUN.yaml empty.csv | empty.csv: not the results of a benchmark that is known
calibrate RUN.yaml foreign/summary.json | summary.json: not the results of a benchmark that is
## diff
RUN.yaml RUN.yaml | RUN.yaml: is a file; the folder of a run is right
none none | none: no such folder
hollow hollow | hollow: holds no run of evenflow's (no summary.json)
. . | .: holds no run of evenflow's (no summary.json); it holds several: foreign
foreign foreign | foreign/summary.json: is no summary that evenflow wrote
## run RUN.yaml; validate RUN.yaml
workers=torch | workers.kind: torch needs the key "model"
workers=tpu | workers.kind: unknown "tpu"; known: emulated, torch
'workers={kind: emulated, faults: [{stage: 2, slow_factor: 2}]}' | stage 2 is none of the 2, 0 to 1
'workers={kind: emulated, faults: [{stage: 0, slow_factor: 0}]}' | should be greater than 0.0, not 0
data_parallel=2 model=Mixtral-8x7B gpu=H100 | data_parallel: can only be simulated;
'speculative={k: 2, acceptance: 0.5, draft_cost_share: 0}' | speculative: can only be
'scheduler={name: vllm_v1, async_scheduling: v2}' dispatch=engine_loop workers=torch model=Yi-34B |
    its decodes run ahead of their last token, which only emulated workers serve
'workers={kind: emulated, faults: [{stage: 0}]}' scheduler=distserve | workers.faults: with pools
##
simulat | No such command 'simulat'. Did you mean 'simulate'? (evenflow --help)
traces inf | No such command 'inf'. Did you mean 'info'? (evenflow traces --help)
simulate RUN.yaml b.yaml | unexpected extra argument
simulate RUN.yaml --save some | 'some' is not one of 'summary', 'requests', 'all'
simulate RUN.yaml --format xlsx | 'xlsx' is not one of 'csv', 'parquet'
simulate RUN.yaml --set | Option '--set' requires an argument
validate RUN.yaml --runs 0 | '--runs': Input should be greater than or equal to 1
serve RUN.yaml --port 70000 | '--port': Input should be less than or equal to 65535
tune RUN.yaml --trials many | '--trials': Input should be a valid integer
traces info missing.csv | trace "missing.csv" is neither a file nor a bundled sample
traces convert trace.csv --out no/such/folder.csv | no/such/folder.csv: cannot be written
traces convert trace.csv --out copy.csv --to azure | cannot write trace format "azure"
## simulate RUN.yaml
kv.pages=9223372036854775808 | kv.pages: should be auto or a whole number of at least 1
stages=9223372036854775808 | stages: should be a whole number of at least 1
stages=1000000 | and at most 4096, or a list of layers per stage, not 1000000
virtual_engines=1000000 | and at most 4096, not 1000000
replicas.count=1000000 | replicas.count: should be at most 4096, not 1000000
workload.requests=1000000000000 | workload.requests: should be at most 100000000
kv.pages=0200 | 0200 is 128 to some readers of YAML and 200 to others; write it without the 0
max_model_len=190:20:30 | 190:20:30 would be 685230, a time; write it as one number
'gpu={? [a] : 1}' | a list or a mapping as a key; one word or number is right
'workload={trace: azure-conv-sample, requests: 9, arrivals: {kind: poisson, rate: 5e-324}}' |
    the last request would arrive after inf s; at most 1e+12 s is right
costs.per_token_s=1e308 | the run would last for more than 1e+12 s
model=Qwen2.5-32B 'link={bandwidth_gb_s: 5e-324}' | the run would last for more than 1e+12 s
model=Qwen2.5-32B 'link={bandwidth_gb_s: 50, latency_us: 1e30}' | for more than 1e+12 s
'workload={trace: trace.csv, arrivals: {kind: replay, scale: 5e-324}}' | would arrive after inf s
max_model_len=10000001 | max_model_len: should be at most 10000000, not 10000001
workload.requests=1e12 | workload.requests: should be a whole number, not 1000000000000.0
workload.skip=1000000000000 | workload.skip: should be at most 100000000
""")
"""What is typed, and what is told."""


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_what_is_typed(words: list[str], told: str) -> None:
    Path("empty.csv").touch()
    Path("broken.py").write_text("1 / 0")
    Path("greedy.py").write_text("class Greedy: ...")
    Path("hollow").mkdir()
    Path("foreign").mkdir()
    Path("foreign/summary.json").write_text('{"provenance": 1}')
    Path("prices.yaml").write_text("H100: 4\n")
    Path("free.yaml").write_text("L20: 1\nH100: 0\n")
    assert told in refusal(*words)


COMMANDS = ["simulate", "compare", "diff", "sweep", "capacity", "tune", "figures", "run", "serve"]
COMMANDS += ["replay", "validate", "schedulers", "profile", "profile import", "profile check"]
COMMANDS += [f"traces {name}" for name in ("info", "fit", "convert", "predict")]
WITHOUT_ARGUMENTS = {"figures", "schedulers", "profile"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_where_to_read_what_is_right(command: str) -> None:
    told = f"No such option: --xyzzy (evenflow {command} --help)"
    assert told in refusal(*command.split(), "--xyzzy")
    if command not in WITHOUT_ARGUMENTS:
        assert f"(evenflow {command} --help)" in refusal(*command.split())


@pytest.mark.parametrize("group", ["", "traces"])
def test_no_command_at_all_shows_the_help(group: str) -> None:
    status, output, errors = evenflow(*group.split())
    assert (status, errors) == (2, "")
    assert f"Usage: evenflow {group}" in output


def test_the_configuration_itself_is_right() -> None:
    status, output, errors = evenflow("simulate", "RUN.yaml", "--save", "summary")
    assert (status, errors) == (0, "")
    assert output.endswith("out/RUN\n")


ALIASES = "gpu: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)
MERGES = "gpu: &a0 {x: 1}\n" + "".join(
    f"k{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], <<: *a{i - 1}}}\n" for i in range(1, 40)
)
RUNS = [
    (None, "RUN.yaml: no such file"),
    ("stages: \x00\n", "RUN.yaml: not valid YAML: unacceptable character #x0000"),
    (RUN + "gpu: L21\n", 'unknown gpu "L21"; did you mean "L20"?'),
    (RUN + "gpu: {name: X, memory_gb: 4}\n", "gpu: a key is missing"),
    (RUN.replace("stages: 2", "stages: 02"), "RUN.yaml:1: 02 is 2 to some readers of YAML and 2"),
    (RUN + "? [a]\n: 1\n", "RUN.yaml:6: a list or a mapping as a key; one word or number is"),
    (RUN + "gpu: {{a: 1}: 2}\n", "RUN.yaml:6: a list or a mapping as a key"),
    (RUN + ALIASES, "RUN.yaml:6: more than 100000 values, counting what aliases repeat"),
    (RUN + MERGES, "more than 100000 values, counting what aliases repeat"),
    (RUN + "#" * 2**20, "RUN.yaml: has more than 1048576 bytes"),
    (RUN.replace("pages: 200", "pages: auto"), 'kv.pages: auto needs the key "model"'),
]
TRACES = [
    (None, 'trace "trace.csv" is neither a file nor a bundled sample; known: arxiv-16k-sample'),
    ("", "trace trace.csv"),
    (HEAD + "0.0,10,5\n1.0,-3,5\n", "trace trace.csv, line 3: num_prefill_tokens is '-3'"),
    ("num_prefill_tokens,num_decode_tokens\n10,5\n", "the trace has no arrival times"),
    (
        "arrived_at,num_prefill_tokens,num_decode_tokens,num_prefill_tokens\n0,10,5,9\n",
        'trace trace.csv, line 1: the column "num_prefill_tokens" is there twice',
    ),
    (
        '{"timestamp": 0, "input_length": 9, "output_length": 2, "input_length": 3}\n',
        "trace trace.csv, line 1: not a JSON object on one line, perhaps truncated (the key ",
    ),
    (
        '[{"input_token_length": 1, "output_token_length": 1, "input_token_length": 2}]',
        'trace trace.csv, entry 1: the key "input_token_length" is given twice',
    ),
    (HEAD + "0,10,5\n1e308,10,5\n", "workload: the last request would arrive after 1e+308 s"),
    (HEAD + f"0,10,5\n1{'0' * 15},10,5\n", "would arrive after 1e+15 s; at most 1e+12 s is right"),
]
FILES = [("RUN.yaml", *row) for row in RUNS] + [("trace.csv", *row) for row in TRACES]


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(("file", "text", "told"), FILES)
def test_what_a_file_holds(command: str, file: str, text: str | None, told: str) -> None:
    if text is None:
        Path(file).unlink()
    else:
        Path(file).write_text(text, encoding="utf-8")
    schedulers = ["--schedulers", "sarathi,vllm"] if command == "compare" else []
    assert told in refusal(command, "RUN.yaml", *schedulers)


POLICY = """\
from evenflow.types import Plan, Prefill

class Policy:
    def __init__(self, width: int = 1):
        {constructor}

    def schedule(self, view):
        {schedule}
"""


def write_policy(name: str, schedule: str, constructor: str = "pass") -> str:
    """Write a module with a policy; return how it is named in a run."""
    text = POLICY.format(constructor=constructor, schedule=schedule)
    Path(f"policy_{name}.py").write_text(text, encoding="utf-8")
    return f"policy_{name}:Policy"


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("name", "schedule", "told"),
    [
        ("raises", "return 1 / 0", " raised ZeroDivisionError: division by zero"),
        ("says_nothing", "return None", " returned None, not a Plan"),
        ("other", "return Plan([Prefill(10**6, 1)])", " prefills request 1000000, which is not"),
        ("many", "return Plan([Prefill(0, 10**6)])", ", request 0: prefills 1000000 of 20 tokens"),
        ("negative", "return Plan([Prefill(0, -1)])", ", request 0: prefills -1 of 20 tokens"),
        ("not_ready", "return Plan(decodes=5)", " takes 5 decodes of 0 ready"),
        ("stalls", "return Plan()", " stalls at 0 s"),
        ("sleeps", "return Plan(wake_at_s=view.now_s + 1)", " stalls at 1001.8 s: nothing"),
        ("leaves", "raise SystemExit(0)", " raised SystemExit: 0"),
        ("line", "return view.waiting[:1]", "(policy_line.py:8: return view.waiting[:1])"),
        ("typo", "return view.waitng", 'did you mean "waiting"?'),
        (
            "pair",
            "return Plan([(0, 5)])",
            " plans (0, 5) as a prefill; Prefill(request_id, tokens)",
        ),
        ("half", "return Plan([Prefill(0, 12.5)])", " plans 12.5 as the tokens to prefill of requ"),
        ("all", "return Plan(decodes='all')", " plans 'all' as the decodes to take; how many is"),
        ("one", "return Plan(Prefill(0, 5))", " plans 0 as a prefill; Prefill(request_id, tokens)"),
        ("a_set", "return Plan({Prefill(0, 5)})", " as the prefills; a list of Prefill(request_id"),
        ("untaken", "return Plan()", "not taken: 0 decodes, 1 prompts, with "),
    ],
)
def test_a_policy_that_breaks_its_promise(
    command: str, name: str, schedule: str, told: str
) -> None:
    policy = write_policy(name, schedule)
    if command == "simulate":
        line = refusal("simulate", "RUN.yaml", "--set", f"scheduler={policy}")
    else:
        line = refusal("compare", "RUN.yaml", "--schedulers", f"sarathi,{policy}")
    assert "policy Policy" in line
    assert told in line


def test_a_policy_that_stalls_in_a_pool() -> None:
    policy = write_policy("of_pool", "return Plan()")
    for name in ("prefill", "decode"):
        system = f"scheduler={{name: distserve, {name}: {{scheduler: '{policy}'}}}}"
        assert "policy Policy stalls at " in refusal("simulate", "RUN.yaml", "--set", system)


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        ("policy_made:Policy", "KeyError: 'key'"),
        ("{name: 'policy_made:Policy', widht: 3}", "did you mean 'width'?"),
        ("policy_syntax:Policy", "cannot import 'policy_syntax'"),
        ("policy_exits:Policy", "cannot import 'policy_exits' (SystemExit: 0)"),
        ("policy_exits_late:Policy", "its constructor raised SystemExit: 0"),
    ],
)
def test_a_policy_that_cannot_be_made(scheduler: str, told: str) -> None:
    write_policy("made", "return Plan()", constructor="{}['key']")
    Path("policy_exits.py").write_text("import sys\nsys.exit(0)", encoding="utf-8")
    write_policy("exits_late", "return Plan()", constructor="raise SystemExit(0)")
    Path("policy_syntax.py").write_text("class Policy(:", encoding="utf-8")
    assert told in refusal("simulate", "RUN.yaml", "--set", f"scheduler={scheduler}")


@pytest.mark.parametrize("more", [["simulate"], ["compare", "--schedulers", "sarathi,vllm"]])
def test_an_output_folder_that_cannot_be_written(more: list[str]) -> None:
    Path("results").write_text("a file is in the way", encoding="utf-8")
    told = refusal(more[0], "RUN.yaml", *more[1:], "--out", "results")
    assert "results: is a file; give a folder with --out" in told
    assert Path("results").read_text(encoding="utf-8") == "a file is in the way"


def test_a_failed_run_leaves_an_earlier_one_as_it_was() -> None:
    evenflow("simulate", "RUN.yaml", "--save", "requests")
    earlier = {path: path.read_bytes() for path in Path("out/RUN").iterdir()}
    names = {"summary.json", "requests.csv", "manifest.json", "wall_clock.json"}
    assert {path.name for path in earlier} == names
    refusal("simulate", "RUN.yaml", "--set", "workload.requests=21")
    assert {path: path.read_bytes() for path in Path("out/RUN").iterdir()} == earlier


@pytest.mark.parametrize("name", ["missing.yaml", "RUN.yaml"])
def test_as_a_process_of_its_own(name: str) -> None:
    policy = write_policy("process", "raise RuntimeError('two\\nlines')")
    process = spawn("simulate", name, "--set", f"scheduler={policy}")
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert not Path("out").exists()


CONFIG = json.dumps({"config": {"stages": 2}, "folder": "."}).encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        (b"not gzip", "cannot read it"),
        (gzip.compress(b"", mtime=0), "no first line"),
        (gzip.compress(b"[]\n", mtime=0), "no first line with a configuration"),
        (gzip.compress(b"{\n", mtime=0), "1: not a line of JSON"),
        (gzip.compress(b"[" * 100_000, mtime=0), "1: not a line of JSON"),
        (gzip.compress(CONFIG, mtime=0), "a configuration of evenflow None"),
        (gzip.compress(CONFIG, mtime=0)[:-12], "Compressed file ended"),
    ],
)
def test_a_folder_that_holds_no_record(content: bytes | None, told: str) -> None:
    if content is not None:
        Path("decisions.jsonl.gz").write_bytes(content)
    assert told in refusal("replay", ".")


def test_a_pipe_is_no_journal() -> None:
    os.mkfifo("decisions.jsonl.gz")
    assert "no such file" in refusal("replay", ".")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([["add", 0, float("nan"), 5, 3, None, None]], "2: not a line of JSON"),
        ([["add", 0, 0.0, -5, 3, None, None]], "2: no entry of a journal: a request of -5 prompt"),
        ([["add", "x", "y", "z", 3, None, None]], "2: no entry of a journal: ['add', 'x'"),
        ([["add", 0]], "2: no entry of a journal: ['add', 0]"),
        ([["next", "soon", None]], "2: no entry of a journal: ['next', 'soon', None]"),
        ([["next", 0.0, [5, 5]]], "2: no entry of a journal"),
        ([["abort", [1]]], "2: no entry of a journal: ['abort', [1]]"),
        ([["abort", 5]], "entry 0 (Aborted): cannot follow those before it: request 5 is not"),
        ([["complete", 0.0, 5, [], []]], "entry 0 (Completed): cannot follow those before it"),
        ([["add", 0, 0.0, 5, 3, None, None]] * 2, "entry 1 (Added): cannot follow those before it"),
    ],
)
def test_a_record_that_no_run_wrote(lines: list[Any], told: str) -> None:
    head = {"config": load_config(Path("RUN.yaml")).resolved(), "folder": "."}
    record = gzip.compress("\n".join(map(json.dumps, [head, *lines])).encode())
    Path("decisions.jsonl.gz").write_bytes(record)
    line = refusal("replay", ".")
    assert line.startswith("decisions.jsonl.gz")
    assert told in line


DEEP = "[" * 3000
LONG = "x" * 5000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--set", f"model={DEEP}"], "nested too deep"),
        (["--set", f"kv.pages={'9' * 5000}"], "a number of 5000 letters; at most 40 is right"),
        (["--set", f"kv.pages=0x{'f' * 5000}"], "a number of 5002 letters; at most 40 is right"),
        (["--set", f"scheduler={LONG}"], "xxx"),
        (["--set", f"workload.trace={LONG}"], "xxx"),
        (["--set", f"model={LONG}"], "xxx"),
        (["--set", f"gpu={LONG}"], "xxx"),
        (["--set", f"workload.{LONG}=1"], "xxx"),
        (["--set", f"scheduler.{LONG}=1"], "xxx"),
        (["--set", f"workload.trace={'two words ' * 500}"], "two words"),
        (["--out", "o" * 300], "File name too long"),
        (["--set", f"workload.trace={'t' * 300}"], "File name too long"),
    ],
)
def test_a_line_stays_a_line_whatever_is_long(words: list[str], told: str) -> None:
    line = refusal("simulate", "RUN.yaml", *words)
    assert told in line
    assert len(line) <= MOST_LETTERS + 3


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_what_is_no_file_is_not_read(name: str) -> None:
    os.mkfifo("pipe")
    told = f"{name}: is a pipe or a device; a file is right"
    assert told in refusal("simulate", name)
    for key in ("workload.trace", "model"):
        assert told in refusal("simulate", "RUN.yaml", "--set", f"{key}={name}")
    profile = f"costs={{kind: profile, path: {name}}}"
    keys = ("model=Qwen2.5-32B", "gpu=L20", profile)
    words = [word for key in keys for word in ("--set", key)]
    assert told in refusal("simulate", "RUN.yaml", *words)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "config.json: nested too deep"),
        ('{"hidden_size": 1, "hidden_size": 2}', 'the key "hidden_size" is given twice'),
        (f'{{"hidden_size": {"9" * 5000}}}', "config.json: not a JSON file (Exceeds the limit"),
    ],
)
def test_a_model_file_that_cannot_be(text: str, told: str) -> None:
    Path("config.json").write_text(text, encoding="utf-8")
    words = ("model=config.json", "gpu=L20", "costs=roofline")
    assert told in refusal(
        "simulate", "RUN.yaml", *(part for word in words for part in ("--set", word))
    )
