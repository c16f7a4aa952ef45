"""Rules of single serving engines, in which they differ from the core."""
