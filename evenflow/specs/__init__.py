"""Models, GPUs, links, and a model spread over GPUs.

Plain data and arithmetic on it. Nothing here knows seconds of work; that is `evenflow.costs`.
"""
