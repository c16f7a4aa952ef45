"""The part of the GPU report that serves: tokens and times in each mode, and the validation.

Several stages share the one device. Knows no command line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evenflow.errors import UsageError
from evenflow.specs.model import ModelSpec, model

if TYPE_CHECKING:
    from evenflow.types import Request
    from experiments.runs import Job

NEEDED = {
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "pydantic": "pydantic",
    "rich": "rich",
    "simpy": "simpy",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Modules that serving imports beyond those of the profiles -> the packages that bring them."""

MODES = ("one_process", "ipc", "gloo")
POLICIES = ("token_throttling", "sarathi", "vllm")
LOAD = 0.8
"""Share of the throughput of a full queue at which requests arrive for the validation."""

AFFINE = {"kind": "affine", "base_s": 0.001, "per_token_s": 1e-5}
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
        from experiments.run_file.build import load_workload
        from experiments.run_file.run import RunConfig
        from experiments.runs import Job

        workers = {"device": self.scale.device, "transport": way.mode, "weights": self.weights}
        dtype = {2: "bfloat16", 4: "float32"}[model(self.path).dtype_bytes]
        values = {
            "model": str(self.path.resolve()),
            "stages": way.stages,
            "costs": dict(self.costs),
            "kv": {"pages": 4 * self.scale.context},
            "max_model_len": self.scale.context,
            "workers": {"kind": "torch", "dtype": dtype, **workers},
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
    from runtime.torch.weights import write_config

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
    from experiments.real import serve_job

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

        served = serve_job(job, on_token=keep)
        row = way._asdict() | {"failure": served.failure, "equal": tokens == expected}
        print(f"tokens of {way.stages} stages, {way.mode}: equal {row['equal']}", flush=True)
        rows.append(row)
    return rows


def _tokens_of_the_cpu(folder: Path, requests: Sequence[Request]) -> dict[int, list[int]]:
    from runtime.tokens import RandomTexts
    from runtime.torch.timed import greedy_tokens
    from runtime.torch.weights import load_stage

    stage, text_of = load_stage(folder, 0, SMALL.num_layers), RandomTexts(SMALL.vocab_size, 0)
    return {
        each.request_id: greedy_tokens(stage, list(text_of(each).prompt_ids), each.output_tokens)
        for each in requests
    }


def small_checkpoint(out: Path) -> Path:
    """Return a folder with a small random model in float32, drawn on the CPU."""
    from runtime.torch.model import Rope
    from runtime.torch.weights import save_random

    folder = out / "small"
    if not folder.is_dir():
        folder.mkdir()
        save_random(SMALL, Rope(SMALL.rope_theta), folder)
    return folder


def serve_modes(subject: Subject) -> list[dict[str, Any]]:
    """Serve a full queue with each number of stages in each mode; say what a mode is refused for.

    Times in ms, of micro-batches; throughputs per second.
    """
    from experiments.real import outcome_of, serve_job

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
    from experiments.report.plots import save
    from experiments.validation.validate import validate
    from experiments.validation.write import draw_validation, markdown

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
    rng = np.random.default_rng(0)
    prompts = rng.integers(scale.context // 16, scale.context // 4, size=scale.requests)
    outputs = rng.integers(2, max(scale.context // 8, 3), size=scale.requests)
    pairs = zip(prompts.tolist(), outputs.tolist(), strict=True)
    rows = [f"0.0,{prompt},{output}" for prompt, output in pairs]
    head = "arrived_at,num_prefill_tokens,num_decode_tokens"
    (folder / "lengths.csv").write_text("\n".join([head, *rows, ""]), encoding="utf-8")
