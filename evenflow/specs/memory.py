"""Memory that an engine takes of each GPU besides weights and pages, by engine: `memory.csv`.

Fitted on start-up logs by `tools.startup_memory` (docs/kv.md). Knows a model's shape; no scheduler.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from evenflow.errors import NonNegative, Positive
from evenflow.specs.gpu import GIB
from evenflow.specs.modelspec import ModelSpec
from evenflow.specs.tables import read_table

MemoryName = Literal["plain", "vllm", "vllm-0.19", "vllm-0.16", "trtllm", "sglang", "sglang-0.5.13"]
"""An engine of `memories()`; `plain`: none, the nominal memory and the largest step."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one engine on each GPU, measured as it starts: a step, libraries, CUDA graphs.

    A step holds `hidden_states` hidden states a token, and the buffers of the experts that a token
    is sent to. It also holds an MLP's columns. Or, if that is more, on the last stage the sampler's
    `logit_bytes` for each row and word. CUDA libraries and NCCL take `one_gpu_gib` on one GPU,
    `stages_gib` with several stages, `ranks_gib` with ranks over NVLink. Ranks over PCIe have that
    of one GPU, an assumption. 102 graphs take `graph_gib`, and `graph_layer_gib` a layer of the
    stage; fewer (`graphs`) have their part of that. `share_of` is what `memory_utilization` is a
    share of. `gpu`: of the GPU, for all. `left`: of what all that leaves, for pages. `free`: of
    what libraries leave, for weights and pages, so that a step and graphs have the rest.
    `utilization` is that share where none is given. Without `counts_drafts` a draft's weights and
    pages lie beside that share.
    """

    name: str
    logit_bytes: NonNegative
    hidden_states: NonNegative
    one_gpu_gib: NonNegative
    stages_gib: NonNegative
    ranks_gib: NonNegative
    graph_gib: NonNegative = 0.0
    graph_layer_gib: NonNegative = 0.0
    share_of: Literal["gpu", "left", "free"] = "gpu"
    utilization: Positive = 0.9
    counts_drafts: bool = True
    source: str = ""

    def step_bytes(
        self, kinds: Iterable[ModelSpec], ranks: int, slices: int, tokens: int, rows: int
    ) -> int:
        """Return the bytes of a step of `tokens` on one GPU whose layers are of `kinds`.

        `rows` sample (0: on no other than the last stage); an expert is cut in `slices`. None where
        it has the rest of the GPU.
        """
        if self.share_of == "free":
            return 0
        kinds = list(kinds)
        model = kinds[0]
        columns = max(-(-kind.shared_columns // ranks) for kind in kinds)
        layer = tokens * (3 if model.gated_mlp else 2) * columns * model.dtype_bytes
        logits = min(rows, tokens) * model.vocab_size * self.logit_bytes
        held = self.hidden_states * model.hidden_size + max(
            _expert_values(kind, slices) for kind in kinds
        )
        return int(tokens * held * model.dtype_bytes + max(layer, logits))

    def other_bytes(self, layers: int, ranks: int, stages: int, rows: int, *, direct: bool) -> int:
        """Return the bytes of libraries and CUDA graphs on a GPU.

        `rows`: the most that sample at once (max_num_seqs). `direct`: ranks have NVLink.
        """
        kept_gib = self.one_gpu_gib if stages == 1 else self.stages_gib
        if ranks > 1:
            kept_gib = self.ranks_gib if direct else self.one_gpu_gib
        captured_gib = self.graph_layer_gib * layers * graphs(rows) / graphs(SIZES[-1])
        return int((kept_gib + self.graph_gib + captured_gib) * GIB)


SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Tokens of the steps that vLLM captures at most, but for data centers' Blackwell (up to 1,024)."""


def graphs(rows: int) -> int:
    """Return how many CUDA graphs vLLM captures: of mixed steps, and of `rows` decodes at most.

    Its estimate is a first one of each kind, and the second's memory for each other. Source: vLLM
    0.33, config/vllm.py: _set_cudagraph_sizes; gpu_model_runner.py: profile_cudagraph_memory.
    """
    return sum((size <= 2 * rows) + (size <= rows) for size in SIZES)


def _expert_values(kind: ModelSpec, slices: int) -> int:
    """Return the values of a token in the two buffers of the experts it is sent to."""
    columns, hidden = -(-kind.expert_intermediate_size // slices), kind.hidden_size
    return kind.experts_per_token * (max(columns, hidden) + max(2 * columns, hidden))


@cache
def memories() -> Mapping[str, EngineMemory]:
    return read_table("memory", EngineMemory)
