"""The schema of the workload: which requests come, and when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from experiments.run_file.fields import Count, Keys, Positive, short_form


class ReplayArrivals(Keys):
    """The trace's own times, `scale` times as fast: 2 is twice the rate."""

    kind: Literal["replay"]
    scale: Positive = 1.0


class PoissonArrivals(Keys):
    """Independent arrivals at `rate` requests per second.

    `rescale` stretches them so that the last of n comes at n / rate, as vLLM's benchmark does.
    """

    kind: Literal["poisson"]
    rate: Positive
    rescale: bool = False


class GammaArrivals(Keys):
    """Gamma-distributed gaps; burstiness 1 is Poisson, above is steadier (.inf: equal gaps)."""

    kind: Literal["gamma"]
    rate: Positive
    burstiness: Annotated[float, Field(gt=0)] = 1.0
    rescale: bool = False


class OnOffArrivals(Keys):
    """Poisson arrivals for `on_s`, none for `off_s`, and again; `rate` is the mean over both."""

    kind: Literal["onoff"]
    rate: Positive
    on_s: Positive
    off_s: Positive


class ClosedArrivals(Keys):
    """`concurrency` clients; each sends its next request when the last one is finished."""

    kind: Literal["closed"]
    concurrency: Count


class OfflineArrivals(Keys):
    """All requests wait at time 0."""

    kind: Literal["offline"]


Arrivals = Annotated[
    ReplayArrivals
    | PoissonArrivals
    | GammaArrivals
    | OnOffArrivals
    | ClosedArrivals
    | OfflineArrivals,
    short_form("kind"),
    Discriminator("kind"),
]


class WorkloadConfig(Keys):
    """Which requests come, and when.

    `skip`: requests of the trace to leave out before the first. `conversations`: the trace has a
    row for each turn, whose prompt holds the history.
    """

    trace: Annotated[str, Field(min_length=1)]
    format: str | None = None
    requests: Count | None = None
    skip: Annotated[int, Field(ge=0)] = 0
    arrivals: Arrivals = ReplayArrivals(kind="replay")
    seed: Annotated[int, Field(ge=0)] = 0
    tokenizer: str | None = None
    filter: str | None = None
    conversations: bool = False
