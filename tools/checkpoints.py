"""Small random models to try the runtime with: their files, and the tokens they should give.

Needs torch, and safetensors to write weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from evenflow.runtime.torch.model import Part, Rope, Stage, sample
from evenflow.runtime.torch.weights import random_weights
from evenflow.runtime.wire import Piece
from evenflow.specs.modelspec import ModelSpec
from tools.launch_plans import config_json


def write_config(spec: ModelSpec, path: Path) -> None:
    """Write the config.json of a model that `read_model` can read."""
    values = config_json(spec) | {
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_epsilon,
        "attention_bias": spec.attention_bias,
        "torch_dtype": "bfloat16" if spec.dtype_bytes == 2 else "float32",
    }
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def save_random(spec: ModelSpec, rope: Rope, folder: Path) -> None:
    """Write a checkpoint of random weights in float32, drawn on the CPU."""
    from safetensors.torch import save_file

    draw = random_weights(torch.float32, torch.device("cpu"))
    tensors: dict[str, torch.Tensor] = {}

    def kept(name: str, shape: tuple[int, ...], part: Part) -> torch.Tensor:
        tensors[name] = draw(name, shape, part)
        return tensors[name]

    Stage(spec, rope, 0, spec.num_layers, kept)
    save_file(tensors, str(folder / "model.safetensors"))
    write_config(spec, folder / "config.json")


def greedy_tokens(stage: Stage, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the tokens that a stage with all layers of a model continues a prompt with."""
    page_tokens = 16
    total_pages = (len(prompt) + new_tokens) // page_tokens + 1
    kv, pages = stage.kv_pages(total_pages, page_tokens), list(range(total_pages))
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + new_tokens:
        row = Piece(0, computed, len(tokens), True, pages)
        ids = torch.tensor(tokens[computed:], device=stage.device)
        logits = stage.forward(ids, stage.inputs([row], page_tokens), kv)
        computed = len(tokens)
        tokens += sample(logits)
    return tokens[len(prompt) :]
