"""Kernels that an engine compiles just in time, when a micro-batch first needs them.

TensorRT-LLM's products of FP8 with blocks on Hopper are DeepGEMM's, a kernel for each matrix and
tile. Source: TensorRT-LLM 1.1, `get_best_gemm_config` (`deep_gemm/jit_utils.cuh`), the dispatch of
`fp8_blockscale_gemm_kernel.cuh`, and `warmup` of its `PyTorchModelEngine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from evenflow.core.request import Request
from evenflow.costs.base import BatchShape, StageCost, prefill_work
from evenflow.costs.modifiers import Modified
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment
from evenflow.specs.modelspec import ModelSpec

GPUS = ("H100", "H200")

PROCESSORS = 132
"""Multiprocessors of one of them."""

TILE_TOKENS, TILE_COLUMNS = 128, range(16, 129, 8)

SHARING_TOKENS = 1024
"""Tokens from which neighbouring tiles share what they load."""

BLOCKS = "fp8_block"


class Product(NamedTuple):
    """A matrix [inputs, outputs] of each of `experts`; `prompts`: for their tokens only."""

    inputs: int
    outputs: int
    experts: int = 1
    prompts: bool = False


Kernel = tuple[Product, int, bool]
"""A product, the columns of a tile, and whether tiles share what they load."""


@lru_cache(maxsize=4096)
def kernel(product: Product, tokens: int) -> Kernel:
    """Return the kernel of a product: with tiles of the fewest rounds, then of the fullest last."""

    def rounds(columns: int) -> tuple[int, int]:
        tiles = -(-tokens // TILE_TOKENS) * -(-product.outputs // columns) * product.experts
        return -(-tiles // PROCESSORS), -((tiles - 1) % PROCESSORS)

    columns = min(TILE_COLUMNS, key=rounds)
    even = product.experts == 1 and product.outputs % (2 * columns) == 0
    return product, columns, even and tokens >= SHARING_TOKENS


def products(kind: ModelSpec, deployment: Deployment) -> Iterator[Product]:
    """Return the products of a layer on one GPU that are in FP8 with blocks."""
    ranks, (slices, spread) = deployment.tensor_parallel, deployment.expert_split
    for shape in kind.linear_shapes(ranks) if kind.quantization == BLOCKS else ():
        if kind.is_quantized(shape, ranks):
            yield Product(*shape, prompts=shape == kind.up_shape(ranks))
    for shape in kind.expert_shapes(slices) if kind.expert_format == BLOCKS else ():
        yield Product(*shape, experts=kind.num_experts // spread)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CompilingCost(Modified):
    """Costs of an engine that compiles kernels just in time: `compile_s` a kernel, on all ranks.

    `products`: of each stage. Start-up compiles all kernels of decodes, and those of `at_start`
    tokens. Groups that step together compile separately. `known`: compiled kernels by group and
    stage; None: all are there. Known error: kernels that only drafts need, or only decodes of more
    than 128 tokens, count as there.
    """

    products: Sequence[frozenset[Product]]
    compile_s: float
    at_start: Sequence[int]
    known: dict[tuple[int, int], set[Kernel]] | None = None

    def begun(self) -> StageCost:
        """Return the costs of one run, which remember its kernels."""
        return replace(self, known={})

    def times(self, batch: BatchShape) -> list[float]:
        times = self.costs.times(batch)
        if self.known is None or not batch.prefill_tokens:
            return times
        return [s + self.compile_s * self._new(stage, batch) for stage, s in enumerate(times)]

    def _new(self, stage: int, batch: BatchShape) -> int:
        """Return how many kernels a stage lacks, the most of any group; then it has them."""
        assert self.known is not None
        most = 0
        for group, part in enumerate(getattr(batch, "parts", ()) or (batch,)):
            known = self.known.get((group, stage))
            if known is None:
                works = map(prefill_work, self.at_start)
                known = {each for work in works for each in self._needed(stage, work, work)}
                self.known[group, stage] = known
            new = set(self._needed(stage, part, batch)) - known
            known |= new
            most = max(most, len(new))
        return most

    def _needed(self, stage: int, part: BatchShape, batch: BatchShape) -> Iterator[Kernel]:
        """Return the kernels of a group's part; experts serve the tokens of all groups."""
        for product in self.products[stage]:
            of = batch if product.experts > 1 else part
            tokens = of.prefill_tokens + (0 if product.prompts else of.decode_tokens)
            if tokens > TILE_TOKENS:
                yield kernel(product, tokens)


def compiling(
    costs: StageCost, placed: Deployment | None, compile_s: float, requests: Sequence[Request]
) -> CompilingCost:
    """Return costs with the compiling of kernels that start-up and the first request lack.

    UsageError where an engine compiles none.
    """
    found = _by_stage(placed) if placed else []
    if placed is None or not all(found):
        raise UsageError(
            f"runtime.compile_s: {compile_s:g} is for weights of {BLOCKS} on {', '.join(GPUS)}; "
            "0 is right elsewhere"
        )
    largest = placed.activation_tokens
    first = [min(request.prompt_tokens, largest) for request in requests[:1]]
    return CompilingCost(costs, found, compile_s, (largest, *first))


def _by_stage(placed: Deployment) -> list[frozenset[Product]]:
    found: list[frozenset[Product]] = []
    for stage in range(placed.depth):
        kinds = placed.kinds(stage) if placed.gpu_of(stage).name in GPUS else ()
        found.append(frozenset(each for kind in kinds for each in products(kind, placed)))
    return found
