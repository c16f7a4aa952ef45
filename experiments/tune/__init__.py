"""Tuning: the best scheduler, settings and layout under an SLO, checked on unseen requests."""
