"""Kernels that the host launches one by one, as no CUDA graph replays them.

Knows a model's shape and the numbers of a micro-batch; what an engine captures is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.costs.base import BatchShape, StageCost
from evenflow.costs.modifiers import Modified
from evenflow.specs.deployment import Deployment
from evenflow.specs.modelspec import ModelSpec

LAUNCH_S = 28e-6
"""Seconds from one launch of an engine in Python to the next, with what leads to it."""

LATENT, EXPERTS = 7, 6
"""What a layer with latents and one with experts take beyond their kernels, in launches: Python of
the router, of the fused experts, of joins and views. Both, and LAUNCH_S, are from eager steps of
others (docs/costs-errors.md, launches of kernels)."""

PIECE = 3
"""Launches of a layer whose kernels are replayed but for the attention: the rest, as one graph, the
writing of keys and values, the attention."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LaunchedCost(Modified):
    """A stage that takes at least as long as the host takes to launch its kernels.

    Launches take `kernels_s` on each stage where nothing is replayed, `pieces_s` where all but
    attention is. Decodes alone are replayed, unless `eager`; micro-batches with prompts in pieces
    up to `graph_tokens`. Known error: launches begin when the stage is free, not before.
    """

    kernels_s: Sequence[float]
    pieces_s: Sequence[float]
    graph_tokens: int = 0
    eager: bool = False

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        if not (self.eager or batch.prefill_tokens):
            return times
        tokens = batch.prefill_tokens + batch.decode_tokens
        if parts := getattr(batch, "parts", ()):
            tokens = max(part.prefill_tokens + part.decode_tokens for part in parts)
        in_pieces = not self.eager and tokens <= self.graph_tokens
        return list(map(max, times, self.pieces_s if in_pieces else self.kernels_s))


def launched(
    costs: StageCost, deployment: Deployment, launch_s: float, graph_tokens: int, *, eager: bool
) -> LaunchedCost:
    """Return costs with the launches of a deployment's kernels."""
    stages = range(deployment.depth)
    whole_s = [launch_s * stage_launches(deployment, stage) for stage in stages]
    pieces_s = [launch_s * (PIECE * deployment.layers_per_stage[stage]) for stage in stages]
    return LaunchedCost(costs, whole_s, pieces_s, graph_tokens, eager)


def stage_launches(deployment: Deployment, stage: int) -> int:
    """Return the launches of a stage: of layers, embedding, and head with norm and sampling."""
    layers = sum(
        count * launches(kind, deployment.stage_gpus, narrow=deployment.arithmetic != "16-bit")
        for kind, count in deployment.kinds(stage).items()
    )
    return layers + (stage == 0) + 4 * (stage == deployment.depth - 1)


def launches(kind: ModelSpec, ranks: int, *, narrow: bool = False) -> int:
    """Return a layer's launches on one of `ranks` GPUs, with other host work counted in launches.

    Its kernels, the host's extra work for latents and experts, and two all-reduces. Norms of
    queries and keys are launched by themselves; those over all heads of several ranks have an
    all-reduce, too (SGLang, pull request 14416).
    """
    count = layer_kernels(kind, ranks, narrow=narrow) + expert_kernels(kind, narrow=narrow)
    count += 2 * (kind.qk_norm and not kind.qk_norm_over_heads)
    count += LATENT * (kind.kv_lora_rank > 0) + EXPERTS * (kind.num_experts > 0)
    if ranks > 1:
        count += kind.qk_norm_over_heads + (1 if kind.parallel_attention else 2)
    return count


DENSE_KERNELS = 10
"""Kernels of a dense layer in 16 bits: two norms, four products, rotary embedding, writing of keys
and values, attention, activation."""


def layer_kernels(kind: ModelSpec, ranks: int, *, narrow: bool = False) -> int:
    """Return the kernels of a layer on one of `ranks` GPUs, but for experts and all-reduces.

    Those of DENSE_KERNELS, but that products are the model's, and that there is no activation
    without an MLP. Norms of queries and keys are in the rotary embedding's kernel (vLLM compiles
    them so, TensorRT-LLM has `fuse_qk_norm_rope`), those over all heads two more. Latents add a
    norm of each, and the joining of keys. Products that are `narrow` quantise their inputs. Known
    error: in SGLang this norm is one kernel more.
    """
    own = [*kind.linear_shapes(ranks)]
    for shape in kind.mlp_shapes(ranks):
        own.remove(shape)
    count = 5 + len(own) + mlp_kernels(kind, ranks, narrow=narrow) + 2 * kind.qk_norm_over_heads
    if kind.kv_lora_rank:
        count += 2 + (kind.q_lora_rank > 0)
    if narrow:
        count += sum(kind.is_quantized(shape, ranks) for shape in own)
    return count


def mlp_kernels(kind: ModelSpec, ranks: int, *, narrow: bool = False) -> int:
    """Return the kernels of the MLP that all tokens pass: products, quantising, activation."""
    shapes = kind.mlp_shapes(ranks)
    quantized = narrow and sum(kind.is_quantized(shape, ranks) for shape in shapes)
    return len(shapes) + quantized + (kind.shared_columns > 0)


def expert_kernels(kind: ModelSpec, *, narrow: bool = False) -> int:
    """Return the kernels of a layer's experts, 0 without any.

    Top-k choice, sorting of tokens (two), two products, activation, weighted sum, and addition of
    the shared expert; for `narrow` (8- or 4-bit) products also the quantising of their inputs.
    """
    return 7 + (kind.shared_columns > 0) + 2 * narrow if kind.num_experts else 0


SHARED_BESIDE = {"sglang": 1024, "trtllm": 512, "vllm": 256}
"""Tokens up to which an engine computes the shared expert beside the others, on a second stream.

SGLang's DUAL_STREAM_TOKEN_THRESHOLD, vLLM's VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD;
TensorRT-LLM does so in CUDA graphs, by default of up to 128 requests, here of four tokens each."""
