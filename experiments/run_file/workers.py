"""The schema of who computes in a real run, and of what shall go wrong there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from evenflow.keys import Count, Keys, NonNegative, Positive, Share, short_form

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
    """Processes that wait for as long as `costs` says, all ready within `start_limit_s`."""

    kind: Literal["emulated"]
    start_limit_s: Positive = 60.0
    faults: list[FaultConfig] | None = None

    @property
    def words(self) -> str:
        """What is real of such a run."""
        return "emulated (no model computes, tokens are made up)"


class SamplingConfig(Keys):
    """How requests draw their tokens; temperature 0 is greedy, and `top_k` 0 is all tokens.

    What a request draws follows from `seed`, its id and the position alone.
    """

    temperature: NonNegative = 0.0
    top_k: Index = 0
    top_p: Share = 1.0
    seed: Index = 0


class TorchWorkers(Keys):
    """Processes that run the model, `threads` cores each on a CPU.

    `dtype` null is what the model's config.json says of its weights, and of a name bfloat16.
    `weights`: those in the model's folder, or random ones of its shapes. `transport`, how hidden
    states cross from stage to stage, defaults to gloo on a CPU and to nccl on GPUs. The run fails
    when nothing is heard of a micro-batch for `patience_s` longer than `costs` says, and does not
    begin when weights are not loaded within `start_limit_s`.
    """

    kind: Literal["torch"]
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    threads: Count = 1
    weights: Literal["checkpoint", "random"] = "checkpoint"
    transport: Literal["gloo", "nccl", "ipc", "one_process", "sm_partition"] | None = None
    sampling: SamplingConfig = SamplingConfig()
    patience_s: Positive = 30.0
    start_limit_s: Positive = 600.0

    @property
    def words(self) -> str:
        """What is real of such a run."""
        made_up = " with random weights" if self.weights == "random" else ""
        return f"real (torch on {self.device}{made_up})"


Workers = Annotated[EmulatedWorkers | TorchWorkers, short_form("kind"), Discriminator("kind")]
