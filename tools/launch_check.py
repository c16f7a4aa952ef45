"""Launch lines of `tools.launch_plans`, as an engine's own parser and rules take them.

`python -m tools.launch_check vllm FILE` and `... sglang FILE` each run in an environment with that
engine (`make test-vllm`, `make test-sglang`); `... gllm FILE` with gLLM's unpacked package on
the path (`make test-gllm`). Exit status 1 with the lines that would not start.
No GPU is here: what an engine checks of one is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

Plan = dict[str, Any]
NODE = {
    "vLLM": ["--node-rank", "0", "--master-addr", "127.0.0.1"],
    "SGLang": ["--node-rank", "0", "--dist-init-addr", "127.0.0.1:5000"],
}
"""What the line of each machine says besides, of the first one."""


def words_of(plan: Plan, engine: str, model: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments of a plan's line, with a folder as its model."""
    words = shlex.split(plan["commands"][engine])
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = words[len(variables) :]
    start = words.index("--model-path") + 1 if "--model-path" in words else 2
    given = [model, *words[start + 1 :]]
    return variables, given + (NODE[engine] if "--nnodes" in words else [])


def vllm(plan: Plan, model: str) -> None:
    """Raise unless vLLM takes a line: parser, configuration, layers, and KV against length."""
    from vllm.distributed.utils import get_pp_indices
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    variables, words = words_of(plan, "vLLM", model)
    os.environ.update(variables)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    parsed.model = parsed.model_tag
    validate_parsed_serve_args(parsed)
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.skip_tokenizer_init = True
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    ends = _divided(plan, config.model_config.get_total_num_hidden_layers(), get_pp_indices)
    specs = [_kv_specs(config, start, stop, plan["config"]) for start, stop in ends]
    config.cache_config.kv_cache_layout = "LBNHC"  # of a GPU; the engine core finds it out there
    get_kv_cache_configs(config, specs, plan["free_bytes"])


def _divided(plan: Plan, layers: int, indices: Callable[..., Any]) -> list[tuple[int, int]]:
    """Return where the layers of each stage begin and end; ValueError unless as planned."""
    stages = len(plan["layers"])
    ends = [indices(layers, stage, stages) for stage in range(stages)]
    if [stop - start for start, stop in ends] != plan["layers"]:
        raise ValueError(f"layers are {ends}, not {plan['layers']}")
    return ends


def _kv_specs(config: Any, start: int, stop: int, model: Plan) -> dict[str, Any]:
    """Return what vLLM keeps of a token in each layer of a stage."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    kept = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": config.model_config.get_num_kv_heads(config.parallel_config),
        "head_size": config.model_config.get_head_size(),
        "dtype": torch.uint8 if "fp8" in config.cache_config.cache_dtype else torch.bfloat16,
    }
    if "kv_lora_rank" in model:
        return {f"layer {each}": MLAAttentionSpec(**kept) for each in range(start, stop)}
    kinds = getattr(config.model_config.hf_text_config, "layer_types", None)
    window = model.get("sliding_window")
    return {
        f"layer {each}": SlidingWindowSpec(**kept, sliding_window=window)
        if kinds and kinds[each] == "sliding_attention"
        else FullAttentionSpec(**kept)
        for each in range(start, stop)
    }


def sglang(plan: Plan, model: str) -> None:
    """Raise unless SGLang takes a line: parser, `ServerArgs`, the model's configuration, layers."""
    from tools.sglang_loads import stand_in

    stand_in()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.server_args import prepare_server_args

    variables, words = words_of(plan, "SGLang", model)
    os.environ.update(variables)
    config = ModelConfig.from_server_args(prepare_server_args(["--model-path", *words]))
    _divided(plan, config.num_hidden_layers, get_pp_indices)


class Started(Exception):  # noqa: N818
    """An engine would be made now."""


def gllm(plan: Plan, model: str) -> None:
    """Raise unless gLLM takes a line: its server's parser, and the layers; all else is stood in."""
    engine = MagicMock(side_effect=Started)
    _, words = words_of(plan, "gLLM", model)
    stand_ins = {**dict.fromkeys(BESIDE_GLLM, MagicMock()), "gllm.async_llm_engine": MagicMock()}
    stand_ins["gllm.async_llm_engine"].PipeAsyncLLM = engine
    with (
        patch.dict(sys.modules, stand_ins),
        patch.object(sys, "argv", ["gllm", "--model-path", *words]),
        suppress(Started),
    ):
        runpy.run_module("gllm.entrypoints.api_server", run_name="__main__")
    given = engine.call_args.kwargs
    even = [sum(plan["layers"]) // given["pp_size"]] * given["pp_size"]
    said = given["assigned_layers"]
    if (list(map(int, said.split(","))) if said else even) != plan["layers"]:
        raise ValueError(f"layers are {said or even}, not {plan['layers']}")


BESIDE_GLLM = (
    *("fastapi", "fastapi.responses", "logger", "uvicorn", "gllm.llm_engine", "gllm.utils"),
    *(f"gllm.entrypoints.{name}" for name in ("protocol", "serving_chat", "serving_completions")),
)
"""What gLLM's server imports besides its engine."""

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

CHECKS: dict[str, Callable[[Plan, str], None]] = {"vllm": vllm, "sglang": sglang, "gllm": gllm}


def failure(check: Callable[[Plan, str], None], plan: Plan, folder: Path) -> str:
    """Return why a plan's line would not start, "" where it would."""
    (folder / "config.json").write_text(json.dumps(plan["config"]), encoding="utf-8")
    said = StringIO()
    try:
        with patch.dict(os.environ), redirect_stderr(said):
            check(plan, str(folder))
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(given: Sequence[str] | None = None) -> int:
    """Check all plans of a file, and say which would not start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=CHECKS)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args(given)
    os.environ |= QUIET
    plans = [json.loads(line) for line in asked.file.read_text(encoding="utf-8").splitlines()]
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        for number, plan in enumerate(plans):
            folder = Path(name) / str(number)  # engines remember what a path's config.json says
            folder.mkdir()
            if reason := failure(CHECKS[asked.engine], plan, folder):
                print(f"{plan['commands']}\n  {reason}", flush=True)
                reasons[reason[:80]] += 1
    print(f"{asked.engine}: {len(plans) - reasons.total()} of {len(plans)} lines start")
    print("\n".join(f"{count} x {reason}" for reason, count in reasons.most_common()))
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
