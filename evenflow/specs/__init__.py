"""Models, GPUs, links, and a model spread over GPUs.

Plain data and arithmetic on it. Nothing here knows seconds of work; that is `evenflow.costs`.
"""

from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import GpuSpec, LinkSpec
from evenflow.specs.modelspec import ModelSpec

__all__ = ["Deployment", "GpuSpec", "LinkSpec", "ModelSpec"]
