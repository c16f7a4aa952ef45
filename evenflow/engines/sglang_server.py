"""Defaults that SGLang's server derives from the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenflow.errors import is_count

CHUNKS = ((160, 16384), (60, 8192), (20, 4096), (0, 2048))
"""GiB of a GPU from which on, and tokens of a chunk (`chunked_prefill_size`)."""

GRAPHS = ((160, (512, 512)), (60, (256, 512)), (35, (32, 160)), (20, (48, 160)), (0, (8, 8)))
"""GiB of a GPU from which on, and rows of the largest CUDA graph of decodes: to 3 ranks, and from
4.
"""

PROMPTS = (
    *((4, 33, 4), (48, 257, 16), (288, 513, 32)),
    *((576, 1025, 64), (1280, 4097, 256), (4608, 32769, 512)),
)
"""Ranges (start, stop, step) of the token counts for which prompts have CUDA graphs."""


def chunked_prefill_size(gib: float) -> int:
    """Return the default `chunked_prefill_size` in tokens on GPUs of `gib` GiB."""
    return int(_by_size(gib, CHUNKS))


def mem_fraction_static(
    gib: float,
    params: Mapping[str, Any],
    ranks: int,
    stages: int,
    groups: int,
    *,
    eager: bool,
) -> float:
    """Return the default `mem_fraction_static`: the share of a GPU's memory for weights and pages.

    Left free are MiB for activations, for CUDA graphs (none: `eager`), and for each of `ranks` x
    `stages` GPUs; more with data-parallel `groups`. `gib`: GiB of the GPU; `params`: the policy's.
    Known error: for latent attention SGLang leaves 1 GiB more. Source: SGLang 0.5.23,
    arg_groups/memory_hook.py: handle_gpu_memory_settings, reserve_for_graph_mb.
    """
    ranks *= groups
    given = {key: value for key, value in params.items() if value is None or is_count(value)}
    chunk = given.get("chunked_prefill_size", chunked_prefill_size(gib)) or 0
    most = _by_size(gib, GRAPHS)[ranks >= 4]
    rows = min(most, given.get("max_running_requests") or most)
    prompts = sum(size <= chunk for sizes in PROMPTS for size in range(*sizes))
    kept = 512 + 1.5 * max(chunk or given.get("max_prefill_tokens") or 16384, 2048)
    if not eager:
        kept += 2 * rows + 8 * prompts * (stages == 1)
    kept += ranks * stages * 128
    if groups > 1:
        kept += rows * groups * (4.5 if rows > 300 else 3)
    if gib > 60:
        kept = max(kept, 10240)
    return round(1 - kept / (gib * 1024), 3)


def _by_size(gib: float, table: Sequence[tuple[int, Any]]) -> Any:
    return next(value for least, value in table if gib >= least)
