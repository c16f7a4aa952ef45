"""Scheduling of pipeline-parallel LLM inference: one core for the simulated and the real world.

`import evenflow as ef` gives what a policy is written with, and the front door: `ef.simulate`,
`ef.compare`, `ef.diff`, `ef.check`, `ef.sweep`, `ef.capacity`, `ef.plan`, `ef.figures`,
`ef.intervals`, `ef.reproduce` and `ef.calibrate`. Each is loaded when it is first asked for. The
front door is in `evenflow.api`, which no module below it imports.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenflow.core.request import Request
    from evenflow.core.rules import Rules
    from evenflow.core.scheduling import Plan, Prefill, Scheduler, View
    from evenflow.errors import PolicyError, StallError, UsageError

FRONT_DOOR = (
    "calibrate",
    "capacity",
    "check",
    "compare",
    "diff",
    "figures",
    "intervals",
    "plan",
    "reproduce",
    "simulate",
    "sweep",
)

WRITTEN_WITH = {
    "Plan": "evenflow.core.scheduling",
    "PolicyError": "evenflow.errors",
    "Prefill": "evenflow.core.scheduling",
    "Request": "evenflow.core.request",
    "Rules": "evenflow.core.rules",
    "Scheduler": "evenflow.core.scheduling",
    "StallError": "evenflow.errors",
    "UsageError": "evenflow.errors",
    "View": "evenflow.core.scheduling",
}
"""What a policy is written with, by its module."""

__all__ = [
    "Plan",
    "PolicyError",
    "Prefill",
    "Request",
    "Rules",
    "Scheduler",
    "StallError",
    "UsageError",
    "View",
]


def later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that loads some names on first use.

    `modules` says which module has each of these names.
    """

    def loaded(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return loaded


__getattr__ = later(
    __name__,
    {
        **WRITTEN_WITH,
        **dict.fromkeys(FRONT_DOOR, "evenflow.api"),
        "__version__": "evenflow.version",
    },
)


def __dir__() -> list[str]:
    return sorted([*globals(), *WRITTEN_WITH, *FRONT_DOOR])
