"""Costs from a profile: a file of times measured on one device."""
