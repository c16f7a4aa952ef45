"""Makes a command of a function: its options are in its types, its result is shown."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from typer.core import TyperGroup

from evenflow.report.echo import echo


class Commands(TyperGroup):
    """Commands, whose help has the first sentence of each, which click cuts to a line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        made = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(400)) for name, each in made if each]
            )


class Instead(NamedTuple):
    """An option with which a command only prints lines, made from its other arguments."""

    option: str
    help: str
    lines: Callable[..., Iterable[object]]


def command(
    function: Callable[..., Any],
    *,
    folder: str = "",
    page: str = "report.html",
    instead: Instead | None = None,
    **fixed: Any,
) -> Callable[..., None]:
    """Return a function for typer, with the parameters that are annotated as options or arguments.

    `folder`: where it writes without `--out`, by the stem of its file; `page`: the file to read
    then. A parameter `watch` gets a bar, `say` what prints; others are `fixed`.
    """
    parameters = inspect.signature(function).parameters
    options = [
        _in_a_terminal(p) for p in parameters.values() if get_origin(p.annotation) is Annotated
    ]
    if instead is not None:
        kind = Annotated[bool, typer.Option(instead.option, help=instead.help)]
        options.append(_keyword("only", kind, default=False))

    def run(only: bool = False, **words: Any) -> None:
        if folder and words["out"] is None:
            file = next(iter(words.values()))
            words["out"] = Path("out") / folder.format(getattr(file, "stem", ""))
        if instead is not None and only:
            for line in instead.lines(**words):
                echo(line)
        else:
            _carry_out(function, words | fixed, page, parameters)

    run.__doc__ = (inspect.getdoc(function) or "").partition("\n")[0]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _in_a_terminal(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter with the type that it has in a terminal, and how it is called there."""
    *kinds, how = get_args(parameter.annotation)
    return _keyword(parameter.name, Annotated[kinds[-1], how], parameter.default)


def _carry_out(
    function: Callable[..., Any], words: dict[str, Any], page: str, takes: Container[str]
) -> None:
    from evenflow.cli.terminal import progress, show

    out = words.get("out")
    try:
        shows = {"watch": progress, "say": show}
        found = function(**words, **{name: shows[name] for name in shows if name in takes})
    except KeyboardInterrupt:
        if out is not None and (out / "store").exists():
            echo("interrupted: what is done is kept, the same command goes on from there", err=True)
        raise
    show(found.told())
    if out is not None:
        echo(out / page if (out / page).exists() else out)
    if found.is_failure:
        raise typer.Exit(1)
