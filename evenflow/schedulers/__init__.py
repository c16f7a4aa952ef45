"""The policies, by name, and how one is made from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from evenflow.compiled import docstring
from evenflow.core.scheduling import Scheduler
from evenflow.errors import UsageError, instead_of
from evenflow.schedulers.limits import Policy, refuse, require_given
from evenflow.user_code import imported

POLICIES = {
    "static": "evenflow.schedulers.reserving:Static",
    "orca": "evenflow.schedulers.reserving:Orca",
    "vllm": "evenflow.schedulers.vllm:VLLM",
    "vllm_v1": "evenflow.schedulers.vllm:VLLMV1",
    "vllm_balanced": "evenflow.schedulers.vllm:VLLMBalanced",
    "sglang": "evenflow.schedulers.sglang:SGLang",
    "trtllm": "evenflow.schedulers.trtllm:TRTLLM",
    "sarathi": "evenflow.schedulers.sarathi:Sarathi",
    "token_throttling": "evenflow.schedulers.token_throttling:TokenThrottling",
    "td_pipe": "evenflow.schedulers.td_pipe:TDPipe",
}
"""Where each is that has a name: one is imported when it is asked for."""

POOLED = ("distserve", "splitwise")
"""Names that stand for several pools, each with a policy: see `evenflow.config.pools`."""

ESTIMATES = ("token_budget_for", "prefill_s", "decode_s")
"""Constructor parameters that take a callable over the cost model (`evenflow.costs.estimates`)."""

GIVEN = ("depth", "data_parallel", "page_tokens", "in_step", *ESTIMATES)
"""Constructor parameters that a user cannot set. `depth` is the number of stages; `in_step`:
decodes wait for their last token (`RunConfig.in_step`).
"""

FACTS = ("max_model_len", *GIVEN)
"""Constructor parameters that the deployment fills in when the user did not."""


OLD_ATTRIBUTES = """
append_only_pages by_priority decodes_ahead leaves_out newest_first padded pipelined_chunks
predictor preempted_last preempts_in_flight radix_cache slotted uncapped
""".split()  # noqa: SIM905
"""Attributes that said of a policy what its rules say now."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy as `evenflow schedulers` shows it: parameters are (name, default) pairs."""

    name: str
    summary: str
    source: str
    parameters: tuple[tuple[str, Any], ...]


def policy(name: str) -> type[Scheduler]:
    """Return the class of a policy: one of POLICIES, or a user's as `module:Class`.

    Raises UsageError for an unknown name, module or class.
    """
    if name in POLICIES or ":" in name:
        return _imported(POLICIES.get(name, name))
    known = instead_of(name, (*POLICIES, *POOLED))
    raise UsageError(f"unknown scheduler {name!r}; {known}; or your own as module:Class")


def parameters(cls: type[Scheduler]) -> dict[str, inspect.Parameter]:
    """Return the constructor parameters of a policy that a user may set, by name."""
    return {name: each for name, each in _signature(cls).items() if name not in GIVEN}


@cache
def _signature(cls: type[Scheduler]) -> Mapping[str, inspect.Parameter]:
    """Return all parameters of a policy's constructor, by name."""
    return {} if cls.__init__ is object.__init__ else inspect.signature(cls).parameters


def create(
    policy_or_name: str | type[Scheduler], params: Mapping[str, Any], **facts: Any
) -> Scheduler:
    """Make a policy. `facts` about the deployment (FACTS) reach the parameters of that name.

    Raises UsageError for an unknown policy or parameter, and a value of another type or that the
    constructor refuses.
    """
    if isinstance(policy_or_name, str):
        name, cls = policy_or_name, policy(policy_or_name)
    else:
        cls = policy_or_name
        name = f"{cls.__module__}:{cls.__qualname__}"
    known = parameters(cls)
    for key in params:
        if key not in known:
            hint = instead_of(key, known) if known else "it has none"
            raise UsageError(f"scheduler {name} has no parameter {key!r}; {hint}")
    given = {key: value for key, value in facts.items() if key in _signature(cls)}
    given |= {key: value for key, value in params.items() if value is not None or key not in given}
    try:
        require_given(f"scheduler {name}", cls, known, given)
        if not issubclass(cls, Policy):  # which refuses by itself
            refuse(cls, params)
        made = cls(**given)
    except (ValueError, TypeError) as error:
        raise UsageError(f"scheduler {name}: {error}") from error
    require_sound(made)
    return made


def require_sound(made: Scheduler) -> None:
    """Raise UsageError for a policy with an async schedule, or an attribute of older versions.

    One that is a parameter beside rules may stay.
    """
    if inspect.iscoroutinefunction(made.schedule) or inspect.isasyncgenfunction(made.schedule):
        raise UsageError(f"policy {type(made).__name__}: schedule is async; a plain def is right")
    known = parameters(type(made)) if getattr(made, "rules", None) is not None else ()
    for old in OLD_ATTRIBUTES:
        if getattr(made, old, None) and old not in known:
            raise UsageError(
                f"policy {type(made).__name__}: the attribute {old} is gone; say it in rules = "
                "Rules(...), see docs/policies.md"
            )


def catalogue() -> list[PolicyEntry]:
    """Return the policies with their parameters, defaults and sources."""
    found: list[PolicyEntry] = []
    for name in POLICIES:
        listed = parameters(cls := policy(name)).items()
        found.append(entry(name, cls, tuple((key, value.default) for key, value in listed)))
    return found


def entry(name: str, cls: type, listed: tuple[tuple[str, Any], ...]) -> PolicyEntry:
    """Return what a list of schedulers says of `cls`, from its docstring."""
    paragraphs = docstring(cls).split("\n\n")
    source = next((text for text in paragraphs if text.startswith("Source: ")), "")
    source = source.removeprefix("Source: ").replace("\n", " ").split(". ")[0].rstrip(".")
    return PolicyEntry(name, paragraphs[0].replace("\n", " "), source, listed)


def _imported(name: str) -> type[Scheduler]:
    cls, module_name = imported("scheduler", name)
    if not (inspect.isclass(cls) and callable(getattr(cls, "schedule", None))):
        raise UsageError(
            f"scheduler {name!r}: {module_name} has no class {name.partition(':')[2]!r} with a "
            "method schedule(view)"
        )
    return cast("type[Scheduler]", cls)
