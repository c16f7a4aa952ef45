"""Measures a device: what the operators of a stage cost, for cost models to interpolate.

Operators are timed in place, inside forward passes of whole stages, because that is where their
caches, their threads and their launches are as they will be. The package knows no model: whoever
has one gives it as a `Subject`. Importing the package imports no torch.
"""
