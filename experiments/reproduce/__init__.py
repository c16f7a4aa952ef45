"""Measured runs of real engines on real GPUs, simulated again and scored."""
