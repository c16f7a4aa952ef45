"""Seconds per stage from the shapes of a model and the peaks of a GPU, for any GPU in the table.

Does not know: overlap of compute and communication, kernels that change with the batch size, CUDA
graphs, and CPU time (the runtime's business). Where it is off is in docs/costs.md, with numbers.
"""

from __future__ import annotations

from evenflow.costs import experts, formulas
from evenflow.costs.base import BatchShape
from evenflow.costs.collectives import Fabric, Ring
from evenflow.errors import UsageError
from evenflow.specs.checks import require_counts, require_positive
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import LinkSpec


class RooflineCost:
    """Predict each operator as the longer of arithmetic and memory traffic, and add them up.

    `fabric` is what connects the tensor-parallel ranks of a stage (a link means a ring over it); a
    UsageError without it when there are several. `tile_tokens`: linear operators compute whole
    tiles of that many tokens. `expert_imbalance` is the load of the busiest expert-parallel rank
    over the mean.
    """

    __slots__ = (
        "_attention",
        "_embedding_per_token_s",
        "_head_by_rows",
        "_layer_by_tokens",
        "_layers",
        "_rates",
        "_transfer_bytes_per_token",
        "deployment",
        "expert_imbalance",
        "fabric",
        "tile_tokens",
    )

    def __init__(
        self,
        deployment: Deployment,
        fabric: LinkSpec | Fabric | None = None,
        *,
        tile_tokens: int = 128,
        expert_imbalance: float = 1.0,
    ) -> None:
        require_counts("costs: roofline", tile_tokens=tile_tokens)
        _check_imbalance(expert_imbalance, deployment)
        if deployment.tensor_parallel > 1 and fabric is None:
            raise UsageError(
                f"tensor_parallel: {deployment.tensor_parallel} ranks all-reduce over a link; "
                "give its bandwidth_gb_s and latency_us"
            )
        model = deployment.model
        self.deployment = deployment
        self.fabric = Ring(fabric) if isinstance(fabric, LinkSpec) else fabric
        self.expert_imbalance = expert_imbalance
        self.tile_tokens = tile_tokens
        self._rates = formulas.Rates.of(deployment.gpu)
        self._layers = tuple(float(count) for count in deployment.layers_per_stage)
        self._attention = formulas.AttentionRates.of(model, deployment.tensor_parallel, self._rates)
        self._embedding_per_token_s = formulas.embedding_s(1, model, self._rates)
        self._transfer_bytes_per_token = model.hidden_size * model.dtype_bytes
        # A run asks for few distinct sizes, over and over: each is computed once.
        self._layer_by_tokens: dict[int, float] = {}
        self._head_by_rows: dict[int, float] = {}

    @property
    def depth(self) -> int:
        """Number of pipeline stages."""
        return len(self._layers)

    def times(self, batch: BatchShape) -> list[float]:
        """Return the seconds on every stage."""
        tokens = batch.prefill_tokens + batch.decode_tokens
        layer_s = self._layer_by_tokens.get(tokens)
        if layer_s is None:
            layer_s = self._layer_by_tokens[tokens] = self._layer_s(tokens)
        if batch.decode_tokens:
            layer_s += self._attention.decode_s(batch.decode_tokens, batch.decode_context)
        for chunk in batch.chunks:
            layer_s += self._attention.prefill_s(chunk.start, chunk.stop)
        head_s = self._head_by_rows.get(batch.sampled_rows)
        if head_s is None:
            head_s = self._head_by_rows[batch.sampled_rows] = self._head_s(batch.sampled_rows)
        times = [count * layer_s for count in self._layers]
        times[0] += tokens * self._embedding_per_token_s
        times[-1] += head_s
        return times

    def __call__(self, stage: int, batch: BatchShape) -> float:
        """Return the seconds on one stage."""
        return self.times(batch)[stage]

    def transfer_bytes(self, batch: BatchShape) -> float:
        """Return the bytes of the hidden states that cross from one stage to the next.

        Known error: engines that keep the residual apart (vLLM, gLLM) send it too, twice as much;
        with tensor parallelism each pair of ranks may send its share only.
        """
        return self._transfer_bytes_per_token * (batch.prefill_tokens + batch.decode_tokens)

    def all_reduce_s(self, tokens: int) -> float:
        """Return the seconds that one layer spends in all-reduces of the hidden states."""
        ranks, model = self.deployment.tensor_parallel, self.deployment.model
        if self.fabric is None or ranks == 1:
            return 0.0
        size_bytes = tokens * model.hidden_size * model.dtype_bytes
        once = model.parallel_attention or self.deployment.expert_parallel
        return (1 if once else 2) * self.fabric.all_reduce_s(size_bytes, ranks)

    def all_to_all_s(self, tokens: int) -> float:
        """Return the seconds that one layer spends sending tokens to their experts and back.

        Only where the ranks hold whole experts. The all-reduce of the attention is then the only
        one: its scatter half leaves each rank its share of the tokens, its gather half comes after
        the experts.
        """
        ranks, model = self.deployment.tensor_parallel, self.deployment.model
        if self.fabric is None or ranks == 1 or not self.deployment.expert_parallel:
            return 0.0
        size_bytes = experts.all_to_all_bytes(tokens, model, ranks, self.expert_imbalance)
        return 2 * self.fabric.all_to_all_s(size_bytes, ranks)

    def _layer_s(self, tokens: int) -> float:
        """Return a layer's seconds without attention: all that follows from the tokens alone."""
        model, ranks = self.deployment.model, self.deployment.tensor_parallel
        linear_s = sum(
            formulas.linear_s(tokens, shape, model.dtype_bytes, self.tile_tokens, self._rates)
            for shape in model.linear_shapes(ranks)
        )
        elementwise_s = formulas.elementwise_s(tokens, model, ranks, self._rates)
        overhead_s = self.deployment.gpu.per_layer_overhead_s
        exchange_s = self.all_reduce_s(tokens) + self.all_to_all_s(tokens)
        return linear_s + elementwise_s + overhead_s + exchange_s + self._experts_s(tokens)

    def _experts_s(self, tokens: int) -> float:
        deployment = self.deployment
        if not deployment.model.num_experts:
            return 0.0
        return experts.experts_s(
            tokens,
            deployment.model,
            deployment.tensor_parallel,
            self._rates,
            expert_parallel=deployment.expert_parallel,
            imbalance=self.expert_imbalance,
        )

    def _head_s(self, rows: int) -> float:
        model, ranks = self.deployment.model, self.deployment.tensor_parallel
        return formulas.head_s(rows, model, ranks, self.tile_tokens, self._rates)


def _check_imbalance(imbalance: float, deployment: Deployment) -> None:
    require_positive("costs: roofline", expert_imbalance=imbalance)
    if imbalance < 1:
        raise UsageError(
            f"costs: roofline: expert_imbalance is {imbalance}; the busiest rank has at least the "
            "mean load, so 1 or above is right"
        )
    if imbalance > 1 and not deployment.expert_parallel:
        raise UsageError("costs: roofline: expert_imbalance needs expert_parallel: true")
