"""Measure a device: what the operators of a stage cost, for cost models to interpolate.

Operators are timed in place, inside forward passes of whole stages, where caches, threads and
launches are as in service. The package knows no model: a caller passes one as a `Subject`.
Importing the package imports no torch.
"""

from evenflow.profiler.check import Errors, check_profile
from evenflow.profiler.importers import import_files
from evenflow.profiler.machine import most_beside, require_device
from evenflow.profiler.profile import (
    ProfileSettings,
    StageOf,
    profile,
    tokenizer_beside,
)
from evenflow.profiler.shapes import Limits, Shape
from evenflow.profiler.timed_runs import Mark, Subject

__all__ = [
    "Errors",
    "Limits",
    "Mark",
    "ProfileSettings",
    "Shape",
    "StageOf",
    "Subject",
    "check_profile",
    "import_files",
    "most_beside",
    "profile",
    "require_device",
    "tokenizer_beside",
]
