"""The command `explore`: it parses and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenflow.errors import UsageError, require_package
from evenflow.options import RunPath, SetTexts
from evenflow.report.echo import echo


def explore_command(
    run: RunPath,
    set_: SetTexts = None,
    *,
    schedulers: Annotated[
        str, typer.Option("--schedulers", metavar="A,B,...", help="Side by side, at most four.")
    ] = "",
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="METRIC=LIMIT", help="A limit to draw; repeatable."),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="On this machine only; 0: a free one.")
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PAGE.html", help="Write one file with its points instead."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=V1,V2,...", help="With --out: a slider; repeatable."),
    ] = None,
) -> None:
    """Open a page in the browser that simulates what its sliders say, until Ctrl-C."""
    from evenflow.explore import tasks
    from evenflow.explore.document import given

    asked = given(run, set_ or (), schedulers, slo or ())
    tasks.check(asked)
    if out is not None:
        from evenflow.explore.still import write_page

        write_page(out, asked, vary or ())
        echo(out)
        return
    if vary:
        raise UsageError("--vary: is for --out PAGE.html; the page of a server has all sliders")
    for module in ("starlette", "uvicorn"):
        require_package(module, "explore", "starlette uvicorn")
    from evenflow.explore.server import serve

    def opened(address: str) -> None:
        echo(address)
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(asked, port, opened)
