"""The options that several commands take, so that they are called and explained the same."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be given repeatedly."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")]
Force = Annotated[
    bool,
    typer.Option("--force", help="Write beside files that evenflow did not write; they stay."),
]
AllowRefused = Annotated[
    bool,
    typer.Option("--allow-refused", help="Answer though more than 10 % of requests are refused."),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="vllm: real vLLM serves, with our policy in it."),
]
Intervals = Annotated[
    bool, typer.Option("--intervals", help="Also: 90 % intervals, from nine more simulations.")
]
Schedulers = Annotated[
    str | None, typer.Option("--schedulers", metavar="A,B,...", help="Which to try.")
]
Slo = Annotated[
    list[str] | None,
    typer.Option("--slo", metavar="METRIC=LIMIT", help="A limit; may be given repeatedly."),
]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N", help="How many GPUs: 8, several (4,8) or 4..64."),
]
MedianQueue = Annotated[
    float | None,
    typer.Option("--max-median-queue-s", help="Limit the median scheduling delay (seconds)."),
]
Executor = Annotated[
    str,
    typer.Option(
        "--executor", metavar="NAME", help="process, dask, or dask:ADDRESS of a scheduler."
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Default: the number of cores.")
]
