"""Capacity: the largest rate that a deployment serves within its limits."""
