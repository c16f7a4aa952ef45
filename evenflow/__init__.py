"""Scheduling of pipeline-parallel LLM inference: one core for the simulated and the real world."""

__version__ = "0.1.0"
