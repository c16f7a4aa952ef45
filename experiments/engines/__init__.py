"""Recorded decisions of real engines, replayed through our own Batcher."""
