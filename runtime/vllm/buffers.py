"""What a worker of vLLM lacks on a CPU that runs without its warm-up."""

from __future__ import annotations

from typing import Any


class Buffers:
    """An extension of vLLM's worker (`worker_extension_cls`)."""

    def make_buffers(self: Any) -> None:
        """Make the buffer for what the stage before sends, where the warm-up has not made it."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
