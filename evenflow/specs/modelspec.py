"""The shape of a decoder-only transformer: what its memory and its costs follow from.

Knows parameter counts and KV bytes; no GPU, no seconds, no weights. Layers may be of several kinds
(dense ones before a mixture's, sliding windows between global ones): `kinds` lists them, each as a
model of identical layers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

from evenflow.errors import (
    Count,
    Positive,
    UsageError,
    Whole,
    instead_of,
    require_counts,
    require_declared,
)
from evenflow.specs.mixer import Mixer
from evenflow.specs.precision import DTYPE_BYTES, FORMATS, KV_BYTES, Format

QK_NORM_BYTES = 8
"""Of a token's sums of squares of queries and of keys, in 32 bits."""


class Split(NamedTuple):
    """Number of slices each expert is cut in, and of ranks that experts are spread over."""

    slices: int
    ranks: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describe one model in the terms of its config.json.

    `gated_mlp`: three MLP matrices (gate, up, down) instead of two. `attention_bias`: a bias on the
    query, key and value projections. `parallel_attention`: attention and MLP read the same input
    and are summed once (Falcon). So tensor parallelism reduces once a layer instead of twice.
    `qk_norm`: queries and keys are normalised, a head at a time (Qwen3). `qk_norm_over_heads`: over
    all heads (MiniMax-M2). So tensor parallelism reduces two sums a token and layer besides (vLLM,
    pull request 31493).

    `num_experts` > 0: a mixture of experts. A router sends each token to `experts_per_token` MLPs
    of `expert_intermediate_size` columns. `norm_topk_prob`: their shares add up to 1.
    Every token also passes one shared MLP of `shared_intermediate_size` columns with a separate
    gate, if that is above 0. `intermediate_size` is then that of layers without experts.

    `kv_lora_rank` > 0: multi-head latent attention (DeepSeek-V2, section 2.1). A token keeps one
    latent vector of that size and a rotated key of `qk_rope_head_dim`, for all heads. Queries pass
    a latent of `q_lora_rank` (0: none). A head compares `head_dim` values without position and the
    rotated ones, and yields `v_head_dim`.

    `sliding_window` > 0: tokens attend to that many last ones.

    `mtp_layers` > 0: after its layers it has that many to predict further tokens (`mtp`).
    `is_mtp`: its layers are such modules. They first project a hidden state and a token's
    embedding, side by side, to one (DeepSeek-V3, section 2.2). Embedding and head are the model's.

    `mixer`: what a layer has in place of plain attention, or beside it. `attention_gate`: queries
    come with as many gates of the outputs (Qwen3.5). `values_are_keys`: both are of one projection
    (Gemma 4). `expert_hidden_size` > 0: experts work on vectors of that size, not the hidden one.

    `parts`: the kinds of layers, as models of such layers alone; empty where all are alike. Unlike
    are dense ones before a mixture's, windows between global ones. `pattern` has the part of each
    layer.

    `quantization`: the format of the layers' matrices, a name of `FORMATS`; "": the model's dtype.
    `plain_attention`, `plain_mlp`: what stays in the model's dtype; in gpt-oss both, so that only
    experts are quantised. `expert_quantization`: theirs, where it is another (DeepSeek-V4).
    `kv_dtype`: that of keys and values, a name of `KV_BYTES`; "": the model's.

    `source`: where the shape is from; of the table, the repository on huggingface.co whose
    config.json it is.
    """

    name: str
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    intermediate_size: Whole
    vocab_size: Count
    max_position_embeddings: Count
    rope_theta: Positive
    gated_mlp: bool = True
    dtype_bytes: Count = 2
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    parallel_attention: bool = False
    norm_epsilon: Positive = 1e-5
    family: str = "llama"
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    num_experts: Whole = 0
    experts_per_token: int = 0
    norm_topk_prob: bool = True
    expert_intermediate_size: int = 0
    shared_intermediate_size: Whole = 0
    quantization: str = ""
    kv_dtype: str = ""
    kv_lora_rank: Whole = 0
    q_lora_rank: Whole = 0
    qk_rope_head_dim: Whole = 0
    v_head_dim: Whole = 0
    sliding_window: Whole = 0
    plain_attention: bool = False
    plain_mlp: bool = False
    mtp_layers: Whole = 0
    is_mtp: bool = False
    mixer: Mixer | None = None
    attention_gate: bool = False
    values_are_keys: bool = False
    expert_quantization: str = ""
    expert_hidden_size: Whole = 0
    parts: tuple["ModelSpec", ...] = ()
    pattern: tuple[int, ...] = ()
    source: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        require_declared(self.name, self)
        if not (self.num_experts or self.parts or self.mixer):
            require_counts(self.name, intermediate_size=self.intermediate_size)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.name}: {self.num_kv_heads} KV heads do not divide {self.num_heads} heads"
            )
        if self.num_experts:
            self._check_experts()
        if self.kv_lora_rank:
            sizes = {"qk_rope_head_dim": self.qk_rope_head_dim, "v_head_dim": self.v_head_dim}
            require_counts(self.name, **sizes)
        for key, value, known in (
            ("quantization", self.quantization, FORMATS),
            ("expert_quantization", self.expert_quantization, FORMATS),
            ("kv_dtype", self.kv_dtype, KV_BYTES),
        ):
            if value and value not in known:
                raise UsageError(f'{self.name}: {key} is "{value}"; {instead_of(value, known)}')

    @classmethod
    def from_config_json(
        cls, path: str | Path, dtype: str | None = None, kv_dtype: str | None = None
    ) -> Self:
        """Read a Hugging Face config.json, or the folder that holds one.

        Families are those of `families.csv`. Formats that are given (`in_precision`) go before the
        file's. UsageError names the file and the key.
        """
        from evenflow.specs.huggingface import read_config

        values = read_config(path, dtype, kv_dtype)
        layers = values.pop("layers", [])
        try:
            return in_precision(cls(**values).of_layers(layers), dtype, kv_dtype)
        except UsageError as error:
            raise UsageError(f"{values['source']}: {error}") from None

    def of_layers(self, layers: Sequence[Mapping[str, Any]]) -> Self:
        """Return the model with layers that differ from it in these fields, one after the other."""
        if not any(layers):
            return self
        unlike = [layer for i, layer in enumerate(layers) if layer not in layers[:i]]
        parts = tuple(replace(self, **layer) for layer in unlike)
        return replace(self, parts=parts, pattern=tuple(map(unlike.index, layers)))

    def changed(self, **fields: Any) -> Self:
        """Return the model with fields of all of its layers replaced."""
        parts = tuple(replace(part, **fields) for part in self.parts)
        return replace(self, parts=parts, **fields)

    def kinds(self, start: int = 0, stop: int | None = None) -> dict[Self, int]:
        """Return how many of the layers [start, stop) are of each kind: models of such layers."""
        stop = self.num_layers if stop is None else stop
        if not self.parts:
            return {self: stop - start}
        parts = cast("tuple[Self, ...]", self.parts)
        return dict(Counter(parts[part] for part in self.pattern[start:stop]))

    @property
    def dense_layers(self) -> int:
        """Number of the first layers of a mixture that have no experts."""
        experts = [self.parts[part].num_experts for part in self.pattern]
        return next((layer for layer, count in enumerate(experts) if count), 0)

    @property
    def full_every(self) -> int:
        """Number n where each n-th layer attends to all tokens, others to a window; 0: none."""
        windows = [self.parts[part].sliding_window for part in self.pattern]
        return windows.index(0) + 1 if any(windows) and 0 in windows else 0

    def kinds_by_stage(self, layers_per_stage: Sequence[int]) -> dict[Self, list[int]]:
        """Return how many layers of each kind every stage has."""
        pairs = zip(accumulate(layers_per_stage), layers_per_stage, strict=True)
        stages = [self.kinds(stop - count, stop) for stop, count in pairs]
        kinds = dict.fromkeys(kind for stage in stages for kind in stage)
        return {kind: [stage.get(kind, 0) for stage in stages] for kind in kinds}

    def kind_words(self) -> str:
        """Say what a layer of this kind is: what mixes its tokens, and its MLP."""
        plain = "latent attention" if self.kv_lora_rank else "attention"
        if self.sliding_window:
            plain += f" to {self.sliding_window} tokens"
        mixer, mlp = self.mixer, f"MLP of {self.intermediate_size}"
        if mixer is not None:
            beside = f", {mixer.name}" if mixer.name else ""
            plain = f"{plain}{beside}" if mixer.beside else mixer.name
        if self.num_experts:
            mlp = f"{self.experts_per_token} of {self.num_experts} experts"
        return f"{plain}; {mlp if self.num_experts or self.intermediate_size else 'no MLP'}"

    def require_plain(self, what: str) -> None:
        """Raise UsageError where layers have another mixer than attention, which `what` lacks."""
        mixers = {kind.mixer.name for kind in self.kinds() if kind.mixer}
        if mixers:
            names = ", ".join(sorted(filter(None, mixers)))
            raise UsageError(
                f"{what} has no formula for {names} layers of {self.name}; "
                "costs: aiconfigurator has their times"
            )

    def mtp(self) -> Self:
        """Return the modules that predict later tokens, of the last kind; UsageError if none."""
        if not self.mtp_layers:
            raise UsageError(f"{self.name} has no layer that predicts further tokens (MTP)")
        (kind,) = self.kinds(self.num_layers - 1)
        return replace(
            kind, name=f"{self.name}-MTP", num_layers=self.mtp_layers, mtp_layers=0, is_mtp=True
        )

    def linear_shapes(self, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the matrices that every token passes in a layer, on one rank.

        In order: qkv, o, and the MLP (gate and up, down). In a mixture of experts the MLP is the
        shared one, if there is one. The router, whole on every rank, follows. A next-token module
        has what projects its input, too. Heads and MLP columns are divided over the ranks, rounded
        up.
        KV heads are replicated where there are fewer of them than ranks. Latent attention: see
        `_latent_shapes`.
        """
        hidden, mixer = self.hidden_size, self.mixer
        attention = () if mixer and not mixer.beside else self._attention_shapes(tensor_parallel)
        attention += mixer.shapes(tensor_parallel) if mixer else ()
        mlp = self.mlp_shapes(tensor_parallel)
        router = ((hidden, self.num_experts),) if self.num_experts else ()
        entry = ((2 * hidden, -(-hidden // tensor_parallel)),) if self.is_mtp else ()
        return attention + mlp + router + entry

    def _attention_shapes(self, ranks: int) -> tuple[tuple[int, int], ...]:
        heads, size = -(-self.num_heads // ranks), self.v_head_dim or self.head_dim
        if self.kv_lora_rank:
            return self._latent_shapes(heads)
        queries = heads * self.head_dim * (2 if self.attention_gate else 1)
        kept = self.head_dim + (0 if self.values_are_keys else size)
        qkv = queries + self.local_kv_heads(ranks) * kept
        return (self.hidden_size, qkv), (heads * size, self.hidden_size)

    def up_shape(self, tensor_parallel: int = 1) -> tuple[int, int] | None:
        """Return the matrix that makes the heads' keys and values of latents; None without any."""
        heads = -(-self.num_heads // tensor_parallel)
        columns = heads * (self.head_dim + self.v_head_dim)
        return (self.kv_lora_rank, columns) if self.kv_lora_rank else None

    def _latent_shapes(self, heads: int) -> tuple[tuple[int, int], ...]:
        """Return down (whole on every rank), the queries' up if there is one, the heads' up, o.

        The heads' up-projection makes keys and values of latents, or, absorbed into queries and
        outputs as in decode steps, as many operations with the same matrix.
        """
        hidden, queries = self.hidden_size, heads * (self.head_dim + self.qk_rope_head_dim)
        down = self.kv_lora_rank + self.qk_rope_head_dim
        up = (self.kv_lora_rank, heads * (self.head_dim + self.v_head_dim))
        o = (heads * self.v_head_dim, hidden)
        if not self.q_lora_rank:
            return (hidden, down + queries), up, o
        return (hidden, self.q_lora_rank + down), (self.q_lora_rank, queries), up, o

    def mlp_shapes(self, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the MLP of `linear_shapes`; in a mixture the shared one."""
        return self._mlp_shapes(-(-self.shared_columns // tensor_parallel))

    def expert_shapes(self, tensor_parallel: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of one expert's matrices, columns divided over the ranks."""
        columns = -(-self.expert_intermediate_size // tensor_parallel)
        return self._mlp_shapes(columns, self.expert_hidden_size)

    @property
    def shared_columns(self) -> int:
        """MLP columns that every token passes."""
        return self.shared_intermediate_size if self.num_experts else self.intermediate_size

    def _mlp_shapes(self, columns: int, hidden: int = 0) -> tuple[tuple[int, int], ...]:
        if columns == 0:
            return ()
        hidden = hidden or self.hidden_size
        up = 2 * columns if self.gated_mlp else columns
        return (hidden, up), (columns, hidden)

    def _check_experts(self) -> None:
        require_counts(
            self.name,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_intermediate_size=self.expert_intermediate_size,
        )
        if self.experts_per_token > self.num_experts:
            raise UsageError(
                f"{self.name}: experts_per_token is {self.experts_per_token}; there are only "
                f"{self.num_experts} experts"
            )

    def local_kv_heads(self, tensor_parallel: int = 1) -> int:
        """Return the KV heads that one tensor-parallel rank holds, at least 1; a latent is one."""
        if self.kv_lora_rank:
            return 1
        return -(-self.num_kv_heads // tensor_parallel)

    def layer_parameters(self, tensor_parallel: int = 1) -> int:
        """Return the parameters of one layer on one rank: matrices, qkv bias, norm vectors.

        Of a mixture's dense layers and the others, of each by itself: `kinds`.
        """
        matrices = self._matrices(tensor_parallel, None)
        held = sum(count * parameters((shape,)) for shape, count, _ in matrices)
        return held + self._vectors(tensor_parallel)

    def layer_bytes(self, tensor_parallel: int = 1, split: Split | None = None) -> int:
        """Return the bytes of one layer's weights on one rank; `layer_parameters` says of which.

        `split` is that of its experts; None: every rank has its columns of all of them.
        """
        matrices = self._matrices(tensor_parallel, split)
        held = sum(count * self.matrix_bytes(shape, stored) for shape, count, stored in matrices)
        return held + self._vectors(tensor_parallel) * self.dtype_bytes

    def _matrices(self, ranks: int, split: Split | None) -> list[tuple[tuple[int, int], int, str]]:
        """Return a layer's matrices on one rank: how often each is there, and its format."""
        slices, over = split or (ranks, 1)
        own = [
            (shape, 1, self.quantization if self.is_quantized(shape, ranks) else "")
            for shape in self.linear_shapes(ranks)
        ]
        experts, stored = self.num_experts // over, self.expert_format
        return own + [(shape, experts, stored) for shape in self.expert_shapes(slices)]

    def _vectors(self, ranks: int) -> int:
        bias = self.linear_shapes(ranks)[0][1] if self.attention_bias else 0
        heads = self.num_heads + self.num_kv_heads if self.qk_norm_over_heads else 2
        norms = 2 * self.hidden_size + (heads * self.head_dim if self.qk_norm else 0)
        latents = self.kv_lora_rank + self.q_lora_rank
        gated = self.family in ("qwen2_moe", "qwen3_5")
        gate = self.hidden_size if self.num_experts and self.shared_columns and gated else 0
        return bias + norms + latents + gate + (self.mixer.vectors if self.mixer else 0)

    @property
    def format(self) -> Format | None:
        """The format of the layers' matrices; None for the model's own dtype."""
        return FORMATS[self.quantization] if self.quantization else None

    @property
    def expert_format(self) -> str:
        """The format of the experts, a name of `FORMATS`; "" for the model's own dtype."""
        return self.expert_quantization or self.quantization

    def matrix_bytes(self, shape: tuple[int, int], stored: str) -> int:
        """Return the bytes of a matrix in a format, with scales; in the model's dtype for ""."""
        if not stored:
            return shape[0] * shape[1] * self.dtype_bytes
        return FORMATS[stored].matrix_bytes(shape)

    def is_quantized(self, shape: tuple[int, int], ranks: int) -> bool:
        """Say whether a matrix that every token passes is in the format; a router never is.

        `shape` is that on one of `ranks` tensor-parallel ranks.
        """
        if not self.quantization or shape[1] == self.num_experts:
            return False
        plain = self.plain_mlp if shape in self.mlp_shapes(ranks) else self.plain_attention
        return not plain

    @property
    def kv_value_bytes(self) -> int:
        return KV_BYTES[self.kv_dtype] if self.kv_dtype else self.dtype_bytes

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; the LM head is as large."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embedding and LM head count once."""
        ends = 1 if self.tie_word_embeddings else 2
        layers = sum(count * kind.layer_parameters() for kind, count in self.kinds().items())
        return layers + ends * self.embedding_parameters + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes: all of them, less the experts it is not sent to."""
        return self.num_parameters - sum(
            count * (kind.num_experts - kind.experts_per_token) * parameters(kind.expert_shapes())
            for kind, count in self.kinds().items()
        )

    def kv_bytes_per_token(self, layers: int | None = None, tensor_parallel: int = 1) -> int:
        """Return the bytes that one token's keys and values take in `layers` layers of one rank.

        `layers` are of the kind that the model itself is; None: all of the model's, of any kind.
        """
        return kv_bytes_of(self.kinds() if layers is None else {self: layers}, tensor_parallel)

    def kv_token_bytes(self, tensor_parallel: int = 1) -> float:
        """Return the bytes that a token keeps in a layer on one rank; less than one of several."""
        index = self.mixer.index_bytes if self.mixer else 0.0
        return self.kv_values(tensor_parallel) * self._kept_value_bytes + index

    @property
    def _kept_value_bytes(self) -> float:
        """Bytes of one element of what a token keeps, with its share of scales."""
        small = self.kv_value_bytes == 1 and self.mixer
        return small.small_bytes if small else self.kv_value_bytes

    def kv_values(self, tensor_parallel: int = 1) -> float:
        """Return the values that a token keeps in a layer on one rank.

        2 (K and V) x KV heads x head size. Or a latent and a rotated key, whole on every rank. Or
        what its mixer keeps.
        """
        if self.mixer and not self.mixer.beside:
            return self.mixer.kv_values
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        size = self.head_dim + (self.v_head_dim or self.head_dim)
        return self.local_kv_heads(tensor_parallel) * size

    def state_bytes(self, tensor_parallel: int = 1) -> int:
        """Return the bytes that a request keeps in a layer on one rank, however long it is."""
        if self.mixer is None:
            return 0
        shared = -(-self.mixer.state_bytes // tensor_parallel)
        window = self.mixer.window_values * self._kept_value_bytes
        return shared + round(window) + self.mixer.pending_bytes


Model = TypeVar("Model", bound=ModelSpec)


def kv_bytes_of(kinds: Mapping[ModelSpec, int], tensor_parallel: int) -> int:
    """Return the bytes that one token's keys and values take in layers of some kinds, on a rank."""
    return round(math.fsum(n * kind.kv_token_bytes(tensor_parallel) for kind, n in kinds.items()))


def in_precision(spec: Model, dtype: str | None, kv_dtype: str | None) -> Model:
    """Return a model with its weights in `dtype`, and its keys and values in `kv_dtype`.

    `dtype` is a plain type (bfloat16, float16, float32) or a name of `FORMATS`. That leaves what is
    not quantised at 2 bytes. None leaves either as it is.
    """
    if dtype in DTYPE_BYTES:
        spec = spec.changed(dtype_bytes=DTYPE_BYTES[dtype], quantization="", expert_quantization="")
    elif dtype is not None:
        spec = spec.changed(dtype_bytes=2, quantization=dtype, expert_quantization="")
    return spec if kv_dtype is None else spec.changed(kv_dtype=kv_dtype)


def parameters(shapes: tuple[tuple[int, int], ...]) -> int:
    """Return how many parameters matrices of these (inputs, outputs) hold."""
    return sum(inputs * outputs for inputs, outputs in shapes)
