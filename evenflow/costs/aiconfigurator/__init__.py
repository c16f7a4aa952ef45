"""Seconds of AIConfigurator's compiled engine, sampled into tables."""
