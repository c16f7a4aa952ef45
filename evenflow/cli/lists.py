"""The commands that run nothing: lists of names, a run file's keys, descriptions of traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evenflow.cli.command import Commands
from evenflow.errors import UsageError
from evenflow.files import require_new, write_new
from evenflow.report.echo import echo

if TYPE_CHECKING:
    from evenflow.specs.modelspec import ModelSpec

TEMPLATE = Path(__file__).parent.parent / "config" / "template.yaml"


traces_app = typer.Typer(
    cls=Commands, help="Look at, fit or convert a request trace.", no_args_is_help=True
)
TraceFile = Annotated[str, typer.Argument(metavar="FILE", help="A trace, or a sample's name.")]
Format = Annotated[str | None, typer.Option("--format", help="The format; default: detected.")]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="ROLE=NAME,...",
        help="A log's columns: arrival=request_time,prompt=prompt_tokens,output=...",
    ),
]
TimeUnit = Annotated[
    Literal["s", "ms", "us", "ns", "iso"] | None,
    typer.Option("--time-unit", help="Of the file's times; default: seen."),
]
OnBadRow = Annotated[
    Literal["refuse", "skip"],
    typer.Option("--on-bad-row", help="Skipped rows are counted, the first five named."),
]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="A tokenizer.json, for traces of text.")
]


def schedulers_command() -> None:
    """List policies and parameters; `evenflow systems` lists the papers' systems."""
    from evenflow.config.pools import catalogue
    from evenflow.report.tables import print_table

    rows = [
        (
            entry.name,
            "\n".join(f"{name}: {default}" for name, default in entry.parameters),
            f"{entry.summary}\n{entry.source}",
        )
        for entry in catalogue()
    ]
    print_table(("name", "parameters: defaults", "what it does, and its source"), rows)
    echo("Your own: a class with schedule(view) -> Plan, named as FILE.py:Class.")


FromConfig = Annotated[
    Path | None,
    typer.Option("--from-config", metavar="FILE", help="Print what a config.json is read as."),
]


def models_command(from_config: FromConfig = None) -> None:
    """List the models that a run may name; any other is a path to its config.json."""
    from evenflow.report.tables import print_numbers
    from evenflow.specs.deployment import Deployment
    from evenflow.specs.gpu import GIB, gpus
    from evenflow.specs.model import models
    from evenflow.specs.modelspec import ModelSpec

    if from_config is not None:
        _print_model(ModelSpec.from_config_json(from_config))
        return
    rows = [
        (
            f"{name}*" if any(kind.mixer for kind in spec.kinds()) else name,
            f"{spec.num_parameters / 1e9:.1f}",
            f"{Deployment(spec, gpus()[0], (spec.num_layers,)).weight_bytes(0) / GIB:.1f}",
            str(spec.num_layers),
            f"{spec.kv_bytes_per_token() / 1024:g}",
            str(spec.max_position_embeddings),
        )
        for name, spec in models().items()
    ]
    heads = ("model", "billions", "weights\n(GiB)", "layers", "KV KiB\na token", "most\ntokens")
    print_numbers(heads, rows)
    echo("* has layers that rooflines do not describe; costs: aiconfigurator has their times.")


def _print_model(spec: ModelSpec) -> None:
    """Print a model as it was read: its layers by kind, what they keep, and its formats."""
    from evenflow.report.tables import print_numbers

    rows = [
        (
            kind.kind_words(),
            str(count),
            f"{kind.layer_parameters() / 1e6:.1f}",
            f"{kind.kv_token_bytes():g}",
            f"{kind.state_bytes():,}",
        )
        for kind, count in spec.kinds().items()
    ]
    heads = ("layers of", "layers", "1e6 parameters", "KV bytes/token", "state bytes/request")
    print_numbers(heads, rows)
    billions = f"{spec.num_parameters / 1e9:.2f}e9 parameters"
    active = f"{spec.active_parameters / 1e9:.2f}e9 of them a token"
    echo(f"{spec.name}: {spec.num_layers} layers, {billions}, {active}.")
    kept = sum(count * kind.state_bytes() for kind, count in spec.kinds().items())
    echo(f"KV: {spec.kv_bytes_per_token():,} bytes a token, {kept:,} a request.")
    own = f"{8 * spec.dtype_bytes} bits"
    parts = {
        (False, False): "matrices of layers",
        (True, False): "MLPs",
        (False, True): "attention and experts",
        (True, True): "experts",
    }[spec.plain_attention, spec.plain_mlp]
    experts = f"experts {spec.expert_quantization}, " if spec.expert_quantization else ""
    weights = f"{experts}{parts} {spec.quantization}, all else {own}" if spec.quantization else own
    echo(f"Precision: {weights}; keys and values {spec.kv_dtype or own}.")


def gpus_command() -> None:
    """List the GPUs that a run may name, and the machine of each, where a run names none."""
    from evenflow.report.tables import print_numbers
    from evenflow.specs.gpu import gpus

    rows = []
    for spec in gpus():
        numbers = (spec.fp16_tflops, spec.memory_bandwidth_gb_s, spec.memory_gb)
        rows.append((spec.name, *(f"{number:g}" for number in numbers), spec.machine))
    print_numbers(("gpu", "fp16 TFLOPS", "GB/s", "GiB", "machine"), rows)
    echo(
        "Another GPU is a mapping: gpu: {name: X, fp16_tflops: 100, memory_bandwidth_gb_s: 1000, "
        "memory_gb: 24}."
    )


def machines_command() -> None:
    """List the machines that a run may name: GPUs, links within, network between."""
    from evenflow.report.tables import print_table
    from evenflow.specs.gpu import machines

    rows = []
    for spec in machines():
        within = f"{spec.gpus} x {spec.link}"
        within += f", all-reduce {spec.all_reduce}" if spec.all_reduce else ""
        rows.append((spec.name, within, f"{spec.adapters} x {spec.network}", spec.source))
    print_table(("machine", "GPUs and link", "network", "what it is"), rows)


def links_command() -> None:
    """List the links that a run may name: one direction, 1e9 bytes a second."""
    from evenflow.report.tables import print_numbers
    from evenflow.specs.gpu import links

    rows = []
    for spec in links():
        numbers = (f"{spec.bandwidth_gb_s:g}", f"{spec.latency_us:g}")
        rows.append((spec.name, *numbers, spec.all_reduce, spec.source))
    print_numbers(("link", "GB/s", "us", "all-reduces", "from"), rows)


def systems_command() -> None:
    """List the published systems, for `compare --systems`: keys laid over a run."""
    from evenflow.config.systems import systems
    from evenflow.report.tables import print_table

    rows = [(each.name, each.keys, f"{each.title}: {each.source}") for each in systems()]
    print_table(("name", "keys of RUN.yaml", "system: source"), rows)


def metrics_command() -> None:
    """List the numbers of a run's summary that tables show; all may stand in `--slo`."""
    from evenflow.report.tables import print_table
    from evenflow.report.words import metrics

    best = {"high": "more", "low": "less", "": "-"}
    rows = [
        (each.key, f"{each.words}: {each.meaning}".rstrip(": "), best[each.best])
        for each in metrics()
    ]
    print_table(("key", "what it is", "better"), rows)
    echo("Of ttft, tpot, itl, e2el and queue also median, std and any percentile: p97.5_itl_ms.")


def init_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")] = Path(
        "RUN.yaml"
    ),
) -> None:
    """Write a run file with every key that most runs need, explained; never over another file."""
    write_new(path, TEMPLATE.read_bytes())
    echo(f"{path}: evenflow simulate {path}")


def schema_command(
    file: Annotated[Literal["run", "sweep"], typer.Argument(help="run, or sweep.")] = "run",
) -> None:
    """Print the JSON schema of a RUN.yaml or SWEEP.yaml, by which editors complete its keys."""
    from evenflow.config.run import RunConfig
    from evenflow.config.schema import schema
    from evenflow.study.sweep_file import SweepConfig

    echo(json.dumps(schema(RunConfig if file == "run" else SweepConfig), indent=1))


def _load(
    file: TraceFile,
    *,
    format_: Format = None,
    tokenizer: Tokenizer = None,
    columns: Columns = None,
    time_unit: TimeUnit = None,
    on_bad_row: OnBadRow = "refuse",
) -> Any:
    """Load a trace, and print what makes it doubtful."""
    from evenflow.traces import load_trace
    from evenflow.traces.formats import ROLES

    pairs = [part.partition("=") for part in columns.split(",")] if columns else []
    mapping = {role.strip(): name.strip() for role, _, name in pairs}
    for role, name in mapping.items():
        if role not in ROLES or not name:
            right = "arrival=NAME,prompt=NAME,output=NAME, or some of them"
            raise UsageError(f"--columns {columns}: should be {right}")
    trace = load_trace(
        file,
        format=format_,
        tokenizer=tokenizer,
        columns=mapping,
        time_unit=time_unit,
        on_bad_row=on_bad_row,
    )
    for doubt in trace.doubts:
        echo(f"trace: {doubt}", err=True)
    if trace.arrival_s is None and trace.unread:
        left = ", ".join(trace.unread)
        echo(f"trace: no times; nothing reads {left} (--columns arrival=NAME)", err=True)
    return trace


def _of_a_trace(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command of a function of a trace: the options of loading one come before its own."""
    loading = signature(_load, eval_str=True).parameters
    _, *own = signature(function, eval_str=True).parameters.values()

    def command(**words: Any) -> None:
        trace = _load(**{name: words.pop(name) for name in loading})
        function(trace, **words)

    command.__doc__ = function.__doc__
    command.__signature__ = Signature([*loading.values(), *own])  # type: ignore[attr-defined]
    return command


@traces_app.command("info")
@_of_a_trace
def info_command(trace: Any) -> None:
    """Print what a trace is like, as JSON."""
    from evenflow.traces.describe import info

    _print_json(info(trace))


@traces_app.command("fit")
@_of_a_trace
def fit_command(trace: Any) -> None:
    """Print quantiles and the best distributions of lengths and gaps, as JSON."""
    from evenflow.traces.describe import fit

    _print_json(fit(trace))


@traces_app.command("convert")
@_of_a_trace
def convert_command(
    trace: Any,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The csv to write.")],
) -> None:
    """Write a trace as a csv of Vidur."""
    from evenflow.traces.describe import convert

    echo(convert(trace, out))
    if trace.prefixes is not None:
        echo("left out: which prompts begin alike (hash_ids)", err=True)
    for reason, count in trace.dropped.items():
        echo(f"dropped: {count} rows: {reason}", err=True)


@traces_app.command("predict")
def predict_command(
    file: TraceFile,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="MODEL", help="Store it here (safetensors).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Shuffles the rows.")] = 0,
    format_: Format = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Train a predictor of output lengths on a trace; print how good it is, as JSON."""
    from evenflow.traces import load_trace
    from evenflow.traces.predict import save_classifier, train

    if out is not None:
        require_new(out)
    trace = load_trace(file, format=format_, tokenizer=tokenizer, keep_text=True, seed=seed)
    classifier, report = train(trace, seed)
    if out is not None:
        save_classifier(classifier, out)
    _print_json(report)


def _print_json(data: object) -> None:
    """Print JSON, its numbers to nine digits: those behind are of the arithmetic."""
    echo(json.dumps(json.loads(json.dumps(data), parse_float=_short), indent=2))


def _short(number: str) -> float:
    return float(f"{float(number):.9g}")
