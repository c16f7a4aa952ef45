"""A model spread over GPUs: which stage holds what, and how many KV pages fit beside it.

Knows bytes, not seconds. Communication buffers, CUDA graphs and an engine's measured step are
counted where `memory` is that of an engine. Else `memory_utilization` leaves room for them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from evenflow.errors import (
    Count,
    DoesNotFitError,
    Positive,
    UsageError,
    require_counts,
    require_declared,
)
from evenflow.specs.gpu import GIB, GpuSpec
from evenflow.specs.memory import EngineMemory
from evenflow.specs.modelspec import ModelSpec, Split, kv_bytes_of
from evenflow.specs.precision import Arithmetic


def require_shareable(model: ModelSpec, ranks: int) -> None:
    """Raise UsageError unless `ranks` tensor-parallel ranks can share a model's heads evenly."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if model.kv_lora_rank:
        kv_heads = 1
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise UsageError(
            f"tensor_parallel: {ranks} ranks cannot share the {heads} heads and {kv_heads} "
            f"KV heads of {model.name} evenly; use a divisor of both"
        )


def split_layers(num_layers: int, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each stage: an even split over a number of stages, or those listed.

    Layers left over by an even split go to the stages before the last, from the back, as in vLLM.
    The last stage has the LM head already, and stage 0 gets one only when all others have.
    UsageError when the list does not add up or a stage would be empty.
    """
    if isinstance(stages, int):
        require_counts("deployment", stages=stages)
        if stages > num_layers:
            raise DoesNotFitError(
                f"stages: {stages} stages for {num_layers} layers; use fewer stages"
            )
        each, left_over = divmod(num_layers, stages)
        first_extra = stages - 1 - left_over
        return tuple(each + (first_extra <= stage < stages - 1) for stage in range(stages))
    layers = tuple(stages)
    if not layers or any(not isinstance(count, int) or count < 1 for count in layers):
        raise UsageError(f"stages: {list(layers)} must list whole numbers of layers, 1 or above")
    if sum(layers) != num_layers:
        raise UsageError(
            f"stages: {list(layers)} add up to {sum(layers)} layers; the model has {num_layers}"
        )
    return layers


@dataclass(frozen=True, slots=True)
class Deployment:
    """Describe a model spread over `depth` x `stage_gpus` GPUs.

    All are a `gpu`, or those of each stage as in `gpus`, where stages have unlike ones.

    `activation_tokens` is the largest micro-batch, `logits_rows` the most rows that sample at once.
    Both are memory that must stay free of KV. `windows`: the number of requests with room for the
    tokens of sliding windows. `memory_utilization` is the share of a GPU's nominal memory that the
    engine may use. `memory`: what the engine itself takes; None: nothing, and the step by formula.

    `expert_parallel`: the GPUs of a stage hold whole experts, not a slice of each. `data_parallel`
    > 1: a stage is as many groups of `tensor_parallel` GPUs, with separate requests and KV. A group
    has all of the model but the experts, which are over all groups. `draft`: a second model that
    proposes tokens (speculative decoding). It lives on the last stage, divided over its ranks, with
    separate KV. `verified_tokens`: what a decoding request computes in a step, one or with the
    proposals k + 1.
    """

    model: ModelSpec
    gpu: GpuSpec
    layers_per_stage: tuple[int, ...]
    tensor_parallel: Count = 1
    memory_utilization: Positive = 0.9
    activation_tokens: Count = 2048
    logits_rows: Count = 256
    windows: Count = 256
    page_tokens: Count = 16
    expert_parallel: bool = False
    draft: ModelSpec | None = None
    data_parallel: Count = 1
    verified_tokens: Count = 1
    memory: EngineMemory | None = None
    gpus: tuple[GpuSpec, ...] = ()

    def __post_init__(self) -> None:
        split_layers(self.model.num_layers, self.layers_per_stage)
        require_declared("deployment", self)
        if self.memory_utilization > 1:
            raise UsageError(f"memory_utilization is {self.memory_utilization}; at most 1 is right")
        require_shareable(self.model, self.tensor_parallel)
        if self.draft is not None:
            require_shareable(self.draft, self.tensor_parallel)
        if self.expert_parallel and not self.model.num_experts:
            raise UsageError(
                f"expert_parallel: {self.model.name} has no experts; leave it out, or use a "
                "mixture of experts"
            )
        if self.data_parallel > 1 and not self.model.num_experts:
            raise UsageError(
                f"data_parallel: {self.model.name} has no experts to share; use replicas"
            )
        if self.model.num_experts % self.expert_split.ranks:
            raise UsageError(
                f"expert_parallel: {self.stage_gpus} ranks cannot share the "
                f"{self.model.num_experts} experts of {self.model.name} evenly; use a divisor"
            )

    def on(self, gpu: GpuSpec) -> Self:
        return replace(self, gpu=gpu, gpus=())

    def gpu_of(self, stage: int) -> GpuSpec:
        return self.gpus[stage] if self.gpus else self.gpu

    @property
    def stage_gpus(self) -> int:
        """GPUs of a stage, among which experts are divided."""
        return self.tensor_parallel * self.data_parallel

    @property
    def expert_split(self) -> Split:
        """Division of the experts among the GPUs of a stage."""
        return Split(1, self.stage_gpus) if self.expert_parallel else Split(self.stage_gpus, 1)

    @property
    def arithmetic(self) -> Arithmetic:
        """Format in which the layers' products are computed: theirs, or 16 bits (weight-only)."""
        wanted = self.model.format
        computed = wanted is not None and self.gpu.peak(wanted.arithmetic) > 0
        return wanted.arithmetic if wanted and computed else "16-bit"

    def precision(self) -> dict[str, str]:
        """Say what is not in the model's own dtype, and how it is computed; nothing if all is."""
        said, model, gpu = {}, self.model, self.gpu
        if model.format is not None:
            wanted, computed = model.format.arithmetic, self.arithmetic
            unit = "TOP/s" if computed == "int8" else "TFLOP/s"
            how = f"multiplied in {computed}, {gpu.peak(computed) / 1e12:g} {unit}"
            if computed != wanted:
                how += f", weight-only: {gpu.name} has no {wanted} arithmetic"
            said["weights"] = f"{model.quantization}, {how}"
        if self.gpus and said:
            each = {kind.name: self.on(kind).precision()["weights"] for kind in self.gpus}
            said["weights"] = "; ".join(f"{name}: {how}" for name, how in each.items())
        return said | ({"kv": model.kv_dtype} if model.kv_dtype else {})

    @property
    def depth(self) -> int:
        return len(self.layers_per_stage)

    def kinds(self, stage: int) -> dict[ModelSpec, int]:
        """Return how many of a stage's layers are of each kind."""
        start = sum(self.layers_per_stage[:stage])
        return self.model.kinds(start, start + self.layers_per_stage[stage])

    def weight_bytes(self, stage: int) -> int:
        """Return the bytes of weights on one GPU of a stage.

        The embedding is on stage 0, the final norm and the LM head on the last stage. Both matrices
        are divided over the tensor-parallel ranks. A tied head is a second copy unless there is one
        stage. A draft model is on the last stage. Of a next-token module the head is the model's,
        and so is the embedding on one stage. Quantised layers with their scales.
        """
        model, ranks = self.model, self.tensor_parallel
        vocabulary = -(-model.embedding_parameters // ranks)
        size = sum(
            count * kind.layer_bytes(ranks, self.expert_split)
            for kind, count in self.kinds(stage).items()
        )
        count = 0
        is_last = stage == self.depth - 1
        if stage == 0:
            count += vocabulary
        if is_last:
            count += model.hidden_size
        if is_last and not (model.tie_word_embeddings and self.depth == 1):
            count += vocabulary
        size += count * model.dtype_bytes
        if is_last and self.draft is not None:
            size += self.drafting().weight_bytes(0)
            shared = (2 if self.depth == 1 else 1) if self.draft.is_mtp else 0
            size -= shared * vocabulary * model.dtype_bytes
        return size

    def drafting(self) -> Self:
        """Return the draft model alone, as it lies on the last stage."""
        assert self.draft is not None
        experts = self.expert_parallel and self.draft.num_experts > 0
        return replace(
            self.on(self.gpu_of(self.depth - 1)),
            model=self.draft,
            layers_per_stage=(self.draft.num_layers,),
            draft=None,
            expert_parallel=experts,
            verified_tokens=1,
        )

    def activation_bytes(self, stage: int) -> int:
        """Return the bytes of working memory on one GPU of a stage for the largest micro-batch.

        Hidden state and residual, with the MLP's up projection and its product beside them: the
        widest moment of a layer. Of the experts only the ones that a token is sent to count. On the
        last stage also the logits, as computed and as float32. Of an engine, what it measures
        (`EngineMemory.step_bytes`). Known error: without an engine an estimate, some 20 % under
        what PyTorch's allocator holds.
        """
        model, ranks, kinds = self.model, self.tensor_parallel, self.kinds(stage)
        rows = self.logits_rows if stage == self.depth - 1 else 0
        if self.memory is not None:
            slices = self.expert_split.slices
            return self.memory.step_bytes(kinds, ranks, slices, self.activation_tokens, rows)
        columns = max(
            -(-kind.shared_columns // ranks)
            + kind.experts_per_token * -(-kind.expert_intermediate_size // ranks)
            for kind in kinds
        )
        width = 2 * model.hidden_size + (3 if model.gated_mlp else 2) * columns
        count = self.activation_tokens * width * model.dtype_bytes
        return count + rows * model.vocab_size * (model.dtype_bytes + 4)

    def other_bytes(self, stage: int) -> int:
        """Return the bytes of libraries and CUDA graphs on one GPU of a stage, as an engine's.

        Of a share of what they leave, that share of them.
        """
        if self.memory is None:
            return 0
        layers, ranks = self.layers_per_stage[stage], self.stage_gpus
        direct = self.gpu_of(stage).is_joined
        rows = self.logits_rows
        taken = self.memory.other_bytes(layers, ranks, self.depth, rows, direct=direct)
        return int(taken * self.memory_utilization) if self.memory.share_of == "free" else taken

    def whole_bytes(self, stage: int) -> int:
        """Return the bytes of a GPU of a stage: nominal, or, for an engine, what it sees."""
        gpu = self.gpu_of(stage)
        return gpu.memory_bytes if self.memory is None else gpu.visible_bytes

    @property
    def _shares(self) -> tuple[float, float]:
        """The share of a GPU that the engine may use, and that of what is left for KV."""
        of_left = self.memory is not None and self.memory.share_of == "left"
        return (1.0, self.memory_utilization) if of_left else (self.memory_utilization, 1.0)

    def usable_bytes(self, stage: int) -> float:
        """Return the bytes of a GPU of a stage that the engine may use."""
        return self.whole_bytes(stage) * self._shares[0]

    def free_bytes(self, stage: int) -> float:
        """Return the bytes that are left for KV on one GPU of a stage; below 0: none."""
        taken = self.weight_bytes(stage) + self.activation_bytes(stage) + self.other_bytes(stage)
        return (self.usable_bytes(stage) - taken) * self._shares[1]

    def kv_bytes_per_token(self, stage: int) -> int:
        """Return the bytes of one token's keys and values on one GPU of a stage."""
        size = kv_bytes_of(self.kinds(stage), self.tensor_parallel)
        if self.draft is not None and stage == self.depth - 1:
            size += self.draft.kv_bytes_per_token(tensor_parallel=self.tensor_parallel)
        return size

    def state_bytes(self, stage: int) -> int:
        """Return the bytes that a request keeps on one GPU of a stage, however long it is.

        States of recurrent layers, and windows of compressed attention.
        """
        kinds = self.kinds(stage).items()
        return sum(count * kind.state_bytes(self.tensor_parallel) for kind, count in kinds)

    def pool_bytes_per_token(self, stage: int) -> float:
        """Return the bytes that a token takes of the pool on one GPU of a stage.

        vLLM divides layers with and without a window into groups of as many layers, and pads the
        last (`kv_cache_utils`). Gemma 3 of 62 layers has pages of 70.
        """
        held = self.kv_bytes_per_token(stage)
        counts = Counter[int]()
        for kind, count in self.model.kinds().items():
            counts[kind.sliding_window] += count
        if self.memory is None or len(counts) == 1 or self.state_bytes(stage):
            return held
        group = min(counts.values())
        if max(counts.values()) < 1.5 * group:
            group = max(counts.values())
        padded = sum(-(-count // group) * group for count in counts.values())
        return held * padded / self.model.num_layers

    def kv_pages(self) -> int:
        """Return how many KV pages fit. A page is one id on every stage: the fullest stage decides.

        The states of as many requests as sample at once (`logits_rows`) are set apart first, as
        SGLang does. VLLM takes a page for each. Layers with a sliding window keep all tokens. Or
        they have room for a window of each of `windows` requests, beside pages of the other layers.
        Whichever way fits more pages counts.

        DoesNotFitError with the numbers when a stage has no room for a single page.
        """
        beside = self.memory is not None and not self.memory.counts_drafts
        counted = replace(self, draft=None) if beside else self
        return min(map(counted._pages_of, range(self.depth)))

    def _pages_of(self, stage: int) -> int:
        free = self.free_bytes(stage) - self.logits_rows * self.state_bytes(stage)
        per_token = self.pool_bytes_per_token(stage) or 1  # a stage of states keeps no tokens
        pages = int(free // (self.page_tokens * per_token))
        kept_bytes, window_bytes = self._window_bytes(stage)
        if window_bytes and kept_bytes:
            free -= self.windows * window_bytes
            pages = max(pages, int(free // (self.page_tokens * kept_bytes)))
        if pages < 1:
            page_gib = self.page_tokens * per_token / GIB
            page = f", {page_gib:.1f} for a page of {self.page_tokens} tokens (kv.page_tokens),"
            raise DoesNotFitError(
                f"{self.model.name} does not fit: each GPU of stage {stage} needs "
                f"{self._needs(stage)}{page * (free > 0)} and has "
                f"{self.usable_bytes(stage) / GIB:.1f} "
                f"({self._shares[0]:g} of an {self.gpu_of(stage).name}'s "
                f"{self.whole_bytes(stage) / GIB:g}); use more stages or tensor_parallel, a larger "
                f"GPU, or a policy with fewer than {self.activation_tokens} tokens a step"
            )
        return pages

    def _needs(self, stage: int) -> str:
        weights, steps = self.weight_bytes(stage) / GIB, self.activation_bytes(stage) / GIB
        said = f"{weights:.1f} GiB for weights"
        states = self.logits_rows * self.state_bytes(stage) / GIB
        said += f", {states:.1f} for states of {self.logits_rows} requests" if states else ""
        if self.memory is None:
            return f"{said} and {steps:.1f} for activations"
        others = self.other_bytes(stage) / GIB
        return f"{said}, {steps:.1f} for activations and {others:.1f} for {self.memory.name}"

    def _window_bytes(self, stage: int) -> tuple[int, int]:
        """Return the bytes of a token that leaves no window, and those of a request's windows."""
        per_token, windows = self.kv_bytes_per_token(stage), 0
        for kind, count in self.kinds(stage).items():
            if kind.sliding_window:
                each = kind.kv_bytes_per_token(count, self.tensor_parallel)
                per_token -= each
                windows += each * kind.sliding_window
        return per_token, windows
