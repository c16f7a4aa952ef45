"""The commands `traces ...`: they parse and print; `traces` does the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

TraceFile = Annotated[str, typer.Argument(metavar="FILE", help="A trace, or a sample's name.")]
Format = Annotated[str | None, typer.Option("--format", help="The format; default: detected.")]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="A tokenizer.json, for traces of text.")
]


def info_command(file: TraceFile, format_: Format = None, tokenizer: Tokenizer = None) -> None:
    """Print what a trace is like, as JSON."""
    from traces import load_trace
    from traces.describe import info

    _print_json(info(load_trace(file, format=format_, tokenizer=tokenizer)))


def fit_command(file: TraceFile, format_: Format = None, tokenizer: Tokenizer = None) -> None:
    """Print quantiles and the best distributions of lengths and gaps, as JSON."""
    from traces import load_trace
    from traces.describe import fit

    _print_json(fit(load_trace(file, format=format_, tokenizer=tokenizer)))


def convert_command(
    file: TraceFile,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The csv to write.")],
    to: Annotated[str, typer.Option("--to", help="The format to write.")] = "vidur",
    format_: Format = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Write a trace in another format."""
    from traces import load_trace
    from traces.describe import convert

    trace = load_trace(file, format=format_, tokenizer=tokenizer)
    typer.echo(convert(trace, out, to))
    for reason, count in trace.dropped.items():
        typer.echo(f"dropped: {count} rows: {reason}", err=True)


def predict_command(
    file: TraceFile,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="MODEL", help="Store the predictor here (JSON).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Shuffles the rows.")] = 0,
    format_: Format = None,
    tokenizer: Tokenizer = None,
) -> None:
    """Train a predictor of output lengths on a trace; print how good it is, as JSON."""
    from traces import load_trace
    from traces.predict import save_classifier, train

    trace = load_trace(file, format=format_, tokenizer=tokenizer, keep_text=True, seed=seed)
    classifier, report = train(trace, seed)
    if out is not None:
        save_classifier(classifier, out)
    _print_json(report)


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2))
