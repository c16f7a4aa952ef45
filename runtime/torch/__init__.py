"""Workers that compute with torch: the model, its shards, its inputs, and how they travel.

Here is what a stage is made from, which needs no torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from evenflow.runtime.worker import Place, Worker

Transport = Literal["gloo", "nccl", "one_process"]
"""How activations cross: over the host, between GPUs, or among the threads of one process."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Layers [start, stop) of `model`, a folder; for random weights also a config.json or a name.

    On a CPU the stage computes on `cores`, in as many threads. `mailboxes` carry the activations of
    each hop where all stages are one process; pickled together, they stay the same objects.
    """

    model: str
    start: int
    stop: int
    weights: Literal["checkpoint", "random"] = "checkpoint"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    transport: Transport = "gloo"
    cores: tuple[int, ...] = ()
    mailboxes: tuple[deque[Any], ...] = ()
    limit_s: float = 60.0

    def make(self, place: Place) -> Worker:
        """Load the weights, reserve the KV pages, meet the other stages within `limit_s`."""
        from evenflow.runtime.torch.worker import make_worker

        return make_worker(place, self)
