"""Sweeps: grids, draws and searches over the keys of a run, and what they say."""
