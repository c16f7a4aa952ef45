"""A policy that Python gives as a class or an object, where RUN.yaml could only name one."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenflow.errors import UsageError
from evenflow.scheduling import Scheduler


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GivenPolicy:
    """A class, which is called, or an object, which is copied: now, and for each engine and run.

    UsageError for what has no method schedule(view).
    """

    policy: type[Scheduler] | Scheduler
    _kept: Any = field(init=False)

    def __post_init__(self) -> None:
        if not callable(getattr(self.policy, "schedule", None)):
            raise UsageError(
                "scheduler: should be a name, a mapping, or a class or object with a method "
                f"schedule(view), not {self.policy!r}"
            )
        object.__setattr__(self, "_kept", copy.deepcopy(self.policy))

    @property
    def cls(self) -> type:
        return self.policy if isinstance(self.policy, type) else type(self.policy)

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.cls.__name__

    @property
    def name(self) -> str:
        """The policy as `module:Class`, which stands in the configuration."""
        return f"{self.cls.__module__}:{self.cls.__qualname__}"

    def make(self, **facts: Any) -> Scheduler:
        """Return a fresh policy; a class gets those facts of the deployment that it takes."""
        if not isinstance(self.policy, type):
            made: Scheduler = copy.deepcopy(self._kept)
            return made
        accepted = inspect.signature(self.policy).parameters
        return self.policy(**{name: fact for name, fact in facts.items() if name in accepted})

    def source(self) -> Mapping[str, str | None]:
        """Return the name, and the SHA-256 of the class's source where Python can find it."""
        try:
            digest = hashlib.sha256(inspect.getsource(self.cls).encode()).hexdigest()
        except (OSError, TypeError):
            digest = None
        return {"name": self.name, "source_sha256": digest}
