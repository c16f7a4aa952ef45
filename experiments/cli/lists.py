"""The commands that list what there is, each a table of a few columns, `schema` and `init`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from evenflow.errors import UsageError

TEMPLATE = Path(__file__).parent.parent / "run_file" / "template.yaml"


def models_command() -> None:
    """List the models that a run may name; any other is a path to its config.json."""
    from evenflow.specs.model import models
    from experiments.report.tables import print_numbers

    rows = [
        (
            name,
            f"{spec.num_parameters / 1e9:.1f}",
            str(spec.num_layers),
            f"{spec.kv_bytes_per_token() / 1024:g}",
            str(spec.max_position_embeddings),
        )
        for name, spec in models().items()
    ]
    print_numbers(("model", "1e9 parameters", "layers", "KV KiB/token", "most tokens"), rows)


def gpus_command() -> None:
    """List the GPUs that a run may name, and the link and the all-reduce of each one's host."""
    from evenflow.specs.gpu import gpus
    from experiments.report.tables import print_numbers
    from experiments.run_file.links import HOSTS, Wires, link_words

    rows = []
    for spec in gpus():
        host = HOSTS.get(spec.name, Wires())
        link = "-" if host.link is None else link_words(host.link)
        adds = link if host.all_reduce is None else link_words(host.all_reduce)
        numbers = (spec.fp16_tflops, spec.memory_bandwidth_gb_s, spec.memory_gb)
        rows.append((spec.name, *(f"{number:g}" for number in numbers), link, adds))
    print_numbers(("gpu", "fp16 TFLOPS", "GB/s", "GiB", "link", "all-reduce"), rows)


def links_command() -> None:
    """List the links that a run may name: one direction, 1e9 bytes a second."""
    from evenflow.specs.gpu import links
    from experiments.report.tables import print_numbers

    rows = [
        (spec.name, f"{spec.bandwidth_gb_s:g}", f"{spec.latency_us:g}", spec.source)
        for spec in links()
    ]
    print_numbers(("link", "GB/s", "us", "from"), rows)


def systems_command() -> None:
    """List the published systems, for `compare --systems`: keys laid over a run."""
    from experiments.report.tables import print_table
    from experiments.systems import systems

    rows = [(each.name, each.keys, f"{each.title}: {each.source}") for each in systems()]
    print_table(("name", "keys of RUN.yaml", "system: source"), rows)


def metrics_command() -> None:
    """List the numbers of a run's summary that tables show; all may stand in `--slo`."""
    from experiments.report.tables import print_table
    from experiments.report.words import metrics

    best = {"high": "more", "low": "less", "": "-"}
    rows = [
        (each.key, f"{each.words}: {each.meaning}".rstrip(": "), best[each.best])
        for each in metrics()
    ]
    print_table(("key", "what it is", "better"), rows)
    typer.echo(
        "Of ttft, tpot, itl, e2el and queue also median, std and any percentile: p97.5_itl_ms."
    )


def init_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")] = Path(
        "RUN.yaml"
    ),
) -> None:
    """Write a run file with every key that most runs need, explained; never over another file."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UsageError(f"{path}: is there already; name another file") from None
    typer.echo(f"{path}: evenflow simulate {path}")


class File(StrEnum):
    """Which file's keys."""

    run = "run"
    sweep = "sweep"


def schema_command(
    file: Annotated[File, typer.Argument(help="run, or sweep.")] = File.run,
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Both files' keys in tables: docs/reference.md.")
    ] = False,
) -> None:
    """Print the JSON schema of a RUN.yaml or SWEEP.yaml, by which editors complete its keys."""
    from experiments.run_file.reference import reference
    from experiments.run_file.run import RunConfig
    from experiments.run_file.schema import schema
    from experiments.study.sweep_file import SweepConfig

    schemas = {"RUN.yaml": schema(RunConfig), "SWEEP.yaml": schema(SweepConfig)}
    chosen = schemas[f"{file.upper()}.yaml"]
    typer.echo(reference(schemas).rstrip() if markdown else json.dumps(chosen, indent=1))
