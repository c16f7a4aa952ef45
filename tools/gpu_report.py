"""All that is to be measured on a GPU machine, as one command that runs anywhere.

    python -m tools.gpu_report --device cuda --out gpu-report

For each model: a profile of its layer shapes, how far predictions from it are off on random
micro-batches, and the profile beside the silicon tables of the same GPU (needs the extra
`silicon`). Then: greedy tokens on the device against those on the CPU. Needs torch and numpy,
neither an installation nor a network. Where a run's packages are there too: layers of the first
model served with 1, 2 and 4 stages in each mode, which share the one device, and the validation of
three policies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evenflow.core.batch import Span, Work
from evenflow.costs.profile.cost import profile_cost
from evenflow.costs.profile.file import read_profile
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.costs.tables import TableCost
from evenflow.errors import UsageError
from evenflow.profiler.check import check_profile, errors_table
from evenflow.profiler.machine import device_name, require_device
from evenflow.profiler.profile import ProfileSettings
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import gpu
from evenflow.specs.model import model
from evenflow.specs.modelspec import ModelSpec

if TYPE_CHECKING:
    from evenflow.study.runs import Job
    from evenflow.types import Request

MODELS = ("Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-8B")
SMALL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    vocab_size=1000,
    max_position_embeddings=512,
    rope_theta=10000.0,
    dtype_bytes=4,
)


def report(
    models: Sequence[str], out: Path, settings: ProfileSettings, batches: int, scale: Scale
) -> dict[str, Any]:
    """Measure each model, `settings.minutes` each, into `out`; serve the first; return all.

    report.json has what is measured so far: a device may be lent for a time.
    """
    require_device(settings.device)
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": device_name(settings.device), "models": {}}

    def keep() -> None:
        (out / "report.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    for name in models:
        found["models"][name] = _measure(name, out, settings, batches)
        keep()
    found["tokens_equal"] = tokens_equal(settings.device, small_checkpoint(out))
    keep()
    found["runtime"] = _serve(out, models[0], found["models"][models[0]]["profile"], scale)
    keep()
    return found


def _serve(out: Path, name: str, profile: str, scale: Scale) -> dict[str, Any]:
    missing = missing_packages()
    if missing:
        line = f"needs {', '.join(missing)}: bring them as wheels (pip download, pip install)"
        print(f"serving and validation are left out: {line}", flush=True)
        return {"left_out": line}
    return serve_and_validate(out, scale, name, out / profile)


def _measure(name: str, out: Path, settings: ProfileSettings, batches: int) -> dict[str, Any]:
    from evenflow.runtime.profiled import profile_model, timed_stage

    path = profile_path(out, name)
    began_s = perf_counter()
    profile = profile_model(name, path, settings)
    measured_s = perf_counter() - began_s
    rows = check_profile(path, timed_stage, batches=batches, layers=settings.layers)
    print(f"{name}: {profile.header.grid}\n{errors_table(rows)}\n", flush=True)
    return {
        "profile": path.name,
        "points": len(profile.points),
        "seconds": measured_s,
        "check_seconds": perf_counter() - began_s - measured_s,
        "errors": [row._asdict() for row in rows],
        "silicon": compare(name, path),
    }


def profile_path(out: Path, name: str) -> Path:
    """Return the file of the profile of a model, a name or a config.json; names have dots."""
    return out / f"{Path(name).name.removesuffix('.json')}.csv.gz"


def tokens_equal(device: str, folder: Path, new_tokens: int = 32) -> bool:
    """Say whether a checkpoint in float32 gives the same greedy tokens as on the CPU."""
    from evenflow.runtime.torch.weights import load_stage
    from tools.checkpoints import greedy_tokens

    prompt = list(range(100, 140))
    stages = (load_stage(folder, 0, SMALL.num_layers, device=where) for where in ("cpu", device))
    expected, found = (greedy_tokens(stage, prompt, new_tokens) for stage in stages)
    return expected == found


# -- serving and validation ------------------------------------------------------------------------

NEEDED = {
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "pydantic": "pydantic",
    "rich": "rich",
    "simpy": "simpy",
    "typer": "typer",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Modules that serving imports beyond those of the profiles -> the packages that bring them."""

MODES = ("one_process", "gloo")
POLICIES = ("token_throttling", "sarathi", "vllm")
LOAD = 0.8
"""Share of the throughput of a full queue at which requests arrive for the validation."""
AFFINE = {"kind": "affine", "base_s": 0.001, "per_token_s": 1e-5}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is served: `requests` of at most `context` tokens, each validation `runs` times.

    `layers` of the model, cut into each number of `stages`.
    """

    device: str
    requests: int = 200
    context: int = 2048
    layers: int = 8
    runs: int = 2
    stages: Sequence[int] = (1, 2, 4)


class Way(NamedTuple):
    """Stages on the device, and how activations get from one to the next."""

    stages: int
    mode: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in `folder`, at `path`, that is served at a scale; paths in `costs` start there."""

    folder: Path
    path: Path
    scale: Scale
    costs: Mapping[str, Any]
    weights: str = "random"

    def job(self, way: Way, arrivals: Any = "offline", policy: str = POLICIES[0]) -> Job:
        """Return the run that serves it in one way."""
        from evenflow.config.build import load_workload
        from evenflow.config.run import RunConfig
        from evenflow.study.runs import Job

        workers = {"device": self.scale.device, "transport": way.mode, "weights": self.weights}
        values = {
            "model": str(self.path.resolve()),
            "stages": way.stages,
            "costs": dict(self.costs),
            "kv": {"pages": 4 * self.scale.context},
            "max_model_len": self.scale.context,
            "workers": {"kind": "torch", **workers},
            "scheduler": policy,
            "workload": {"trace": "lengths.csv", "arrivals": arrivals},
        }
        config = RunConfig.model_validate(values)
        return Job(config, load_workload(config, self.folder), self.folder)

    def ways(self) -> list[Way]:
        """Return the numbers of stages, each in the modes that several of them have."""
        numbers = self.scale.stages
        return [Way(n, mode) for n in numbers for mode in (MODES if n > 1 else MODES[:1])]


def missing_packages() -> list[str]:
    """Return what has to be installed before anything can be served here."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def serve_and_validate(
    out: Path, scale: Scale, name: str, profile: Path | None = None
) -> dict[str, Any]:
    """Serve a small checkpoint and layers of the model `name` in each mode; validate the latter.

    Writes what it serves under `out`. `profile` is what was measured of that model.
    """
    from tools.checkpoints import write_config

    path = out / "served.json"
    spec = replace(model(name), num_layers=scale.layers, max_position_embeddings=scale.context)
    write_config(spec, path)
    write_lengths(out, scale)
    costs = AFFINE if profile is None else {"kind": "profile", "path": profile.name}
    subject = Subject(out, path, scale, costs)
    tokens, modes = check_tokens(out, scale), serve_modes(subject)
    found = {"model": name, "layers": scale.layers, "tokens": tokens, "modes": modes}
    return found | {"validation": validate_policies(subject, modes)}


def check_tokens(out: Path, scale: Scale) -> list[dict[str, Any]]:
    """Serve a small checkpoint in each mode; compare its tokens with those of the CPU."""
    from evenflow.runtime.real import serve_job
    from evenflow.runtime.serve import ServeOptions

    small = replace(scale, requests=24, context=128)
    folder = small_checkpoint(out)
    write_lengths(folder, small)
    subject = Subject(folder, folder, small, AFFINE, "checkpoint")
    expected: dict[int, list[int]] = {}
    rows = []
    for way in subject.ways():
        job = subject.job(way)
        expected = expected or _tokens_of_the_cpu(folder, job.workload.requests)
        tokens: defaultdict[int, list[int]] = defaultdict(list)

        def keep(request_id: int, token: int, to: Any = tokens) -> None:
            to[request_id].append(token)

        served = serve_job(job, options=ServeOptions(on_token=keep))
        row = way._asdict() | {"failure": served.failure, "equal": tokens == expected}
        print(f"tokens of {way.stages} stages, {way.mode}: equal {row['equal']}", flush=True)
        rows.append(row)
    return rows


def _tokens_of_the_cpu(folder: Path, requests: Sequence[Request]) -> dict[int, list[int]]:
    from evenflow.runtime.tokens import RandomTexts
    from evenflow.runtime.torch.weights import load_stage
    from tools.checkpoints import greedy_tokens

    stage, text_of = load_stage(folder, 0, SMALL.num_layers), RandomTexts(SMALL.vocab_size, 0)
    return {
        each.request_id: greedy_tokens(stage, list(text_of(each).prompt_ids), each.output_tokens)
        for each in requests
    }


def small_checkpoint(out: Path) -> Path:
    """Return a folder with a small random model in float32, drawn on the CPU."""
    from evenflow.runtime.torch.model import Rope
    from tools.checkpoints import save_random

    folder = out / "small"
    if not folder.is_dir():
        folder.mkdir()
        save_random(SMALL, Rope(SMALL.rope_theta), folder)
    return folder


def serve_modes(subject: Subject) -> list[dict[str, Any]]:
    """Serve a full queue with each number of stages in each mode; say what a mode is refused for.

    Times in ms, of micro-batches; throughputs per second.
    """
    from evenflow.runtime.real import outcome_of, serve_job

    rows: list[dict[str, Any]] = []
    refused = [Way(stages, "nccl") for stages in subject.scale.stages if stages > 1]
    for way in [*subject.ways(), *refused]:
        row: dict[str, Any] = way._asdict()
        try:
            job = subject.job(way)
            served = serve_job(job)
        except UsageError as error:
            rows.append(row | {"refused": str(error)})
            continue
        result, summary = served.result, outcome_of(job, served).summary
        hops_s = result.available_s[:, 1:] - result.end_s[:, :-1]
        row |= {
            "failure": served.failure,
            "requests_per_s": summary["completed"] / summary["duration"],
            "total_token_throughput": summary["total_token_throughput"],
            "median_stage_ms": 1e3 * float(np.median(result.end_s - result.start_s)),
            "median_hop_ms": 1e3 * float(np.median(hops_s)) if way.stages > 1 else None,
        }
        print(f"{way.stages} stages, {way.mode}: {row['requests_per_s']:.3g} requests/s")
        rows.append(row)
    return rows


def validate_policies(subject: Subject, modes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validate each policy in one process, with one stage and with two that share the device.

    Writes validation.md and the figures under the subject's folder.
    """
    from evenflow.experiments.validation import validate
    from evenflow.experiments.validation.write import draw_validation, markdown
    from evenflow.report.plots import save

    rows, pages = [], []
    for stages in subject.scale.stages[:2]:
        way = Way(stages, MODES[0])
        full = next(each for each in modes if (each["stages"], each["mode"]) == way)
        rate = LOAD * full["requests_per_s"]
        for policy in POLICIES:
            job = subject.job(way, {"kind": "poisson", "rate": rate}, policy)
            validation = validate(job, subject.scale.runs)
            found = validation.found
            pages.append(f"## {stages} stages, {rate:.3g} requests/s\n\n{markdown([found])}")
            folder = subject.folder / f"validation-{stages}-{policy}"
            folder.mkdir(exist_ok=True)
            figure = draw_validation(validation, f"{policy}, {stages} stages")
            save(figure, folder / "validation")
            rows.append({"stages": stages, "rate": rate} | found)
            print(f"validated: {policy}, {stages} stages", flush=True)
    (subject.folder / "validation.md").write_text("\n".join(pages), encoding="utf-8")
    return rows


def write_lengths(folder: Path, scale: Scale) -> None:
    """Write a trace of random lengths: prompts to a quarter of the context, outputs to an 8th."""
    from evenflow.report.tables import write_table

    rng = np.random.default_rng(0)
    prompts = rng.integers(scale.context // 16, scale.context // 4, size=scale.requests)
    outputs = rng.integers(2, max(scale.context // 8, 3), size=scale.requests)
    times = {"arrived_at": np.zeros(scale.requests)}
    lengths = {"num_prefill_tokens": prompts, "num_decode_tokens": outputs}
    write_table(folder / "lengths.csv", times | lengths)


# -- the profile beside the silicon tables ---------------------------------------------------------

TABLED = ("H200", "H100", "L40S")
"""GPUs that the tables measured, by what their device's name holds."""

TOKENS = (1, 16, 128, 512, 2048)
CHUNKS = ((512, 0), (2048, 0), (512, 4096))
DECODES = ((1, 1024), (16, 1024), (64, 1024), (64, 4096))
"""(tokens, context before) of a chunk; (rows, context of each) of a step."""


def compare(name: str, path: Path) -> dict[str, Any]:
    """Return measured / tabled seconds of a layer's parts, and the median of each part.

    `left_out` says why where nothing can be compared.
    """
    profile = read_profile(path)
    found = next((each for each in TABLED if each in profile.header.device), None)
    if found is None:
        return {"left_out": f"no tables of {profile.header.device}"}
    if find_spec("aiconfigurator_core") is None or find_spec("pyarrow") is None:
        return {"left_out": "needs pip install '.[silicon]'"}
    spec = model(name)
    measured = _one_layer(lambda own: profile_cost(profile, own, (own.num_layers,)), spec)
    rows = list(_rows(measured, _one_layer(lambda own: _silicon_cost(own, found), spec)))
    parts = dict.fromkeys(row["part"] for row in rows)
    medians = {
        part: float(np.median([row["ratio"] for row in rows if row["part"] == part]))
        for part in parts
    }
    return {"gpu": found, "median_ratio": medians, "points": rows}


LayerSeconds = Callable[[Work], float]


def _rows(measured: LayerSeconds, tabled: LayerSeconds) -> Iterator[dict[str, Any]]:
    for part, tokens, context, work, without in _works():
        seconds = [cost(work) - (cost(without) if without else 0.0) for cost in (measured, tabled)]
        yield {
            "part": part,
            "tokens": tokens,
            "context": context,
            "measured_us": 1e6 * seconds[0],
            "tabled_us": 1e6 * seconds[1],
            "ratio": seconds[0] / seconds[1],
        }


def _works() -> Iterator[tuple[str, int, int, Work, Work | None]]:
    """Name parts of a layer as what a work takes more than the same without it."""
    for tokens in TOKENS:
        yield "matrices and the like", tokens, 0, Work(prefill_tokens=tokens), None
    for tokens, context in CHUNKS:
        plain = Work(prefill_tokens=tokens)
        chunk = plain._replace(chunks=(Span(context, context + tokens),))
        yield "prefill attention", tokens, context, chunk, plain
    for rows, context in DECODES:
        step = Work(decode_tokens=rows, decode_context=rows * context)
        yield "decode attention", rows, context, step, Work(prefill_tokens=rows)


def _one_layer(cost: Callable[[ModelSpec], TableCost], spec: ModelSpec) -> LayerSeconds:
    """Return the seconds of a layer: what the second one adds."""
    one, two = (cost(replace(spec, num_layers=layers)) for layers in (1, 2))
    return lambda work: two.times(work)[0] - one.times(work)[0]


def _silicon_cost(spec: ModelSpec, gpu_name: str) -> TableCost:
    deployment = Deployment(spec, gpu(gpu_name), (spec.num_layers,))
    return silicon_cost(deployment, silicon_source(deployment))


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder to write")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each model's profile")
    parser.add_argument("--batches", type=int, default=100, help="random micro-batches to check")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names, or config.json files")
    parser.add_argument("--max-tokens", type=int, help="of a chunk; default: the device's")
    parser.add_argument("--max-rows", type=int, help="decodes; default: the device's")
    parser.add_argument("--max-context", type=int, help="of a row; default: the device's")
    parser.add_argument("--requests", type=int, default=200, help="to serve, in each mode")
    parser.add_argument("--context", type=int, default=2048, help="most tokens of a request")
    parser.add_argument("--layers", type=int, default=8, help="of the model that is served")
    parser.add_argument("--runs", type=int, default=2, help="of each validation")
    parser.add_argument("--stages", type=int, nargs="+", default=(1, 2, 4), help="to serve with")
    given = parser.parse_args(arguments)
    settings = ProfileSettings(
        given.device,
        given.minutes,
        max_tokens=given.max_tokens,
        max_rows=given.max_rows,
        max_context=given.max_context,
    )
    try:
        scale = Scale(
            given.device, given.requests, given.context, given.layers, given.runs, given.stages
        )
        found = report(given.models, given.out, settings, given.batches, scale)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"tokens on {given.device} equal those on the CPU: {found['tokens_equal']}")
    print(given.out / "report.json")
    return 0 if found["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
