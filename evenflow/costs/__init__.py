"""Seconds of work: how long each stage computes a micro-batch.

Knows specifications and the numbers of a micro-batch; no clock, no policy, no requests.
"""

from evenflow.core.batch import Work
from evenflow.costs.base import AffineCost, BatchShape, StageCost, decode_work, prefill_work
from evenflow.costs.collectives import AllReduceTimes, Fabric, Ring, TwoLevel
from evenflow.costs.estimates import balanced_by, balanced_layers, estimates, token_budget_for
from evenflow.costs.modifiers import DraftedCost, RanksCost, ScaledCost, SwapCost
from evenflow.costs.roofline import RooflineCost

__all__ = [
    "AffineCost",
    "AllReduceTimes",
    "BatchShape",
    "DraftedCost",
    "Fabric",
    "RanksCost",
    "Ring",
    "RooflineCost",
    "ScaledCost",
    "StageCost",
    "SwapCost",
    "TwoLevel",
    "Work",
    "balanced_by",
    "balanced_layers",
    "decode_work",
    "estimates",
    "prefill_work",
    "token_budget_for",
]
