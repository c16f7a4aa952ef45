"""Seconds of work: how long each stage computes a micro-batch.

Knows specifications and the numbers of a micro-batch; no clock, no policy, no requests.
"""

from evenflow.costs.affine import AffineCost
from evenflow.costs.balance import balanced_layers
from evenflow.costs.base import BatchShape, StageCost, Work, decode_work, prefill_work
from evenflow.costs.budget import token_budget_for
from evenflow.costs.collectives import Fabric, Measured, Ring, TwoLevel
from evenflow.costs.drafts import DraftedCost
from evenflow.costs.estimates import estimates
from evenflow.costs.graphs import GraphCost
from evenflow.costs.roofline import RooflineCost
from evenflow.costs.swap import SwapCost

__all__ = [
    "AffineCost",
    "BatchShape",
    "DraftedCost",
    "Fabric",
    "GraphCost",
    "Measured",
    "Ring",
    "RooflineCost",
    "StageCost",
    "SwapCost",
    "TwoLevel",
    "Work",
    "balanced_layers",
    "decode_work",
    "estimates",
    "prefill_work",
    "token_budget_for",
]
