"""Profiles and fits: measured costs, where they come from and how far off they are."""
