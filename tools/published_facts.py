"""Published times and ratios that follow from costs alone, beside what the cost model predicts.

No scheduler is involved and none of these numbers was used in a fit, except the two L20 times,
which are points of the fitted curve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from evenflow.costs import RooflineCost, prefill_work
from evenflow.costs.base import StageCost
from evenflow.costs.collectives import Ring
from evenflow.costs.estimates import REFERENCE, joined
from evenflow.costs.silicon.cost import silicon_cost, silicon_source
from evenflow.costs.silicon.points import memory_bytes_per_s
from evenflow.costs.silicon.tables import load_tables
from evenflow.errors import UsageError
from evenflow.experiments.figures.iterations import in_chunks
from evenflow.report.tables import markdown_table
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


CUBE = 8192
Costs = Callable[[Deployment, LinkSpec | None], StageCost]
"""Makes the costs of a deployment whose ranks all-reduce over a link (None: over NVLink)."""


def roofline(deployment: Deployment, all_reduce: LinkSpec | None) -> RooflineCost:
    """Return the costs by the formulas, with the bundled efficiencies."""
    return RooflineCost(deployment, all_reduce or link("nvlink-a100"))


def silicon(deployment: Deployment, all_reduce: LinkSpec | None) -> StageCost:
    """Return the costs by measured operators (vLLM); over NVLink, all-reduces are measured too."""
    fabric = None if all_reduce is None else Ring(all_reduce)
    return silicon_cost(deployment, silicon_source(deployment), fabric)


def published_facts() -> list[Fact]:
    """Return all facts, with what the roofline predicts."""
    on_l20 = [*_l20_times(), *_tensor_parallel_prefill()]
    h200 = gpu("H200")
    return [*on_l20, *_h200_rates(h200.flops_per_s, h200.bytes_per_s), *_of_models(roofline)]


def silicon_facts() -> list[Fact]:
    """Return the facts about GPUs that are measured, with what the measured operators predict."""
    products = load_tables("h200_sxm", "vllm").gemm
    flops_per_s = 2 * CUBE**3 / products[CUBE][CUBE][CUBE]
    return [*_h200_rates(flops_per_s, memory_bytes_per_s(products)), *_of_models(silicon)]


def facts_table(facts: Sequence[Fact], measured: Sequence[Fact] = ()) -> str:
    """Return facts as a table, with what the measured operators predict where they do."""
    also = {fact.name: fact for fact in measured}
    rows = []
    for fact in facts:
        cells = [fact.name, f"{fact.published:.4g}", f"{fact.predicted:.4g}", f"{fact.off:+.0%}"]
        other = also.get(fact.name)
        cells += ["", ""] if other is None else [f"{other.predicted:.4g}", f"{other.off:+.0%}"]
        rows.append(cells)
    heads = ("fact", "published", "roofline", "off by", "silicon", "off by")
    return markdown_table(heads, rows)


def _deployment(name: str, gpu_name: str, stages: int = 1, ranks: int = 1) -> Deployment:
    spec = model(name)
    return Deployment(spec, gpu(gpu_name), split_layers(spec.num_layers, stages), ranks)


def _h200_rates(flops_per_s: float, bytes_per_s: float) -> Iterator[Fact]:
    """What one H200 was measured to sustain, by none of the sources of our numbers."""
    yield Fact(f"product of {CUBE}-cubes, H200, TFLOP/s", 790, flops_per_s / 1e12)
    yield Fact("memory, H200, GB/s (a copy)", 4300, bytes_per_s / 1e9)


def _of_models(costs: Costs) -> list[Fact]:
    return [*_decode_iterations(costs), *_by_tokens(costs), *_chunking(costs)]


def _l20_times() -> Iterator[Fact]:
    cost = roofline(_deployment("Qwen2.5-32B", "L20"), None)
    for tokens, published_ms in ((1, 85.5), (2047, 1208)):
        name = f"L20, Qwen2.5-32B, length {tokens}, ms"
        yield Fact(name, published_ms, 1000 * cost.times(prefill_work(tokens))[0])


def _decode_iterations(costs: Costs) -> Iterator[Fact]:
    """Sarathi-Serve, Table 3: strict SLO / 5, a decode step at batch 32 and 4096 tokens of context.

    Four ranks with NVLink in pairs all-reduce over PCIe between the pairs.
    """
    pcie = link("allreduce-a100-pcie")
    ethernet = link("ethernet-100g").transfer_s(0)
    cases = (
        ("Mistral-7B, A100", 20, _deployment("Mistral-7B", "A100-80G"), None, 0.0),
        ("Yi-34B TP2, A100", 40, _deployment("Yi-34B", "A100-80G", 1, 2), None, 0.0),
        ("LLaMA2-70B TP4-PP2, A40", 200, _deployment("Llama2-70B", "A40", 2, 4), pcie, 0.0),
        (
            "Falcon-180B TP4-PP2, A100",
            200,
            _deployment("Falcon-180B", "A100-80G", 2, 4),
            pcie,
            ethernet,
        ),
    )
    for name, published_ms, deployment, all_reduce, between_s in cases:
        try:
            cost = costs(deployment, all_reduce)
        except UsageError:  # not measured: A40, and heads of 64 on A100
            continue
        seconds = sum(cost.times(REFERENCE)) + between_s
        yield Fact(f"decode iteration, {name}, ms", published_ms, 1000 * seconds)


def _by_tokens(costs: Costs) -> Iterator[Fact]:
    """Sarathi-Serve, section 3: one token is as dear as a short prompt; 512 tokens saturate."""
    cost = costs(_deployment("Mistral-7B", "A100-80G"), None)
    times_s = {tokens: cost.times(prefill_work(tokens))[0] for tokens in (1, 128, 512, 4096)}
    yield Fact("128 prompt tokens over 1, Mistral-7B, A100", 1.0, times_s[128] / times_s[1])
    rate = (512 / times_s[512]) / (4096 / times_s[4096])
    yield Fact("prompt tokens/s of 512 over 4096, Mistral-7B, A100", 1.0, rate)


def _tensor_parallel_prefill() -> Iterator[Fact]:
    """TD-Pipe, Fig. 6: Llama-30B prefill of 2048 tokens on L20."""
    work = prefill_work(2048)
    alone_s = roofline(_deployment("Llama-30B", "L20"), None).times(work)[0]
    for ranks, published in ((2, 0.2584), (4, 0.4739)):
        cost = roofline(_deployment("Llama-30B", "L20", 1, ranks), link("allreduce-l20"))
        share = 60 * cost.all_reduce_s(2048) / cost.times(work)[0]
        yield Fact(f"TP{ranks} prefill, Llama-30B, L20, share of communication", published, share)
    speed_up = alone_s / cost.times(work)[0]
    yield Fact("TP4 prefill, Llama-30B, L20, speed-up over 1 GPU", 1.84, speed_up)


def _chunking(costs: Costs) -> Iterator[Fact]:
    """Sarathi-Serve, Fig. 14, section 4.3 and Fig. 9: prompts in chunks, and with decodes."""
    cost = costs(_deployment("Yi-34B", "A100-80G", 1, 2), None)
    prompt = prefill_work(8192)
    in_512, in_257, in_256 = (
        sum(cost.times(chunk)[0] for chunk in in_chunks(8192, tokens)) for tokens in (512, 257, 256)
    )
    pieces = in_512 / cost.times(prompt)[0]
    yield Fact("chunks of 512 over one piece, Yi-34B TP2 (at most)", 1.25, pieces)
    yield Fact("chunks of 257 over chunks of 256, Yi-34B TP2 (worst)", 1.32, in_257 / in_256)
    ratio = cost.times(joined(REFERENCE, prompt))[0] / cost.times(REFERENCE)[0]
    yield Fact("decodes with a whole prompt over decodes, Yi-34B TP2 (largest)", 28.3, ratio)


if __name__ == "__main__":
    print(facts_table(published_facts(), silicon_facts()), end="")
