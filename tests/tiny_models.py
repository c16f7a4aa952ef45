"""Random tiny checkpoints, saved by transformers, and a loop that decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from evenflow.core.kv import PagePool  # noqa: E402
from evenflow.runtime.torch.model import Stage, sample  # noqa: E402
from evenflow.runtime.torch.settings import cut  # noqa: E402
from evenflow.runtime.torch.weights import load_stage, read_model  # noqa: E402
from evenflow.runtime.wire import Piece  # noqa: E402
from evenflow.specs.deployment import split_layers  # noqa: E402
from tests.configs import CONFIGS  # noqa: E402

torch.set_num_threads(1)  # threads that wait for each other on a busy machine take seconds

PAGE_TOKENS = 4
SHAPE = CONFIGS["tiny"]


def save_checkpoint(folder: Path, family: str, **changes: Any) -> Any:
    """Save a random checkpoint of a `family` of transformers; return its model."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the oracle")
    config = transformers.AutoConfig.for_model(family, **(SHAPE | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return model


def continued(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Return what transformers' `generate` continues a prompt with, greedily, past any end."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def load_stages(folder: Path, stages: int, device: str = "cpu") -> list[Stage]:
    """Load a checkpoint as so many stages."""
    spec, _ = read_model(folder)
    spans = cut(split_layers(spec.num_layers, stages))
    return [load_stage(folder, start, stop, device=device) for start, stop in spans]


def generate(
    stages: Sequence[Stage], prompts: Sequence[list[int]], new_tokens: int, chunk_tokens: int
) -> list[list[int]]:
    """Decode greedily; row i joins at step i, so that chunks and decodes share micro-batches."""
    pool = PagePool(64, PAGE_TOKENS)
    caches = [stage.kv_pages(64, PAGE_TOKENS) for stage in stages]
    tokens = [list(prompt) for prompt in prompts]
    pages: list[list[int]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    ends = [len(prompt) + new_tokens for prompt in prompts]
    step = 0
    while any(len(row) < end for row, end in zip(tokens, ends, strict=True)):
        step += 1
        work, ids, sampled = [], [], []
        for row, have in enumerate(tokens):
            if row >= step or len(have) == ends[row]:
                continue
            stop = min(computed[row] + chunk_tokens, len(have))
            pages[row] += pool.allocate(pool.pages_for(stop) - len(pages[row]))
            work.append(Piece(row, computed[row], stop, stop == len(have), pages[row]))
            ids += have[computed[row] : stop]
            sampled += [row] if stop == len(have) else []
            computed[row] = stop
        values = torch.tensor(ids, device=stages[0].device)
        for stage, cache in zip(stages, caches, strict=True):
            values = stage.forward(values, stage.inputs(work, PAGE_TOKENS), cache)
        for row, token in zip(sampled, sample(values), strict=True):
            tokens[row].append(token)
    return [row[len(prompt) :] for row, prompt in zip(tokens, prompts, strict=True)]


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, name: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(name))
        return name(*args, **(kwargs or {}))
