"""Published times and ratios that follow from costs alone, beside what the cost model predicts.

No scheduler is involved and none of these numbers was used in a fit, except the two L20 times,
which are points of the fitted curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from evenflow.costs import RooflineCost, Work, decode_work, prefill_work
from evenflow.specs.deployment import Deployment, split_layers
from evenflow.specs.gpu import LinkSpec, gpu, link
from evenflow.specs.model import model


class Fact(NamedTuple):
    """A published number and our prediction of it, in the unit that the name states."""

    name: str
    published: float
    predicted: float

    @property
    def off(self) -> float:
        """Relative difference of the prediction."""
        return self.predicted / self.published - 1


def published_facts() -> list[Fact]:
    """Return all facts, in the order of the table in docs/costs.md."""
    return [*_l20_times(), *_decode_iterations(), *_tensor_parallel_prefill(), *_chunking()]


def _cost(
    name: str, gpu_name: str, stages: int = 1, ranks: int = 1, all_reduce: LinkSpec | None = None
) -> RooflineCost:
    spec = model(name)
    layers = split_layers(spec.num_layers, stages)
    return RooflineCost(Deployment(spec, gpu(gpu_name), layers, ranks), all_reduce)


def _l20_times() -> Iterator[Fact]:
    cost = _cost("Qwen2.5-32B", "L20")
    for tokens, published_ms in ((1, 85.5), (2047, 1208)):
        name = f"L20, Qwen2.5-32B, length {tokens}, ms"
        yield Fact(name, published_ms, 1000 * cost(0, prefill_work(tokens)))


def _decode_iterations() -> Iterator[Fact]:
    """Sarathi-Serve, Table 3: strict SLO / 5, a decode step at batch 32 and 4096 tokens of context.

    Four ranks with NVLink in pairs all-reduce over PCIe between the pairs.
    """
    work = decode_work(32, 32 * 4096)
    pcie, nvlink = link("allreduce-a100-pcie"), link("nvlink-a100")
    ethernet = link("ethernet-100g").transfer_s(0)
    cases = (
        ("Mistral-7B, A100", 20, _cost("Mistral-7B", "A100-80G"), 0.0),
        ("Yi-34B TP2, A100", 40, _cost("Yi-34B", "A100-80G", 1, 2, nvlink), 0.0),
        ("LLaMA2-70B TP4-PP2, A40", 200, _cost("Llama2-70B", "A40", 2, 4, pcie), 0.0),
        ("Falcon-180B TP4-PP2, A100", 200, _cost("Falcon-180B", "A100-80G", 2, 4, pcie), ethernet),
    )
    for name, published_ms, cost, between_s in cases:
        yield Fact(
            f"decode iteration, {name}, ms",
            published_ms,
            1000 * (sum(cost.times(work)) + between_s),
        )


def _tensor_parallel_prefill() -> Iterator[Fact]:
    """TD-Pipe, Fig. 6: Llama-30B prefill of 2048 tokens on L20."""
    work = prefill_work(2048)
    ring = link("allreduce-l20")
    alone_s = _cost("Llama-30B", "L20")(0, work)
    for ranks, published in ((2, 0.2584), (4, 0.4739)):
        cost = _cost("Llama-30B", "L20", 1, ranks, ring)
        share = 60 * cost.all_reduce_s(2048) / cost(0, work)
        yield Fact(f"TP{ranks} prefill, Llama-30B, L20, share of communication", published, share)
    four_s = _cost("Llama-30B", "L20", 1, 4, ring)(0, work)
    yield Fact("TP4 prefill, Llama-30B, L20, speed-up over 1 GPU", 1.84, alone_s / four_s)


def _chunking() -> Iterator[Fact]:
    """Sarathi-Serve, Fig. 14, section 4.3 and Fig. 9: prompts in chunks, and with decodes."""
    cost = _cost("Yi-34B", "A100-80G", 1, 2, link("nvlink-a100"))
    whole_s = cost(0, prefill_work(8192))
    yield Fact(
        "chunks of 512 over one piece, Yi-34B TP2 (at most)", 1.25, _chunked_s(cost, 512) / whole_s
    )
    tile = _chunked_s(cost, 257) / _chunked_s(cost, 256)
    yield Fact("chunks of 257 over chunks of 256, Yi-34B TP2 (worst)", 1.32, tile)
    decodes = decode_work(32, 32 * 4096)
    prompt = prefill_work(8192)
    both = Work(prompt.chunks, 8192, 32, decodes.decode_context, 33)
    yield Fact(
        "decodes with a whole prompt over decodes, Yi-34B TP2 (largest)",
        28.3,
        cost(0, both) / cost(0, decodes),
    )


def _chunked_s(cost: RooflineCost, chunk_tokens: int, prompt_tokens: int = 8192) -> float:
    total_s = 0.0
    for start in range(0, prompt_tokens, chunk_tokens):
        tokens = min(chunk_tokens, prompt_tokens - start)
        total_s += cost(0, prefill_work(tokens, start, last=start + tokens == prompt_tokens))
    return total_s
