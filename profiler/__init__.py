"""Measure a device: what the operators of a stage cost, for cost models to interpolate.

Operators are timed in place, inside forward passes of whole stages, where caches, threads and
launches are as in service. The package knows no model: a caller passes one as a `Subject`.
Importing the package imports no torch.
"""
