"""Costs from per-operator measurements of real GPUs, the tables of aiconfigurator-core."""
