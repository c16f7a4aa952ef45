"""The schema of who computes in a real run, and of what shall go wrong there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from evenflow.config_fields import Keys, NonNegative, Positive, short_form

Index = Annotated[int, Field(ge=0)]


class FaultConfig(Keys):
    """What is wrong with one `stage`, on purpose; stages count from 0.

    It computes `slow_factor` times as long; it is killed before micro-batch `dies_after`; what it
    is sent arrives `link_delay_s` seconds later.
    """

    stage: Index
    slow_factor: Positive = 1.0
    dies_after: Index | None = None
    link_delay_s: NonNegative = 0.0


class EmulatedWorkers(Keys):
    """Processes that wait for as long as `costs` says."""

    kind: Literal["emulated"]
    faults: list[FaultConfig] | None = None


class TorchWorkers(Keys):
    """Processes that run the model."""

    kind: Literal["torch"]


Workers = Annotated[EmulatedWorkers | TorchWorkers, short_form("kind"), Discriminator("kind")]
