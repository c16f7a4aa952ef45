"""Validation: how far the simulator is off a real run, layer by layer."""
