"""The systems of the papers as keys of RUN.yaml: which policy on which deployment each one is.

Data, for `evenflow schedulers`, docs/systems.md and examples/systems; the code is the policies' and
the deployment's. `python -m experiments.systems` prints the table of the document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from evenflow.errors import UsageError, instead_of

ORACLE = "request by request against an independent simulator; invariants; replay"
POOLS = (
    "transfers and back-pressure by hand; request by request against an independent simulator; "
    "invariants and replay of every pool"
)


@dataclass(frozen=True, slots=True)
class System:
    """A system: its `keys` are YAML laid over a run with four GPUs; `name` is its example's."""

    name: str
    title: str
    keys: str
    source: str
    checked: str


SYSTEMS: tuple[System, ...] = (
    System(
        "faster_transformer",
        "FasterTransformer",
        "{scheduler: static}",
        "Orca, section 2; Sarathi-Serve, section 2.4",
        ORACLE,
    ),
    System("orca", "Orca", "{scheduler: orca}", "Orca (OSDI'22)", ORACLE),
    System(
        "vllm_v0",
        "vLLM V0, pipeline",
        "{scheduler: vllm, virtual_engines: true, runtime: vllm}",
        "vLLM V0: an engine, a cap and a share of the KV a stage; CPU share of gLLM, section 3.4",
        f"virtual engines: {ORACLE}",
    ),
    System(
        "vllm_v1",
        "vLLM V1, pipeline",
        "{scheduler: {name: sarathi, token_budget: 2048}, dispatch: eager, runtime: vllm}",
        "vLLM V1: one scheduler that fills every free slot; CPU share of gLLM, section 3.4",
        f"policy: {ORACLE}",
    ),
    System(
        "sarathi",
        "Sarathi-Serve",
        "{scheduler: {name: sarathi, token_budget: 512}}",
        "Sarathi-Serve, algorithm 3",
        ORACLE,
    ),
    System(
        "sarathi_chunked_only",
        "Sarathi-Serve, chunked prefills only",
        "{scheduler: {name: sarathi, token_budget: 512, mode: chunked_only}}",
        "Sarathi-Serve, table 4",
        ORACLE,
    ),
    System(
        "sarathi_hybrid_only",
        "Sarathi-Serve, hybrid batching only",
        "{scheduler: {name: sarathi, token_budget: 512, mode: hybrid_only}}",
        "Sarathi-Serve, table 4",
        ORACLE,
    ),
    System(
        "gllm",
        "gLLM",
        "{scheduler: token_throttling, runtime: gllm}",
        "gLLM, equations (3) and (4)",
        f"budgets against the equations; case studies of figures 7 and 8; {ORACLE}",
    ),
    System(
        "gllm_no_wt",
        "gLLM without WT",
        "{scheduler: {name: token_throttling, use_wt: false}, runtime: gllm}",
        "gLLM, section 4.5",
        f"budgets against the equations; {ORACLE}",
    ),
    System(
        "gllm_no_ut",
        "gLLM without UT",
        "{scheduler: {name: token_throttling, use_ut: false}, runtime: gllm}",
        "gLLM, section 4.5",
        f"budgets against the equations; {ORACLE}",
    ),
    System(
        "gllm_ck",
        "gLLM with CK",
        "{scheduler: {name: token_throttling, coupled: true}, runtime: gllm}",
        "gLLM, section 4.5",
        ORACLE,
    ),
    System(
        "sglang",
        "SGLang",
        "{stages: 1, tensor_parallel: 4, scheduler: {name: sarathi, token_budget: 2048, "
        "max_num_seqs: 4096}, runtime: sglang}",
        "gLLM, evaluation; SGLang 0.4's own cap; its CPU work hidden: an input, not measured",
        f"policy: {ORACLE}; all-reduce: by hand, TD-Pipe figure 6",
    ),
    System(
        "tp_sb",
        "TP+SB",
        "{stages: 1, tensor_parallel: 4, scheduler: vllm, runtime: vllm}",
        "TD-Pipe, evaluation (vLLM 0.5.3)",
        f"policy: {ORACLE}; all-reduce: by hand, TD-Pipe figure 6",
    ),
    System(
        "tp_hb",
        "TP+HB",
        "{stages: 1, tensor_parallel: 4, scheduler: {name: sarathi, token_budget: 2048}, "
        "runtime: vllm}",
        "TD-Pipe, evaluation (vLLM 0.5.3)",
        f"policy: {ORACLE}; all-reduce: by hand, TD-Pipe figure 6",
    ),
    System(
        "pp_sb",
        "PP+SB",
        "{scheduler: vllm, virtual_engines: true, runtime: vllm}",
        "TD-Pipe, evaluation (vLLM 0.5.3)",
        f"virtual engines: {ORACLE}",
    ),
    System(
        "pp_hb",
        "PP+HB",
        "{scheduler: {name: sarathi, token_budget: 2048}, virtual_engines: true, runtime: vllm}",
        "TD-Pipe, evaluation (vLLM 0.5.3)",
        f"virtual engines: {ORACLE}",
    ),
    System(
        "td_pipe",
        "TD-Pipe",
        "{scheduler: td_pipe}",
        "TD-Pipe, algorithm 1 and section 3; docs/td_pipe.md",
        f"figure 9 to the digit; the equations; each decision by hand; {ORACLE}",
    ),
    System(
        "distserve",
        "DistServe",
        "{scheduler: distserve}",
        "DistServe (OSDI'24), sections 3 and 4; docs/disaggregation.md",
        POOLS,
    ),
    System(
        "splitwise",
        "Splitwise",
        "{scheduler: splitwise}",
        "Splitwise (ISCA'24), section 4; a mixed pool needs GPUs that hold the model alone",
        POOLS,
    ),
)


def keys_of_system(name: str) -> dict[str, Any]:
    """Return the keys of a published system; UsageError with the known ones for another name."""
    for system in SYSTEMS:
        if system.name == name:
            return dict(yaml.safe_load(system.keys))
    raise UsageError(f"{name}: no such system; {instead_of(name, [s.name for s in SYSTEMS])}")


def markdown() -> str:
    """Return the table of docs/systems.md."""
    head = "| system | YAML | from | how it was checked |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {system.title} | `{system.keys}` | {system.source} | {system.checked} |\n"
        for system in SYSTEMS
    )


if __name__ == "__main__":
    print(markdown(), end="")
