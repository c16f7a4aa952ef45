"""Request traces: load public formats, draw samples like them, give arrivals, make requests.

`traces.describe` summarises a trace, `traces.predict` predicts the lengths of its outputs; their
names are loaded when they are used.
"""

from evenflow import later
from evenflow.traces.arrivals import (
    AnyArrivals,
    Arrivals,
    Closed,
    Gamma,
    Offline,
    Poisson,
    Replay,
    make_requests,
    with_own_prefixes,
)
from evenflow.traces.formats import FORMATS
from evenflow.traces.trace import (
    FILTERS,
    SAMPLE_NAMES,
    Trace,
    load_trace,
    sample_trace,
    with_conversations,
)

__all__ = [
    "FILTERS",
    "FORMATS",
    "SAMPLE_NAMES",
    "AnyArrivals",
    "Arrivals",
    "Closed",
    "Gamma",
    "Offline",
    "Poisson",
    "Replay",
    "Trace",
    "load_trace",
    "make_requests",
    "sample_trace",
    "with_conversations",
    "with_own_prefixes",
]

__getattr__ = later(
    __name__,
    {
        **dict.fromkeys(("convert", "fit", "info"), "evenflow.traces.describe"),
        **dict.fromkeys(
            ("PREDICTORS", "Predictor", "make_predictor", "train", "with_predictions"),
            "evenflow.traces.predict",
        ),
    },
)
