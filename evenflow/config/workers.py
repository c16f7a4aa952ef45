"""The schema of the workers of a real run."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from evenflow.keys import Count, Keys, NonNegative, Positive, Share, short_form

Index = Annotated[int, Field(ge=0)]


class _Stages(Keys):
    """Keys that our own kinds of workers share."""

    metadata: Literal["ahead", "with_activations"] = "ahead"
    """When a stage knows of a micro-batch: as it is scheduled, so that it prepares the inputs while
    it computes another; or with the activations, and prepares before it computes.
    """


class EmulatedWorkers(_Stages):
    """Processes that wait for as long as `costs` says."""

    kind: Literal["emulated"]
    start_limit_s: Positive = 60.0
    """Seconds until all have to be ready."""

    @property
    def words(self) -> str:
        """Parts of a run on these workers that are real."""
        return "emulated (no model computes, tokens are made up)"


class SamplingConfig(Keys):
    """Sampling: how requests draw their tokens."""

    temperature: NonNegative = 0.0
    """What logits are divided by, a ratio; 0 is greedy."""
    top_k: Index = 0
    """Tokens that are drawn from; 0: all."""
    top_p: Share = 1.0
    """The share of the probability that is drawn from."""
    seed: Index = 0
    """What a request draws follows from this, its id and the position alone."""


class TorchWorkers(_Stages):
    """Processes that run the model."""

    kind: Literal["torch"]
    device: Literal["cpu", "cuda"] = "cpu"
    """What they compute on; cuda has run on one H200."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What weights and activations are in; null: as config.json says, and bfloat16 for a model of
    the table.
    """
    threads: Count = 1
    """Cores of each process on a CPU."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """Those in the model's folder, or random ones of its shapes."""
    transport: Literal["gloo", "nccl", "one_process"] | None = None
    """How hidden states cross from stage to stage; null: gloo on a CPU, nccl on GPUs."""
    sampling: SamplingConfig = SamplingConfig()
    """How requests draw their tokens."""
    patience_s: Positive = 30.0
    """Seconds beyond what `costs` says after which a silent micro-batch fails the run."""
    start_limit_s: Positive = 600.0
    """Seconds until all weights have to be loaded."""

    @property
    def words(self) -> str:
        """Parts of a run on these workers that are real."""
        made_up = " with random weights" if self.weights == "random" else ""
        return f"real (torch on {self.device}{made_up})"


class VllmWorkers(Keys):
    """Real vLLM: its engine and its workers, with the policy in its scheduler's place."""

    kind: Literal["vllm"]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What weights and activations are in; null: as config.json says."""
    threads: Count = 1
    """Cores of each worker on a CPU."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """Those in the model's folder, or random ones of its shapes."""
    max_num_batched_tokens: Count = 8192
    """Tokens that a policy may plan for a micro-batch."""
    max_num_seqs: Count = 256
    """Requests that may run at once."""
    sampling: SamplingConfig = SamplingConfig()
    """How requests draw their tokens."""
    patience_s: Positive = 60.0
    """Seconds after which a micro-batch of several stages that is not back fails the run."""

    @property
    def words(self) -> str:
        """Parts of a run on these workers that are real."""
        made_up = " with random weights" if self.weights == "random" else ""
        return f"real (vLLM{made_up})"


Workers = Annotated[
    EmulatedWorkers | TorchWorkers | VllmWorkers, short_form("kind"), Discriminator("kind")
]
