"""vLLM V1 that spreads its work over the micro-batches of a pipeline, as proposed for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evenflow.compiled import mypyc_attr
from evenflow.schedulers.vllm_v1 import VLLMV1
from evenflow.scheduling import View


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class VLLMBalanced(VLLMV1):
    """`vllm_v1` that takes a share of the decodes, or of the tokens, and leaves the rest.

    Source: vLLM pull requests 57433, 19873 and vllm-rbln 900, none of them in vLLM 0.32.0; read
    from their descriptions, never compared with their code. `share` of a micro-batch on n stages:
    `seats`, at most max_num_seqs / n decodes (57433); `decodes`, at most a n-th of those that run
    (900), prompts free in both; `tokens`, a n-th of all decodes and prompt tokens that there are,
    up to the budget (19873, whose two phases are one where the next question counts anew).
    """

    share: Literal["seats", "decodes", "tokens"] = "seats"

    def limits(self, view: View) -> tuple[int, int]:
        decodes, tokens = super().limits(view)
        if self.share == "seats":
            return -(-self.max_num_seqs // self.depth), tokens
        if self.share == "decodes":
            return -(-view.running_decodes // self.depth), tokens
        there = view.running_decodes + view.waiting_tokens
        return decodes, min(tokens, -(-there // self.depth))
