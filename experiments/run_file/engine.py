"""The schema of what an engine adds to plain serving: speculation and replicas."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from experiments.run_file.fields import Count, Keys, NonNegative


class SpeculativeConfig(Keys):
    """`k` tokens are proposed a step, each accepted with probability `acceptance`, in turn.

    What a proposal costs: `draft_cost_share` of a decode step of the model (0: free, as from
    n-grams), or a decode step of `draft_model`, which also takes memory.
    """

    k: Count
    acceptance: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    draft_cost_share: NonNegative | None = None
    draft_model: str | None = None

    @model_validator(mode="after")
    def _one_draft(self) -> Self:
        if (self.draft_cost_share is None) == (self.draft_model is None):
            key = '"speculative.draft_cost_share" or "speculative.draft_model", one of them'
            raise PydanticCustomError("needed", "", {"reason": "speculative", "key": key})
        return self


class ReplicasConfig(Keys):
    """`count` pipelines of one kind side by side; `router` divides the requests among them."""

    count: Count
    router: Literal["round_robin", "least_outstanding", "prefix_affinity"] = "round_robin"
