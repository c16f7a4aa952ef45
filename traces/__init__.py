"""Request traces: load public formats, draw samples like them, give arrivals, make requests."""

from traces.arrivals import (
    AnyArrivals,
    Arrivals,
    Closed,
    Gamma,
    Offline,
    OnOff,
    Poisson,
    Replay,
    make_requests,
    with_own_prefixes,
)
from traces.describe import convert, fit, info
from traces.formats import FORMATS
from traces.load import load_trace
from traces.predict import PREDICTORS, Predictor, make_predictor, train, with_predictions
from traces.samples import SAMPLE_NAMES, sample_trace
from traces.trace import FILTERS, Trace, with_conversations

__all__ = [
    "FILTERS",
    "FORMATS",
    "PREDICTORS",
    "SAMPLE_NAMES",
    "AnyArrivals",
    "Arrivals",
    "Closed",
    "Gamma",
    "Offline",
    "OnOff",
    "Poisson",
    "Predictor",
    "Replay",
    "Trace",
    "convert",
    "fit",
    "info",
    "load_trace",
    "make_predictor",
    "make_requests",
    "sample_trace",
    "train",
    "with_conversations",
    "with_own_prefixes",
    "with_predictions",
]
